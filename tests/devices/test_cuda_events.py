"""Events of CUDA devices: callbacks, timeouts, times, captures."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.device import Device
from dagexec.core.stream import Capture, Event, EventState, Kernel, Stream
from dagexec.devices.cuda import completion
from dagexec.devices.cuda.event import CudaEvent
from dagexec.devices.sim import SimEvent, simulated
from dagexec.errors import DeviceError
from tests.cuda.emulated import emulated
from tests.cuda.emulated.machine import Fault, Machine
from tests.devices.test_cuda_copies import fetched, on_device
from tests.devices.test_cuda_memory import Gate
from tests.devices.test_cuda_streams import cuda, fill


@pytest.fixture(params=[None, 5], ids=["threads", "seeded"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with emulated(asynchronous=True, seed=request.param) as machine:
        yield machine


class Seen:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.spans: dict[str, tuple[float, float]] = {}

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        self.told.append(("launched", stream.name, kernel.label))

    def recorded(self, stream: Stream, event: Event) -> None:
        self.told.append(("recorded", stream.name, event.owner))

    def waits(self, stream: Stream, event: Event) -> None:
        self.told.append(("waits", stream.name, event.owner))

    def host_waited(self, event: Event | Stream) -> None:
        self.told.append(("host waited", getattr(event, "owner", None) or getattr(event, "name", None)))

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        self.told.append(("executed", stream.name, kernel.label))
        self.spans[kernel.label] = start, end

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        self.told.append(("waited", stream.name, event.owner))
        self.spans[f"wait for {event.owner}"] = start, end


def test_a_callback_may_call_cuda_and_comes_once_on_a_thread_of_the_device(machine: Machine) -> None:
    runtime = cuda()
    stream, array, called = runtime.lease(), runtime.allocate(8), list[str]()
    done = threading.Event()

    def callback() -> None:
        stream.launch(fill(array, 2))
        called.append(threading.current_thread().name)
        done.set()

    stream.launch(fill(array, 1))
    event = runtime.event("end")
    event.record(stream)
    event.when_done(callback)
    assert done.wait(30)
    assert stream.synchronize()
    assert called in (["cuda:0: watcher 0 of events"], [threading.current_thread().name])
    assert stream.failure is None
    assert fetched(array).tolist() == [2] * 8


def test_a_fast_event_is_not_held_up_by_a_slow_one() -> None:
    with emulated(asynchronous=True):
        runtime = cuda()
        slow, fast = runtime.lease(), runtime.lease()
        gate, order = Gate(slow), list[str]()
        done = [threading.Event(), threading.Event()]
        for stream, name, told in ((slow, "slow", done[0]), (fast, "fast", done[1])):
            if stream is fast:
                second = Gate(fast)
            event = runtime.event(name)
            event.record(stream)
            event.when_done(lambda name=name, told=told: (order.append(name), told.set()))
        second.open()
        assert done[1].wait(30)
        assert order == ["fast"]
        gate.open()
        assert done[0].wait(30)
        assert order == ["fast", "slow"]


def test_events_beyond_the_most_threads_are_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MAX_WATCHERS", 2)
    with emulated(asynchronous=True):
        runtime, told = cuda(), threading.Semaphore(0)
        streams = [runtime.lease() for _ in range(5)]
        gates = [Gate(stream) for stream in streams]
        for stream in streams:
            event = runtime.event(stream.name)
            event.record(stream)
            event.when_done(told.release)
        assert sum("of events" in thread.name for thread in threading.enumerate()) == 2
        for gate in gates:
            gate.open()
        for _ in streams:
            assert told.acquire(timeout=30)


def test_cuda_calls_nothing_of_pythons() -> None:
    # CUDA holds a lock while it calls a host function. One of Python's waits then for Python's lock, while whoever has
    # that may wait for CUDA's: CuPy keeps Python's lock in streamQuery, eventQuery, memGetInfo and setDevice.
    sources = [
        path
        for folder in ("devices/cuda", "ops/engines/cuda")
        for path in Path(dagexec.__file__).parent.glob(f"{folder}/**/*.py")
    ]
    assert len(sources) > 40
    for path in sources:
        assert not re.search(r"launchHostFunc|launch_host_func|add_callback|streamAddCallback", path.read_text()), path


def test_a_callback_that_raises_ends_no_thread(machine: Machine) -> None:
    runtime = cuda()
    stream, done = runtime.lease(), threading.Event()
    for callback in (lambda: 1 / 0, done.set):
        stream.launch(fill(runtime.allocate(8), 1))
        event = runtime.event("it")
        event.record(stream)
        try:
            event.when_done(callback)
        except ZeroDivisionError:  # it was done already, and the callback was called here
            continue
    assert done.wait(30)


def test_an_event_is_waited_for_as_long_as_asked() -> None:
    with emulated(asynchronous=True):
        runtime = cuda()
        stream = runtime.lease()
        gate, event = Gate(stream), runtime.event("late")
        event.record(stream)
        assert not event.finish(0.01)
        assert event.query() is EventState.SCHEDULED
        gate.open()
        assert event.finish(30)
        assert event.query() is EventState.SUCCESS


def test_an_event_that_is_asked_for_many_times_holds_one_thread() -> None:
    with emulated(asynchronous=True):
        runtime = cuda()
        stream, other = runtime.lease(), runtime.lease()
        gate, event, told = Gate(stream), runtime.event("late"), threading.Semaphore(0)
        event.record(stream)
        for _ in range(50):
            event.when_done(told.release)
            assert not event.finish(0.0)
        assert sum("of events" in thread.name for thread in threading.enumerate()) == 1
        second, free, free_told = Gate(other), runtime.event("free"), threading.Event()
        free.record(other)
        free.when_done(free_told.set)
        second.open()
        assert free_told.wait(30)
        assert not told.acquire(blocking=False)
        gate.open()
        for _ in range(50):
            assert told.acquire(timeout=30)


@pytest.mark.slow
def test_misuse_of_an_event_is_an_error(machine: Machine) -> None:
    runtime = cuda()
    stream, event = runtime.lease(), runtime.event("chain 1")
    for use in (event.finish, lambda: event.when_done(gc.collect), lambda: stream.wait(event)):
        with pytest.raises(DeviceError, match="event of chain 1 is waited for but was never recorded"):
            use()
    event.record(stream)
    with pytest.raises(DeviceError, match="event of chain 1 is recorded twice in one run"):
        event.record(stream)
    with simulated("sim:0") as other, pytest.raises(DeviceError, match="is a CUDA device's; it cannot be recorded on"):
        runtime.event("it").record(other.lease())


@pytest.mark.slow
def test_events_of_cuda_are_used_again(machine: Machine) -> None:
    runtime = cuda()
    stream, event = runtime.lease(), runtime.event("chain 1")
    for _ in range(10):
        event.record(stream)
        event.finish()
        event.reset()
    assert sum(call.name == "eventCreateWithFlags" for call in machine.calls) <= 2


def test_a_stream_waits_for_events_of_another_device_and_of_the_host(machine: Machine) -> None:
    one, other = cuda(0).lease(), cuda(1).lease()
    source, target = on_device(np.zeros(4)), on_device(np.zeros(4), 1)
    cuda(0).copy(source, np.arange(4.0), one)
    event = cuda(0).event("the source")
    event.record(one)
    other.wait(event)
    cuda(1).copy(target, source, other)
    assert other.synchronize()
    np.testing.assert_array_equal(fetched(target), np.arange(4.0))
    simulated = SimEvent("of another kind of device")
    simulated.record(None)
    other.wait(simulated)
    assert machine.races == []


def test_an_observer_is_told_all_in_order_and_when_it_happened(machine: Machine) -> None:
    runtime, seen = cuda(), Seen()
    one, other = runtime.lease(), runtime.lease()
    array = runtime.allocate(8)
    one.observer = other.observer = seen
    started = perf_counter()
    one.launch(fill(array, 1))
    event = runtime.event("chain 0")
    event.record(one)
    other.wait(event)
    other.launch(fill(array, 2))
    end, told = runtime.event("end"), threading.Event()
    end.record(other)
    found: list[list[tuple[Any, ...]]] = []
    end.when_done(lambda: (found.append(list(seen.told)), told.set()))
    assert told.wait(30)
    one.synchronize()
    name, second = one.name, other.name
    assert [row for row in seen.told if row[1] == name and row[0] in ("launched", "recorded", "executed")] == [
        ("launched", name, "fill with 1"), ("recorded", name, "chain 0"), ("executed", name, "fill with 1")
    ]  # fmt: skip
    assert [row for row in found[0] if row[1] == second] == [
        ("waits", second, "chain 0"), ("launched", second, "fill with 2"), ("recorded", second, "end"),
        ("waited", second, "chain 0"), ("executed", second, "fill with 2"),
    ]  # fmt: skip
    assert ("host waited", name) in seen.told
    first, wait, last = (seen.spans[key] for key in ("fill with 1", "wait for chain 0", "fill with 2"))
    assert started - 0.01 <= first[0] <= first[1] <= last[0] + 1e-6 <= last[1] + 2e-6 <= perf_counter() + 0.01
    assert wait[0] <= wait[1]
    runtime.give_back(one)
    assert one.observer is None


def test_what_fails_is_told_as_launched_but_not_as_executed(machine: Machine) -> None:
    stream, seen = cuda().lease(), Seen()
    stream.observer = seen
    for label in ("division", "passed over"):
        stream.launch(Kernel(lambda: 1 / 0, label))
    stream.synchronize()
    assert [row[0] for row in seen.told] == ["launched", "launched", "host waited"]


# Captures


def captured_diamond(seed: int | None) -> list[Any]:
    """Replays of a fork and a join over three streams, each branch reading what the one before it wrote."""
    with emulated(asynchronous=True, seed=seed) as machine:
        runtime = cuda()
        streams = [runtime.lease() for _ in range(3)]
        source = on_device(np.zeros(4))
        left, right, joined = (on_device(np.zeros(n)) for n in (4, 4, 8))
        fork, join = runtime.event("fork"), runtime.event("join")
        with runtime.capture(streams) as capture:
            runtime.copy(left, source, streams[0])
            fork.record(streams[0])
            for stream in streams[1:]:
                stream.wait(fork)
            runtime.copy(right, left, streams[1])
            runtime.copy(joined[:4], left, streams[2])
            join.record(streams[1])
            streams[2].wait(join)
            runtime.copy(joined[4:], right, streams[2])
        found = []
        for value in range(3):
            runtime.copy(source, np.full(4, float(value)), streams[1])
            for event in (fork, join):
                event.reset()
            capture.replay()
            assert join.query() in (EventState.SCHEDULED, EventState.SUCCESS)
            host = np.zeros(8)
            runtime.copy(host, joined, streams[2])
            streams[2].synchronize()
            found.append(host)
        assert sum(call.name == "graphLaunch" for call in machine.calls) == 3
        assert machine.races == []
        return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_capture_of_several_streams_replays_in_the_order_of_its_events(seed: int | None) -> None:
    np.testing.assert_array_equal(captured_diamond(seed), [[value] * 8 for value in range(3)])


def test_a_step_that_synchronizes_ends_the_capture_with_its_name(machine: Machine) -> None:
    runtime = cuda()
    one, other = runtime.lease(), runtime.lease()
    array = on_device(np.zeros(8, np.uint8))
    wrongs = {
        "stream synchronized": lambda: runtime.api.streamSynchronize(one.pointer),
        "our stream synchronized": one.synchronize,
        "division": lambda: 1 / 0,
        "a fetch": lambda: runtime.copy(np.zeros(8, np.uint8), array, one),
    }
    captures: list[Capture] = []

    def capture_all(kernel: Kernel) -> None:
        with runtime.capture([other, one]) as capture:
            captures.append(capture)
            one.launch(fill(array, 3))
            one.launch(kernel)

    for label, wrong in wrongs.items():
        with pytest.raises(DeviceError, match=f"{label} cannot be captured"):
            capture_all(Kernel(wrong, label))
        with pytest.raises(DeviceError, match="nothing to replay"):
            captures[-1].replay()
        for stream in (one, other):
            assert stream.failure is None
            stream.launch(fill(array, 4))
            assert stream.synchronize()
    with runtime.capture([one, other]) as capture:
        one.launch(fill(array, 9))
    capture.replay()
    assert one.synchronize()
    assert fetched(array).tolist() == [9] * 8


def test_a_capture_that_python_leaves_by_an_error_leaves_the_streams_usable(machine: Machine) -> None:
    runtime = cuda()
    stream, array = runtime.lease(), on_device(np.zeros(8, np.uint8))

    def interrupted() -> None:
        with runtime.capture([stream]):
            stream.launch(fill(array, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert fetched(array).tolist() == [0] * 8
    stream.launch(fill(array, 5))
    assert stream.synchronize()
    assert fetched(array).tolist() == [5] * 8


def test_misuse_of_a_capture_is_an_error(machine: Machine) -> None:
    runtime = cuda()
    one, other = runtime.lease(), runtime.lease()
    event, inside = runtime.event("before"), runtime.event("inside")
    event.record(one)
    with pytest.raises(DeviceError, match="needs a stream"), runtime.capture([]):
        pass
    with runtime.capture([one]) as capture:
        with pytest.raises(DeviceError, match="which the capture did not record"):
            one.wait(event)
        inside.record(one)
        for use in (inside.finish, lambda: other.wait(inside), lambda: inside.when_done(gc.collect)):
            with pytest.raises(DeviceError, match="event of inside is waited for but was never recorded"):
                use()
        with pytest.raises(DeviceError, match="recorded twice in one capture"):
            inside.record(one)
        with pytest.raises(DeviceError, match="after it has ended"):
            capture.replay()
        with pytest.raises(DeviceError, match="cannot be given back"):
            runtime.give_back(one)
        assert one.is_idle
    assert inside.query() is EventState.INITIALIZED
    other.launch(Kernel(lambda: 1 / 0, "division"))
    with pytest.raises(DeviceError, match="division has failed on it"), runtime.capture([other]):
        pass


def test_a_replay_on_streams_that_failed_is_passed_over(machine: Machine) -> None:
    runtime = cuda()
    one, other = runtime.lease(), runtime.lease()
    array, inside = on_device(np.zeros(8, np.uint8)), runtime.event("inside")
    with runtime.capture([one, other]) as capture:
        other.launch(fill(array, 3))
        inside.record(other)
    other.launch(Kernel(lambda: 1 / 0, "division"))
    capture.replay()
    for stream in (one, other):
        assert stream.synchronize()
        assert stream.failure is not None
        assert stream.failure.label == "division"
    with pytest.raises(ZeroDivisionError):
        inside.finish()
    assert fetched(array).tolist() == [0] * 8


@pytest.mark.slow
def test_an_observer_sees_a_replay_as_one_launch(machine: Machine) -> None:
    runtime, seen = cuda(), Seen()
    stream, array = runtime.lease(), on_device(np.zeros(8, np.uint8))
    with runtime.capture([stream]) as capture:
        stream.launch(fill(array, 3))
        stream.launch(fill(array, 4))
    stream.observer = seen
    capture.replay()
    stream.synchronize()
    assert [row[2] for row in seen.told if row[0] in ("launched", "executed")] == ["a capture of 2 launches"] * 2


@pytest.mark.slow
def test_graphs_are_destroyed_when_nothing_is_under_way(machine: Machine) -> None:
    runtime = cuda()
    stream, array = runtime.lease(), on_device(np.zeros(8, np.uint8))
    with runtime.capture([stream]) as capture:
        stream.launch(fill(array, 3))
    capture.replay()
    stream.synchronize()
    handles = len(machine._handles)
    del capture
    gc.collect()
    with runtime.capture([stream]):
        stream.launch(fill(array, 3))
    assert len(machine._handles) <= handles + 2


@pytest.mark.slow
def test_a_capture_of_a_lost_device_ends() -> None:
    with emulated(asynchronous=True, faults=[Fault("kernel", "memsetAsync", 1, 719)]) as machine:
        runtime = cuda()
        one, other = runtime.lease(), runtime.lease()
        array = runtime.allocate(8)
        other.launch(fill(array, 1))
        machine.stream(other.pointer).sim.synchronize()
        with pytest.raises(DeviceError, match="launch failure"), runtime.capture([one]):
            pass
        assert one.capture is None
        with pytest.raises(DeviceError, match="has failed on it"), runtime.capture([one]):
            pass
        machine.errors.clear()


@pytest.mark.slow
def test_a_forked_child_does_nothing_on_the_device(machine: Machine) -> None:
    runtime = cuda()
    array, stream = runtime.allocate(8), runtime.lease()
    stream.launch(fill(array, 1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before = len(machine.calls)
            del array
            gc.collect()
            try:
                runtime.lease()
            except DeviceError as error:
                status = 0 if "spawn" in str(error) and len(machine.calls) == before else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stream.synchronize()


@pytest.mark.slow
def test_the_threads_of_a_device_end_with_it() -> None:
    with emulated(asynchronous=True):
        runtime = cuda()
        event, called = runtime.event("it"), threading.Event()
        gate = Gate(runtime.lease())
        event.record(next(iter(runtime.streams())))
        event.when_done(called.set)
        gate.open()
        assert called.wait(30)
        names = {thread.name for thread in threading.enumerate()}
        assert "cuda:0: watcher 0 of events" in names
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cuda:0:")]
    assert isinstance(event, CudaEvent)
    assert runtime.device == Device("cuda", 0)
