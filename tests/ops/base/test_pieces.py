"""Pieces: which parts of a tensor are one stretch of its memory, against NumPy's flags."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.ops.base.pieces import copying, is_same_memory, offsets_along, piece_offset
from tests.memory_limits import peak_memory


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_part_is_one_piece_when_its_elements_are_neighbors(shape: list[int], data: st.DataObject) -> None:
    kept = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        kept.append(range(start, data.draw(st.integers(start, size)), data.draw(st.integers(1, 2))))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    part = numbers[tuple(slice(r.start, r.stop, r.step) for r in kept)].reshape(-1)
    together = part.size > 0 and bool((np.diff(part) == 1).all())
    assert piece_offset(shape, kept) == (part[0] if together else None)


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_parts_along_an_axis_begin_where_numpy_says(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    array = np.zeros(shape, np.uint8)
    parts = np.split(array, [cut], axis)
    found = offsets_along(shape, axis, (cut, shape[axis] - cut))
    for part, offset in zip(parts, found, strict=True):
        if part.size and part.flags.c_contiguous:
            assert offset == part.ctypes.data - array.ctypes.data
        elif not part.size:
            assert offset is None


def test_the_same_memory_is_the_same_elements_at_the_same_indices() -> None:
    array = np.arange(12).reshape(3, 4)
    assert is_same_memory(array[:1], array.reshape(-1)[:4].reshape(1, 4))
    assert not is_same_memory(array, array.copy())
    assert not is_same_memory(array[:, :2], array[:, 2:])
    assert not is_same_memory(array.T[:3, :3], array[:3, :3])
    assert not is_same_memory(array, array.view(np.uint64))
    assert not is_same_memory(array[:0], array[:0])


TYPES = (np.float32, np.float64, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, np.object_)


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(TYPES), st.data())
@settings(max_examples=200, deadline=None)
def test_a_part_is_copied_and_nothing_beside_it(shape: list[int], dtype: type, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    size = data.draw(st.integers(0, shape[axis]))
    start = data.draw(st.integers(0, shape[axis] - size))
    place = (*(slice(None),) * axis, slice(start, start + size))
    whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    part = np.zeros_like(whole[place])
    take, put = copying(part, whole[place], axis), copying(whole[place], part, axis)
    take()
    assert part.tolist() == whole[place].tolist()
    wanted = whole.copy()
    wanted[place] = np.ones((), dtype)
    part[...] = np.ones((), dtype)
    put()
    assert whole.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "turned", [np.zeros((6, 4, 8)).T, np.zeros((8, 4, 12))[..., ::2], np.zeros((9, 5, 7))[1:, 1:, 1:]]
)
def test_parts_without_rows_are_copied_too(turned: np.ndarray) -> None:
    source = np.random.default_rng(0).standard_normal(turned.shape)
    copying(turned, source, 1)()
    np.testing.assert_array_equal(turned, source)


def test_copying_rows_takes_no_memory() -> None:
    whole, part = np.zeros((100, 64), np.float32), np.ones((100, 40), np.float32)
    step = copying(whole[:, 8:48], part, 1)
    step()
    peak = peak_memory(step)
    assert peak < part.nbytes / 4
