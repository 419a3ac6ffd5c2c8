"""Moments and LpNorm against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.errors import ArgumentError, ShapeError
from tests.ops.running import run_operator

X = np.random.default_rng(8).normal(2, 3, (3, 4, 5))
FLOATS = [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 2e-2)]


@pytest.mark.parametrize("axes", [(), (0,), (1,), (-1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_moments_are_mean_and_variance(axes: tuple[int, ...], keepdims: int) -> None:
    mean, variance = run_operator("Moments", [X], 2, axes=list(axes), keepdims=keepdims)
    over = axes or None
    np.testing.assert_allclose(mean, X.mean(over, keepdims=bool(keepdims)), rtol=1e-12)
    np.testing.assert_allclose(variance, X.var(over, keepdims=bool(keepdims)), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
def test_moments_of_each_type_of_floats(dtype: Any, tolerance: float) -> None:
    x = X.astype(dtype)
    mean, variance = run_operator("Moments", [x], 2, axes=[1, 2], keepdims=0)
    wide = x.astype(np.float64)
    assert mean.dtype == variance.dtype == dtype
    np.testing.assert_allclose(mean.astype(np.float64), wide.mean((1, 2)), rtol=tolerance)
    np.testing.assert_allclose(variance.astype(np.float64), wide.var((1, 2)), rtol=tolerance)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    x = (X + 1e4).astype(np.float32)
    variance = run_operator("Moments", [x], 2, keepdims=0)[1]
    np.testing.assert_allclose(variance, x.astype(np.float64).var(), rtol=1e-4)


def test_moments_of_nothing_are_nan() -> None:
    for found in run_operator("Moments", [np.zeros((0, 2), np.float32)], 2, axes=[0]):
        assert found.shape == (1, 2)
        assert np.isnan(found).all()


def test_moments_gradient_refuses_a_mean_of_another_shape() -> None:
    with pytest.raises(ShapeError, match="what the reduction of X gives"):
        run_operator("MomentsGradient", [np.zeros(1), np.zeros(1), X, np.zeros(2)], axes=[0, 1, 2], keepdims=0)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("average", [0, 1])
@pytest.mark.parametrize("power", [1, 2])
def test_lp_norm_is_a_sum_of_powers_without_a_root(power: int, average: int, dtype: Any, tolerance: float) -> None:
    x = X.astype(dtype)
    [z] = run_operator("LpNorm", [x], p=power, average=average)
    powers = np.abs(x.astype(np.float64)) ** power
    assert z.shape == (1,)
    np.testing.assert_allclose(z.astype(np.float64), [powers.mean() if average else powers.sum()], rtol=tolerance)


def test_lp_norm_of_nothing_is_0() -> None:
    for power in (1, 2):
        np.testing.assert_array_equal(run_operator("LpNorm", [np.zeros(0, np.float32)], p=power, average=1)[0], [0])


def test_lp_norm_refuses_another_power() -> None:
    with pytest.raises(ArgumentError, match="'p' must be 1 or 2, found 3"):
        run_operator("LpNorm", [X], p=3)
