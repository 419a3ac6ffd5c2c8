"""Unary arithmetic at special values; `test_formulas` has the others."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from dagexec.errors import ShapeError
from tests.ops.running import run_operator


def test_not_negates_booleans_and_refuses_numbers() -> None:
    assert run_operator("Not", [np.array([True, False])])[0].tolist() == [False, True]
    with pytest.raises(ShapeError, match="must be one of bool, found float32"):
        run_operator("Not", [np.ones(2, np.float32)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 3e-14)])
def test_erf_is_accurate_relative_to_its_value_even_close_to_zero(dtype: type, tolerance: float) -> None:
    x = np.concatenate([np.geomspace(1e-30, 6, 3000), np.linspace(0.001, 7, 3000)]).astype(dtype)
    [y] = run_operator("Erf", [np.concatenate([x, -x])])
    expected = np.array([math.erf(float(value)) for value in x])
    np.testing.assert_allclose(y, np.concatenate([expected, -expected]), rtol=tolerance, atol=0)


def test_erf_of_special_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [y] = run_operator("Erf", [np.array([np.inf, -np.inf, np.nan, 1e30, -0.0], np.float32)])
    np.testing.assert_array_equal(y, np.array([1, -1, np.nan, 1, 0], np.float32))
    assert np.signbit(y[4])


def test_round_takes_halves_to_the_even_neighbor() -> None:
    [y] = run_operator("Round", [np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)])
    assert y.tolist() == [-2, -2, 0, 0, 2, 2]


def test_sign_of_nan_is_nan_and_of_zeros_is_zero() -> None:
    [y] = run_operator("Sign", [np.array([np.nan, 0.0, -0.0, -np.inf], np.float32)])
    np.testing.assert_array_equal(y, np.array([np.nan, 0, 0, -1], np.float32))
