"""Settled operators: what follows from shapes is computed when a net is prepared, and no run computes it."""

import numpy as np
import pytest

import dagexec
from dagexec import InputInfo, Model, NetDef, Workspace
from dagexec.core.proto import OperatorDef
from dagexec.errors import DagexecError, OperatorError, ResourceError
from dagexec.scheduler.hazards.check import check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.dynamic import CheckedStep
from dagexec.scheduler.plan.settling import MAX_ELEMENTS, MAX_ELEMENTS_ASKED
from dagexec.tracing import Trace
from tests.ops.running import operator_def

NETS = pytest.mark.parametrize("net_class", [SimpleNet, DAGNet, AsyncDAGNet])
CONSTANTS = {"zero": np.array([0], np.int64), "minus": np.array([-1], np.int64), "one": np.array(1, np.int64)}


def flattening() -> list[OperatorDef]:
    """flat = relu(x).reshape(len(x), -1), as exporters write it."""
    return [
        operator_def("Relu", ["x"], ["r"]),
        operator_def("Shape", ["r"], ["shape"]),
        operator_def("Gather", ["shape", "zero"], ["batch"]),
        operator_def("Concat", ["batch", "minus"], ["target", "sizes"], axis=0),
        operator_def("Reshape", ["r", "target"], ["v"]),
        operator_def("Sqr", ["v"], ["flat"]),
    ]


def feed(workspace: Workspace, *shape: int) -> np.ndarray:
    x = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    workspace.feed_blob("x", x)
    return x


def workspace_for(*shape: int) -> Workspace:
    workspace = Workspace()
    for name, value in CONSTANTS.items():
        workspace.feed_blob(name, value)
    feed(workspace, *shape)
    return workspace


def net_of(operators: list[OperatorDef]) -> NetDef:
    return NetDef(name="n", op=operators)


def checked_steps(net: BaseNet) -> list[int]:
    return [index for index, step in enumerate(net.prepared().steps) if isinstance(step, CheckedStep)]


@NETS
@pytest.mark.parametrize("keep", [None, frozenset({"flat"}), frozenset({"flat", "target", "batch"})])
def test_shapes_that_follow_from_shapes_are_known_before_a_run(
    net_class: type[BaseNet], keep: frozenset[str] | None
) -> None:
    workspace = workspace_for(1, 2, 3)
    with net_class(net_of(flattening()), workspace, constants=frozenset(CONSTANTS), keep=keep) as net:
        for shape in [(1, 2, 3), (2, 3, 2), (1, 2, 3), (4, 1, 1), (3, 2, 2), (2, 2, 2), (5, 1, 2), (2, 3, 2)]:
            x = feed(workspace, *shape)
            for _ in range(2):
                net.run()
                expected = np.square(np.maximum(x, 0)).reshape(shape[0], -1)
                assert workspace.fetch_blob("flat").tobytes() == expected.tobytes()
                assert workspace.fetch_blob("flat").shape == expected.shape
                if keep is None or "target" in keep:
                    assert workspace.fetch_blob("target").tolist() == [shape[0], -1]
            assert not checked_steps(net)
            assert net.prepared().settled == {1, 2, 3}
            assert sorted(index for chain in net.plan.chains for index in chain) == [0, 4, 5]
            assert len(net.plan.chains) == 1
            assert check_net(net).holds


def test_what_others_write_over_a_settled_blob_does_not_last() -> None:
    workspace = workspace_for(2, 3)
    other = net_of([operator_def("Relu", ["x"], ["y"]), operator_def("Shape", ["y"], ["shape"])])
    with (
        SimpleNet(net_of(flattening()), workspace, constants=frozenset(CONSTANTS)) as net,
        SimpleNet(other, workspace) as second,
    ):
        for _ in range(3):
            net.run()
            assert workspace.fetch_blob("shape").tolist() == [2, 3]
            workspace.feed_blob("shape", np.array([7, 7], np.int64))
            workspace.feed_blob("target", np.array([3, 2], np.int64))
            net.run()
            assert workspace.fetch_blob("shape").tolist() == [2, 3]
            assert workspace.fetch_blob("flat").shape == (2, 3)
            workspace.feed_blob("x", np.zeros((1, 1), np.float32))
            second.run()
            assert workspace.fetch_blob("shape").tolist() == [1, 1]
            feed(workspace, 2, 3)


@NETS
def test_results_may_follow_from_shapes_alone(net_class: type[BaseNet]) -> None:
    net = net_of([operator_def("Shape", ["x"], ["shape"]), operator_def("Size", ["x"], ["size"])])
    net.external_input.extend(["x"])
    model = Model("m", net, inputs={"x": InputInfo(shape=(None, 2))}, outputs=("shape", "size"))
    with dagexec.compile(model, net_type=net_class.net_type, replicas=2) as executor:
        for rows in (1, 3, 2, 1):
            out = {"shape": np.zeros(2, np.int64)}
            found = executor.run({"x": np.zeros((rows, 2), np.float32)}, out=out)
            assert found["shape"] is out["shape"]
            assert (out["shape"].tolist(), found["size"].item()) == ([rows, 2], 2 * rows)


def test_what_is_large_is_computed_by_the_run_in_its_own_memory() -> None:
    operators = [
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("ConstantFill", ["shape"], ["mask"], input_as_shape=1, value=1.0),
        operator_def("Relu", ["mask"], ["y"]),
    ]
    workspace = workspace_for(MAX_ELEMENTS)
    with SimpleNet(net_of(operators), workspace) as net:
        assert net.prepared().settled == {0, 1, 2}
        feed(workspace, MAX_ELEMENTS + 1)
        assert net.prepared().settled == {0}
        assert not checked_steps(net)
        net.run()
        assert workspace.fetch_blob("y").sum() == MAX_ELEMENTS + 1


def test_what_shapes_depend_on_is_settled_up_to_a_bound_and_dynamic_beyond() -> None:
    operators = [
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("ConstantFill", ["shape"], ["ones"], input_as_shape=1, value=1, dtype="bool"),
        operator_def("BooleanMask", ["x", "ones"], ["y"]),
    ]
    workspace = workspace_for(MAX_ELEMENTS + 1)
    with SimpleNet(net_of(operators), workspace) as net:
        assert net.prepared().settled == {0, 1}
        workspace.feed_blob("x", np.zeros(MAX_ELEMENTS_ASKED + 1, np.float32))
        assert checked_steps(net) == [2]
        net.run()
        assert workspace.fetch_blob("y").shape == (MAX_ELEMENTS_ASKED + 1,)


@pytest.mark.parametrize("reader", ["Relu", "Shape"])
def test_a_size_that_no_machine_has_is_refused(reader: str) -> None:
    operators = [
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("Mul", ["shape", "huge"], ["count"]),
        operator_def("Range", ["count"], ["y"]),
        operator_def(reader, ["y"], ["z"]),
    ]
    workspace = workspace_for(1000)
    workspace.feed_blob("huge", np.array([10**12], np.int64))
    with (
        SimpleNet(net_of(operators), workspace, constants=frozenset({"huge"})) as net,
        pytest.raises(ResourceError, match=r"Range 'y' \(operator 2\) of net 'n'"),
    ):
        net.run()


def test_an_error_of_a_settled_operator_names_it() -> None:
    workspace = workspace_for(2, 3)
    operators = [operator_def("Shape", ["x"], ["shape"]), operator_def("Gather", ["shape", "one"], ["size"])]
    with SimpleNet(net_of(operators), workspace, constants=frozenset({"one"})) as net:
        net.run()
        assert workspace.fetch_blob("size").item() == 3
        feed(workspace, 2)
        for _ in range(2):
            with pytest.raises(DagexecError, match=r"Gather 'size' \(operator 1\) of net 'n'"):
                net.run()
        feed(workspace, 2, 5)
        net.run()
        assert workspace.fetch_blob("size").item() == 5


def test_what_depends_on_values_prepares_itself_anew() -> None:
    """Rows whose numbers are above the number of rows: BooleanMask depends on values, Shape and Range after it too."""
    operators = [
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("GT", ["x", "one_half"], ["above"]),
        operator_def("BooleanMask", ["x", "above"], ["kept"]),
        operator_def("Shape", ["kept"], ["count"]),
        operator_def("Range", ["count"], ["places"]),
    ]
    workspace = workspace_for(4)
    workspace.feed_blob("one_half", np.array(0.5, np.float32))
    with DAGNet(net_of(operators), workspace, num_workers=2, constants=frozenset({"one_half"})) as net:
        for values in ([1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]):
            workspace.feed_blob("x", np.array(values, np.float32))
            net.run()
            assert workspace.fetch_blob("places").tolist() == list(range(sum(values)))
        assert (net.prepared().settled, checked_steps(net)) == ({0}, [2, 3, 4])


@pytest.mark.parametrize(
    "more",
    [
        [operator_def("Shape", ["y"], ["shape"])],  # a second writer
        [operator_def("Negative", ["shape"], ["shape"])],  # in place
    ],
)
def test_a_blob_with_several_writers_is_left_to_the_run(more: list[OperatorDef]) -> None:
    operators = [
        operator_def("Relu", ["x"], ["y"]),
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("ConstantFill", ["shape"], ["filled"], input_as_shape=1, value=2.0),
        *more,
    ]
    workspace = workspace_for(2, 3)
    with SimpleNet(net_of(operators), workspace) as net:
        assert not net.prepared().settled
        net.run()
        assert workspace.fetch_blob("filled").shape == (2, 3)


def test_an_order_that_is_asked_for_is_kept_past_settled_operators() -> None:
    operators = [
        operator_def("Relu", ["x"], ["first"]),
        operator_def("Shape", ["x"], ["shape"]),
        operator_def("Size", ["shape"], ["size"]),
        operator_def("Sqr", ["x"], ["second"]),
        operator_def("Abs", ["x"], ["free"]),
    ]
    operators[1].control_input.append("first")
    operators[3].control_input.append("size")
    with DAGNet(net_of(operators), workspace_for(2), num_workers=2) as net:
        assert net.prepared().settled == {1, 2}
        assert sorted(net.plan.chains) == [(0, 3), (4,)]
        assert check_net(net).holds


def test_memory_is_planned_in_the_order_of_what_runs() -> None:
    """The large blobs are ordered by settled operators alone, so they are in use at the same time."""
    operators = [
        operator_def("Relu", ["x"], ["a"]),
        operator_def("ReduceSum", ["a"], ["b"]),
        operator_def("Shape", ["b"], ["shape"]),
        operator_def("Gather", ["shape", "zero"], ["one_row"]),
        operator_def("Expand", ["y", "one_row"], ["c"]),
        operator_def("ReduceSum", ["c"], ["d"]),
    ]
    workspace = workspace_for(100, 100)
    workspace.feed_blob("y", np.ones((100, 100), np.float32))
    keep = frozenset({"b", "d"})
    with DAGNet(net_of(operators), workspace, num_workers=2, constants=frozenset(CONSTANTS), keep=keep) as net:
        assert net.prepared().settled == {2, 3}
        assert sorted(net.plan.chains) == [(0, 1), (4, 5)]
        assert check_net(net).holds


@NETS
def test_a_run_out_of_time_names_an_operator_that_runs(net_class: type[BaseNet]) -> None:
    """And a trace has spans of those that run."""
    workspace = workspace_for(2, 3)
    with net_class(net_of(flattening()), workspace, constants=frozenset(CONSTANTS)) as net:
        trace = Trace()
        net.run(trace=trace, timeout=60)
        net.run(trace=trace)
        assert sorted({span.operator for span in trace.spans}) == [0, 4, 5]
    with (
        SimpleNet(net_of(flattening()), workspace, constants=frozenset(CONSTANTS)) as net,
        pytest.raises(DagexecError, match=r"not begun within 0\.0 seconds"),
    ):
        net.run(timeout=0.0)


def test_an_operator_that_fails_in_a_run_is_named_past_settled_ones() -> None:
    operators = [*flattening(), operator_def("Gather", ["flat", "rows"], ["y"])]
    workspace = workspace_for(2, 3)
    workspace.feed_blob("rows", np.array([9], np.int64))
    with (
        DAGNet(net_of(operators), workspace, num_workers=2, constants=frozenset(CONSTANTS)) as net,
        pytest.raises(OperatorError, match=r"Gather 'y' \(operator 6\)"),
    ):
        net.run()


@pytest.mark.filterwarnings("error")
def test_what_is_settled_is_computed_without_warnings_as_in_a_run() -> None:
    operators = [
        operator_def("Shape", ["x"], ["sizes"]),
        operator_def("Cast", ["sizes"], ["floats"], to="float32"),
        operator_def("Log", ["floats"], ["logarithms"]),
    ]
    workspace = workspace_for(0, 1)
    net = SimpleNet(net_of(operators), workspace)
    net.run()
    assert not checked_steps(net)
    np.testing.assert_array_equal(workspace.fetch_blob("logarithms"), np.float32([-np.inf, 0]))
