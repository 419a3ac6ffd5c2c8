"""Products with weights as they lie: values, rows left over, and bytes that do not depend on batch or pieces."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.dot_product import can_multiply, dot_step
from dagexec.testing import run_operator
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array

pytestmark = needs_kernels

SIZES = [(1, 16, 1), (1, 64, 37), (2, 32, 7), (3, 48, 25), (4, 16, 24), (5, 64, 13), (9, 1600, 101), (70, 128, 50)]
"""Rows, inner, units: blocks of both, and what is left."""


def product(x: Array, w: Array, b: Array, pieces: int = 1) -> Array:
    """By the kernels, between elements that must stay as they are."""
    onednn = library()
    assert onednn is not None
    assert can_multiply(onednn, x.shape[1])
    guarded = np.full((len(x) + 2, len(w)), np.nan, np.float32)
    with cut_into(pieces):
        step = dot_step(onednn, x, w, b, guarded[1:-1], "test")
    assert step is not None
    step()
    assert np.isnan(guarded[[0, -1]]).all()
    return guarded[1:-1]


@pytest.mark.parametrize(("rows", "inner", "units"), SIZES)
def test_values_are_those_of_float64_and_bytes_those_of_a_row_alone(rows: int, inner: int, units: int) -> None:
    x, w, b = normal(1, rows, inner), normal(2, units, inner), normal(3, units)
    y = product(x, w, b)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T + b, rtol=0, atol=2e-6 * inner)
    np.testing.assert_array_equal(product(x, w, b, pieces=2), y)
    for row in range(rows):
        np.testing.assert_array_equal(product(x[row : row + 1], w, b)[0], y[row])


def test_what_is_no_number_stays_in_its_row_and_unit() -> None:
    x, w, b = normal(1, 5, 32), normal(2, 9, 32), normal(3, 9)
    x[3, 7], w[4, 2] = np.nan, np.nan
    y = product(x, w, b)
    expected = np.zeros((5, 9), bool)
    expected[3], expected[:, 4] = True, True
    np.testing.assert_array_equal(np.isnan(y), expected)


def test_a_layer_is_right_with_weights_that_others_read() -> None:
    x, w, b = normal(1, 2, 3, 64), normal(2, 301, 64), normal(3, 301)
    [y] = run_operator("FC", [x, w, b], engine="ONEDNN", axis=2, plain_weights=1)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T + b, rtol=0, atol=1e-4)
