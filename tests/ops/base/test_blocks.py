"""How tensors are cut into pieces."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.operator import in_sequence, nothing_to_do
from dagexec.ops.base.blocks import block_indices, even_ranges


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4), limit=st.integers(1, 40))
def test_pieces_cover_every_element_once_in_memory_order_within_the_limit(shape: list[int], limit: int) -> None:
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    pieces = [elements[index] for index in block_indices(tuple(shape), limit)]
    assert [value for piece in pieces for value in piece.ravel()] == list(range(elements.size))
    assert all(piece.size <= limit and piece.flags.c_contiguous for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), most=st.integers(1, 60))
def test_even_boxes_cover_every_element_once_in_memory_order_within_the_limit(shape: list[int], most: int) -> None:
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    ranges = even_ranges(shape, most)
    boxes = [elements[box] for box in product(*ranges)]
    assert [value for box in boxes for value in box.ravel()] == list(range(elements.size))
    assert all(box.size <= most for box in boxes)
    for parts in ranges:
        lengths = [part.stop - part.start for part in parts]
        assert len(set(lengths[:-1])) <= 1
        assert lengths[-1] <= lengths[0]


@pytest.mark.parametrize(("size", "limit", "count"), [(10, 10, 1), (11, 10, 2), (20, 10, 2), (21, 10, 3)])
def test_pieces_are_as_few_as_the_limit_allows(size: int, limit: int, count: int) -> None:
    assert len(block_indices((size,), limit)) == count


def test_a_sequence_calls_its_steps_in_order_and_leaves_out_those_with_nothing_to_do() -> None:
    calls: list[int] = []
    in_sequence([lambda: calls.append(1), nothing_to_do, lambda: calls.append(2)])()
    assert calls == [1, 2]
    assert in_sequence([nothing_to_do]) is nothing_to_do
    assert in_sequence([]) is nothing_to_do
