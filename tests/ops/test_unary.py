"""Unary arithmetic against the functions of the `math` module, element by element."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator

FUNCTIONS: dict[str, tuple[Callable[[float], float], float, float]] = {
    "Exp": (math.exp, -20, 20),
    "Log": (math.log, 1e-6, 50),
    "Sqrt": (math.sqrt, 0, 50),
    "Cbrt": (lambda v: math.copysign(abs(v) ** (1 / 3), v), -50, 50),
    "Rsqrt": (lambda v: 1 / math.sqrt(v), 1e-3, 50),
    "Reciprocal": (lambda v: 1 / v, 1e-3, 50),
    "Sqr": (lambda v: v * v, -20, 20),
    "Cube": (lambda v: v**3, -20, 20),
    "Negative": (lambda v: -v, -20, 20),
    "Abs": (abs, -20, 20),
    "Sign": (lambda v: (v > 0) - (v < 0), -1, 1),
    "Floor": (math.floor, -20, 20),
    "Ceil": (math.ceil, -20, 20),
    "Round": (round, -20, 20),
    "Sin": (math.sin, -20, 20),
    "Cos": (math.cos, -20, 20),
    "Tan": (math.tan, -1.5, 1.5),
    "Asin": (math.asin, -1, 1),
    "Acos": (math.acos, -1, 1),
    "Atan": (math.atan, -20, 20),
    "Sinh": (math.sinh, -10, 10),
    "Cosh": (math.cosh, -10, 10),
    "Erf": (math.erf, -7, 7),
}
INTEGER = ("Sqr", "Cube", "Negative", "Abs", "Sign")


@pytest.mark.parametrize("op_type", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-13)])
def test_operator_agrees_with_the_math_module(op_type: str, dtype: type, tolerance: float) -> None:
    function, low, high = FUNCTIONS[op_type]
    x = np.random.default_rng(0).uniform(low, high, 1200).astype(dtype)
    [y] = run_operator(op_type, [x.reshape(3, 400)])
    assert y.dtype == dtype
    expected = np.array([function(float(value)) for value in x]).reshape(3, 400)
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("op_type", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_operator_of_16_bit_floats_rounds_the_float32_result(op_type: str, dtype: type, tolerance: float) -> None:
    function, low, high = FUNCTIONS[op_type]
    x = np.random.default_rng(1).uniform(max(low, -9), min(high, 9), 500).astype(dtype)
    x = x[(x.astype(np.float64) >= low) & (x.astype(np.float64) <= high)]
    [y] = run_operator(op_type, [x])
    assert y.dtype == dtype
    expected = np.array([function(float(value)) for value in x])
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("op_type", [*FUNCTIONS, "Not"])
def test_operator_in_place_gives_what_it_gives_out_of_place(op_type: str) -> None:
    _, low, high = FUNCTIONS.get(op_type, (bool, 0, 1))
    x = np.random.default_rng(2).uniform(low, high, 70_000).astype(np.float32)
    x = x > 0.5 if op_type == "Not" else x
    workspace = Workspace()
    workspace.feed_blob("x", x)
    with SimpleNet(NetDef(name="n", op=[operator_def(op_type, ["x"], ["x"])]), workspace) as net:
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), run_operator(op_type, [x])[0])


@pytest.mark.parametrize("op_type", INTEGER)
def test_operator_that_takes_integers_stays_in_their_type(op_type: str) -> None:
    x = np.array([-3, 0, 5], np.int32)
    [y] = run_operator(op_type, [x])
    assert y.dtype == np.int32
    assert y.tolist() == [FUNCTIONS[op_type][0](int(value)) for value in x]


@pytest.mark.parametrize("op_type", sorted(set(FUNCTIONS) - set(INTEGER)))
def test_operator_of_real_functions_refuses_integers(op_type: str) -> None:
    with pytest.raises(ShapeError, match=r"must be one of float32.*found int64"):
        run_operator(op_type, [np.array([1, 2], np.int64)])


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(0, 4), max_size=4), op_type=st.sampled_from(["Exp", "Cube", "Erf", "Abs"]))
def test_operator_takes_any_shape_also_without_elements(shape: list[int], op_type: str) -> None:
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    [y] = run_operator(op_type, [x])
    assert y.shape == tuple(shape)
    expected = [FUNCTIONS[op_type][0](float(value)) for value in x.ravel()]
    np.testing.assert_allclose(y.ravel(), expected, rtol=1e-5, atol=1e-6)


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
