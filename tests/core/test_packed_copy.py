"""Packed copies have the values and the shape of what they were made of, however that lies in memory."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.core.packed_copy import copy_transposed, packed_copy

_random = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 1030), (1030, 521), (3, 40, 50)])
def test_a_copy_of_a_transposed_array_is_packed(shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    source = (100 * _random.standard_normal(shape)).astype(dtype)
    for array in (source, source.T, source[::-1].T if shape else source):
        found = packed_copy(array, "a copy")
        assert found.flags.c_contiguous
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert np.array_equal(found, array)
        assert not np.shares_memory(found, array)


def test_a_part_of_a_matrix_takes_the_transposed_one_of_another() -> None:
    target, source = np.zeros((600, 40), np.float32), _random.standard_normal((30, 2000)).astype(np.float32)
    copy_transposed(target[:, 5:35], source.T[100:700])
    assert np.array_equal(target[:, 5:35], source[:, 100:700].T)
    assert not target[:, :5].any()
    assert not target[:, 35:].any()
