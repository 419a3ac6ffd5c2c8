"""Handles of the simulated device's library: two users at once are noticed, on the host and on streams."""

from __future__ import annotations

import threading

import pytest

from dagexec.core.stream import Kernel
from dagexec.devices.sim import LibraryHandle, SimRuntime, simulated
from dagexec.errors import DeviceError


def use(handle: LibraryHandle, runtime: SimRuntime, stream: object, user: str) -> None:
    with handle.used_on(stream, user):  # type: ignore[arg-type]
        stream.launch(Kernel(lambda: None, user))  # type: ignore[attr-defined]


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


def test_kernels_of_two_streams_inside_one_handle_are_found_by_some_seed() -> None:
    found = 0
    for seed in range(20):
        with simulated("sim:0", seed=seed) as runtime:
            handle = runtime.library_handle("h")
            streams = [runtime.lease(), runtime.lease()]
            for number, stream in enumerate(streams):
                use(handle, runtime, stream, f"conv {number}")
            runtime.synchronize()
            failures = [stream.failure for stream in streams if stream.failure is not None]
            for failure in failures:
                found += 1
                text = str(failure.error)
                assert "the handle of h is used by conv" in text
                assert all(name in text for name in ("conv 0", "conv 1", "sim:0 stream 0", "sim:0 stream 1"))
            assert len(failures) < 2
    assert 0 < found < 20


@pytest.mark.parametrize("seed", range(10))
def test_uses_with_an_event_between_them_are_in_order(seed: int) -> None:
    with simulated("sim:0", seed=seed) as runtime:
        handle = runtime.library_handle("h")
        one, two = runtime.lease(), runtime.lease()
        use(handle, runtime, one, "first")
        event = runtime.event("the first use")
        event.record(one)
        two.wait(event)
        use(handle, runtime, two, "second")
        runtime.synchronize()
        assert one.failure is two.failure is None


def test_a_user_that_failed_is_inside_no_longer() -> None:
    with simulated("sim:0", seed=0) as runtime:
        handle = runtime.library_handle("h")
        one, two = runtime.lease(), runtime.lease()
        with handle.used_on(one, "bad"):
            one.launch(Kernel(lambda: 1 / 0, "bad"))
        runtime.synchronize()
        use(handle, runtime, two, "good")
        runtime.synchronize()
        assert two.failure is None
        runtime.give_back(one)
        use(handle, runtime, two, "good again")
        runtime.synchronize()
        assert two.failure is None
