"""Handles of the simulated device's library: two users at once are noticed."""

from __future__ import annotations

import threading

import pytest

from dagexec.devices.sim import LibraryHandle
from dagexec.errors import DeviceError


def test_two_threads_inside_one_handle_are_both_named() -> None:
    handle = LibraryHandle("library state 0 of sim:0")
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with handle:
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=first, name="worker-1")
    thread.start()
    assert inside.wait(30)
    with pytest.raises(DeviceError) as caught, handle:
        pass
    assert str(caught.value) == (
        "the handle of library state 0 of sim:0 is used by thread MainThread while thread worker-1 is using it"
    )
    leave.set()
    thread.join()
    with handle, pytest.raises(DeviceError, match="while thread MainThread is using it"), handle:
        pass
    with handle:
        pass
