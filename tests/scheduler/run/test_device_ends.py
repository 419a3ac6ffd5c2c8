"""How runs on devices end: closed under way, stopped while something hangs, short of memory, after a lost event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.core.exclusive import LibraryState, StreamMutex, library_state
from dagexec.core.operator import Operator
from dagexec.core.stream import Event, Kernel, Priority, Stream
from dagexec.devices.sim import simulated
from dagexec.devices.sim.faults import Fault
from dagexec.errors import DeviceError, OperatorError, ResourceError, RunTimeoutError
from dagexec.platform.threads import SystemThreads, Timer, installed
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.run import drain
from dagexec.scheduler.run.launching import DeviceStreams
from tests.nets import net_of, temporary_operator
from tests.scheduler.nets.test_devices import NETS, SIM, conv_bytes, conv_net, on_devices


def conv_workspace() -> Workspace:
    """The inputs of `conv_net`, and a shared buffer."""
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((1, 4, 12, 12), np.float32))
    workspace.feed_blob("w", np.ones((4, 4, 3, 3), np.float32))
    dagexec.create_shared_buffer(workspace, SIM)
    return workspace


class Outcome:
    """What a net's run on a thread of its own came to."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self.thread.start()

    def _run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error

    def wait(self) -> BaseException | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("net_class", NETS)
def test_a_net_that_is_closed_during_a_run_lets_it_end_with_what_came_of_it(
    net_class: type[BaseNet], fails: bool
) -> None:
    started, opened = threading.Event(), threading.Event()

    def body(_operator: Operator) -> None:
        started.set()
        opened.wait(30)
        if fails:
            raise ValueError("on purpose")

    with temporary_operator("Held", body), simulated(SIM) as runtime:
        net = net_class(on_devices(net_of([[], [0]], op_type="Held"), [SIM]), Workspace())
        run = Outcome(net.run)
        assert started.wait(30)
        closing = Outcome(net.close)
        while not net._closed:
            closing.thread.join(0.001)
        opened.set()
        error = run.wait()
        assert closing.wait() is None
        assert (isinstance(error, OperatorError) and "on purpose" in str(error)) if fails else error is None
        assert runtime.statistics().leased == 0


@pytest.mark.parametrize("net_class", NETS)
def test_a_net_may_be_closed_from_inside_its_run(net_class: type[BaseNet]) -> None:
    net: BaseNet

    class Closing(Observer):
        def operator_stopped(self, *_rest: object) -> None:
            if not net._closed:
                net._closed = True
                net._wait_for_run()

    with temporary_operator("Plain", lambda _operator: None), simulated(SIM):
        definition = on_devices(net_of([[], [0]], op_type="Plain"), [SIM, CPU])
        with net_class(definition, Workspace()) as net:
            assert Outcome(lambda: net.run(trace=Closing())).wait() is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped runs give up soon what their streams hold."""
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.05)


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.usefixtures("impatient")
def test_what_hangs_in_a_library_state_does_not_hold_up_whoever_uses_it_next(net_class: type[BaseNet]) -> None:
    net = on_devices(conv_net(engine="CUDNN", cudnn_state=1), [SIM])
    with (
        simulated(SIM, faults=[Fault("hang", "'y1'")]) as runtime,
        net_class(net, conv_workspace()) as first,
        net_class(net, conv_workspace()) as second,
    ):
        while not runtime.faults.met:  # on a busy machine the time may be over before
            with pytest.raises(RunTimeoutError):
                first.run(timeout=0.05)
        second.run(timeout=30)
        first.run(timeout=30)


@pytest.mark.usefixtures("impatient")
def test_a_run_that_fails_leaves_nothing_behind_that_hangs_in_a_library_state() -> None:
    net = conv_net(engine="CUDNN", cudnn_state=1)
    failing = NetDef(name="failing", op=[net.op[0]])
    failing.op.add(type="Relu", input=["y0"], output=["y0"])
    failing.op.add(type="Conv").CopyFrom(net.op[1])
    failing.op[2].input[0] = "y0"
    faults = [Fault("kernel", "Relu"), Fault("hang", "'y1'")]
    with simulated(SIM, faults=faults) as runtime:
        workspace = conv_workspace()
        workspace.feed_blob("w", np.ones((4, 4, 3, 3), np.float32))
        with AsyncDAGNet(on_devices(failing, [SIM]), workspace, num_workers=1) as first:
            error = Outcome(first.run).wait()
            assert isinstance(error, OperatorError)
            assert "Relu" in str(error)
            assert runtime.faults.met == {"kernel": 1, "hang": 1}
            state = first.operators[-1].library_state
            assert state is not None
            assert state.stream.is_idle
        with AsyncDAGNet(on_devices(net, [SIM]), conv_workspace()) as second:
            assert Outcome(second.run).wait() is None


class LateTimers(SystemThreads):
    """Timers that go off when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Keep `function`."""
        self.calls.append(function)

        class Kept:
            def cancel(self) -> None:
                """Too late."""

        return Kept()


def test_a_timer_that_goes_off_late_gives_up_nothing_of_the_next_run() -> None:
    gates = [threading.Event(), threading.Event()]
    waiting = [threading.Event(), threading.Event()]
    number = [0]

    def body(_operator: Operator) -> None:
        waiting[number[0]].set()
        gates[number[0]].wait(30)

    timers = LateTimers()
    held = on_devices(net_of([[]], op_type="Held"), [SIM])
    with (
        installed(timers),
        temporary_operator("Held", body),
        simulated(SIM),
        AsyncDAGNet(held, Workspace(), num_workers=1) as net,
    ):
        first = Outcome(lambda: net.run(timeout=0.01))
        while not timers.calls:
            first.thread.join(0.001)
        gates[0].set()
        assert isinstance(first.wait(), RunTimeoutError)
        number[0] = 1
        second = Outcome(net.run)
        assert waiting[1].wait(30)
        timers.calls[0]()
        gates[1].set()
        assert second.wait() is None


@pytest.mark.parametrize("net_class", [DAGNet, AsyncDAGNet])
@pytest.mark.parametrize("devices", [[SIM], [SIM, CPU]])
@pytest.mark.usefixtures("impatient")
def test_the_error_of_a_stopped_run_is_not_its_own_cause_nor_secondary_to_itself(
    net_class: type[BaseNet], devices: list[Device]
) -> None:
    options: dict[str, Any] = {"num_workers": 2}
    faults = [Fault("hang", "'b0'")]
    with temporary_operator("Plain", lambda _operator: None), simulated(SIM, faults=faults) as runtime:
        definition = on_devices(net_of([[], [0]], op_type="Plain"), devices)
        with net_class(definition, Workspace(), **options) as net:
            while not runtime.faults.met:
                with pytest.raises(RunTimeoutError) as caught:
                    net.run(timeout=0.05)
            assert caught.value.__cause__ is None
            assert not hasattr(caught.value, "__notes__")
            net.run(timeout=30)


@pytest.mark.unrecorded
@pytest.mark.slow
@pytest.mark.parametrize("net_class", NETS)
def test_what_is_kept_for_other_shapes_gives_way_where_memory_is_short(net_class: type[BaseNet]) -> None:
    definition = NetDef(name="net")
    for index in range(4):
        definition.op.add(type="Relu", input=[f"b{index}"], output=[f"b{index + 1}"])
    with simulated(SIM, memory_limit=400_000):
        workspace = Workspace()
        workspace.feed_blob("b0", np.ones(10_000, np.float32), device=SIM)
        with net_class(on_devices(definition, [SIM]), workspace) as net:
            net.run()
            workspace.feed_blob("b0", np.ones(15_000, np.float32))  # with the memory for 10,000, it does not fit
            net.run()
            assert workspace.fetch_blob("b4").sum() == 15_000
            workspace.feed_blob("b0", np.ones(25_000, np.float32))
            with pytest.raises(ResourceError, match="out of memory"):
                net.run()
            workspace.feed_blob("b0", np.full(15_000, 2, np.float32))
            net.run()
            assert workspace.fetch_blob("b4").sum() == 30_000


def test_a_turn_whose_event_is_lost_is_over_before_the_next() -> None:
    done: list[str] = []
    with simulated(SIM, seed=0, faults=[Fault("event", "turn")]) as runtime:  # a seeded device works when waited for
        mutex, stream = StreamMutex("memory", runtime), runtime.lease()
        with pytest.raises(DeviceError, match="the recording of the event of turn"), mutex.turn(stream):
            stream.launch(Kernel(lambda: done.append("first"), "first"))
        assert done == ["first"]
        runtime.give_back(stream)


@pytest.mark.parametrize("owner", ["before turn", "after turn"])
def test_a_library_state_goes_on_after_a_turn_whose_event_is_lost(owner: str) -> None:
    done: list[str] = []
    with simulated(SIM, seed=0, faults=[Fault("event", owner)]) as runtime:
        state, stream, other = library_state(SIM, 0), runtime.lease(), runtime.lease()
        with pytest.raises(DeviceError, match=owner), state.use(stream) as launch:
            launch(Kernel(lambda: done.append("first"), "first"))
        told: list[bool] = []
        state.give_up([stream], lambda: told.append(True))
        assert told == [True]
        with state.use(other) as launch:
            launch(Kernel(lambda: done.append("second"), "second"))
        state.abandon([stream])
        other.synchronize()
        assert done == ["second"]
        assert other.failure is None


def test_a_library_state_that_works_for_others_is_not_given_up() -> None:
    opened, started = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        started.set()
        opened.wait(30)
        done.append("other")

    with simulated(SIM) as runtime:
        state, mine, other = library_state(SIM, 0), runtime.lease(), runtime.lease()
        with state.use(other) as launch:
            launch(Kernel(hold, "other's"))
        with state.use(mine) as launch:
            launch(Kernel(lambda: done.append("mine"), "mine"))
        assert started.wait(30)
        state.abandon([mine])
        told: list[bool] = []
        state.give_up([mine], lambda: told.append(True))
        assert told == [True]
        opened.set()
        other.synchronize()
        mine.synchronize()
        assert done == ["other"]
        assert state.stream.failure is None
        assert other.failure is None


class Turns(Observer):
    """The streams on which turns at shared memory are recorded."""

    def __init__(self) -> None:
        self.streams: set[Stream] = set()

    def recorded(self, stream: Stream, event: Event) -> None:
        if event.owner.startswith("turn"):
            self.streams.add(stream)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_turn_at_the_shared_buffer_is_over_when_the_library_state_is_done_with_it(seed: int | None) -> None:
    """Not when the user's stream has passed over its wait for the state, as it does when it fails."""
    net = conv_net(shared_buffer=1, engine="CUDNN", cudnn_state=1)
    turns = Turns()
    with simulated(SIM, seed=seed):
        with AsyncDAGNet(on_devices(net, [SIM]), conv_workspace(), num_workers=2) as running:
            running.run(trace=turns)
            states: list[LibraryState] = [state for op in running.operators if (state := op.library_state) is not None]
            assert turns.streams == {state.stream for state in states}
        assert conv_bytes(net, "sim:0", 3) == conv_bytes(net, "cpu", 1)


def test_what_fails_in_a_library_state_fails_the_stream_of_its_user_and_no_other() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    done: list[str] = []
    with simulated(SIM) as runtime:
        state, stream, other = library_state(SIM, 0), runtime.lease(), runtime.lease()
        with state.use(stream) as launch:
            launch(Kernel(fail, "failing"))
            launch(Kernel(lambda: done.append("behind it"), "behind it"))
        with state.use(other) as launch:
            launch(Kernel(lambda: done.append("other's"), "other's"))
        stream.synchronize()
        other.synchronize()
        assert done == ["other's"]
        assert stream.failure is not None
        assert str(stream.failure.error) == "on purpose"
        assert stream.failure.label == "failing"
        assert other.failure is None
        assert state.stream.failure is None


@pytest.mark.parametrize("seed", [None, 0])
def test_a_kernel_that_the_device_fails_in_a_library_state_is_the_failure_of_its_user_only(seed: int | None) -> None:
    done: list[str] = []
    with simulated(SIM, seed=seed, faults=[Fault("kernel", "first")]) as runtime:
        state, stream, other = library_state(SIM, 0), runtime.lease(), runtime.lease()
        for user, label in ((stream, "first"), (other, "second")):
            with state.use(user) as launch:
                launch(Kernel(partial(done.append, label), label))
        stream.synchronize()
        other.synchronize()
        assert done == ["second"]
        assert stream.failure is not None
        assert stream.failure.label == "first"
        assert "a fault of kind 'kernel'" in str(stream.failure.error)
        assert other.failure is None


@pytest.mark.parametrize("net_class", NETS)
def test_an_operator_that_the_device_fails_in_a_library_state_is_named(net_class: type[BaseNet]) -> None:
    net = on_devices(conv_net(engine="CUDNN", cudnn_state=1), [SIM])
    with simulated(SIM, faults=[Fault("kernel", "'y1'")]), net_class(net, conv_workspace()) as running:
        with pytest.raises(OperatorError, match="Conv 'y1'") as caught:
            running.run(timeout=30)
        assert caught.value.operator.startswith("Conv 'y1'")
        running.run(timeout=30)


def test_a_turn_whose_end_is_lost_is_given_up_when_its_kernel_is_done() -> None:
    opened, started = threading.Event(), threading.Event()
    told = threading.Event()

    def hold() -> None:
        started.set()
        opened.wait(30)

    with simulated(SIM, faults=[Fault("event", "after turn")]) as runtime:
        state, stream = library_state(SIM, 0), runtime.lease()

        def take_a_turn() -> None:
            with state.use(stream) as launch:
                launch(Kernel(hold, "held"))
                assert started.wait(30)

        with pytest.raises(DeviceError, match="after turn"):
            take_a_turn()
        state.give_up([stream], told.set)
        assert not told.is_set()
        opened.set()
        assert told.wait(30)


def test_the_workspace_of_a_library_state_grows_and_is_kept() -> None:
    with simulated(SIM):
        state = library_state(SIM, 0)
        first = state.workspace(100)
        assert first.nbytes == 100
        assert state.workspace(50) is first
        assert state.workspace(200).nbytes == 200


def test_threads_that_launch_at_the_same_time_have_streams_of_their_own() -> None:
    found: list[Stream] = []
    chosen, over = threading.Barrier(3), threading.Event()

    def choose() -> None:
        found.append(streams.choose(()))

    def choose_and_stay() -> None:
        choose()
        chosen.wait(30)
        over.wait(30)

    with simulated(SIM):
        streams = DeviceStreams(SIM, 1, Priority.NORMAL)
        assert Outcome(choose).wait() is None  # this one's stream is free again
        staying = [Outcome(choose_and_stay) for _ in range(2)]
        chosen.wait(30)
        over.set()
        assert all(thread.wait() is None for thread in staying)
        assert found[1] is not found[2]
        assert set(streams.all()) == set(found)
        assert len(streams.all()) == 2
        streams.give_back()


def test_a_worker_takes_an_idle_stream_and_otherwise_the_next_in_turn() -> None:
    with simulated(SIM, seed=0):  # nothing is done before somebody waits
        streams = DeviceStreams(SIM, 3, Priority.NORMAL)
        found = []
        for _ in range(6):
            found.append(streams.choose(()))
            found[-1].launch(Kernel(lambda: None, "work"))
        assert found[:3] == found[3:]
        assert len(set(found)) == 3
        streams.give_back()


def test_a_chain_goes_behind_its_parent_where_nothing_else_is_behind_it() -> None:
    placed: dict[str, Stream] = {}

    class Places(Observer):
        def launched(self, stream: Stream, kernel: Kernel) -> None:
            placed[kernel.label.split()[1]] = stream

    definition = on_devices(net_of([[], [0], [0]]), [SIM])
    with (
        simulated(SIM, seed=0),
        AsyncDAGNet(definition, Workspace(), num_workers=1, options=RunOptions(streams_per_worker=2)) as net,
    ):
        net.run(trace=Places())
    assert placed["'b1'"] is placed["'b0'"]
    assert placed["'b2'"] is not placed["'b0'"]


def test_a_turn_waits_for_the_kernel_of_an_earlier_one_though_the_turn_between_was_passed_over() -> None:
    """A stream that fails passes over its waits, too: its turn is over while the one before it still goes on."""
    opened, order = threading.Event(), list[str]()

    def hold() -> None:
        assert opened.wait(30)
        order.append("first")

    with simulated(SIM) as runtime:
        mutex = StreamMutex("memory", runtime)
        first, failing, last = (runtime.lease() for _ in range(3))
        with mutex.turn(first):
            first.launch(Kernel(hold, "first"))
        failing.launch(Kernel(lambda: 1 / 0, "division"))
        with mutex.turn(failing):
            failing.launch(Kernel(lambda: order.append("passed over"), "passed over"))
        assert failing.synchronize(30)
        with mutex.turn(last):
            last.launch(Kernel(lambda: order.append("last"), "last"))
        assert not last.synchronize(0.05)
        opened.set()
        assert first.synchronize(30)
        assert last.synchronize(30)
    assert order == ["first", "last"]
