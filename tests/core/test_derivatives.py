"""Derivatives of expressions of rows against differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dagexec.core.derivatives import gradient
from dagexec.core.expressions import Expression, element, evaluated, exp, row_max, row_mean, row_sum, sqrt, square

OF_A_ROW: dict[str, Callable[[Expression], Expression]] = {
    "sum": row_sum,
    "mean": row_mean,
    "sum beside the mean": lambda x: row_sum(x - row_mean(x) * 2),
    "variance": lambda x: row_mean(square(x - row_mean(x))),
    "length beside the greatest": lambda x: sqrt(row_sum(square(x))) * row_max(x),
    "sum of powers beside the mean": lambda x: row_sum(exp(x * row_mean(x))) / row_sum(square(x) + 1),
}


@pytest.mark.parametrize("name", OF_A_ROW)
def test_derivatives_of_what_has_one_value_a_row_are_the_slopes(name: str) -> None:
    x, dy = np.random.default_rng(0).normal(size=(3, 5)), np.array([[2.0], [-1.0], [0.5]])
    result = OF_A_ROW[name](element(0))
    assert result.is_of_row
    [expression] = gradient(result, [element(0)], element(1, of_row=True))
    found = np.broadcast_to(evaluated([expression], [x, dy])[0], x.shape)
    step = 1e-6
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        high, low = (float((evaluated([result], [x + sign * moved])[0] * dy).sum()) for sign in (1, -1))
        np.testing.assert_allclose(found[place], (high - low) / (2 * step), rtol=1e-7, atol=1e-8)
