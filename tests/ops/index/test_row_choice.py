"""Conditional, whose rows come from one of two tensors."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import ShapeError
from tests.ops.running import run_operator


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("shape", [(4,), (4, 2, 3), (0, 3)])
def test_each_row_is_of_the_tensor_that_its_condition_says(dtype: type, shape: tuple[int, ...]) -> None:
    rows, others = np.arange(np.prod(shape), dtype=dtype).reshape(shape), np.full(shape, -1, dtype)
    condition = np.array([True, False, False, True])[: shape[0]]
    [found] = run_operator("Conditional", [condition, rows, others])
    assert found.dtype == dtype
    assert found.tolist() == [(rows if one else others)[number].tolist() for number, one in enumerate(condition)]


def test_conditions_that_do_not_fit_are_refused() -> None:
    rows = np.zeros((3, 2), np.float32)
    with pytest.raises(ShapeError, match="a condition for each"):
        run_operator("Conditional", [np.array([True]), rows, rows])
    with pytest.raises(ShapeError, match="the shape of the other"):
        run_operator("Conditional", [np.ones(3, bool), rows, rows[:2]])
