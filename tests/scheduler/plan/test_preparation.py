"""Preparations: views, shapes that depend on values, memory kept between runs, nets that would not fit."""

import tracemalloc

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.tensor import Tensor
from dagexec.errors import DagexecError, ResourceError, ShapeError
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.dynamic import CheckedStep
from tests.memory_limits import leave
from tests.ops.running import operator_def


def workspace_with(**blobs: object) -> Workspace:
    workspace = Workspace()
    for name, value in blobs.items():
        workspace.feed_blob(name, np.asarray(value))
    return workspace


def test_a_reshape_whose_blobs_have_no_other_writer_is_a_view_and_costs_no_step() -> None:
    workspace = workspace_with(x=np.arange(6, dtype=np.float32))
    net_def = NetDef(
        name="n",
        op=[
            operator_def("Reshape", ["x"], ["r", "old"], shape=[2, 3]),
            operator_def("Relu", ["r"], ["y"]),
        ],
    )
    with SimpleNet(net_def, workspace) as net:
        net.run()
        assert workspace.get_blob("r").tensor().shares_storage_with(workspace.get_blob("x").tensor())
        np.testing.assert_array_equal(workspace.fetch_blob("y"), [[0, 1, 2], [3, 4, 5]])


def test_a_reshape_whose_output_is_written_again_is_a_copy() -> None:
    workspace = workspace_with(x=np.array([-1, 2], np.float32))
    net_def = NetDef(
        name="n", op=[operator_def("Reshape", ["x"], ["r", "old"], shape=[2, 1]), operator_def("Relu", ["r"], ["r"])]
    )
    with SimpleNet(net_def, workspace) as net:
        net.run()
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), [-1, 2])
    np.testing.assert_array_equal(workspace.fetch_blob("r"), [[0], [2]])


def test_feeding_a_view_leaves_the_viewed_blob_alone() -> None:
    workspace = workspace_with(x=np.array([1, 2], np.float32))
    with SimpleNet(NetDef(name="n", op=[operator_def("Flatten", ["x"], ["f"], axis=0)]), workspace) as net:
        net.run()
        workspace.feed_blob("f", np.zeros((1, 2), np.float32))
        np.testing.assert_array_equal(workspace.fetch_blob("x"), [1, 2])
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("f"), [[1, 2]])


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet])
def test_shapes_computed_by_the_run_may_change_every_time(net_class: type[SimpleNet]) -> None:
    workspace = workspace_with(x=np.arange(12, dtype=np.float32), shape=np.array([3, 4], np.int64))
    net_def = NetDef(
        name="n",
        op=[
            operator_def("Copy", ["shape"], ["computed"]),
            operator_def("Reshape", ["x", "computed"], ["r", "old"]),
            operator_def("Relu", ["r"], ["y"]),
            operator_def("Relu", ["x"], ["static"]),
        ],
    )
    with net_class(net_def, workspace) as net:
        for shape in [(3, 4), (2, 6), (2, 6), (12, 1), (3, 4)]:
            workspace.feed_blob("shape", np.array(shape, np.int64))
            net.run()
            assert workspace.fetch_blob("y").shape == shape
            np.testing.assert_array_equal(workspace.fetch_blob("y").ravel(), np.arange(12))
        kinds = [isinstance(step, CheckedStep) for step in net.prepared().steps]
    assert kinds == [False, True, True, False]


def test_an_error_in_a_shape_computed_by_the_run_names_the_operator() -> None:
    workspace = workspace_with(x=np.arange(12, dtype=np.float32), shape=np.array([5, 5], np.int64))
    net_def = NetDef(name="n", op=[operator_def("Reshape", ["x", "shape"], ["r", "old"])])
    with SimpleNet(net_def, workspace) as net:
        with pytest.raises(Exception, match="Reshape 'r' \\(operator 0\\) of net 'n'"):
            net.run()
        workspace.feed_blob("shape", np.array([4, 3], np.int64))
        net.run()
    assert workspace.fetch_blob("r").shape == (4, 3)


def test_a_blob_with_a_dynamic_and_a_static_writer_is_right_after_every_run() -> None:
    workspace = workspace_with(x=np.arange(4, dtype=np.float32), shape=np.array([2, 2], np.int64))
    net_def = NetDef(
        name="n",
        op=[
            operator_def("Reshape", ["x", "shape"], ["t", "old"]),
            operator_def("Relu", ["t"], ["first"]),
            operator_def("Relu", ["x"], ["t"]),
            operator_def("Relu", ["t"], ["second"]),
        ],
    )
    with DAGNet(net_def, workspace, num_workers=2) as net:
        for shape in [(2, 2), (4, 1), (1, 4)]:
            workspace.feed_blob("shape", np.array(shape, np.int64))
            for _ in range(2):
                net.run()
                assert workspace.fetch_blob("first").shape == shape
                assert workspace.fetch_blob("second").shape == (4,)
                assert workspace.fetch_blob("t").shape == (4,)


def test_a_steady_state_run_allocates_no_activation() -> None:
    workspace = workspace_with(
        x=np.ones((1, 8, 128, 128), np.float32), w=np.ones((8, 8, 3, 3), np.float32), b=np.ones(8, np.float32)
    )
    net_def = NetDef(
        name="n",
        op=[
            operator_def("Conv", ["x", "w", "b"], ["c"], kernel=3, pad=1),
            operator_def("Relu", ["c"], ["r"]),
            operator_def("MaxPool", ["r"], ["p"], kernel=2, stride=2),
            operator_def("Softmax", ["p"], ["y"]),
        ],
    )
    activation = 8 * 64 * 64 * 4  # bytes of the smallest one; NumPy's own iterator takes up to 32 KiB for a moment
    with DAGNet(net_def, workspace, num_workers=2) as net:
        net.run()
        tracemalloc.start()
        try:
            for _ in range(3):
                net.run()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < activation


def test_a_net_that_would_not_fit_in_memory_is_refused_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = workspace_with(x=np.ones((1000,), np.float32))
    net_def = NetDef(name="n", op=[operator_def("Relu", [f"{'x' if i == 0 else i}"], [f"{i + 1}"]) for i in range(4)])
    leave(monkeypatch, 10_000)
    with (
        SimpleNet(net_def, workspace) as net,
        pytest.raises(ResourceError, match=r"Relu '3' \(operator 2\) of net 'n'.*needs 12,000 bytes.*has 10,000"),
    ):
        net.run()


def test_inputs_that_do_not_fit_together_are_refused_when_the_net_is_prepared() -> None:
    workspace = workspace_with(x=np.ones((2, 3), np.float32), w=np.ones((4, 5), np.float32), b=np.ones(4, np.float32))
    with (
        SimpleNet(NetDef(name="n", op=[operator_def("FC", ["x", "w", "b"], ["y"])]), workspace) as net,
        pytest.raises(ShapeError, match=r"FC 'y' \(operator 0\) of net 'n'"),
    ):
        net.prepared()


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet])
def test_an_adopted_array_is_never_written_when_another_takes_its_place(net_class: type[BaseNet]) -> None:
    workspace = Workspace()
    first, second = np.ones(3, np.float32), np.full(3, 2, np.float32)
    workspace.adopt_blob("w", first)
    with net_class(NetDef(name="n", op=[operator_def("Relu", ["w"], ["y"])]), workspace) as net:
        net.run()
        workspace.adopt_blob("w", second)
        net.run()
        assert workspace.fetch_blob("y").tolist() == [2, 2, 2]
        workspace.feed_blob("w", np.full(3, 3, np.float32))
        net.run()
        assert workspace.fetch_blob("y").tolist() == [3, 3, 3]
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [2, 2, 2])


def test_feeding_an_input_that_was_a_view_leaves_the_tensor_it_viewed_alone() -> None:
    workspace = workspace_with(x=np.ones(3, np.float32))
    view = workspace.create_blob("v").tensor()
    view.share(workspace.get_blob("x").tensor())
    with SimpleNet(NetDef(name="n", op=[operator_def("Relu", ["v"], ["y"])]), workspace) as net:
        net.run()
        workspace.feed_blob("v", np.full(3, 5, np.float32))
        net.run()
        assert workspace.fetch_blob("y").tolist() == [5, 5, 5]
    assert workspace.fetch_blob("x").tolist() == [1, 1, 1]


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet])
@pytest.mark.parametrize("op_type", ["Relu", "Reshape"])
def test_a_blob_given_another_object_between_runs_is_read_anew(net_class: type[BaseNet], op_type: str) -> None:
    workspace = workspace_with(x=np.ones(2, np.float32), s=np.array([2]))
    inputs, outputs = (["x"], ["y"]) if op_type == "Relu" else (["x", "s"], ["y", "old"])
    with net_class(NetDef(name="n", op=[operator_def(op_type, inputs, outputs)]), workspace) as net:
        net.run()
        for value in (5, 6, 7):
            replacement = Tensor()
            replacement.feed(np.full(2, value, np.float32))
            workspace.get_blob("x").value = replacement
            net.run()
            assert workspace.fetch_blob("y").tolist() == [value, value]
        workspace.get_blob("y").value = Tensor()
        net.run()
        assert workspace.fetch_blob("y").tolist() == [7, 7]
        workspace.get_blob("x").value = "text"
        with pytest.raises(DagexecError, match="blob 'x' holds a str; expected a Tensor"):
            net.run()
