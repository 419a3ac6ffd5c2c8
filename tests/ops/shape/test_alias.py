"""Operators that pass a tensor on, and their gradients in nets."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.errors import SchemaError
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.backward import add_gradient_operators
from tests.ops.running import operator_def, run_operator, workspace_of

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("op_type", ["Alias", "AliasWithName", "EnsureDense"])
def test_a_name_more_holds_the_same_values(op_type: str) -> None:
    [y] = run_operator(op_type, [X])
    np.testing.assert_array_equal(y, X)


def run(operators: list[OperatorDef], **feeds: np.ndarray) -> Workspace:
    workspace = workspace_of(feeds)
    with SimpleNet(NetDef(name="test", op=operators), workspace) as net:
        net.run()
    return workspace


def test_writing_an_alias_leaves_the_blob_as_it_was() -> None:
    operators = [operator_def("Alias", ["x"], ["y"]), operator_def("Negative", ["y"], ["y"])]
    workspace = run(operators, x=X)
    np.testing.assert_array_equal(workspace.fetch_blob("x"), X)
    np.testing.assert_array_equal(workspace.fetch_blob("y"), -X)


def test_free_keeps_what_blobs_hold() -> None:
    workspace = run([operator_def("Free", ["x", "z"], ["x", "z"])], x=X, z=X + 1)
    np.testing.assert_array_equal(workspace.fetch_blob("z"), X + 1)


def test_free_wants_its_inputs_as_outputs() -> None:
    with pytest.raises(SchemaError, match="the outputs must be the inputs"):
        run([operator_def("Free", ["x", "z"], ["x", "other"])], x=X, z=X)


def test_copy_on_device_like_copies() -> None:
    [y] = run_operator("CopyOnDeviceLike", [X, np.zeros(1, np.int64)])
    np.testing.assert_array_equal(y, X)


def test_copy_on_device_like_copies_to_the_device_of_the_operator() -> None:
    definition = operator_def("CopyOnDeviceLike", ["x", "x"], ["y"])
    definition.device_option.CopyFrom(Device("sim", 0).to_option())
    workspace = run([definition], x=X)
    assert workspace.get_blob("y").tensor().device == Device("sim", 0)
    np.testing.assert_array_equal(workspace.fetch_blob("y"), X)


def gradients(operators: list[OperatorDef], wanted: list[str], **feeds: np.ndarray) -> list[np.ndarray]:
    net = NetDef(name="test", op=operators, external_input=feeds)
    found = add_gradient_operators(net, ["loss"], wanted=wanted)
    workspace = run(list(net.op), **feeds)
    return [workspace.fetch_blob(str(found[name])) for name in wanted]


def test_gradients_pass_through_an_alias() -> None:
    operators = [
        operator_def("Alias", ["x"], ["y"]),
        operator_def("Sqr", ["y"], ["squares"]),
        operator_def("SumElements", ["squares"], ["loss"]),
    ]
    np.testing.assert_array_equal(gradients(operators, ["x"], x=X)[0], 2 * X)


def test_the_gradient_of_ensure_dense_is_dense_behind_a_gather() -> None:
    operators = [
        operator_def("EnsureDense", ["x"], ["dense"]),
        operator_def("Gather", ["dense", "rows"], ["picked"]),
        operator_def("SumElements", ["picked"], ["loss"]),
    ]
    [found] = gradients(operators, ["x"], x=X, rows=np.array([1, 1], np.int32))
    np.testing.assert_array_equal(found, [[0, 0, 0], [2, 2, 2]])


def test_zero_gradient_gives_zeros_to_a_blob_that_nothing_else_depends_on() -> None:
    operators = [
        operator_def("ZeroGradient", ["w"], []),
        operator_def("SumElements", ["x"], ["loss"]),
    ]
    found = gradients(operators, ["x", "w"], x=X, w=X[:1])
    np.testing.assert_array_equal(found[0], np.ones_like(X))
    np.testing.assert_array_equal(found[1], np.zeros_like(X[:1]))


def test_zero_gradient_adds_nothing_to_the_gradient_of_other_readers() -> None:
    operators = [
        operator_def("ZeroGradient", ["x"], []),
        operator_def("SumElements", ["x"], ["loss"]),
    ]
    np.testing.assert_array_equal(gradients(operators, ["x"], x=X)[0], np.ones_like(X))


def test_compile_runs_a_net_with_all_of_them() -> None:
    net = NetDef(name="all", external_input=["x"], external_output=["y"])
    net.op.extend(
        [
            operator_def("Alias", ["x"], ["a"]),
            operator_def("AliasWithName", ["a"], ["b"], arg={"name": "b"}),
            operator_def("EnsureDense", ["b"], ["c"]),
            operator_def("Relu", ["c"], ["y"]),
            operator_def("Free", ["c"], ["c"]),
        ]
    )
    with dagexec.compile(net) as executor:
        np.testing.assert_array_equal(executor.run({"x": X - 2})["y"], np.maximum(X - 2, 0))


def test_a_gradient_is_negated_on_the_way_back() -> None:
    [y] = run_operator("NegateGradient", [X])
    np.testing.assert_array_equal(y, X)
    net = NetDef(op=[operator_def("NegateGradient", ["x"], ["y"]), operator_def("SumSqrElements", ["y"], ["loss"])])
    gradients = add_gradient_operators(net, ["loss"])
    workspace = run(list(net.op), x=X)
    np.testing.assert_array_equal(workspace.fetch_blob(str(gradients["x"])), -2 * X)
