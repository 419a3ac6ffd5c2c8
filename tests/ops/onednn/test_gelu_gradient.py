"""The gradient of Gelu by a kernel, and multiples, against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import normal, run_onednn

X = np.concatenate([np.linspace(-20, 20, 4003), [0.0, -0.0, 1e-20, 87.0, -1e30]]).astype(np.float32)


@needs_kernels
@pytest.mark.parametrize("pieces", [1, 2])
def test_exact_gradient(pieces: int) -> None:
    x, dy = X.astype(np.float64), normal(0, *X.shape)
    with np.errstate(over="ignore"):
        density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    slope = (1 + np.array([math.erf(value) for value in x / math.sqrt(2)])) / 2 + x * density
    (found,) = run_onednn("GeluGradient", [dy, X], pieces=pieces)
    np.testing.assert_allclose(found, dy * slope, rtol=1e-6, atol=3e-7)


@needs_kernels
def test_gradient_of_the_approximation() -> None:
    near, dy = np.clip(X, -8.5, 8.5).astype(np.float64), normal(1, *X.shape)
    c = math.sqrt(2 / math.pi)
    tanh = np.tanh(c * (near + 0.044715 * near**3))
    slope = (1 + tanh) / 2 + near / 2 * (1 - tanh**2) * c * (1 + 3 * 0.044715 * near**2)
    (found,) = run_onednn("GeluGradient", [dy, X], fast_gelu=1)
    np.testing.assert_allclose(found, dy * slope, rtol=2e-6, atol=5e-7)


@needs_kernels
@pytest.mark.parametrize("fast", [0, 1])
def test_far_away_the_slope_is_0_or_1_and_nan_stays(fast: int) -> None:
    x, dy = np.float32([np.inf, -np.inf, np.nan]), np.float32([2, 3, 4])
    (found,) = run_onednn("GeluGradient", [dy, x], fast_gelu=fast)
    np.testing.assert_allclose(found, [2, 0, np.nan], atol=1e-20)


@needs_kernels
def test_multiples_are_exact() -> None:
    (found,) = run_onednn("Scale", [X], scale=0.3)
    assert found.tobytes() == (X * np.float32(0.3)).tobytes()
