"""Gradients of pointwise operators beyond their formulas (`test_formulas`): borders, errors; Pow, Softmax, Cast."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient, stops_gradients
from dagexec.errors import ArgumentError, GradientError, ShapeError
from dagexec.ops.base.layout import BLOCKS
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.running import Array, operator_def, run_operator

Arguments = dict[str, Any]
EVERYWHERE, POSITIVE, WITHIN_ONE = (-4.0, 4.0), (0.2, 4.0), (-0.9, 0.9)

X_NEEDED: list[tuple[str, Arguments]] = [
    *((name, {}) for name in ("Softsign", "HardSwish", "Gelu", "Log", "Sqr", "Cube", "Abs", "Sin", "Erf", "Pow")),
    ("LeakyRelu", {"alpha": 0.0}),
]


def gradient_of_x(op_type: str, x: Array, dy: Array, **arguments: Any) -> Array:
    return analytic_gradients(operator_def(op_type, ["x"], ["y"], **arguments), [x], {0: dy}, [0])[0]


@pytest.mark.parametrize(
    ("op_type", "arguments", "x", "expected"),
    [
        ("Relu", {}, [0.0, -0.0, 1e-30, -1e-30], [0, 0, 1, 0]),
        ("ReluN", {"n": 2.0}, [0.0, 2.0, 1.999], [0, 0, 1]),
        ("LeakyRelu", {"alpha": 0.25}, [0.0, 1e-30, -1e-30], [1, 1, 0.25]),
        ("Clip", {"min": -1.0, "max": 1.0}, [-1.0, 1.0, 0.999, -2.0, 2.0], [0, 0, 1, 0, 0]),
        ("HardSigmoid", {"alpha": 0.25, "beta": 0.5}, [-2.0, 2.0, 1.0], [0, 0, 0.25]),
        ("HardSwish", {}, [-3.0, 3.0, -4.0, 4.0, np.inf, -np.inf], [0, 1, 0, 1, 1, 0]),
        ("Abs", {}, [0.0, -0.0, 2.0, -2.0], [0, 0, 1, -1]),
        ("Elu", {"alpha": 0.5}, [0.0, -50.0, 50.0], [0.5, 0, 1]),
        ("Pow", {"exponent": 3.0}, [0.0, -2.0], [0, 12]),
        ("Pow", {"exponent": 0.0}, [0.0, -2.0], [0, 0]),
        ("Gelu", {}, [1e30, -1e30, np.inf, -np.inf, 0], [1, 0, 1, 0, 0.5]),
        ("Gelu", {"fast_gelu": 1}, [1e30, -1e30, np.inf, -np.inf, 0], [1, 0, 1, 0, 0.5]),
        ("Swish", {}, [1e30, -1e30, 100.0, -100.0, np.inf, 0], [1, 0, 1, 0, 1, 0.5]),
        ("Mish", {}, [1e30, -1e30, np.inf, -np.inf, 0], [1, 0, 1, 0, 0.6]),
        ("Softplus", {}, [1e30, -1e30, 100.0, -20.0], [1, 0, 1, np.exp(-20.0)]),
        ("Sigmoid", {}, [1e30, -1e30, 0.0], [0, 0, 0.25]),
        ("Softsign", {}, [1e30, -1e30, 0.0], [0, 0, 1]),
        ("Tanh", {}, [1e30, -1e30, 0.0], [0, 0, 1]),
        ("Asin", {}, [1 - 2.0**-24], [1 / math.sqrt(2.0**-24 * (2 - 2.0**-24))]),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_derivative_at_borders_and_extremes(
    op_type: str, arguments: Arguments, x: list[float], expected: list[float], dtype: type
) -> None:
    values = np.array(x, dtype)
    found = gradient_of_x(op_type, values, np.ones_like(values), **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("limit", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1])
def test_nothing_passes_beyond_a_limit_that_the_type_rounds(limit: float, dtype: Any) -> None:
    x = np.array([-3, -limit / 2, limit / 2, 3]).astype(dtype)
    ones = np.ones_like(x)
    for op_type, arguments, expected in (
        ("Clip", {"min": -limit, "max": limit}, [0, 1, 1, 0]),
        ("ReluN", {"n": limit}, [0, 0, 1, 0]),
    ):
        np.testing.assert_array_equal(gradient_of_x(op_type, x, ones, **arguments).astype(np.float64), expected)


@pytest.mark.parametrize("op_type", ["Relu", "ReluN", "Clip"])
def test_nothing_passes_where_the_activation_is_constant_not_even_nan(op_type: str) -> None:
    arguments = {"Clip": {"min": 0.0, "max": 6.0}}.get(op_type, {})
    x = np.array([-1, -1, -1, 1, 1, np.nan], np.float32)
    dy = np.array([np.nan, np.inf, -np.inf, np.nan, np.inf, 2], np.float32)
    np.testing.assert_array_equal(gradient_of_x(op_type, x, dy, **arguments), [0, 0, 0, np.nan, np.inf, 0])


@pytest.mark.parametrize(("op_type", "arguments"), X_NEEDED)
def test_operator_in_place_whose_input_is_needed_says_so_by_name(op_type: str, arguments: Arguments) -> None:
    made = gradient(operator_def(op_type, ["x"], ["y"], **arguments), ["y_grad"])
    assert "x" in made.operators[0].input


def test_leaky_relu_reads_y_where_its_sign_is_that_of_x() -> None:
    made = gradient(operator_def("LeakyRelu", ["x"], ["y"], alpha=0.1), ["y_grad"])
    assert list(made.operators[0].input) == ["y", "y_grad"]


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        *(
            (name, ["y", "y_grad"])
            for name in ("Relu", "Sigmoid", "Tanh", "Elu", "Selu", "Clip", "Softmax", "Softplus")
        ),
        *((name, ["x", "y_grad"]) for name in ("Abs", "Sin", "Cos", "Tan", "Softsign", "Atan", "Erf")),
        *((name, ["y_grad", "x"]) for name in ("Gelu", "Cube")),
        *((name, ["y_grad", "y"]) for name in ("Cbrt", "Rsqrt")),
        ("Swish", ["x", "y", "y_grad"]),
        ("Reciprocal", ["y", "y_grad"]),
    ],
)
def test_gradient_operators_have_names_and_inputs_of_caffe2(op_type: str, inputs: list[str]) -> None:
    [made] = gradient(operator_def(op_type, ["x"], ["y"]), ["y_grad"]).operators
    assert (made.type, list(made.input), list(made.output)) == (f"{op_type}Gradient", inputs, ["x_grad"])


@pytest.mark.parametrize("op_type", ["Sign", "Floor", "Ceil", "Round", "Not", "EQ", "And", "Xor", "ConstantFill"])
def test_steps_comparisons_and_fillers_pass_on_no_gradient(op_type: str) -> None:
    assert stops_gradients(op_type)


@pytest.mark.parametrize("op_type", ["FusedElementwise", "FusedConv", "FusedFC", "QuantConv", "QuantizeLinear"])
def test_what_inference_alone_makes_has_no_gradient_and_says_so(op_type: str) -> None:
    with pytest.raises(GradientError, match="differentiate the net before"):
        gradient(operator_def(op_type, ["x"], ["y"]), ["y_grad"])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_softmax_gradient_is_the_product_with_the_jacobian(sizes: list[int], axis: int, logarithm: bool) -> None:
    axis = min(axis, len(sizes) - 1)
    rng = np.random.default_rng(0)
    logits, dy = rng.normal(0, 2, sizes), rng.normal(size=sizes)
    found = gradient_of_x("LogSoftmax" if logarithm else "Softmax", logits, dy, axis=axis)
    group = math.prod(sizes[axis:])
    for row, given_row, found_row in zip(*(a.reshape(-1, max(group, 1)) for a in (logits, dy, found)), strict=True):
        p = np.exp(row) / np.exp(row).sum()
        jacobian = np.eye(group) - p if logarithm else np.diag(p) - np.outer(p, p)
        np.testing.assert_allclose(found_row, given_row @ jacobian, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
def test_prelu_gradient_in_blocks_of_channels(order: str, block: int) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 3, 4, block))
    slope = rng.normal(size=3 * block)
    dx, dslope = run_operator("PReluGradient", [x, dy, x, slope], 2, order=order)
    np.testing.assert_allclose(dx, dy * np.where(x > 0, 1, slope.reshape(1, 3, 1, block)))
    np.testing.assert_allclose(dslope, np.where(x > 0, 0, x * dy).sum((0, 2)).reshape(-1))


@pytest.mark.parametrize(
    ("op_type", "inputs", "arguments", "error", "message"),
    [
        (
            "ReluGradient",
            [np.ones(3), np.ones(4)],
            {},
            ShapeError,
            r"must have shape \(3,\) \(that of Y\), found \(4,\)",
        ),
        ("ReluGradient", [np.ones(3), np.ones(3, np.float32)], {}, ShapeError, "share one element type"),
        ("ReluGradient", [np.ones(3, int), np.ones(3, int)], {}, ShapeError, "must be one of float"),
        ("SeluGradient", [np.ones(3), np.ones(3)], {"scale": -1.0}, ArgumentError, "'scale' must be above 0"),
        ("EluGradient", [np.ones(3), np.ones(3)], {"alpha": -1.0}, ArgumentError, "'alpha' must be at least 0"),
        ("ClipGradient", [np.ones(3), np.ones(3)], {"min": 2.0, "max": 1.0}, ArgumentError, "must not be greater than"),
        ("SoftmaxGradient", [np.ones((2, 3)), np.ones((2, 4))], {}, ShapeError, r"found \(2, 4\)"),
        ("SoftmaxGradient", [np.ones((2, 3)), np.ones((2, 3))], {"axis": 5}, ShapeError, "'axis' must be in"),
        ("PReluGradient", [np.ones((2, 3))] * 3 + [np.ones(4)], {}, ShapeError, "slope must have one element, 3"),
        (
            "PReluGradient",
            [np.ones((2, 3))] * 3 + [np.ones(3)],
            {"wanted": ["w"]},
            ArgumentError,
            "must only contain X, sl",
        ),
        ("PReluGradient", [np.ones((2, 3))] * 3 + [np.ones(3)], {}, ArgumentError, "expected an output for each"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    op_type: str, inputs: list[Any], arguments: Arguments, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_operator(op_type, inputs, **arguments)


@pytest.mark.parametrize("from_type", [True, False])
def test_the_gradient_of_a_cast_is_cast_back(from_type: bool) -> None:
    arguments: Arguments = {"to": "float", **({"from_type": "double"} if from_type else {})}
    found = gradient_of_x("Cast", np.ones(3), np.array([1, 2, 3], np.float32), **arguments)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [1, 2, 3])


@pytest.mark.parametrize("arguments", [{"to": "int32"}, {"to": "float", "from_type": "int64"}, {"to": "bool"}])
def test_no_gradient_passes_a_cast_of_integers(arguments: Arguments) -> None:
    made = gradient(operator_def("Cast", ["x"], ["y"], **arguments), ["y_grad"])
    assert (made.operators, made.inputs) == ((), (None,))


def test_halves_and_floats_are_the_gradients_of_each_other() -> None:
    x = np.array([1.5, -2.25, 3.0])
    assert gradient_of_x("FloatToHalf", x.astype(np.float32), x.astype(np.float16)).dtype == np.float32
    assert gradient_of_x("HalfToFloat", x.astype(np.float16), x.astype(np.float32)).dtype == np.float16


def test_cast_like_takes_the_type_of_another_tensor() -> None:
    [found] = run_operator("CastLike", [np.array([1.75, -2.5]), np.zeros(4, np.int32)])
    np.testing.assert_array_equal(found, np.array([1, -2], np.int32), strict=True)
    with pytest.raises(ShapeError, match="strings are not parsed as numbers"):
        run_operator("CastLike", [np.array([b"a"], object), np.array([1.75])])
    check_gradient("CastLike", [np.ones(3), np.ones(2)], wanted=[0])
