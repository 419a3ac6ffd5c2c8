"""ElementwiseLinear, AffineChannel and RowMul against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.errors import ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(6)
FLOATS = [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)]


def drawn(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
def test_elementwise_linear_has_a_line_for_each_feature(dtype: Any, tolerance: float) -> None:
    x, w, b = drawn(2, 3, 4, dtype=dtype), drawn(12, dtype=dtype), drawn(12, dtype=dtype)
    [y] = run_operator("ElementwiseLinear", [x, w, b])
    wide = [array.astype(np.float64) for array in (x, w, b)]
    expected = wide[0] * wide[1].reshape(3, 4) + wide[2].reshape(3, 4)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def test_elementwise_linear_begins_its_features_at_an_axis() -> None:
    x, w, b = drawn(2, 3, 4), drawn(4), drawn(4)
    np.testing.assert_allclose(run_operator("ElementwiseLinear", [x, w, b], axis=2)[0], x * w + b, rtol=1e-12)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_affine_channel_has_a_line_for_each_channel(order: str, rank: int) -> None:
    x, scale, bias = drawn(*(2, 3, 4, 5, 2)[:rank]), drawn(3), drawn(3)
    spread = (1, 3, *(1,) * (rank - 2))
    expected = x * scale.reshape(spread) + bias.reshape(spread)
    if order == "NHWC":
        x, expected = np.moveaxis(x, 1, -1).copy(), np.moveaxis(expected, 1, -1)
    np.testing.assert_allclose(run_operator("AffineChannel", [x, scale, bias], order=order)[0], expected, rtol=1e-12)


def test_row_mul_has_a_factor_for_each_row() -> None:
    x, w = drawn(4, 2, 3), drawn(4)
    np.testing.assert_allclose(run_operator("RowMul", [x, w])[0], x * w.reshape(4, 1, 1), rtol=1e-12)
    np.testing.assert_allclose(run_operator("ReduceTailSum", [x])[0], x.sum((1, 2)), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
def test_gradients_of_scale_and_bias_are_sums_over_a_channel(dtype: Any, tolerance: float) -> None:
    dy, scale, x = drawn(2, 3, 4, 4, dtype=dtype), drawn(3, dtype=dtype), drawn(2, 3, 4, 4, dtype=dtype)
    found = run_operator("AffineChannelGradient", [dy, x, scale], 3, is_learnable=1)
    wide = [array.astype(np.float64) for array in (dy, scale, x)]
    expected = [wide[0] * wide[1].reshape(3, 1, 1), (wide[0] * wide[2]).sum((0, 2, 3)), wide[0].sum((0, 2, 3))]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("op_type", "axis"), [("ElementwiseLinear", 0), ("AffineChannel", 1), ("RowMul", 0)])
def test_parameters_of_another_length_are_refused(op_type: str, axis: int) -> None:
    inputs = [drawn(2, 3), *[drawn(4)] * (1 if op_type == "RowMul" else 2)]
    with pytest.raises(ShapeError, match="must have an element for each of"):
        run_operator(op_type, inputs)
