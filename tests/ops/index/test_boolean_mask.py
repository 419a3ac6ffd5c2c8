"""Rows chosen and put back by masks, places of values, and criteria of pairs."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import OperatorError
from tests.ops.running import run_operator

MASK = np.array([True, False, True, True])
DATA = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_a_mask_chooses_rows_and_tells_their_numbers() -> None:
    rows, places = run_operator("BooleanMask", [DATA, MASK], 2)
    np.testing.assert_array_equal(rows, DATA[MASK])
    assert places.tolist() == [0, 2, 3]
    assert places.dtype == np.int64


def test_masks_put_values_back_and_the_first_wins() -> None:
    first, second = np.array([True, False, True]), np.array([True, True, False])
    [found] = run_operator("BooleanUnmask", [first, np.array([1, 2]), second, np.array([3, 4])])
    assert found.tolist() == [1, 4, 2]


def test_a_place_that_no_mask_has_is_refused() -> None:
    with pytest.raises(OperatorError, match="position 1 is in none of the masks"):
        run_operator("BooleanUnmask", [np.array([True, False]), np.array([1])])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_values_are_found_where_they_stand_last(dtype: type) -> None:
    index = np.array([7, 6, 5, 7], dtype)
    [found] = run_operator("Find", [index, np.array([[7, 4], [6, 9]], dtype)], missing_value=-2)
    assert found.tolist() == [[3, -2], [1, -2]]
    assert run_operator("Find", [np.zeros(0, dtype), np.array([1], dtype)])[0].tolist() == [-1]


def test_criteria_of_pairs() -> None:
    s, y = np.array([0.5, 0.5, -0.5], np.float32), np.array([1, -1, -1], np.int32)
    np.testing.assert_allclose(
        run_operator("CosineEmbeddingCriterion", [s, y], margin=0.1)[0], [0.5, 0.4, 0], rtol=1e-6
    )
    x1, x2 = np.array([3, 1, 2], np.float32), np.array([1, 3, 2], np.float32)
    y = np.array([1, 1, -1], np.int32)
    np.testing.assert_allclose(run_operator("MarginRankingCriterion", [x1, x2, y])[0], [0, 3, 1], rtol=1e-6)


def test_the_divergence_of_equal_probabilities_is_0_and_of_certain_ones_ln_2() -> None:
    p, q = np.array([0.3, 0, 1], np.float32), np.array([0.3, 1, 0], np.float32)
    np.testing.assert_allclose(run_operator("BernoulliJSD", [p, q])[0], [0, np.log(2), np.log(2)], rtol=1e-6, atol=1e-9)
