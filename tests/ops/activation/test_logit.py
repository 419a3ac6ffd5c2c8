"""Logit, Glu, IsNaN and ReplaceNaN against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.errors import ArgumentError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(9)
FLOATS = [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
def test_logit_undoes_the_logistic_function(dtype: Any, tolerance: float) -> None:
    x = RNG.uniform(0.05, 0.95, (3, 50)).astype(dtype)
    [y] = run_operator("Logit", [x])
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y.astype(np.float64), np.log(wide / (1 - wide)), rtol=tolerance, atol=tolerance)


def test_logit_clips_to_what_eps_leaves() -> None:
    [y] = run_operator("Logit", [np.array([-1, 0, 0.01, 0.99, 1, 2, np.nan])], eps=0.25)
    edge = np.log(3)
    np.testing.assert_allclose(y, [-edge, -edge, -edge, edge, edge, edge, np.nan], rtol=1e-12)


def test_the_gradient_of_logit_is_0_outside() -> None:
    x, dy = np.array([0.0, 0.001, 0.25, 1.0]), np.array([1.0, 1, 3, 1])
    np.testing.assert_allclose(run_operator("LogitGradient", [x, dy], eps=0.01)[0], [0, 0, 16, 0], rtol=1e-12)


def test_logit_refuses_an_eps_that_leaves_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"'eps' must be in \[0, 0.5\)"):
        run_operator("Logit", [np.zeros(1)], eps=0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu_gates_the_first_half_by_the_second(dim: int, dtype: Any, tolerance: float) -> None:
    x = RNG.normal(size=(2, 4, 6)).astype(dtype)
    values, gates = np.split(x.astype(np.float64), 2, axis=dim)
    [y] = run_operator("Glu", [x], dim=dim)
    np.testing.assert_allclose(y.astype(np.float64), values / (1 + np.exp(-gates)), rtol=tolerance, atol=tolerance)


def test_glu_refuses_an_odd_size() -> None:
    with pytest.raises(ShapeError, match="axis 1 must have an even size to be halved, found 3"):
        run_operator("Glu", [np.zeros((2, 3))])


@pytest.mark.parametrize(("dtype", "_tolerance"), FLOATS)
def test_nan_is_found_and_replaced(dtype: Any, _tolerance: float) -> None:
    x = np.array([[1, np.nan, np.inf], [-np.inf, np.nan, 0]]).astype(dtype)
    [found] = run_operator("IsNaN", [x])
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, [[0, 1, 0], [0, 1, 0]])
    [y] = run_operator("ReplaceNaN", [x], value=-2.5)
    np.testing.assert_array_equal(y.astype(np.float64), [[1, -2.5, np.inf], [-np.inf, -2.5, 0]])
