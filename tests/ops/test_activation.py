"""Activations against float64 formulas, on ordinary and extreme values, in place, and in 16-bit types."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import Array, operator_def, run_operator

Formula = Callable[[Array], Array]


def erf(x: Array) -> Array:
    return np.array([math.erf(value) for value in x.ravel()]).reshape(x.shape)


def logistic(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


CASES: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "Relu": ("Relu", {}, lambda x: np.where(x > 0, x, 0)),
    "ReluN": ("ReluN", {}, lambda x: np.clip(x, 0, 6)),
    "ReluN of 2": ("ReluN", {"n": 2}, lambda x: np.clip(x, 0, 2)),
    "LeakyRelu": ("LeakyRelu", {}, lambda x: np.where(x > 0, x, 0.01 * x)),
    "LeakyRelu of -0.5": ("LeakyRelu", {"alpha": -0.5}, lambda x: np.where(x > 0, x, -0.5 * x)),
    "LeakyRelu of 3": ("LeakyRelu", {"alpha": 3.0}, lambda x: np.where(x > 0, x, 3 * x)),
    "Elu": ("Elu", {}, lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)),
    "Elu of 0.5": ("Elu", {"alpha": 0.5}, lambda x: np.where(x > 0, x, 0.5 * (np.exp(np.minimum(x, 0)) - 1))),
    "Selu": (
        "Selu",
        {},
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(np.minimum(x, 0)) - 1)),
    ),
    "Sigmoid": ("Sigmoid", {}, logistic),
    "Tanh": ("Tanh", {}, lambda x: 2 * logistic(2 * x) - 1),
    "Softplus": ("Softplus", {}, lambda x: np.logaddexp(x, 0)),
    "Softsign": ("Softsign", {}, lambda x: x / (1 + np.abs(x))),
    "Swish": ("Swish", {}, lambda x: x * logistic(x)),
    "HardSigmoid": ("HardSigmoid", {}, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    "HardSigmoid of 1/8": ("HardSigmoid", {"alpha": 0.125, "beta": 0.25}, lambda x: np.clip(x / 8 + 0.25, 0, 1)),
    "HardSwish": ("HardSwish", {}, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "Gelu": ("Gelu", {}, lambda x: x / 2 * (1 + erf(x / math.sqrt(2)))),
    "fast Gelu": (
        "Gelu",
        {"fast_gelu": 1},
        lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "Clip": ("Clip", {"min": -0.5, "max": 1.25}, lambda x: np.where(x < -0.5, -0.5, np.where(x > 1.25, 1.25, x))),
    "Clip from below": ("Clip", {"min": 0.25}, lambda x: np.where(x < 0.25, 0.25, x)),
}
EXTREME = np.array([0.0, -0.0, 1e-30, -1e-30, 100, -100, 1000, -1000, 1e30, -1e30, 3e38, -3e38])
IN_PLACE = sorted(set(CASES) - {"Swish"})


def sample(seed: int, size: int) -> Array:
    return np.random.default_rng(seed).normal(0, 3, size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-13)])
def test_activation_agrees_with_its_formula(case: str, dtype: type, tolerance: float) -> None:
    op_type, arguments, formula = CASES[case]
    x = sample(0, 3000).astype(dtype).reshape(3, 1000)
    [y] = run_operator(op_type, [x], **arguments)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, formula(x.astype(np.float64)), rtol=tolerance * 4, atol=tolerance)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"fast Gelu", "LeakyRelu of 3"}))
def test_activation_of_extreme_values_is_finite_and_right_without_a_warning(case: str) -> None:
    op_type, arguments, formula = CASES[case]
    x = EXTREME.astype(np.float32) * np.float32(0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [y] = run_operator(op_type, [x], **arguments)
    with np.errstate(all="ignore"):
        expected = formula(x.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_activation_keeps_nan_where_it_is(case: str) -> None:
    op_type, arguments, _ = CASES[case]
    x = sample(1, 2000).astype(np.float32)
    x[[3, 1500]] = np.nan
    [y] = run_operator(op_type, [x], **arguments)
    assert np.flatnonzero(np.isnan(y)).tolist() == [3, 1500]


@pytest.mark.parametrize("case", CASES)
def test_activation_of_a_tensor_of_several_pieces_equals_that_of_each_part(case: str) -> None:
    op_type, arguments, _ = CASES[case]
    x = sample(2, 150_001).astype(np.float32)
    [whole] = run_operator(op_type, [x], **arguments)
    [head] = run_operator(op_type, [x[:70_000]], **arguments)
    [tail] = run_operator(op_type, [x[70_000:]], **arguments)
    np.testing.assert_array_equal(whole, np.concatenate([head, tail]))


@pytest.mark.parametrize("case", IN_PLACE)
def test_activation_in_place_gives_what_it_gives_out_of_place(case: str) -> None:
    op_type, arguments, _ = CASES[case]
    x = sample(3, 70_000).astype(np.float32)
    workspace = Workspace()
    workspace.feed_blob("x", x)
    with SimpleNet(NetDef(name="n", op=[operator_def(op_type, ["x"], ["x"], **arguments)]), workspace) as net:
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), run_operator(op_type, [x], **arguments)[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_activation_of_16_bit_floats_is_the_rounded_float32_result(case: str, dtype: Any, tolerance: float) -> None:
    op_type, arguments, formula = CASES[case]
    x = sample(4, 70_000).astype(dtype)
    [y] = run_operator(op_type, [x], **arguments)
    assert y.dtype == dtype
    expected = formula(x.astype(np.float64))
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=tolerance / 8)


@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(0, 4), max_size=4), case=st.sampled_from(sorted(CASES)))
def test_activation_takes_any_shape_also_without_elements(shape: list[int], case: str) -> None:
    op_type, arguments, formula = CASES[case]
    x = sample(5, math.prod(shape)).astype(np.float32).reshape(shape)
    [y] = run_operator(op_type, [x], **arguments)
    assert y.shape == tuple(shape)
    np.testing.assert_allclose(y, formula(x.astype(np.float64)), rtol=1e-5, atol=1e-6)


def test_sigmoid_of_very_negative_values_keeps_its_relative_accuracy() -> None:
    x = np.linspace(-80, -5, 500, dtype=np.float32)
    [y] = run_operator("Sigmoid", [x])
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)) / (1 + np.exp(x.astype(np.float64))), rtol=1e-6)


def test_clip_takes_integers_and_its_limits_default_to_those_of_the_type() -> None:
    x = np.array([np.iinfo(np.int64).min, -7, 0, 9, np.iinfo(np.int64).max], np.int64)
    np.testing.assert_array_equal(run_operator("Clip", [x])[0], x)
    np.testing.assert_array_equal(run_operator("Clip", [x], min=-2.5, max=3.5)[0], [-2, -2, 0, 3, 3])
    unsigned = np.array([0, 5, 255], np.uint8)
    np.testing.assert_array_equal(run_operator("Clip", [unsigned], min=-10, max=1000)[0], unsigned)
    infinite = np.array([-np.inf, np.inf], np.float32)
    limits = np.finfo(np.float32)
    np.testing.assert_array_equal(run_operator("Clip", [infinite])[0], [limits.min, limits.max])


@pytest.mark.parametrize(
    ("slope_shape", "order", "view"),
    [((1,), "NCHW", (1, 1, 1, 1)), ((3,), "NCHW", (1, 3, 1, 1)), ((4,), "NHWC", (1, 1, 1, 4)),
     ((3, 1, 1), "NCHW", (1, 3, 1, 1)), ((5, 4), "NCHW", (1, 1, 5, 4))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_prelu_takes_a_shared_slope_one_a_channel_or_one_that_broadcasts(
    slope_shape: tuple[int, ...], order: str, view: tuple[int, ...], dtype: type
) -> None:
    x = sample(6, 120).astype(dtype).reshape(2, 3, 5, 4)
    slope = sample(7, math.prod(slope_shape)).astype(dtype).reshape(slope_shape)
    [y] = run_operator("PRelu", [x, slope], order=order)
    exact = x.astype(np.float64)
    expected = np.where(exact > 0, exact, exact * slope.astype(np.float64).reshape(view))
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-6 if dtype == np.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_prelu_takes_a_scalar(dtype: type) -> None:
    [y] = run_operator("PRelu", [dtype(-2.0), np.array([0.5], dtype)])
    assert y.shape == ()
    assert y == -1


def test_prelu_of_a_large_tensor_uses_each_channels_slope_in_every_piece() -> None:
    x = sample(8, 2 * 5 * 20_000).astype(np.float32).reshape(2, 5, 100, 200)
    slope = np.array([0.1, -0.2, 0.3, 0.0, 2.0], np.float32)
    [y] = run_operator("PRelu", [x, slope])
    np.testing.assert_allclose(y, np.where(x > 0, x, x * slope[:, None, None]), rtol=1e-6)


def test_prelu_refuses_a_slope_that_fits_no_axis_and_a_bad_order() -> None:
    x = np.ones((2, 3, 4, 4), np.float32)
    with pytest.raises(ShapeError, match=r"one element, 3 \(a channel each\).*found shape \(4,\)"):
        run_operator("PRelu", [x, np.ones(4, np.float32)])
    with pytest.raises(ArgumentError, match="'order' must be NCHW, NHWC, NCHW8c or NCHW16c, found 'NWHC'"):
        run_operator("PRelu", [x, np.ones(4, np.float32)], order="NWHC")
    with pytest.raises(ShapeError, match="share one element type"):
        run_operator("PRelu", [x, np.ones(3, np.float64)])


@pytest.mark.parametrize("op_type", sorted({op_type for op_type, _, _ in CASES.values()} - {"Clip"}))
def test_activation_refuses_integers_and_names_the_blob(op_type: str) -> None:
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator(op_type, [np.array([1, 2], np.int32)])


@pytest.mark.parametrize(
    ("op_type", "arguments", "message"),
    [
        ("Elu", {"alpha": -1.0}, "'alpha' must be at least 0, found -1"),
        ("ReluN", {"n": -2.0}, "'n' must be at least 0, found -2"),
        ("LeakyRelu", {"alpha": float("nan")}, "'alpha' is not a number"),
        ("HardSigmoid", {"beta": "half"}, "'beta' must be a float; found a string"),
        ("Clip", {"min": 2.0, "max": 1.0}, "'min' must not exceed 'max', found 2 > 1"),
        ("Gelu", {"fast_gelu": "yes"}, "'fast_gelu' must be an integer; found a string"),
    ],
)
def test_activation_refuses_bad_arguments_before_anything_runs(
    op_type: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_operator(op_type, [np.ones(2, np.float32)], **arguments)


def test_swish_may_not_run_in_place_since_its_gradient_needs_the_input() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(2, np.float32))
    with pytest.raises(SchemaError, match="may not overwrite input 0 in place"):
        SimpleNet(NetDef(name="n", op=[operator_def("Swish", ["x"], ["x"])]), workspace)
