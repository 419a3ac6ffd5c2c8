"""Softmax and LogSoftmax against float64 formulas and onnxruntime."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dagexec.errors import SchemaError, ShapeError
from tests.ops.running import Array, run_operator


def softmax(x: Array, axes: tuple[int, ...]) -> Array:
    powers = np.exp(x.astype(np.float64) - x.astype(np.float64).max(axis=axes, keepdims=True))
    return powers / powers.sum(axis=axes, keepdims=True)


def by_onnxruntime(op_type: str, x: Array, axis: int, opset: int) -> Array:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"], axis=axis)],
        "g",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", kind, x.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data(), logarithm=st.booleans())
def test_axes_from_axis_on_are_normalized_together(shape: list[int], data: st.DataObject, logarithm: bool) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)
    [y] = run_operator("LogSoftmax" if logarithm else "Softmax", [x], axis=axis)
    expected = softmax(x, tuple(range(axis % len(shape), len(shape))))
    np.testing.assert_allclose(y, np.log(expected) if logarithm else expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data(), logarithm=st.booleans())
def test_single_axis_is_normalized_alone(shape: list[int], data: st.DataObject, logarithm: bool) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(1).normal(0, 3, shape).astype(np.float64)
    [y] = run_operator("LogSoftmax" if logarithm else "Softmax", [x], axis=axis, single_axis=1)
    expected = softmax(x, (axis,))
    np.testing.assert_allclose(y, np.log(expected) if logarithm else expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("opset", "axis"), [(11, 0), (11, 1), (11, 2), (13, 0), (13, 1), (13, -1)])
def test_softmax_agrees_with_onnxruntime_before_and_after_opset_13(op_type: str, opset: int, axis: int) -> None:
    x = np.random.default_rng(2).normal(0, 5, (4, 5, 6)).astype(np.float32)
    [y] = run_operator(op_type, [x], axis=axis, single_axis=int(opset >= 13))
    np.testing.assert_allclose(y, by_onnxruntime(op_type, x, axis, opset), rtol=1e-5, atol=1e-6)


def test_default_axis_is_one_and_flattens_the_rest() -> None:
    x = np.random.default_rng(3).normal(size=(2, 3, 4)).astype(np.float32)
    [y] = run_operator("Softmax", [x])
    np.testing.assert_allclose(y.sum(axis=(1, 2)), [1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("op_type", "expected"),
    [("Softmax", [0, 0.5, 0.5]), ("LogSoftmax", [-2e4 - math.log(2), -math.log(2), -math.log(2)])],
)
def test_large_logits_neither_overflow_nor_lose_the_result(op_type: str, expected: list[float]) -> None:
    x = np.array([[-1e4, 1e4, 1e4]], np.float32)
    np.testing.assert_allclose(run_operator(op_type, [x])[0][0], expected, rtol=1e-5)


def test_softmax_refuses_bad_axes_integers_and_running_in_place() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ShapeError, match=r"'axis' must be in \[-2, 2\], found 3"):
        run_operator("Softmax", [x], axis=3)
    with pytest.raises(ShapeError, match=r"'axis' must be in \[-2, 1\], found 2"):
        run_operator("Softmax", [x], axis=2, single_axis=1)
    with pytest.raises(ShapeError, match=r"must be one of float32.*found int32"):
        run_operator("LogSoftmax", [x.astype(np.int32)])
    with pytest.raises(SchemaError, match="axis"):
        run_operator("Softmax", [x], axis="last")
