"""What holds of the runtime of every device that has streams: leases, current streams, captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dagexec.core.device import CPU, Device
from dagexec.core.runtime import DeviceRuntime, install_runtime, installed_runtime, runtime_of
from dagexec.core.stream import EventState, Kernel, Priority
from dagexec.devices.sim import SimRuntime, SimSettings, configure, sim_runtime, simulated
from dagexec.errors import DeviceError, ShapeError
from tests.cuda.emulated import emulated


def nothing() -> None:
    """A kernel that does nothing."""


KINDS = ["sim:0", "sim:0 seeded", "cuda:0", "cuda:0 seeded", "cuda:0 at once"]
"""Of CUDA devices, emulated ones: with threads, with a seed, and doing at once what they are asked for."""


@pytest.fixture(params=KINDS)
def runtime(request: pytest.FixtureRequest) -> Iterator[DeviceRuntime]:
    if "cuda" in request.param:
        seed = 1 if "seeded" in request.param else None
        with emulated(asynchronous="at once" not in request.param, seed=seed):
            yield runtime_of(Device("cuda", 0))
    else:
        with simulated("sim:0", seed=1 if "seeded" in request.param else None) as runtime:
            yield runtime


def test_streams_are_made_when_they_are_needed_and_used_again(runtime: DeviceRuntime) -> None:
    assert runtime.statistics().streams == 0
    first, second, urgent = runtime.lease(), runtime.lease(), runtime.lease(Priority.HIGH)
    names = [f"{runtime.device} stream {number}" for number in range(3)]
    assert [stream.name for stream in (first, second, urgent)] == names
    assert [stream.priority for stream in (first, urgent)] == [Priority.NORMAL, Priority.HIGH]
    assert (runtime.statistics().streams, runtime.statistics().leased) == (3, 3)
    runtime.give_back(first)
    runtime.give_back(urgent)
    assert runtime.statistics().leased == 1
    assert runtime.lease(Priority.HIGH) is urgent
    assert runtime.lease() is first
    assert (runtime.statistics().streams, runtime.statistics().leased) == (3, 3)


def test_a_stream_is_given_back_once_and_to_its_own_device(runtime: DeviceRuntime) -> None:
    stream = runtime.lease()
    runtime.give_back(stream)
    with pytest.raises(DeviceError, match=f"{stream.name} is not leased from {runtime.device}"):
        runtime.give_back(stream)
    with simulated("sim:5") as other:
        with pytest.raises(DeviceError, match=f"sim:5 stream 0 is not leased from {runtime.device}"):
            runtime.give_back(other.lease())
        with (
            pytest.raises(DeviceError, match=f"sim:5 stream 1 cannot be the current stream of {runtime.device}"),
            runtime.using(other.lease()),
        ):
            pass


def test_a_stream_that_failed_can_be_given_back_and_is_as_new(runtime: DeviceRuntime) -> None:
    stream = runtime.lease()
    stream.launch(Kernel(lambda: 1 / 0, "division"))
    assert stream.synchronize(30)
    assert stream.failure is not None
    assert isinstance(stream.failure.error, ZeroDivisionError)
    assert stream.failing
    runtime.give_back(stream)
    again = runtime.lease()
    assert again is stream
    assert again.failure is None
    assert not again.failing


def test_a_busy_stream_is_not_given_back() -> None:
    with simulated("sim:0", seed=1) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
        with pytest.raises(DeviceError, match="sim:0 stream 0 cannot be reset: 1 commands are not done"):
            runtime.give_back(stream)
        assert runtime.statistics().leased == 1
        stream.synchronize()
        runtime.give_back(stream)
        assert runtime.statistics().leased == 0


def test_each_thread_has_a_current_stream_of_each_device(runtime: DeviceRuntime) -> None:
    mine = runtime.current_stream()
    assert runtime.current_stream() is mine
    theirs: list[Any] = []
    thread = threading.Thread(target=lambda: theirs.append(runtime.current_stream()))
    thread.start()
    thread.join()
    assert theirs[0] is not mine
    other = runtime.lease()
    with runtime.using(other) as used:
        assert used is other
        assert runtime.current_stream() is other
    assert runtime.current_stream() is mine


def test_kernels_events_and_copies_come_in_the_order_of_the_stream(runtime: DeviceRuntime) -> None:
    stream, log = runtime.lease(), list[str]()
    source, target = np.arange(5.0), np.zeros(5)
    stream.launch(Kernel(lambda: log.append("first"), "first"))
    runtime.copy(target, source, stream)
    stream.launch(Kernel(lambda: log.append(str(target.sum())), "sum"))
    event, called = runtime.event("all"), threading.Event()
    event.record(stream)
    event.when_done(called.set)
    assert called.wait(30)
    assert event.finish(30)
    assert event.query() is EventState.SUCCESS
    assert (event.stream, event.error) == (stream, None)
    assert stream.is_idle
    assert log == ["first", "10.0"]
    assert runtime.statistics().launches == 3
    runtime.synchronize()
    with pytest.raises(ShapeError, match="expected the same"):
        runtime.copy(target, source[:2], stream)


def test_a_failed_event_gives_what_the_work_before_it_raised(runtime: DeviceRuntime) -> None:
    stream, other, log = runtime.lease(), runtime.lease(), list[str]()
    stream.launch(Kernel(lambda: 1 / 0, "division"))
    event = runtime.event("it")
    event.record(stream)
    with pytest.raises(ZeroDivisionError):
        event.finish(30)
    assert event.query() is EventState.FAILED
    assert isinstance(event.error, ZeroDivisionError)
    other.follow(event)
    other.launch(Kernel(lambda: log.append("after follow"), "k"))
    other.wait(event)
    other.launch(Kernel(lambda: log.append("after wait"), "k"))
    assert other.synchronize(30)
    assert log == ["after follow"]
    assert other.failure is not None
    assert other.failure.error is event.error
    event.reset()
    assert (event.query(), event.error, event.stream) == (EventState.INITIALIZED, None, None)


@pytest.mark.slow
def test_a_capture_is_replayed(runtime: DeviceRuntime) -> None:
    stream, other = runtime.lease(), runtime.lease()
    event, outside = runtime.event("inside"), runtime.event("outside")
    outside.record(None)
    first, between, last = (runtime.allocate(8) for _ in range(3))
    found = np.zeros(8, np.uint8)

    def put(target: Any, value: int) -> None:
        runtime.copy(target, np.full(8, value, np.uint8), stream)
        assert stream.synchronize(30)

    def last_value() -> int:
        runtime.copy(found, last, other)
        assert other.synchronize(30)
        return int(found[0])

    for target in (first, between, last):
        put(target, 1)
    with runtime.capture([stream, other]) as capture:
        runtime.copy(between, first, stream)
        event.record(stream)
        other.wait(event)
        runtime.copy(last, between, other)
        with pytest.raises(DeviceError, match="which the capture did not record"):
            other.wait(outside)
        with pytest.raises(DeviceError, match="already being captured"), runtime.capture([other]):
            pass
    put(first, 2)
    assert last_value() == 1
    for value in (3, 4):
        put(first, value)
        capture.replay()
        assert last_value() == value
        assert event.finish(30)
        assert event.query() is EventState.SUCCESS
        event.reset()


def test_memory_of_a_device_is_bytes(runtime: DeviceRuntime) -> None:
    buffer = runtime.allocate(100)
    assert (buffer.shape, buffer.dtype) == ((100,), np.dtype(np.uint8))


def test_settings_hold_for_a_while_or_for_good() -> None:
    place = Device("sim", 9)
    install_runtime(place, None)
    plain = sim_runtime(place)
    with simulated("sim:9", memory_limit=10) as limited:
        assert runtime_of(place) is limited
        assert limited.settings == SimSettings(memory_limit=10)
    assert runtime_of(place) is plain
    configured = configure(place, SimSettings(seed=3))
    assert runtime_of(place) is configured
    assert isinstance(configured, SimRuntime)
    install_runtime(place, None)
    assert installed_runtime(place) is None
    for what in ("cpu", "sim:64"):
        with pytest.raises(DeviceError), simulated(what):
            pass
    with pytest.raises(DeviceError, match="cpu is not a simulated device"):
        sim_runtime(CPU)


def test_the_threads_of_a_simulated_device_end_with_it() -> None:
    before = set(threading.enumerate())
    for seed in (None, 1):
        with simulated("sim:0", seed=seed) as runtime:
            for _ in range(4):
                runtime.lease().launch(Kernel(nothing, "k"))
            runtime.synchronize()
            started = set(threading.enumerate()) - before
            assert started
            assert all(thread.name.startswith("sim:") for thread in started)
            assert all(thread.daemon for thread in started)
        assert set(threading.enumerate()) == before
