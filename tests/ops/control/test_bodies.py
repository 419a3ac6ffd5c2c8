"""Operators that run nets: what an execution sees and leaves, errors, proofs, traces, and how a loop is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef, Workspace, op
from dagexec.core.device import Device
from dagexec.core.dtypes import BOOL, FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.errors import (
    ClosedError,
    OperatorError,
    RunTimeoutError,
    SchemaError,
    ShapeError,
    UnsupportedOperatorError,
)
from dagexec.scheduler.exploration.exploring import explore
from dagexec.scheduler.exploration.strategies import RandomStrategy
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.nets import body as body_module
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.dynamic import CheckedStep
from dagexec.tracing import Trace
from tests.nets import temporary_operator
from tests.ops.running import workspace_of

Array = npt.NDArray[Any]

COUNT = NetDef(
    name="count",
    op=[op("Add", ["x", "one"], ["y"]), op("LT", ["y", "limit"], ["go"])],
    external_input=["i", "c", "x", "one", "limit"],
    external_output=["go", "y", "y"],
)
"""x + 1 until it is `limit`."""

NETS = [("simple", None), ("dag", 1), ("dag", 2), ("async_dag", 2)]


@pytest.fixture(params=NETS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Runs the operators of a net twice, on a net of each kind, and gives what its last blobs hold."""
    kind, workers = request.param
    nets: list[Any] = []

    def run(definition: NetDef, feeds: dict[str, Any], *outputs: str) -> list[Any]:
        workspace = Workspace()
        for name, value in feeds.items():
            workspace.feed_blob(name, np.asarray(value))
        nets.append(workspace.build_net(definition, kind, workers))
        nets[-1].run()
        first = [workspace.fetch_blob(name) for name in outputs]
        nets[-1].run()
        for name, value in zip(outputs, first, strict=True):
            np.testing.assert_array_equal(workspace.fetch_blob(name), value)
        return first

    yield run
    for net in nets:
        net.close()


def counting(**arguments: Any) -> NetDef:
    captured = {"loop_net": COUNT, "captured": ["one", "limit"]}
    made = op("Loop", ["begin", "step", "end"], ["last", "all"], name="counting", **captured, **arguments)
    return NetDef(name="outer", op=[made], external_input=["begin", "step", "end"])


FLOATS = {"begin": np.float32([0]), "step": np.float32([1]), "end": np.float32([5])}


def test_a_loop_carries_values_and_stacks_them(run: Callable[..., list[Any]]) -> None:
    last, stacked = run(counting(), FLOATS, "last", "all")
    assert (last.tolist(), stacked.tolist()) == ([5], [[1], [2], [3], [4], [5]])


def test_a_loop_without_iterations_gives_what_it_begins_with(run: Callable[..., list[Any]]) -> None:
    net = counting(trip_count=1)
    net.op[0].input.insert(0, "n")
    last, stacked = run(net, FLOATS | {"n": np.int64(0)}, "last", "all")
    assert (last.tolist(), stacked.shape, stacked.dtype) == ([0], (0, 1), np.float32)


def test_carried_values_are_read_before_any_is_written(run: Callable[..., list[Any]]) -> None:
    body = NetDef(name="swap", external_input=["i", "c", "a", "b"], external_output=["c", "b", "a"])
    net = NetDef(
        name="outer", op=[op("Loop", ["n", "a0", "b0"], ["a1", "b1"], loop_net=body, trip_count=1)],
        external_input=["n", "a0", "b0"],
    )  # fmt: skip
    a, b = run(net, {"n": np.int64(3), "a0": np.float32([1, 2]), "b0": np.float32([3, 4])}, "a1", "b1")
    assert (a.tolist(), b.tolist()) == ([3, 4], [1, 2])


def test_a_carried_value_may_change_its_shape(run: Callable[..., list[Any]]) -> None:
    body = NetDef(
        name="grow", op=[op("Concat", ["x", "piece"], ["y", "split"], axis=0), op("Copy", ["c"], ["d"])],
        external_input=["i", "c", "x", "piece"], external_output=["d", "y"],
    )  # fmt: skip
    grow = op("Loop", ["n", "x0", "p"], ["x1"], loop_net=body, trip_count=1, captured=["piece"])
    net = NetDef(name="outer", op=[grow], external_input=["n", "x0", "p"])
    [x] = run(net, {"n": np.int64(3), "x0": np.float32([0]), "p": np.float32([7])}, "x1")
    assert x.tolist() == [0, 7, 7, 7]


@pytest.mark.parametrize("condition", [True, False])
def test_branches_may_differ_in_shape(run: Callable[..., list[Any]], condition: bool) -> None:
    branches = {
        "then_net": NetDef(name="t", op=[op("Relu", ["v"], ["r"])], external_input=["v"], external_output=["r"]),
        "else_net": NetDef(name="e", external_input=["v", "w"], external_output=["w"]),
    }
    net = NetDef(
        name="outer", op=[op("If", ["k", "x", "z"], ["y"], captured=["v", "w"], **branches)],
        external_input=["k", "x", "z"],
    )  # fmt: skip
    [y] = run(net, {"k": np.bool_(condition), "x": np.float32([-1, 2]), "z": np.int64([[9]])}, "y")
    assert y.tolist() == ([0, 2] if condition else [[9]])


def test_a_scan_goes_along_any_axis_in_any_direction(run: Callable[..., list[Any]]) -> None:
    body = NetDef(
        name="sum", op=[op("Add", ["s", "x"], ["t"]), op("Copy", ["t"], ["u"])],
        external_input=["s", "x"], external_output=["t", "u"],
    )  # fmt: skip
    scan = op(
        "Scan", ["s0", "xs"], ["s1", "us"], scan_net=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[1], scan_output_axes=[-1], scan_output_directions=[1],
    )  # fmt: skip
    xs = np.arange(6, dtype=np.float32).reshape(2, 3)
    net = NetDef(name="n", op=[scan], external_input=["s0", "xs"])
    state, sums = run(net, {"s0": np.zeros(2, "f4"), "xs": xs}, "s1", "us")
    np.testing.assert_array_equal(state, xs.sum(1))
    np.testing.assert_array_equal(sums, np.cumsum(xs[:, ::-1], 1)[:, ::-1])


def test_what_follows_an_operator_with_bodies_sees_each_runs_shapes() -> None:
    net = counting()
    net.op.append(op("Relu", ["all"], ["y"]))
    workspace = workspace_of(FLOATS)
    built = workspace.build_net(net, "dag", 2)
    for end in (2, 6, 2):
        workspace.feed_blob("end", np.float32([end]))
        built.run()
        assert workspace.fetch_blob("y").shape == (end, 1)
    built.close()


def failing(at: int) -> Callable[[Operator], None]:
    def fail(operator: Operator) -> None:
        if operator.input(0).array.item() == at:
            raise RuntimeError("boom")

    return fail


def test_an_error_names_outer_operator_iteration_and_inner_operator(run: Callable[..., list[Any]]) -> None:
    with temporary_operator("FailAt3", failing(3)):
        net = counting()
        body = net.op[0].arg[0].n
        body.op.append(op("FailAt3", ["i"], ["nothing"], name="inner"))
        with pytest.raises(OperatorError, match=r"Loop 'counting' .*, iteration 3: FailAt3 'inner' .*boom") as caught:
            run(net, FLOATS, "last")
    assert "FailAt3" in caught.value.operator
    assert caught.value.net == "count"


def test_a_net_that_does_not_fit_is_refused_when_it_is_built() -> None:
    workspace = workspace_of(FLOATS)
    net = counting()
    net.op[0].arg[0].n.external_output.append("y")
    with pytest.raises(SchemaError, match=r"loop_net must take 3 values .* and give 3; it takes 3 and gives 4"):
        workspace.build_net(net)
    net = counting()
    net.op[0].arg[0].n.op.append(op("Copy", ["x"], ["limit"]))
    with pytest.raises(SchemaError, match="writes 'limit'"):
        workspace.build_net(net)
    net = counting()
    net.op[0].arg[0].n.op.append(op("Nonsense", ["x"], ["z"]))
    with pytest.raises(UnsupportedOperatorError, match="Nonsense"):
        workspace.build_net(net)


def test_rows_of_two_shapes_cannot_be_stacked(run: Callable[..., list[Any]]) -> None:
    body = NetDef(
        name="grow", op=[op("Concat", ["x", "x"], ["y", "split"], axis=0)],
        external_input=["i", "c", "x"], external_output=["c", "y", "y"],
    )  # fmt: skip
    net = NetDef(
        name="outer", op=[op("Loop", ["n", "x0"], ["x1", "all"], loop_net=body, trip_count=1)],
        external_input=["n", "x0"],
    )  # fmt: skip
    with pytest.raises(OperatorError, match=r"it was float32\[2\], and in iteration 1 it is float32\[4\]") as caught:
        run(net, {"n": np.int64(2), "x0": np.float32([1])}, "x1")
    assert isinstance(caught.value.__cause__, ShapeError)


@pytest.mark.parametrize("kind", ["simple", "dag", "async_dag"])
def test_the_proof_covers_the_nets_inside(kind: str) -> None:
    workspace = workspace_of(FLOATS)
    net = workspace.build_net(counting(), kind)
    assert isinstance(net, BaseNet)
    named, run_first = check_net(net, by_name=True), check_net(net)
    net.run()
    prepared = check_net(net)
    net.close()
    assert all(proof.holds for proof in (named, run_first, prepared))
    assert named.operators == prepared.operators == 3


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_a_trace_has_spans_for_inner_operators_within_the_outer_one(kind: str) -> None:
    workspace = workspace_of(FLOATS)
    net = workspace.build_net(counting(), kind)
    trace = Trace()
    net.run(trace=trace)  # type: ignore[call-arg]
    net.close()
    [outer] = [span for span in trace.spans if span.is_whole]
    inner = [span for span in trace.spans if span.inner is not None]
    assert len(inner) == 10
    assert {span.inner.split()[0] for span in inner if span.inner} == {"Add", "LT"}
    assert all(outer.start <= span.start <= span.end <= outer.end for span in inner)
    assert len(trace.operator_seconds(1)) == 1


ENDLESS = NetDef(
    name="endless",
    op=[op("Loop", ["go", "x"], ["y"], condition=1, loop_net=NetDef(
        name="body", op=[op("Announce", ["v"], ["nothing"]), op("Copy", ["v"], ["w"])], external_input=["i", "c", "v"],
        external_output=["c", "w"],
    ))],
    external_input=["go", "x"],
    external_output=["y"],
)  # fmt: skip


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_an_endless_loop_ends_with_its_executor(net_type: str, prepared: bool) -> None:
    going = threading.Event()
    errors: list[BaseException] = []
    with temporary_operator("Announce", lambda _operator: going.set()):
        inputs = {"go": InputInfo(BOOL, ()), "x": InputInfo(FLOAT32, (1,))}
        model = Model("endless", ENDLESS, inputs=inputs, outputs=("y",))
        executor = dagexec.compile(model, num_workers=1, optimize=False, net_type=net_type)
        if prepared:  # the next run is in its caller's thread
            executor.run({"go": np.bool_(False), "x": np.float32([1])})

        def call() -> None:
            try:
                executor.run({"go": np.bool_(True), "x": np.float32([1])})
            except ClosedError as error:
                errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        assert going.wait(60)
        assert not executor.drain(timeout=0)
        caller.join(60)
    assert len(errors) == 1


@pytest.mark.parametrize("kind", ["simple", "dag", "async_dag"])
def test_an_endless_loop_ends_at_the_timeout_of_its_run(kind: str) -> None:
    workspace = workspace_of({"x": np.float32([1]), "go": np.bool_(True)})
    with temporary_operator("Announce", lambda _operator: None):
        net = workspace.build_net(ENDLESS, kind, 1)
        with pytest.raises(RunTimeoutError):
            net.run(timeout=0.01)  # type: ignore[call-arg]
        net.close()


WIDE = NetDef(
    name="wide",
    op=[
        *(op("Mark", ["x"], [f"m{index}"], name=f"branch{index}") for index in range(4)),
        op("Sum", [f"m{index}" for index in range(4)], ["y"]),
        op("LT", ["i", "last"], ["go"]),
    ],
    external_input=["i", "c", "x", "last"],
    external_output=["go", "y"],
)
"""Four branches a turn, three turns."""


def wide_loop() -> tuple[NetDef, Workspace]:
    workspace = workspace_of({"x": np.float32([1]), "last": np.int64(2)})
    loop = op("Loop", ["x", "last"], ["y"], loop_net=WIDE, captured=["last"])
    return NetDef(name="outer", op=[loop], external_input=["x", "last"]), workspace


def copy_marked(operator: Operator) -> None:
    operator.output(0).array[...] = operator.input(0).array


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_branches_of_a_body_share_the_pool_in_any_schedule(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(body_module, "MIN_SECONDS_SAVED", -1.0)
    helpers: set[str] = set()

    def mark(operator: Operator) -> None:
        helpers.add(threading.current_thread().name)
        copy_marked(operator)

    def scenario() -> float:
        definition, workspace = wide_loop()
        net = workspace.build_net(definition, "dag", workers)
        net.run()
        net.close()
        found: float = workspace.fetch_blob("y").item()
        return found

    with temporary_operator("Mark", mark):
        for seed in range(20):
            explored = explore(scenario, RandomStrategy(seed))
            assert explored.failure is None
            assert explored.result == 4**3
            assert not explored.left
    assert len(helpers) == workers


@pytest.mark.parametrize("stopped", [False, True])
def test_a_failure_in_a_shared_body_ends_the_run_in_any_schedule(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(body_module, "MIN_SECONDS_SAVED", -1.0)

    def mark(operator: Operator) -> None:
        if operator.definition.name == "branch2":
            raise RuntimeError("boom")
        copy_marked(operator)

    def scenario() -> str:
        definition, workspace = wide_loop()
        if stopped:  # beside the loop, something else fails, which stops it in the middle
            definition.op.append(op("Mark", ["x"], ["z"], name="branch2"))
            [loop] = [argument.n for argument in definition.op[0].arg if argument.name == "loop_net"]
            loop.op[2].name = "fine"
        net = workspace.build_net(definition, "dag", 2)
        with pytest.raises(OperatorError) as caught:
            net.run()
        with pytest.raises(OperatorError):
            net.run()
        net.close()
        return str(caught.value)

    with temporary_operator("Mark", mark):
        for seed in range(20):
            explored = explore(scenario, RandomStrategy(seed))
            assert explored.failure is None
            assert not explored.left
            expected = "Mark 'branch2' (operator 1) of net 'outer'" if stopped else "iteration 0: Mark 'branch2'"
            assert expected in (explored.result or "")


@pytest.mark.parametrize("kind", ["dag", "async_dag"])
def test_in_a_net_for_a_device_control_flow_stays_on_the_host(kind: str) -> None:
    definition = counting()
    definition.op.insert(0, op("Relu", ["start"], ["begin"]))
    definition.op.append(op("Negative", ["last"], ["y"]))
    del definition.external_input[:]
    definition.device_option.CopyFrom(Device.parse("sim:0").to_option())
    workspace = workspace_of({"start": np.float32([-3]), "step": np.float32([1]), "end": np.float32([5])})
    net = workspace.build_net(definition, kind, 2)
    net.run()
    assert check_net(net).holds  # type: ignore[arg-type]
    assert workspace.fetch_blob("y").tolist() == [-5]
    net.close()


def test_a_body_of_ever_new_shapes_is_prepared_as_a_whole_again_once_they_are_steady() -> None:
    body = NetDef(
        name="grow", op=[op("Concat", ["x", "piece"], ["y", "split"], axis=0), op("Relu", ["y"], ["z"])],
        external_input=["i", "c", "x", "piece"], external_output=["c", "z"],
    )  # fmt: skip
    grow = op("Loop", ["n", "x0", "p"], ["x1"], loop_net=body, trip_count=1, captured=["piece"])
    workspace = workspace_of({"n": np.int64(30), "x0": np.float32([0]), "p": np.float32([7])})
    net = workspace.build_net(NetDef(name="outer", op=[grow]), "simple")
    assert isinstance(net, BaseNet)
    net.run()
    assert workspace.fetch_blob("x1").tolist() == [0] + [7] * 30
    inner = net.operators[0].bodies["loop_net"]
    assert isinstance(inner, body_module.BodyNet)
    assert any(isinstance(step, CheckedStep) for step in inner.prepared().steps)
    workspace.feed_blob("n", np.int64(100))
    workspace.feed_blob("p", np.zeros(0, np.float32))
    net.run()
    assert workspace.fetch_blob("x1").tolist() == [0]
    assert not any(isinstance(step, CheckedStep) for step in inner.prepared().steps)
    net.close()


def test_a_body_that_is_back_at_a_known_shape_reads_what_it_is_given_in_each_execution() -> None:
    """What it is given lies elsewhere then, from the middle of the first execution on."""
    add = NetDef(name="add", op=[op("Add", ["s", "r"], ["t"])], external_input=["s", "r"], external_output=["t"])
    count = [op("Cast", ["i"], ["f"], to="float"), op("Add", ["s", "f"], ["t"])]
    net = NetDef(name="count", op=count, external_input=["i", "on", "s"], external_output=["on", "t"])
    scan = op("Scan", ["x", "rows"], ["sum"], scan_net=add, num_scan_inputs=1)
    loop = op("Loop", ["times", "x"], ["counted"], loop_net=net, trip_count=1)
    workspace = workspace_of({"times": np.array(4)})
    built = None
    for size in (1, 2, 1, 3, 2, 1):
        rows = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        workspace.feed_blob("x", np.ones(size, np.float32))
        workspace.feed_blob("rows", rows)
        built = built or workspace.build_net(NetDef(name="outer", op=[scan, loop]), "simple")
        built.run()
        np.testing.assert_array_equal(workspace.fetch_blob("sum"), 1 + rows.sum(0))
        np.testing.assert_array_equal(workspace.fetch_blob("counted"), np.full(size, 7, np.float32))
