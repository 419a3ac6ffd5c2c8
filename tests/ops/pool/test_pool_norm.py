"""LpPool: the p-norm of each window, against loops in float64 and against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.pool import window as blocks_module
from tests.ops.drawing import drawn
from tests.ops.pooling import FLOATS, PoolCase, norms, onnx_pools, pool_cases
from tests.ops.running import run_operator
from tests.ops.windows import LEGACY, Geometry, run_onnx

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}


def check(case: PoolCase) -> None:
    """Compare with the loops and, where it has the same pooling, with onnxruntime."""
    reproduction = f"reproduce with: check({case})"
    x = case.integers()
    (y,) = case.run("LpPool", x)
    expected = norms(x, case)
    assert y.dtype == np.dtype(case.dtype)
    assert y.shape == expected.shape, reproduction
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=1e-7, err_msg=reproduction)
    if case.dtype == "float32" and case.batch and case.p.is_integer() and onnx_pools(case.geometry):
        attributes = case.geometry.onnx_attributes() | {"ceil_mode": int(case.geometry.ceil_mode), "p": int(case.p)}
        found = run_onnx("LpPool", [x], attributes)
        np.testing.assert_allclose(y, found, rtol=1e-5, atol=1e-7, err_msg=f"onnxruntime differs; {reproduction}")


@pytest.mark.slow
@given(pool_cases("LpPool", FLOATS, (1.0, 2.0, 3.0, 0.5, 2.5)))
@drawn(200)
def test_lp_pool_takes_the_norm_of_each_window(case: PoolCase) -> None:
    check(case)


def test_the_exponent_is_two_when_none_is_given() -> None:
    (y,) = run_operator("LpPool", [np.array([[[3, -4, 0]]], np.float32)], kernel=2)
    np.testing.assert_array_equal(y, [[[5, 4]]])


def test_an_integer_is_read_as_an_exponent_too() -> None:
    (y,) = run_operator("LpPool", [np.array([[[3, -4, 0]]], np.float32)], kernel=2, p=1)
    np.testing.assert_array_equal(y, [[[7, 4]]])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_halves_are_computed_in_single_precision(p: float) -> None:
    """300 squared, and the sum of 2048 and 1, are more than float16 holds."""
    x = np.array([[[300, 400, 0, 2048, 1, 1]]], np.float16)
    (y,) = run_operator("LpPool", [x], kernel=3, stride=3, p=p)
    wide = x.astype(np.float64).reshape(2, 3)
    np.testing.assert_array_equal(y.reshape(-1), ((wide**p).sum(axis=1) ** (1 / p)).astype(np.float16))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("kernel", [2, 4])
def test_nan_and_infinity_spread_to_their_windows_only(p: float, kernel: int) -> None:
    x = np.array([[[1, np.nan, 0, 2], [1, 1, -np.inf, 2], [0, 0, 0, 0]]], np.float32)
    (y,) = run_operator("LpPool", [x], kernel=kernel, stride=2, p=p)
    with np.errstate(invalid="ignore"):
        expected = (np.abs(x.reshape(3, -1, kernel)) ** p).sum(axis=2) ** (1 / p)
    np.testing.assert_allclose(y[0], expected, rtol=1e-6)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_images_in_blocks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK", 250)
    check(PoolCase("LpPool", Geometry((11, 9), (3, 2), (2, 1), (1, 1), (1, 0, 1, 1)), 3, 5, order, p=3.0))
    check(PoolCase("LpPool", Geometry((5, 4), (5, 4), (1, 1), (1, 1), (0,) * 4), 7, 3, order, whole=True))


def test_caffe_legacy_pooling_has_the_sizes_that_caffe2_gives() -> None:
    case = PoolCase("LpPool", Geometry((8, 8), (3, 3), (2, 2), (1, 1), (1,) * 4, LEGACY))
    assert case.run("LpPool", case.integers())[0].shape == (1, 2, 5, 5)


@pytest.mark.parametrize("op_type", ["LpPool", "LpPoolGradient"])
@pytest.mark.parametrize(
    ("p", "message"),
    [
        (0.0, "'p' must be a finite number above 0, found 0.0"),
        (-1.0, "'p' must be a finite number above 0, found -1.0"),
        (np.inf, "'p' must be a finite number above 0, found inf"),
        (np.nan, "'p' is not a number"),
    ],
)
def test_other_exponents_are_refused(op_type: str, p: float, message: str) -> None:
    x = np.zeros((1, 1, 4), np.float32)
    inputs: list[Any] = [x] if op_type == "LpPool" else [x, x[..., :3], x[..., :3]]
    with pytest.raises(ArgumentError, match=f"{op_type} 'y0'.*{message}"):
        run_operator(op_type, inputs, kernel=2, p=p)


def test_integers_and_other_ranks_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"LpPool 'y0'.*must be one of float32.*found int32"):
        run_operator("LpPool", [np.zeros((1, 1, 4), np.int32)], kernel=2)
    with pytest.raises(ShapeError, match=r"LpPool2D 'y0'.*'x0' must have 4 axes, found 3"):
        run_operator("LpPool2D", [np.zeros((1, 1, 4), np.float32)], kernel=2)
