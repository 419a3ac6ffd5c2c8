"""Activations beyond their formulas (`test_formulas`): integers, slopes of PRelu, arguments that make no sense."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import Array, operator_def, run_operator, workspace_of


def sample(seed: int, size: int) -> Array:
    return np.random.default_rng(seed).normal(0, 3, size)


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


@pytest.mark.parametrize(
    ("op_type", "arguments", "message"),
    [
        ("Elu", {"alpha": -1.0}, "'alpha' must be at least 0, found -1"),
        ("ReluN", {"n": -2.0}, "'n' must be at least 0, found -2"),
        ("LeakyRelu", {"alpha": float("nan")}, "'alpha' is not a number"),
        ("HardSigmoid", {"beta": "half"}, "'beta' must be a float; found a string"),
        ("Clip", {"min": 2.0, "max": 1.0}, "'min' must not be greater than 'max', found 2 > 1"),
        ("Gelu", {"fast_gelu": "yes"}, "'fast_gelu' must be an integer; found a string"),
    ],
)
def test_activation_refuses_bad_arguments_before_anything_runs(
    op_type: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_operator(op_type, [np.ones(2, np.float32)], **arguments)


def test_swish_may_not_run_in_place_since_its_gradient_needs_the_input() -> None:
    workspace = workspace_of({"x": np.ones(2, np.float32)})
    with pytest.raises(SchemaError, match="may not overwrite input 0 in place"):
        SimpleNet(NetDef(name="n", op=[operator_def("Swish", ["x"], ["x"])]), workspace)
