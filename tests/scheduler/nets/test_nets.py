"""The three nets: same results, order kept, work side by side, failures that leave the net usable."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core import registry
from dagexec.core.operator import Operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ClosedError, MissingBlobError, OperatorError, RunTimeoutError, ShapeError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.trace import Trace
from tests.nets import net_of, noop_nets, parents_from_edges, temporary_operator
from tests.new_threads import new_threads
from tests.ops.running import operator_def

PATIENCE = 30  # seconds a test waits for another thread before it fails

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def make_net(kind: str, definition: NetDef, workers: int = 2, workspace: Workspace | None = None) -> BaseNet:
    where = workspace or Workspace()
    if kind == "simple":
        return SimpleNet(definition, where)
    return {"dag": DAGNet, "async_dag": AsyncDAGNet}[kind](definition, where, num_workers=workers)


@pytest.fixture(params=["simple", "dag", "async_dag"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["dag", "async_dag"])
def parallel_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def order() -> Iterator[list[str]]:
    """Operators of type Note append their first output's name to this list when they run."""
    seen: list[str] = []
    with temporary_operator("Note", lambda operator: seen.append(operator.output_blobs[0].name)):
        yield seen


def test_a_net_without_operators_runs(kind: str) -> None:
    with make_net(kind, NetDef(name="empty")) as net:
        net.run()
        net.run()


def test_simple_net_runs_in_list_order(order: list[str]) -> None:
    with make_net("simple", net_of(DIAMOND, op_type="Note")) as net:
        net.run()
    assert order == ["b0", "b1", "b2", "b3"]


@pytest.mark.slow
@given(noop_nets(), st.sampled_from(["dag", "async_dag"]), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_hazard_is_respected_while_running(net: NetDef, kind: str, workers: int) -> None:
    seen: list[int] = []
    with temporary_operator("Stamp", lambda operator: seen.append(operator.arguments.int("index", -1)), ["index"]):
        workspace = Workspace()
        for name in {name for op in net.op for name in op.input}:
            workspace.feed_blob(name, np.zeros(1, np.float32))
        stamped = NetDef()
        stamped.CopyFrom(net)
        for index, op in enumerate(stamped.op):
            op.type = "Stamp"
            op.arg.add(name="index", i=index)
        with make_net(kind, stamped, workers, workspace) as running:
            for _ in range(3):
                seen.clear()
                running.run()
                assert sorted(seen) == list(range(len(net.op)))
                position = {index: place for place, index in enumerate(seen)}
                for earlier, later in running.graph.hazards:
                    assert position[earlier] < position[later], seen


def test_independent_branches_run_at_the_same_time(parallel_kind: str) -> None:
    meeting = threading.Barrier(2)
    with (
        temporary_operator("Meet", lambda _operator: meeting.wait(PATIENCE)),
        make_net(parallel_kind, net_of([[], []], op_type="Meet")) as net,
    ):
        net.run()  # each waits for the other: one after the other, this would break the barrier


def test_the_ready_chain_of_the_highest_priority_is_taken_first(parallel_kind: str, order: list[str]) -> None:
    short_then_long = parents_from_edges(6, [(3, 4), (4, 5)])  # 0, 1, 2 alone; 3 -> 4 -> 5 longer
    with make_net(parallel_kind, net_of(short_then_long, op_type="Note"), workers=1) as net:
        net.run()
    assert order == ["b3", "b4", "b5", "b0", "b1", "b2"]


def test_a_waiting_chain_of_higher_priority_goes_before_a_ready_child(parallel_kind: str, order: list[str]) -> None:
    two_forks = parents_from_edges(6, [(0, 2), (0, 3), (1, 4), (1, 5)])  # both roots are more urgent than any child
    with make_net(parallel_kind, net_of(two_forks, op_type="Note"), workers=1) as net:
        net.run()
    assert order == ["b0", "b1", "b2", "b3", "b4", "b5"]


def test_a_fork_in_the_middle_wakes_a_waiting_worker(parallel_kind: str) -> None:
    meeting = threading.Barrier(2)

    def body(operator: Operator) -> None:
        if operator.output_blobs[0].name != "b0":
            meeting.wait(PATIENCE)

    fork = parents_from_edges(3, [(0, 1), (0, 2)])
    with (
        temporary_operator("MeetAfter", body),
        make_net(parallel_kind, net_of(fork, op_type="MeetAfter")) as net,
    ):
        net.run()


def test_a_ready_child_goes_on_in_the_worker_that_made_it_ready(parallel_kind: str) -> None:
    where: dict[str, str] = {}
    held, release = threading.Event(), threading.Event()

    def note(operator: Operator) -> None:
        assert held.wait(PATIENCE)  # from here on, the other worker cannot help
        where[operator.output_blobs[0].name] = threading.current_thread().name

    fork = parents_from_edges(3, [(0, 1), (0, 2)])

    def hold(_operator: Operator) -> None:
        held.set()
        assert release.wait(PATIENCE)

    definition = net_of(fork, op_type="NoteThread")
    definition.op.add(type="Hold", output=["held"])  # keeps one of the two workers busy all the time
    definition.op.add(type="LetGo", input=["b1", "b2"], output=["freed"])
    with (
        temporary_operator("NoteThread", note),
        temporary_operator("Hold", hold),
        temporary_operator("LetGo", lambda _operator: release.set()),
        make_net(parallel_kind, definition) as net,
    ):
        net.run()
    assert held.is_set()
    assert len({where["b0"], where["b1"], where["b2"]}) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_operator_names_itself_and_leaves_the_net_usable(kind: str, workers: int) -> None:
    fail = threading.Event()
    ran: list[str] = []

    def body(operator: Operator) -> None:
        name = operator.output_blobs[0].name
        ran.append(name)
        if name == "b1" and fail.is_set():
            raise ZeroDivisionError("on purpose")

    with (
        temporary_operator("Maybe", body),
        make_net(kind, net_of(DIAMOND, name="diamond", op_type="Maybe"), workers) as net,
    ):
        for _ in range(3):
            fail.set()
            ran.clear()
            expected = r"Maybe 'b1' \(operator 1\) of net 'diamond'.*on purpose"
            with pytest.raises(OperatorError, match=expected) as caught:
                net.run()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert caught.value.operator.startswith("Maybe 'b1'")
            assert "b3" not in ran
            fail.clear()
            ran.clear()
            net.run()
            assert sorted(ran) == ["b0", "b1", "b2", "b3"]


def test_the_first_error_is_raised_and_later_ones_are_attached(parallel_kind: str) -> None:
    both_inside = threading.Barrier(2)

    def body(operator: Operator) -> None:
        both_inside.wait(PATIENCE)
        raise ValueError(f"from {operator.output_blobs[0].name}")

    with (
        temporary_operator("Fail", body),
        make_net(parallel_kind, net_of([[], []], op_type="Fail")) as net,
        pytest.raises(OperatorError) as caught,
    ):
        net.run()
    first, *notes = [str(caught.value), *caught.value.__notes__]
    assert len(notes) == 1
    assert ("from b0" in first, "from b1" in notes[0]) in {(True, True), (False, False)}


def test_a_run_past_its_timeout_stops_at_the_next_chain_and_the_net_stays_usable(parallel_kind: str) -> None:
    inside, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def body(operator: Operator) -> None:
        ran.append(operator.output_blobs[0].name)
        if operator.output_blobs[0].name == "b0":
            inside.set()
            assert go_on.wait(PATIENCE)

    fork = parents_from_edges(3, [(0, 1), (0, 2)])
    with temporary_operator("Slow", body), make_net(parallel_kind, net_of(fork, op_type="Slow")) as net:

        def release_after_timeout() -> None:
            assert inside.wait(PATIENCE)
            while not stopping.is_set():
                stopping.wait(PATIENCE)
            go_on.set()

        stopping = threading.Event()
        helper = threading.Thread(target=release_after_timeout)
        helper.start()
        pool = net._running_pool()  # type: ignore[attr-defined]
        stop = pool.stop
        pool.stop = lambda run, error: (stop(run, error), stopping.set())
        with pytest.raises(RunTimeoutError, match=r"stopped after 0\.2 seconds"):
            net.run(timeout=0.2)
        helper.join()
        assert ran == ["b0"]
        net.run()
        assert sorted(ran) == ["b0", "b0", "b1", "b2"]


def test_simple_net_stops_between_operators_when_its_time_is_up() -> None:
    clock = threading.Event()
    with (
        temporary_operator("Spend", lambda _operator: clock.wait(0.02)),
        make_net("simple", net_of([[], []], op_type="Spend")) as net,
    ):
        net.run()  # preparation takes time, too
        with pytest.raises(RunTimeoutError, match="stopped before Spend 'b1'"):
            net.run(timeout=0.01)


def test_a_run_without_any_time_does_not_begin(kind: str) -> None:
    calls = []
    with temporary_operator("Count", calls.append), make_net(kind, net_of([[], []], op_type="Count")) as net:
        for _ in range(100):
            with pytest.raises(RunTimeoutError, match=r"net '.*': not begun within 0 seconds"):
                net.run(timeout=0)
        assert calls == []
        net.run(timeout=PATIENCE)
        assert len(calls) == 2


def test_a_second_caller_waits_until_the_first_run_is_over(kind: str) -> None:
    inside = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    most = [0, 0]
    lock = threading.Lock()

    def body(_operator: Operator) -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
        inside.release()
        assert go_on.acquire(timeout=PATIENCE)
        with lock:
            most[0] -= 1

    with temporary_operator("Gate", body), make_net(kind, net_of([[]], op_type="Gate")) as net:
        callers = [threading.Thread(target=net.run) for _ in range(2)]
        for caller in callers:
            caller.start()
        assert inside.acquire(timeout=PATIENCE)
        with pytest.raises(RunTimeoutError, match="still running for another caller"):
            net.run(timeout=0.01)
        go_on.release(2)
        for caller in callers:
            caller.join(PATIENCE)
    assert most == [0, 1]


def test_a_closed_net_says_so_and_leaves_no_thread(kind: str) -> None:
    started = new_threads()
    net = make_net(kind, net_of(DIAMOND))
    net.run()
    net.close()
    net.close()
    assert started() == 0
    with pytest.raises(ClosedError, match="'net' is closed"):
        net.run()


def test_a_missing_input_blob_is_named_when_the_net_is_built(kind: str) -> None:
    definition = NetDef(name="n", op=[operator_def("Relu", ["nowhere"], ["y"])])
    with pytest.raises(MissingBlobError, match=r"Relu 'y' \(operator 0\) of net 'n': input blob 'nowhere'"):
        make_net(kind, definition)


def test_an_input_that_was_never_fed_is_named_when_the_net_runs(kind: str) -> None:
    workspace = Workspace()
    workspace.create_blob("x")
    definition = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"])])
    expected = "'x' is empty"
    with make_net(kind, definition, workspace=workspace) as net, pytest.raises(MissingBlobError, match=expected):
        net.run()


def test_new_shapes_between_runs_are_prepared_anew_and_old_ones_come_back(kind: str) -> None:
    workspace = Workspace()
    definition = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"]), operator_def("Relu", ["y"], ["z"])])
    rng = np.random.default_rng(0)
    workspace.feed_blob("x", np.zeros((1,), np.float32))
    with make_net(kind, definition, workspace=workspace) as net:
        preparations = []
        for shape in [(2, 3), (4, 5), (2, 3), (4, 5), (1,), (2, 3)]:
            x = rng.standard_normal(shape).astype(np.float32)
            workspace.feed_blob("x", x)
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("z"), np.maximum(x, 0))
            np.testing.assert_array_equal(workspace.fetch_blob("y"), np.maximum(x, 0))
            preparations.append(net.prepared())
    assert preparations[0] is preparations[2] is preparations[5]
    assert preparations[1] is preparations[3]


def test_an_intermediate_blob_fed_from_outside_is_computed_again() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((2,), np.float32))
    definition = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"])])
    with make_net("dag", definition, workspace=workspace) as net:
        net.run()
        workspace.feed_blob("y", np.zeros((7,), np.float64))
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), np.ones((2,), np.float32))


def test_a_shape_error_at_the_first_run_names_net_and_operator(kind: str) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((2,), np.int32))
    definition = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"])])
    with (
        make_net(kind, definition, workspace=workspace) as net,
        pytest.raises(ShapeError, match=r"Relu 'y' \(operator 0\) of net 'n': input 'x' must be one of float32"),
    ):
        net.run()


def test_a_trace_has_one_span_for_every_operator(kind: str) -> None:
    with make_net(kind, net_of(DIAMOND)) as net:
        trace = Trace()
        net.run(trace=trace)
        net.run()
    assert sorted(span.operator for span in trace.spans) == [0, 1, 2, 3]
    assert all(span.end >= span.start for span in trace.spans)


def test_an_operator_that_fails_under_trace_is_named_too(kind: str) -> None:
    def body(operator: Operator) -> None:
        if operator.output_blobs[0].name == "b2":
            raise ValueError("traced")

    with (
        temporary_operator("Fail", body),
        make_net(kind, net_of(parents_from_edges(3, [(0, 1), (1, 2)]), op_type="Fail")) as net,
        pytest.raises(OperatorError, match=r"Fail 'b2' \(operator 2\)"),
    ):
        net.run(trace=Trace())


@pytest.mark.parametrize("kind", ["simple", "dag", "async_dag"])
def test_timeouts_may_be_infinite_but_not_negative(kind: str) -> None:
    with make_net(kind, net_of(DIAMOND)) as net:
        net.run(timeout=float("inf"))
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match="at least 0 seconds"):
                net.run(timeout=timeout)


@pytest.mark.parametrize("kind", ["simple", "dag", "async_dag"])
def test_whatever_an_operator_raises_while_it_is_prepared_names_it_and_leaves_the_net_usable(kind: str) -> None:
    problems = [RuntimeError("no engine")]

    def infer(call: OperatorCall) -> list[TensorType]:
        if problems:
            raise problems.pop()
        return [call.inputs[0]]

    with temporary_operator("Shaky", lambda operator: None):
        schema = registry.schema_of("Shaky")
        object.__setattr__(schema, "infer", infer)
        workspace = Workspace()
        workspace.feed_blob("x", np.ones(2, np.float32))
        with make_net(kind, NetDef(name="n", op=[operator_def("Shaky", ["x"], ["y"])]), workspace=workspace) as net:
            with pytest.raises(
                OperatorError, match=r"Shaky 'y' \(operator 0\) of net 'n' failed: RuntimeError: no eng"
            ):
                net.run()
            net.run()


def test_an_operator_that_runs_its_own_net_in_the_same_thread_is_told() -> None:
    nets: list[BaseNet] = []
    with temporary_operator("RunItself", lambda operator: nets[0].run()):
        net = Workspace().create_net(net_of([[]], op_type="RunItself"), "simple")
        assert isinstance(net, BaseNet)
        nets.append(net)
        with pytest.raises(OperatorError, match="an operator cannot run the net that runs it"):
            net.run()
        net.close()
