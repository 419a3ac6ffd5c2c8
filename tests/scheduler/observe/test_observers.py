import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dagexec import Workspace
from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.device import Device
from dagexec.core.graph import build_graph
from dagexec.core.operator import Operator
from dagexec.core.stream import Kernel, Stream
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.counting import RunCountObserver, RunCounts, TimeObserver
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.observers import Observer, ObserverGroup, together
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.run.run import Run
from tests.nets import net_of, parents_from_edges, temporary_operator

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
NETS = [SimpleNet, DAGNet, AsyncDAGNet]


class Diary(Observer):
    """Writes down the name and the arguments of every call, without the run, and the runs."""

    def __init__(self) -> None:
        self.runs: list[ObservedRun] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        for name in vars(Observer):
            if not name.startswith("_"):
                setattr(self, name, self._writes(name))

    def _writes(self, name: str) -> Callable[..., None]:
        def write(*what: Any) -> None:
            if what and isinstance(what[0], ObservedRun):
                self.runs.append(what[0])
                what = what[1:]
            self.calls.append((name, what))

        return write

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [what for called, what in self.calls if called == name]


class FakeStream:
    """As much of a stream as observers look at."""

    def __init__(self, name: str = "sim:0 stream 0", device: str = "sim:0") -> None:
        self.name = name
        self.device = Device.parse(device)


def stream(name: str = "sim:0 stream 0", device: str = "sim:0") -> Stream:
    return FakeStream(name, device)  # type: ignore[return-value]


@pytest.mark.parametrize("net_class", NETS)
def test_an_observer_is_told_of_every_operator_chain_and_run_from_start_to_stop(net_class: type[BaseNet]) -> None:
    diary = Diary()
    with net_class(net_of(DIAMOND), Workspace()) as net:
        net.run(trace=diary)
    assert diary.calls[0][0] == "run_started"
    assert diary.calls[-1][0] == "run_stopped"
    assert diary.calls[-1][1][1] is None
    assert len({id(run) for run in diary.runs}) == 1
    run = diary.runs[0]
    assert sorted(what[0] for what in diary.named("operator_started")) == [0, 1, 2, 3]
    assert sorted(what[0] for what in diary.named("operator_stopped")) == [0, 1, 2, 3]
    assert sorted(what[0] for what in diary.named("chain_started")) == list(range(len(run.chains)))
    names = [name for name, _ in diary.calls]
    assert names.index("run_started") < names.index("chain_started") < names.index("operator_started")
    assert names.index("operator_started") < names.index("operator_stopped") < names.index("chain_stopped")
    ends = {chain: end for chain, _, _, end, _ in diary.named("chain_stopped")}
    for chain, worker, ready, start in diary.named("chain_started"):
        assert ready == max((ends[parent] for parent in run.parents[chain]), default=run.started)
        assert run.started <= ready <= start <= ends[chain]
        assert worker.startswith("MainThread" if net_class is SimpleNet else "dagexec-net-")
    for _, _, start, end, error in diary.named("operator_stopped"):
        assert run.started <= start <= end
        assert error is None


@pytest.mark.parametrize("net_class", NETS)
def test_what_raises_is_told_to_have_stopped_with_its_error(net_class: type[BaseNet]) -> None:
    problem = ValueError("by order")

    def body(operator: Operator) -> None:
        if operator.output_blobs[0].name == "b1":
            raise problem

    diary = Diary()
    with (
        temporary_operator("Fail", body),
        net_class(net_of(parents_from_edges(3, [(0, 1), (1, 2)]), op_type="Fail"), Workspace()) as net,
    ):
        with pytest.raises(OperatorError) as raised:
            net.run(trace=diary)
        assert [(what[0], what[-1]) for what in diary.named("operator_stopped")] == [(0, None), (1, problem)]
        assert [what[-1] for what in diary.named("chain_stopped")] == [problem]
        [(_, error)] = diary.named("run_stopped")
        assert error is raised.value
        problem = None  # type: ignore[assignment]


@pytest.mark.parametrize("net_class", NETS)
def test_a_run_that_nobody_observes_calls_the_prepared_steps_themselves(net_class: type[BaseNet]) -> None:
    with (
        temporary_operator("Step", lambda operator: None),
        net_class(net_of(DIAMOND, op_type="Step"), Workspace()) as net,
    ):
        prepared = {id(step) for step in net.prepared().steps}
        run = net.new_run(lambda: None)
        assert _called_in(run) == prepared
        observed = net.new_run(lambda: None, Observer())
        assert not prepared & _called_in(observed)


def _called_in(run: Run) -> set[int]:
    return {id(step) for pieces in run.work.steps for steps in pieces for step in steps}


def test_a_chain_waits_in_the_queue_from_the_end_of_its_last_parent_until_a_worker_takes_it() -> None:
    diary = Diary()
    with DAGNet(net_of([[], [], [0]]), Workspace(), num_workers=1) as net:
        net.run(trace=diary)
        chains = net.plan.chains
    started = diary.named("chain_started")
    stopped = diary.named("chain_stopped")
    assert [chains[what[0]] for what in started] == [(0, 2), (1,)]
    first_stop = stopped[0][3]
    waiting = started[1]
    assert waiting[2] == diary.runs[0].started
    assert waiting[3] >= first_stop  # the only worker was busy until then


def test_workers_are_named_and_operators_that_run_at_once_have_different_ones() -> None:
    barrier = threading.Barrier(2)
    diary = Diary()
    with (
        temporary_operator("Meet", lambda operator: barrier.wait(30)),
        DAGNet(net_of([[], []], op_type="Meet"), Workspace(), num_workers=2) as net,
    ):
        net.run(trace=diary)
    assert {what[1] for what in diary.named("operator_stopped")} == {"dagexec-net-0", "dagexec-net-1"}


def test_steps_before_and_after_the_operators_are_part_of_the_chain_and_the_wait_is_told() -> None:
    diary = Diary()
    graph = build_graph(net_of([[], [0]]))
    run = ObservedRun(diary, graph, (), build_plan(graph, [1.0, 1.0]))
    order: list[str] = []
    times: dict[str, int] = {}

    def note(name: str) -> None:
        order.append(name)
        times[name] = time.perf_counter_ns()

    named = {name: partial(note, name) for name in ("wait", "a", "b", "record")}
    steps = run.chain(0, [named["a"], named["b"]], waits=[named["wait"]], after=[named["record"]])
    assert len(steps) == 4
    for step in steps:
        step()
    assert order == ["wait", "a", "b", "record"]
    assert [name for name, _ in diary.calls] == [
        "run_started", "chain_started", "event_waited", "operator_started", "operator_stopped", "operator_started",
        "operator_stopped", "chain_stopped",
    ]  # fmt: skip
    [(chain, worker, start, end)] = diary.named("event_waited")
    assert (chain, worker) == (0, "MainThread")
    assert start <= times["wait"] <= end <= times["a"]
    [(chain, _, start, end, error)] = diary.named("chain_stopped")
    assert (chain, error) == (0, None)
    assert start <= times["wait"] <= times["record"] <= end


def test_conversions_before_and_after_an_operator_are_told_with_their_times() -> None:
    diary = Diary()
    graph = build_graph(net_of([[]]))
    times: list[int] = []
    packed = TensorDescriptor.packed((2,))
    before, after = (
        Conversion(blob, packed, packed, lambda: times.append(time.perf_counter_ns())) for blob in ("in", "out")
    )
    converted = ConvertedStep((before,), lambda: times.append(time.perf_counter_ns()), (after,))
    (step,) = ObservedRun(diary, graph, ()).chain(0, [converted])
    step()
    (_, _, first, start_in, end_in), (_, _, second, start_out, end_out) = diary.named("converted")
    assert (first, second) == (before, after)
    assert start_in <= times[0] <= end_in <= times[1] <= start_out <= times[2] <= end_out


def test_the_owner_of_a_run_is_told_of_its_end_even_if_an_observer_raises_then() -> None:
    class Broken(Observer):
        def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
            raise RuntimeError("observer broke")

    told: list[str] = []
    with DAGNet(net_of([[]]), Workspace(), num_workers=1) as net:
        run = net.new_run(lambda: told.append("owner"), Broken())
        with pytest.raises(RuntimeError, match="observer broke"):
            run.finished()
    assert told == ["owner"]


def test_an_observer_that_raises_ends_the_run_with_its_error() -> None:
    class Broken(Observer):
        def operator_started(self, run: ObservedRun, operator: int, worker: str) -> None:
            raise RuntimeError("observer broke")

    with DAGNet(net_of(DIAMOND), Workspace()) as net:
        with pytest.raises(OperatorError, match="observer broke"):
            net.run(trace=Broken())
        net.run()


def test_a_group_tells_all_its_observers_everything() -> None:
    first, second = Diary(), Diary()
    with DAGNet(net_of(DIAMOND), Workspace(), num_workers=1) as net:
        net.run(trace=together(first, None, second))
    assert first.calls == second.calls
    assert len(first.calls) > 10
    group = ObserverGroup([first, second])
    group.host_waited(stream())
    assert first.calls[-1] == second.calls[-1]
    assert first.calls[-1][0] == "host_waited"


def test_together_makes_no_group_of_one_or_none() -> None:
    one = Observer()
    assert together(None, None) is None
    assert together(None, one) is one


def test_runs_and_operators_are_counted() -> None:
    def body(operator: Operator) -> None:
        if operator.output_blobs[0].name == "b1" and fails:
            raise ValueError("no")

    counter = RunCountObserver()
    with (
        temporary_operator("MayFail", body),
        DAGNet(net_of(parents_from_edges(2, [(0, 1)]), op_type="MayFail"), Workspace()) as net,
    ):
        fails = False
        net.run(trace=counter)
        net.run(trace=counter)
        assert counter.counts() == RunCounts(started=2, stopped=2, failed=0, operators=4)
        fails = True
        with pytest.raises(OperatorError):
            net.run(trace=counter)
    assert counter.counts() == RunCounts(started=3, stopped=3, failed=1, operators=5)


def test_mean_times_are_of_runs_and_operators_and_a_failed_one_does_not_count() -> None:
    times = TimeObserver()
    assert times.mean_run_ms == 0.0
    graph = build_graph(net_of([[], [0]]))
    for first, second in ((1_000_000, 4_000_000), (3_000_000, 6_000_000)):
        run = ObservedRun(times, graph, ())
        times.operator_stopped(run, 0, "w", 0, first, None)
        times.operator_stopped(run, 1, "w", 0, second, None)
        times.operator_stopped(run, 1, "w", 0, 10**12, ValueError())
        times.run_stopped(run, run.started + first + second, None)
    times.run_stopped(run, run.started + 10**12, ValueError())
    assert times.mean_operator_ms == pytest.approx({0: 2.0, 1: 5.0})
    assert times.mean_run_ms == pytest.approx(7.0)


def test_the_time_of_an_operator_on_a_device_is_that_on_its_stream() -> None:
    times = TimeObserver()
    with SimpleNet(net_of([[], [0]]), Workspace()) as net:
        run = ObservedRun(times, net.graph, net.operators)
        for index, operator in enumerate(net.operators):
            times.operator_stopped(run, index, "w", 0, 5_000, None)
            times.executed(stream(), Kernel(lambda: None, "k", operator=operator), 1.0, 1.5 + index)
        times.executed(stream(), Kernel(lambda: None, "copy"), 1.0, 100.0)
        assert times.mean_operator_ms == pytest.approx({0: 500.0, 1: 1500.0})
        times.run_stopped(run, run.started + 1, None)
        times.executed(stream(), Kernel(lambda: None, "late", operator=net.operators[0]), 1.0, 100.0)
        assert times.mean_operator_ms[0] == pytest.approx(500.0)
