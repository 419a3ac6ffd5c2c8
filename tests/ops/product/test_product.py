"""Matrix products against float64 einsum and onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ShapeError
from tests.ops.running import Array, operator_def, run_operator


def sample(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def einsum(pattern: str, *arrays: Array) -> Array:
    return np.einsum(pattern, *(array.astype(np.float64) for array in arrays))


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(leading=SIZES, summed=SIZES, units=SIZES, transposed=st.booleans())
def test_fc_keeps_the_leading_axes_and_sums_over_the_folded_ones(
    leading: list[int], summed: list[int], units: list[int], transposed: bool
) -> None:
    x, rows, inner = sample(0, *leading, *summed), math.prod(units), math.prod(summed)
    w, b = sample(1, *units, *summed), sample(2, rows)
    axis_w = len(units)
    if transposed:
        w, axis_w = np.ascontiguousarray(w.reshape(rows, inner).T).reshape(*summed, *units), len(summed)
    [y] = run_operator("FCTransposed" if transposed else "FC", [x, w, b], axis=len(leading), axis_w=axis_w)
    assert y.shape == (*leading, rows)
    matrix = sample(1, *units, *summed).reshape(rows, inner)
    expected = einsum("mk,nk->mn", x.reshape(-1, inner), matrix) + b
    np.testing.assert_allclose(y.reshape(-1, rows), expected, rtol=1e-4, atol=1e-5)


def test_fc_by_default_folds_both_at_axis_one() -> None:
    x, w, b = sample(0, 3, 2, 5), sample(1, 4, 2, 5), sample(2, 4)
    [y] = run_operator("FC", [x, w, b])
    np.testing.assert_allclose(y, einsum("mij,nij->mn", x, w) + b, rtol=1e-5, atol=1e-5)


def test_fc_refuses_weights_and_biases_that_do_not_fit() -> None:
    x = sample(0, 3, 2, 5)
    with pytest.raises(ShapeError, match=r"X folded to 3 x 10 needs a W of 10 columns, found 4 x 9"):
        run_operator("FC", [x, sample(1, 4, 9), sample(2, 4)])
    with pytest.raises(ShapeError, match=r"needs a W of 10 rows, found 4 x 10"):
        run_operator("FCTransposed", [x, sample(1, 4, 10), sample(2, 10)])
    with pytest.raises(ShapeError, match=r"'x2' must have shape \(4,\).*found \(5,\)"):
        run_operator("FC", [x, sample(1, 4, 10), sample(2, 5)])
    with pytest.raises(ShapeError, match=r"'axis' must be in \[-3, 3\], found 4"):
        run_operator("FC", [x, sample(1, 4, 10), sample(2, 4)], axis=4)
    with pytest.raises(ShapeError, match=r"must be one of float32.*found int32"):
        run_operator("FC", [x.astype(np.int32), sample(1, 4, 10), sample(2, 4)])


def test_fc_costs_two_operations_a_weight_and_row() -> None:
    definition = operator_def("FC", ["x", "w", "b"], ["y"])
    kinds = tuple(TensorType(shape, FLOAT32) for shape in ((8, 10), (4, 10), (4,)))
    call = OperatorCall(definition, arguments_of(definition, "FC"), kinds, (None,) * 3, "FC")
    schema = schema_of("FC")
    assert schema.infer is not None
    cost = schema.cost(call, schema.infer(call))
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (2 * 8 * 4 * 10, 4 * (80 + 40 + 4), 4 * 32)


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("op_type", ["MatMul", "BatchMatMul", "Gemm"])
def test_products_of_matrices_transpose_what_they_are_told_to(op_type: str, trans_a: int, trans_b: int) -> None:
    a = sample(0, 4, 3) if trans_a else sample(0, 3, 4)
    b = sample(1, 5, 4) if trans_b else sample(1, 4, 5)
    [y] = run_operator(op_type, [a, b], trans_a=trans_a, trans_b=trans_b)
    expected = einsum(f"{'km' if trans_a else 'mk'},{'nk' if trans_b else 'kn'}->mn", a, b)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_matmul_folds_its_operands_and_takes_the_shape_of_a_third_input() -> None:
    a, b = sample(0, 2, 3, 4), sample(1, 2, 2, 5)
    [y] = run_operator("MatMul", [a, b], axis_a=2, axis_b=2)
    expected = einsum("mk,kn->mn", a.reshape(6, 4), b.reshape(4, 5))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    [y] = run_operator("MatMul", [a, b, np.zeros((2, 3, 5), np.float32)], axis_a=2, axis_b=2)
    np.testing.assert_allclose(y, expected.reshape(2, 3, 5), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match=r"the 6 x 5 product does not fit the shape of input 2, \(2, 2\)"):
        run_operator("MatMul", [a, b, np.zeros((2, 2), np.float32)], axis_a=2, axis_b=2)
    with pytest.raises(ShapeError, match="a 2 x 12 matrix cannot be multiplied by a 2 x 10 one"):
        run_operator("MatMul", [a, b])


def test_matmul_of_integers_is_exact() -> None:
    a, b = np.array([[2**30, 3]], np.int64), np.array([[2**31], [5]], np.int64)
    assert run_operator("MatMul", [a, b])[0].tolist() == [[2**61 + 15]]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data(), m=st.integers(1, 3), k=st.integers(0, 3), n=st.integers(1, 3))
def test_batch_matmul_with_broadcast_follows_numpy(data: st.DataObject, m: int, k: int, n: int) -> None:
    batch = data.draw(st.lists(st.integers(1, 3), max_size=2))
    a_batch = [size if data.draw(st.booleans()) else 1 for size in batch]
    b_batch = batch[data.draw(st.integers(0, len(batch))) :]
    a, b = sample(0, *a_batch, m, k), sample(1, *b_batch, k, n)
    [y] = run_operator("BatchMatMul", [a, b], broadcast=1)
    expected = einsum("...mk,...kn->...mn", a, b)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_batch_matmul_multiplies_matrix_by_matrix() -> None:
    a, b = sample(0, 2, 3, 5, 4), sample(1, 2, 3, 6, 5)
    [y] = run_operator("BatchMatMul", [a, b], trans_a=1, trans_b=1)
    np.testing.assert_allclose(y, einsum("xykm,xynk->xymn", a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((4,), (4,)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,)), ((2, 3, 4), (4, 5))]
)
def test_batch_matmul_agrees_with_onnxruntime_on_vectors_and_mixed_ranks(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    a, b = sample(0, *a_shape), sample(1, *b_shape)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("a", 1, a_shape), helper.make_tensor_value_info("b", 1, b_shape)],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"a": a, "b": b})
    [y] = run_operator("BatchMatMul", [a, b], broadcast=1)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_batch_matmul_refuses_what_only_broadcast_allows() -> None:
    with pytest.raises(ShapeError, match=r"without broadcast=1 the batch axes must be equal, found \(2,\) and \(\)"):
        run_operator("BatchMatMul", [sample(0, 2, 3, 4), sample(1, 4, 5)])
    with pytest.raises(ShapeError, match="B must have at least 2 axes, found 1"):
        run_operator("BatchMatMul", [sample(0, 3, 4), sample(1, 4)])
    with pytest.raises(ShapeError, match="B has one axis and cannot be transposed"):
        run_operator("BatchMatMul", [sample(0, 3, 4), sample(1, 4)], broadcast=1, trans_b=1)
    with pytest.raises(ShapeError, match="a 3 x 4 matrix cannot be multiplied by a 3 x 5 one"):
        run_operator("BatchMatMul", [sample(0, 3, 4), sample(1, 3, 5)])
    with pytest.raises(ShapeError, match=r"shapes \(2,\), \(3,\) do not broadcast"):
        run_operator("BatchMatMul", [sample(0, 2, 3, 4), sample(1, 3, 4, 5)], broadcast=1)


@pytest.mark.parametrize("c_shape", [(3, 5), (5,), (3, 1), (1, 5), (1,), ()])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, -2.0), (2.0, 0.0)])
def test_gemm_scales_the_product_and_a_broadcast_c(c_shape: tuple[int, ...], alpha: float, beta: float) -> None:
    a, b, c = sample(0, 3, 4), sample(1, 4, 5), sample(2, *c_shape)
    [y] = run_operator("Gemm", [a, b, c], alpha=alpha, beta=beta)
    np.testing.assert_allclose(y, alpha * einsum("mk,kn->mn", a, b) + beta * c, rtol=1e-5, atol=1e-5)


def test_gemm_refuses_stacks_and_a_c_that_would_widen_the_product() -> None:
    with pytest.raises(ShapeError, match="'x0' must have 2 axes, found 3"):
        run_operator("Gemm", [sample(0, 2, 3, 4), sample(1, 4, 5)])
    with pytest.raises(ShapeError, match=r"C of shape \(3, 5\) does not broadcast to the product's shape \(1, 5\)"):
        run_operator("Gemm", [sample(0, 1, 4), sample(1, 4, 5), sample(2, 3, 5)])


@pytest.mark.parametrize("op_type", ["FC", "MatMul", "BatchMatMul", "Gemm"])
def test_products_over_no_elements_are_zero_plus_bias(op_type: str) -> None:
    a, b, c = np.empty((2, 0), np.float32), np.empty((0, 3), np.float32), np.array([1, 2, 3], np.float32)
    inputs = {"FC": [a, b.reshape(3, 0), c], "Gemm": [a, b, c]}.get(op_type, [a, b])
    [y] = run_operator(op_type, inputs)
    assert y.tolist() == ([[1, 2, 3]] * 2 if op_type in ("FC", "Gemm") else [[0, 0, 0]] * 2)


def test_gemm_does_not_read_c_when_its_factor_is_zero() -> None:
    [y] = run_operator("Gemm", [np.eye(2), np.eye(2), np.full((2, 2), np.nan)], beta=0.0)
    np.testing.assert_array_equal(y, np.eye(2))
