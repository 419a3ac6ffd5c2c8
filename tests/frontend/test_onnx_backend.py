"""dagexec as a backend of the onnx package: models and nodes by the interface that its test suite uses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import pytest

import dagexec.onnx_backend as backend
from dagexec.errors import FeedError, UnsupportedOperatorError


def subtraction() -> onnx.ModelProto:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "aby"]
    node = onnx.helper.make_node("Sub", ["a", "b"], ["y"])
    graph = onnx.helper.make_graph([node], "difference", value[:2], value[2:])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])


def test_a_prepared_model_takes_inputs_in_order_and_by_name() -> None:
    a, b = np.float32([5, 7]), np.float32([1, 2])
    prepared = backend.prepare(subtraction(), "CPU", net_type="simple")
    with prepared.executor:
        np.testing.assert_array_equal(prepared.run([a, b])[0], [4, 5])
        np.testing.assert_array_equal(prepared.run({"b": a, "a": b})[0], [-4, -5])
        assert prepared.run([a, b])._fields == ("y",)  # type: ignore[attr-defined]
        with pytest.raises(FeedError, match=r"3 inputs are given; the model has 2: \['a', 'b'\]"):
            prepared.run([a, b, a])


def test_a_model_runs_once_and_its_executor_is_closed() -> None:
    [found] = backend.run_model(subtraction(), [np.float32([3]), np.float32([1])])
    np.testing.assert_array_equal(found, [2])


def test_a_node_runs_in_the_operator_set_that_is_asked_for() -> None:
    node = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=1)
    x = np.zeros((1, 2, 2), np.float32)
    assert np.unique(backend.run_node(node, [x])[0]) == [0.5]
    assert np.unique(backend.run_node(node, [x], opset_version=11)[0]) == [0.25]  # over all axes from axis 1 on


def test_what_cannot_run_is_not_compatible() -> None:
    model = subtraction()
    assert backend.is_compatible(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    assert not backend.is_compatible(model)
    with pytest.raises(UnsupportedOperatorError):
        backend.prepare(model)


def test_devices_are_named_as_onnx_names_them() -> None:
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU")
    assert not backend.supports_device("CUDA:99")
