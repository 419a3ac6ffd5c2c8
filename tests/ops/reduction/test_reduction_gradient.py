"""The gradients of reductions: against central differences, and formulas where those show nothing (ties, zeros)."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import gradient
from dagexec.errors import ShapeError
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]

NAMED = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"]


def distinct(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers of both signs, none near 0, no two alike."""
    count = math.prod(shape)
    numbers = np.random.default_rng(seed).permutation(np.linspace(0.3, 1.7, count))
    signs = np.where(np.arange(count) % 3 == 0, -1, 1)
    return (numbers * signs).reshape(shape)


def gradient_of(op_type: str, x: Array, dy: Array, **arguments: ArgumentValue) -> Array:
    return analytic_gradients(operator_def(op_type, ["x0"], ["y0"], **arguments), [x], {0: dy}, [0])[0]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMED), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.data())
def test_reductions_over_any_axes_equal_differences(
    op_type: str, shape: list[int], keepdims: bool, data: st.DataObject
) -> None:
    rank = len(shape)
    axes = data.draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank))
    signed = [axis - rank if data.draw(st.booleans()) else axis for axis in axes]
    arguments: dict[str, Any] = {"axes": signed} if signed else {}
    check_gradient(op_type, [distinct(tuple(shape))], keepdims=int(keepdims), **arguments)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
@pytest.mark.parametrize("side", ["Front", "Back"])
def test_reductions_of_leading_or_trailing_axes_equal_differences(side: str, kind: str, count: int) -> None:
    check_gradient(f"Reduce{side}{kind}", [distinct((2, 3, 2))], num_reduce_dim=count)


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
@pytest.mark.parametrize("side", ["Front", "Back"])
def test_gradients_pass_to_the_first_elements_only(side: str, kind: str) -> None:
    lengths = np.array([3, 1, 2, 3, 2, 1]) if side == "Front" else np.array([2, 1, 1, 2, 2, 1])
    x = distinct((3, 2, 3)) if side == "Front" else distinct((2, 3, 2))
    check_gradient(f"Reduce{side}{kind}", [x, lengths], wanted=[0])


@pytest.mark.parametrize("op_type", ["RowwiseMax", "ColwiseMax"])
def test_maxima_of_rows_and_columns_equal_differences(op_type: str) -> None:
    check_gradient(op_type, [distinct((2, 3, 4))])


@pytest.mark.parametrize("op_type", ["SumElements", "SumSqrElements"])
@pytest.mark.parametrize("average", [0, 1])
@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 3)])
def test_sums_of_all_elements_equal_differences(op_type: str, average: int, shape: tuple[int, ...]) -> None:
    check_gradient(op_type, [distinct(shape)], average=average)


@pytest.mark.parametrize("op_type", NAMED)
def test_the_reduction_of_a_scalar_has_a_gradient(op_type: str) -> None:
    check_gradient(op_type, [np.array(0.7)])


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_every_element_equal_to_the_extreme_gets_the_gradient(op_type: str) -> None:
    x = np.array([[1.0, 3.0, 3.0], [2.0, 1.5, 2.0]]) * (1 if op_type == "ReduceMax" else -1)
    found = gradient_of(op_type, x, np.array([[10.0], [np.inf]]), axes=[1])
    np.testing.assert_array_equal(found, [[0, 10, 10], [np.inf, 0, np.inf]])


def test_the_gradient_of_a_product_with_zeros_is_the_product_of_the_others() -> None:
    x = np.array([[2.0, 0.0, 5.0], [0.0, 3.0, 0.0], [2.0, 3.0, 4.0]])
    found = gradient_of("ReduceProd", x, np.array([1.0, 1.0, 0.5]), axes=[1], keepdims=0)
    np.testing.assert_array_equal(found, [[0, 10, 0], [0, 0, 0], [6, 4, 3]])


def test_the_gradient_of_a_norm_of_zeros_is_zero() -> None:
    for op_type in ("ReduceL1", "ReduceL2"):
        found = gradient_of(op_type, np.array([[0.0, 0.0], [3.0, -4.0]]), np.array([[1.0], [10.0]]), axes=[1])
        np.testing.assert_array_equal(found[0], [0, 0])
        np.testing.assert_allclose(found[1], [10, -10] if op_type == "ReduceL1" else [6, -8])


@pytest.mark.parametrize("op_type", NAMED)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_types_are_near_float64(op_type: str, dtype: Any) -> None:
    x = distinct((4, 5, 3)).astype(dtype)
    dy = distinct((4, 1, 3), 1).astype(dtype)
    y = run_operator(op_type, [x], axes=[1])[0]
    found = run_operator(f"{op_type}Gradient", [dy, x, y], axes=[1])[0]
    assert found.dtype == dtype
    expected = gradient_of(op_type, x.astype(np.float64), dy.astype(np.float64), axes=[1])
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found.astype(np.float64), expected, tolerance, tolerance)


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2"])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_reductions_of_nothing_have_a_gradient_without_elements(op_type: str, axes: list[int]) -> None:
    shape = tuple(1 if axis in axes else size for axis, size in enumerate((0, 3)))
    assert gradient_of(op_type, np.ones((0, 3)), np.ones(shape), axes=axes).shape == (0, 3)


def test_searches_for_the_extreme_have_no_gradient() -> None:
    for op_type in ("ArgMax", "ArgMin"):
        assert gradient(operator_def(op_type, ["x"], ["y"]), ["y_grad"]).inputs == (None,)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = np.ones((2, 3))
    with pytest.raises(ShapeError, match=r"must have shape \(2, 1\).*found \(2, 3\)"):
        run_operator("ReduceSumGradient", [x, x, np.ones((2, 1))], axes=[1])
    with pytest.raises(ShapeError, match="share one element type"):
        run_operator("ReduceL2Gradient", [np.ones((2, 1)), x.astype(np.float32), np.ones((2, 1))], axes=[1])
    with pytest.raises(ShapeError, match=r"must be one of.*found int32"):
        run_operator("SumElementsGradient", [np.ones(3, np.int32), np.ones((), np.int32)])
    with pytest.raises(ShapeError, match="'axes' must be in"):
        run_operator("ReduceSumGradient", [np.ones((2, 1)), x, np.ones((2, 1))], axes=[5])
