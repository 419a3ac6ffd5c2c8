"""Streams of the simulated device: order within one, events across several, failures that pass along events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import EventState, Kernel, Priority, wait_for
from dagexec.devices.sim import Fault, SimRuntime, SimSettings, sim_runtime, simulated
from dagexec.errors import DeviceError
from tests.cuda.emulated import emulated
from tests.devices.sim_programs import Await, Launch, Program, Record, predecessors, programs, put

DRIVERS: list[dict[str, Any]] = [{}, {"seed": 0}, {"seed": 7}, {"kernel_seconds": 1}, {"seed": 3, "kernel_seconds": 1}]


@pytest.fixture(params=DRIVERS, ids=str)
def runtime(request: pytest.FixtureRequest) -> Iterator[SimRuntime]:
    with simulated("sim:0", **request.param) as runtime:
        yield runtime


def nothing() -> None:
    """A kernel that does nothing."""


def failing(error: BaseException) -> Kernel:
    def fail() -> None:
        raise error

    return Kernel(fail, "the bad one")


class Gate:
    """A kernel that stays where it is until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.kernel = Kernel(self._stand, "a gate")

    def _stand(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)


@pytest.mark.slow
@given(programs(), st.one_of(st.none(), st.integers(0, 1000)), st.sampled_from([0.0, 1e-6]))
@settings(max_examples=150, deadline=None)
def test_every_execution_respects_streams_and_events(program: Program, seed: int | None, seconds: float) -> None:
    log: list[int] = []
    called: list[int] = []
    with simulated("sim:0", seed=seed, kernel_seconds=seconds) as runtime:
        streams: list[Any] = [runtime.lease(Priority(index % 2)) for index in range(4)]
        events = put(program, runtime, streams, log)
        for number, event in enumerate(events):
            event.when_done(lambda number=number: called.append(number))
        for event in events:
            assert event.finish(30)
            assert event.query() is EventState.SUCCESS
        runtime.synchronize()
        assert all(stream.is_idle for stream in streams)
    before = predecessors(program)
    assert sorted(log) == sorted(before)
    assert sorted(called) == list(range(len(events)))
    place = {number: position for position, number in enumerate(log)}
    for number, earlier in before.items():
        assert all(place[other] < place[number] for other in earlier), (number, log)


@pytest.mark.slow
@given(programs(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_finished_event_means_that_what_is_before_it_is_done(program: Program, seed: int) -> None:
    with simulated("sim:0", seed=seed) as runtime:
        streams: list[Any] = [runtime.lease() for _ in range(4)]
        log: list[int] = []
        seen: list[tuple[int, frozenset[int]]] = []
        events = put(program, runtime, streams, log)
        for number, event in enumerate(events):
            event.when_done(lambda number=number: seen.append((number, frozenset(log))))
        runtime.synchronize()
    marks: dict[int, set[int]] = {}
    on_stream: dict[int, set[int]] = {}
    for instruction in program:
        done = on_stream.setdefault(instruction.stream, set())
        match instruction:
            case Launch(_, number):
                done.add(number)
            case Record(_, event_number):
                marks[event_number] = set(done)
            case Await(_, event_number):
                done |= marks[event_number]
    for number, log_then in seen:
        assert marks[number] <= log_then


def order_of(seed: int, streams: int = 4, each: int = 5) -> tuple[int, ...]:
    log: list[int] = []
    with simulated("sim:0", seed=seed) as runtime:
        leased = [runtime.lease() for _ in range(streams)]
        for number in range(streams * each):
            leased[number % streams].launch(Kernel(lambda number=number: log.append(number), str(number)))
        runtime.synchronize()
    return tuple(log)


def test_seeds_give_different_orders_and_a_seed_the_same() -> None:
    orders = [order_of(seed) for seed in range(30)]
    assert orders == [order_of(seed) for seed in range(30)]
    assert len(set(orders)) > 25


def test_the_order_of_a_seed_does_not_depend_on_who_launched_first() -> None:
    def order(reverse: bool) -> list[str]:
        log: list[str] = []
        with simulated("sim:0", seed=4) as runtime:
            streams = [runtime.lease() for _ in range(3)]
            for stream in reversed(streams) if reverse else streams:
                for number in range(4):
                    name = f"{stream.name}: {number}"
                    stream.launch(Kernel(lambda name=name: log.append(name), name))
            runtime.synchronize()
        return log

    assert order(False) == order(True)


def test_two_devices_share_the_order_of_a_seed() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        with simulated(["sim:0", "sim:1"], seed=seed) as first:
            second = sim_runtime(Device("sim", 1))
            assert second.driver is first.driver
            near, far = first.lease(), second.lease()
            for _ in range(6):
                near.launch(Kernel(lambda: log.append("near"), "near"))
                far.launch(Kernel(lambda: log.append("far"), "far"))
            event = second.event("all of far")
            event.record(far)
            near.wait(event)
            near.launch(Kernel(lambda: log.append("end"), "end"))
            near.synchronize()
        return log

    orders = [order(seed) for seed in range(10)]
    assert orders == [order(seed) for seed in range(10)]
    assert len({tuple(o) for o in orders}) > 5
    assert all(o[-1] == "end" and o.count("far") == 6 for o in orders)


def test_devices_with_drivers_of_their_own_wait_for_each_other() -> None:
    log: list[str] = []
    with simulated("sim:0", seed=1) as one, simulated("sim:1", seed=1) as two, simulated("sim:2") as three:
        a, b, c = one.lease(), two.lease(), three.lease()
        events = [one.event(name) for name in "abc"]
        for stream, event, name, before in ((b, events[1], "b", None), (c, events[2], "c", 1), (a, events[0], "a", 2)):
            if before is not None:
                stream.wait(events[before])
            stream.launch(Kernel(lambda name=name: log.append(name), name))
            event.record(stream)
        assert events[0].finish(30)
    assert log == ["b", "c", "a"]


def test_a_seeded_device_does_nothing_before_somebody_wants_it() -> None:
    with simulated("sim:0", seed=1) as runtime:
        stream, other = runtime.lease(), runtime.lease()
        log: list[str] = []
        stream.launch(Kernel(lambda: log.append("done"), "k"))
        event = runtime.event("it")
        event.record(stream)
        other.wait(event)
        assert log == []
        assert runtime.statistics().busy == 2
        stream.synchronize()
        stream.launch(Kernel(lambda: log.append("later"), "k"))
        assert event.query() is EventState.SUCCESS
        assert log == ["done"]
        assert not stream.is_idle
        assert runtime.statistics().busy == 1
        gate = threading.Event()
        last = runtime.event("last")
        last.record(stream)
        last.when_done(gate.set)
        assert gate.wait(30)
        assert log == ["done", "later"]


def test_a_seeded_device_stops_when_nobody_wants_anything_any_more() -> None:
    runtime = SimRuntime(Device("sim", 0), SimSettings(seed=1))
    wanted, other, called = runtime.lease(), runtime.lease(), threading.Event()
    wanted.launch(Kernel(nothing, "k"))
    for _ in range(500):
        other.launch(Kernel(nothing, "k"))
    recorded(runtime, wanted).when_done(called.set)
    assert called.wait(30)
    runtime.driver.close()  # its thread has done what it was to do
    assert not other.is_idle
    assert other.done < 500


def test_threads_work_while_the_host_does_something_else() -> None:
    with simulated("sim:0") as runtime:
        gate, done = Gate(), threading.Event()
        runtime.lease().launch(gate.kernel)
        assert gate.entered.wait(30)
        runtime.lease().launch(Kernel(done.set, "beside it"))
        assert done.wait(30)
        gate.opened.set()


def test_every_stream_of_the_thread_driver_goes_on_while_others_stand() -> None:
    with simulated("sim:0") as runtime:
        gates = [Gate() for _ in range(6)]
        first, event = runtime.lease(), runtime.event("the first gate")
        first.launch(gates[0].kernel)
        event.record(first)
        first.launch(gates[1].kernel)  # goes on to stand, as those do that it lets go
        for gate in gates[2:]:
            stream = runtime.lease()
            stream.wait(event)
            stream.launch(gate.kernel)
        gates[0].opened.set()
        for gate in gates:
            assert gate.entered.wait(30), "a stream that can go on does not"
        for gate in gates:
            gate.opened.set()
        runtime.synchronize()


@pytest.mark.parametrize("seed", range(8))
def test_of_streams_that_can_go_on_one_of_high_priority_does(seed: int) -> None:
    with simulated("sim:0", seed=seed) as runtime:
        log: list[Priority] = []
        for priority in (Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.HIGH):
            stream = runtime.lease(priority)
            assert stream.priority is priority
            for _ in range(5):
                stream.launch(Kernel(lambda priority=priority: log.append(priority), "k"))
        runtime.synchronize()
    assert log == [Priority.HIGH] * 10 + [Priority.NORMAL] * 10


def test_a_thread_that_is_free_takes_a_stream_of_high_priority_first() -> None:
    with simulated("sim:0") as runtime:
        gate, log = Gate(), list[str]()
        first = runtime.lease()
        event = runtime.event("the gate")
        first.launch(gate.kernel)
        event.record(first)
        for priority in (Priority.NORMAL, Priority.HIGH):
            stream = runtime.lease(priority)
            stream.wait(event)
            stream.launch(Kernel(lambda priority=priority: log.append(priority.name), "k"))
        gate.opened.set()
        runtime.synchronize()
    assert sorted(log) == ["HIGH", "NORMAL"]


def test_what_a_kernel_raises_fails_the_stream_and_passes_over_the_rest(runtime: SimRuntime) -> None:
    stream, error = runtime.lease(), ValueError("not today")
    log: list[str] = []
    before, after = runtime.event("before"), runtime.event("after")
    stream.launch(Kernel(lambda: log.append("first"), "first"))
    before.record(stream)
    stream.launch(failing(error))
    stream.launch(Kernel(lambda: log.append("never"), "never"))
    after.record(stream)
    assert stream.synchronize(30)
    assert log == ["first"]
    assert before.finish(30)
    assert before.error is None
    with pytest.raises(ValueError, match="not today"):
        after.finish(30)
    assert (after.query(), after.error) == (EventState.FAILED, error)
    assert stream.failure is not None
    assert (stream.failure.label, stream.failure.error) == ("the bad one", error)


def test_a_failed_stream_passes_over_what_is_asked_of_it_later_until_it_is_reset(runtime: SimRuntime) -> None:
    stream = runtime.lease()
    log: list[str] = []
    stream.launch(failing(ValueError("first")))
    events = [recorded(runtime, stream)]
    stream.synchronize()
    stream.launch(failing(ValueError("second")))
    stream.launch(Kernel(lambda: log.append("no"), "no"))
    events.append(recorded(runtime, stream))
    stream.synchronize()
    events.append(recorded(runtime, stream))
    for event in events:
        with pytest.raises(ValueError, match="first"):
            event.finish(30)
    assert stream.failing
    stream.reset()
    assert stream.failure is None
    assert not stream.failing
    assert {event.query() for event in events} == {EventState.FAILED}  # what is past stays as it was
    stream.launch(Kernel(lambda: log.append("yes"), "yes"))
    assert stream.synchronize(30)
    assert log == ["yes"]


def test_a_failure_passes_to_streams_that_wait_and_no_others(runtime: SimRuntime) -> None:
    bad, waits, waits_later, follows, beside = (runtime.lease() for _ in range(5))
    log: list[str] = []
    event, passed = runtime.event("the bad one's"), runtime.event("the waiter's")
    bad.launch(failing(ValueError("x")))
    event.record(bad)
    waits.wait(event)
    waits.launch(Kernel(lambda: log.append("waits"), "waits"))
    passed.record(waits)
    waits_later.wait(passed)
    waits_later.launch(Kernel(lambda: log.append("waits later"), "waits later"))
    follows.follow(event)
    follows.launch(Kernel(lambda: log.append("follows"), "follows"))
    beside.launch(Kernel(lambda: log.append("beside"), "beside"))
    runtime.synchronize()
    assert sorted(log) == ["beside", "follows"]
    assert bad.failure is not None
    assert bad.failure is waits.failure is waits_later.failure
    assert follows.failure is beside.failure is None
    waits.reset()
    waits.wait(event)  # it failed long ago, and still does
    waits.synchronize()
    assert waits.failure is bad.failure


def test_the_first_of_several_failures_has_the_lowest_number() -> None:
    with simulated("sim:0") as runtime:
        first, second, gate = runtime.lease(), runtime.lease(), Gate()
        second.launch(gate.kernel)
        second.launch(failing(ValueError("later")))
        first.launch(failing(ValueError("earlier")))
        first.synchronize()
        gate.opened.set()
        second.synchronize()
        assert first.failure is not None
        assert second.failure is not None
        assert first.failure.number < second.failure.number


def test_a_stream_that_stands_for_an_event_can_be_abandoned(runtime: SimRuntime) -> None:
    with simulated("sim:1", faults=[Fault("hang")]) as other:
        hung, stream = other.lease(), runtime.lease()
        event, after = other.event("what hangs"), runtime.event("what waits for it")
        hung.launch(Kernel(nothing, "k"))
        event.record(hung)
        stream.wait(event)
        stream.launch(Kernel(nothing, "k"))
        after.record(stream)
        assert not after.finish(timeout=0.01)
        stream.abandon(TimeoutError("long enough"))
        with pytest.raises(TimeoutError, match="long enough"):
            after.finish(30)
        assert stream.is_idle
        assert not hung.is_idle
        assert event.query() is EventState.SCHEDULED
        hung.abandon(TimeoutError("too"))
        assert hung.synchronize(30)
        for mine, its in ((runtime, stream), (other, hung)):
            mine.give_back(its)
            assert mine.statistics().leased == 0


def test_a_kernel_that_runs_when_its_stream_is_abandoned_ends_in_its_own_time() -> None:
    with simulated("sim:0") as runtime:
        stream, gate, log = runtime.lease(), Gate(), list[str]()
        stream.launch(gate.kernel)
        stream.launch(Kernel(lambda: log.append("never"), "never"))
        event = runtime.event("both")
        event.record(stream)
        assert gate.entered.wait(30)
        error = TimeoutError("too long")
        stream.abandon(error)
        stream.abandon(TimeoutError("again"))
        assert stream.failure is not None
        assert stream.failure.error is error
        assert not stream.is_idle
        with pytest.raises(DeviceError, match="sim:0 stream 0 cannot be reset: 2 commands are not done"):
            stream.reset()
        gate.opened.set()
        with pytest.raises(TimeoutError, match="too long"):
            event.finish(30)
        assert log == []
        assert stream.is_idle


def test_a_stream_abandoned_during_its_last_kernel_has_failed_after_it(runtime: SimRuntime) -> None:
    stream = runtime.lease()
    stream.launch(Kernel(lambda: stream.abandon(TimeoutError("enough")), "gives up its own stream"))
    assert stream.synchronize(30)
    too_late = recorded(runtime, stream)
    with pytest.raises(TimeoutError, match="enough"):
        too_late.finish(30)


def test_an_idle_stream_has_nothing_to_abandon(runtime: SimRuntime) -> None:
    stream = runtime.lease()
    stream.launch(Kernel(nothing, "k"))
    stream.synchronize()
    stream.abandon(TimeoutError())
    assert stream.failure is None


def test_the_host_stops_waiting_after_its_timeout() -> None:
    with simulated("sim:0") as runtime:
        stream, gate = runtime.lease(), Gate()
        stream.launch(gate.kernel)
        event = runtime.event("the gate")
        event.record(stream)
        assert event.finish(timeout=0.01) is False
        assert stream.synchronize(timeout=0.01) is False
        assert event.query() is EventState.SCHEDULED
        gate.opened.set()
        assert event.finish(30)
        assert stream.synchronize(30)


def test_an_event_is_recorded_once_before_a_reset(runtime: SimRuntime) -> None:
    stream, event = runtime.lease(), runtime.event("chain 3")
    assert event.query() is EventState.INITIALIZED
    assert event.stream is None
    for use in (event.finish, lambda: stream.wait(event), lambda: event.when_done(nothing)):
        with pytest.raises(DeviceError, match="event of chain 3 is waited for but was never recorded"):
            use()
    event.record(stream)
    assert event.stream is stream
    with pytest.raises(DeviceError, match="event of chain 3 is recorded twice in one run"):
        event.record(stream)
    assert event.finish(30)
    event.reset()
    assert event.query() is EventState.INITIALIZED
    event.record(None)
    assert event.query() is EventState.SUCCESS


def test_who_waits_keeps_the_place_it_asked_for_when_the_event_is_used_again() -> None:
    with simulated("sim:0") as runtime:
        one, two, gate, log = runtime.lease(), runtime.lease(), Gate(), list[str]()
        event = runtime.event("e")
        one.launch(gate.kernel)
        event.record(one)
        two.wait(event)
        two.launch(Kernel(lambda: log.append("after the gate"), "k"))
        event.reset()
        event.record(None)
        assert event.query() is EventState.SUCCESS
        assert gate.entered.wait(30)
        assert log == []
        gate.opened.set()
        assert two.synchronize(30)
        assert log == ["after the gate"]


def test_callbacks_are_made_once_and_at_once_when_the_event_is_done(runtime: SimRuntime) -> None:
    stream, event = runtime.lease(), runtime.event("e")
    called: list[int] = []
    stream.launch(failing(ValueError()))
    event.record(stream)
    gate = threading.Event()
    event.when_done(lambda: (called.append(1), gate.set()))
    assert gate.wait(30)
    event.when_done(lambda: called.append(2))
    assert called == [1, 2]


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with simulated("sim:0", seed=0) as runtime:
        stream, log = runtime.lease(), list[str]()

        def bad() -> None:
            raise ValueError("mine")

        stream.launch(Kernel(lambda: log.append("one"), "k"))
        recorded(runtime, stream).when_done(bad)
        stream.launch(Kernel(lambda: log.append("two"), "k"))
        assert stream.synchronize(30)
        assert log == ["one", "two"]
        assert stream.failure is None
        assert "sim:0 stream 0: a callback of Event.when_done raised" in caplog.text


def test_a_kernel_that_waits_for_the_device_is_told_that_it_never_would_end(runtime: SimRuntime) -> None:
    stream = runtime.lease()
    stream.launch(Kernel(stream.synchronize, "waits for itself"))
    with pytest.raises(DeviceError, match=r"a kernel, or a callback of Event\.when_done, waits for the device"):
        recorded(runtime, stream).finish(30)


def recorded(runtime: SimRuntime, stream: Any) -> Any:
    event = runtime.event("so far")
    event.record(stream)
    return event


def test_waiting_blocks_the_host_only_for_another_kind_of_device(runtime: SimRuntime) -> None:
    stream, other = runtime.lease(), runtime.lease()
    log: list[str] = []
    stream.launch(Kernel(lambda: log.append("k"), "k"))
    event = recorded(runtime, stream)
    wait_for(event, stream)
    wait_for(event, other)
    wait_for(event, None)
    assert log == ["k"]
    with emulated():
        device = runtime_of(Device("cuda", 0))
        foreign, foreign_stream = device.event("cuda's"), device.lease()
        with pytest.raises(DeviceError, match="event of cuda's is waited for but was never recorded"):
            stream.wait(foreign)
        foreign.record(foreign_stream)
        stream.wait(foreign)
        with pytest.raises(DeviceError, match="is a CUDA device's; it cannot be recorded on sim:0 stream 0"):
            device.event("cuda's").record(stream)
        with pytest.raises(DeviceError, match="is a simulated device's; it cannot be recorded on cuda:0 stream 0"):
            runtime.event("sim's").record(foreign_stream)


def test_a_wait_for_its_own_past_costs_a_stream_nothing() -> None:
    with simulated("sim:0", seed=0) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
        stream.wait(recorded(runtime, stream))
        assert stream.launched == 1
        stream.synchronize()
        other = runtime.lease()
        other.wait(recorded(runtime, stream))  # done already
        assert other.launched == 0
