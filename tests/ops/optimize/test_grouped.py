"""Updates by the norm of many gradients, against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(51)


@pytest.mark.parametrize("shape", [(5, 7), (6,), (3, 2, 4)])
def test_group_ftrl_leaves_columns_at_zero(shape: tuple[int, ...]) -> None:
    alpha, beta, first, second = 0.1, 0.5, 0.75, 0.25
    param, grad, z = (RNG.normal(size=shape).astype(np.float32) for _ in range(3))
    n = RNG.uniform(0, 2, shape).astype(np.float32)
    result, state = run_operator(
        "GFtrl", [param, np.stack([n, z], -1), grad], 2, alpha=alpha, beta=beta, lambda1=first, lambda2=second
    )
    columns = list(np.ndindex(shape[1:]))
    zeros = 0
    for column in columns:
        after = []
        for row in range(shape[0]):
            w, g, before, old = (float(one[(row, *column)]) for one in (param, grad, n, z))
            squares = before + g * g
            after.append((squares, old + g - (math.sqrt(squares) - math.sqrt(before)) / alpha * w))
        norm, least = math.sqrt(sum(one**2 for _, one in after)), first * math.sqrt(shape[0])
        zeros += norm <= least
        for row, (squares, new) in enumerate(after):
            slope = (beta + math.sqrt(squares)) / alpha + second
            expected = new * (least / norm - 1) / slope if norm > least else 0.0
            np.testing.assert_allclose(result[(row, *column)], expected, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(state[(row, *column)], (squares, new), rtol=1e-5, atol=1e-6)
    assert zeros < len(columns)


def test_a_column_of_small_norm_is_zero() -> None:
    param, grad = np.full((4, 2), 0.5, np.float32), np.array([[0.1, 9]] * 4, np.float32)
    result, _ = run_operator("GFtrl", [param, np.zeros((4, 2, 2), np.float32), grad], 2, alpha=1.0, lambda1=0.5)
    assert (result[:, 0] == 0).all()
    assert (result[:, 1] != 0).all()
    with pytest.raises(ArgumentError, match="'alpha' must not be negative, nor alpha 0"):
        run_operator("GFtrl", [param, np.zeros((4, 2, 2), np.float32), grad], 2, alpha=0.0)


def test_wngrad_divides_by_what_all_gradients_have_added() -> None:
    param, grad = (RNG.normal(size=(3, 4)).astype(np.float32) for _ in range(2))
    b, rate = np.array([2.5], np.float32), np.array([-0.3], np.float32)
    result, after = run_operator("Wngrad", [param, b, grad, rate], 2, epsilon=0.5)
    np.testing.assert_allclose(result, param - 0.3 * grad.astype(np.float64) / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, 2.5 + (grad.astype(np.float64) ** 2).sum() / 3, rtol=1e-6)
    with pytest.raises(ShapeError, match="must be one number"):
        run_operator("Wngrad", [param, np.ones(2, np.float32), grad, rate], 2)


def test_sparse_wngrad_changes_the_rows_of_its_indices() -> None:
    param, grad = RNG.normal(size=(5, 2)).astype(np.float32), RNG.normal(size=(3, 2)).astype(np.float32)
    b, rate = np.array([1.5], np.float32), np.array([0.2], np.float32)
    indices = np.array([3, 0, 3])
    result, after = run_operator("SparseWngrad", [param, b, indices, grad, rate], 2, epsilon=0.5)
    expected = param.astype(np.float64)
    for row, slope in zip(indices, grad, strict=True):
        expected[row] += 0.2 * slope / 2
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result[[1, 2, 4]], param[[1, 2, 4]])
    np.testing.assert_allclose(after, 1.5 + (grad.astype(np.float64) ** 2).sum() / 2, rtol=1e-6)
    with pytest.raises(OperatorError, match="index"):
        run_operator("SparseWngrad", [param, b, np.array([3, 0, 5]), grad, rate], 2)
