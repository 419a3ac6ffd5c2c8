"""Gradient clipping by the norm of all gradients, and layer-wise learning rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, SchemaError, ShapeError
from tests.ops.optimize.updating import DEVICES, Array, run_steps, scalar
from tests.ops.running import run_operator

FLOATS = st.floats(0, 1e6, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_the_global_norm_is_the_root_of_the_sum(squares: list[float]) -> None:
    (norm,) = run_operator("GlobalNorm", [scalar(square) for square in squares])
    assert norm.shape == ()
    assert norm == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-6)


def test_the_global_norm_takes_floats_of_both_sizes_and_keeps_nan() -> None:
    assert run_operator("GlobalNorm", [np.float64(9), scalar(16)])[0] == 5
    assert np.isnan(run_operator("GlobalNorm", [scalar(math.nan), scalar(1)])[0])
    assert run_operator("GlobalNorm", [scalar(math.inf), scalar(1)])[0] == math.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tensor_is_scaled_only_when_the_norm_exceeds_the_threshold(dtype: type, device: str) -> None:
    x = np.array([3.0, -4.0], dtype)
    for norm, expected in [(5.0, x / 2), (2.5, x), (2.0, x), (math.nan, x)]:
        for output in ("x", "y"):
            blobs = {"x": x, "norm": scalar(norm)}
            found = run_steps("ClipTensorByScaling", ["x", "norm"], [output], blobs, [{}], device=device, threshold=2.5)
            np.testing.assert_allclose(found[output], expected, rtol=1e-7)


def test_a_third_input_multiplies_the_threshold() -> None:
    blobs = {"x": np.ones(3, np.float32), "norm": scalar(8), "factor": scalar(2)}
    result = run_steps("ClipTensorByScaling", list(blobs), ["x"], blobs, [{"x": blobs["x"]}] * 2, threshold=2.0)
    assert result["x"].tolist() == [0.5] * 3


def test_an_empty_tensor_may_be_clipped() -> None:
    assert run_operator("ClipTensorByScaling", [np.zeros((0, 3), np.float32), scalar(9)], threshold=1.0)[0].size == 0


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.inf])
def test_a_threshold_must_be_above_zero(threshold: float) -> None:
    with pytest.raises(ArgumentError, match="'threshold' must be above 0 and finite"):
        run_operator("ClipTensorByScaling", [np.ones(3, np.float32), scalar(9)], threshold=threshold)


def test_clipping_needs_a_threshold_and_one_norm() -> None:
    with pytest.raises(SchemaError, match="argument 'threshold' is required"):
        run_operator("ClipTensorByScaling", [np.ones(3, np.float32), scalar(9)])
    with pytest.raises(ShapeError, match="the norm, must have one element"):
        run_operator("ClipTensorByScaling", [np.ones(3, np.float32), np.ones(2, np.float32)], threshold=1.0)


def lars(x: Array, dx: Array, scalars: tuple[float, ...] = (), **arguments: float) -> float:
    """The factor."""
    (factor,) = run_operator("Lars", [x, dx, *map(scalar, scalars)], **arguments)
    assert factor.shape == (1,)
    assert factor.dtype == np.float32
    return float(factor[0])


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60_000), st.sampled_from([np.float32, np.float64]), st.sampled_from([0.0, 0.5, 2.0]))
def test_lars_is_the_quotient_of_norms(size: int, dtype: type, offset: float) -> None:
    rng = np.random.default_rng(size)
    x, dx = rng.standard_normal(size).astype(dtype), rng.standard_normal(size).astype(dtype)
    quotient = math.sqrt(math.fsum(dx.astype(np.float64) ** 2) / math.fsum(x.astype(np.float64) ** 2))
    assert lars(x, dx, offset=offset) == pytest.approx(1 / (quotient + offset), rel=1e-6)
    decayed = 0.75 / (quotient + 0.25 + offset)
    assert lars(x, dx, (0.25, 0.75, 1e9), offset=offset, lr_min=0.0) == pytest.approx(decayed, rel=1e-6)
    assert lars(x, dx, (0.25,), offset=offset) == pytest.approx(decayed / 0.75, rel=1e-6)


def test_lars_is_limited_and_one_for_a_parameter_of_zeros() -> None:
    x, dx = np.array([3.0, 4.0], np.float32), np.array([0.3, 0.4], np.float32)
    assert lars(x, dx) == pytest.approx(1 / 0.6)
    assert lars(x, dx, (0.0, 1.0, 1.25)) == 1.25
    assert lars(x, dx, (0.0, 0.01, 1.25), lr_min=0.5) == 0.5
    assert lars(0 * x, dx) == 1
    assert lars(0 * x, dx, (0.0, 1.0, 0.5)) == 0.5
    assert lars(x, 0 * dx, offset=0.0) == math.inf


def test_lars_refuses_what_does_not_fit() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(ArgumentError, match="'offset' must be at least 0"):
        lars(x, x, offset=-1.0)
    with pytest.raises(ShapeError, match="that of the parameter"):
        lars(x, np.ones(2, np.float32))
    with pytest.raises(ShapeError, match="expected 2, 3 or 5 inputs"):
        lars(x, x, (0.0, 1.0))
