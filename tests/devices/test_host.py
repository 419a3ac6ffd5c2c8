"""The host as a device: its memory, and no streams."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from dagexec.core.device import CPU
from dagexec.core.runtime import runtime_of
from dagexec.devices.sim import simulated
from dagexec.errors import DeviceError, ResourceError


def test_the_host_allocates_aligned_memory_and_copies() -> None:
    host = runtime_of(CPU)
    for nbytes in (0, 1, 100):
        buffer = host.allocate(nbytes)
        assert (buffer.dtype, buffer.size) == (np.dtype(np.uint8), nbytes)
        assert buffer.ctypes.data % 64 == 0 or nbytes == 0
    target = np.zeros(3)
    host.copy_now(target, np.arange(3.0))
    assert target.tolist() == [0, 1, 2]


def test_the_host_has_no_streams() -> None:
    host, array = runtime_of(CPU), np.zeros(1)
    with simulated("sim:0") as other:
        stream = other.lease()
        for use in (host.lease, host.current_stream, partial(host.give_back, stream), partial(host.event, "it"),
                    partial(host.copy, array, array, stream), partial(host.capture, [])):  # fmt: skip
            with pytest.raises(DeviceError, match=r"cpu has no (streams|events): its work is done when a call returns"):
                use()
    host.synchronize()
    assert (host.streams(), host.stream_in_use(), host.statistics().streams) == ((), None, 0)


def test_more_than_any_machine_has_is_refused() -> None:
    with pytest.raises(ResourceError):
        runtime_of(CPU).allocate(2**60)


def test_memory_that_the_system_refuses_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(ResourceError, match="1,000 bytes: the system refused the allocation"):
        runtime_of(CPU).allocate(1000)
