"""Which known numbers of rows a new one is made up of."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.binding.block_sizes import BLOCK_SECONDS, MAX_BLOCKS, MAX_PRICE, BlockSizes, cover

SIZES = st.sets(st.integers(1, 200), max_size=8)


@given(st.integers(1, 300), SIZES, st.floats(0, 1000))
def test_blocks_have_all_rows_and_cost_little_more_than_these(rows: int, sizes: set[int], overhead: float) -> None:
    found = cover(rows, sizes, overhead)
    if found is None:
        assert rows not in sizes
        return
    assert sizes.issuperset(found)
    assert sum(found) >= rows > sum(found[:-1])
    assert found == sorted(found, reverse=True)
    assert len(found) <= MAX_BLOCKS
    assert sum(found) + len(found) * overhead <= MAX_PRICE * (rows + overhead) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rows", "sizes", "overhead", "found"),
    [
        (37, [32, 8], 0, [32, 8]),
        (37, [32], 0, None),  # 64 rows for 37
        (37, [32, 5, 4, 1], 0, [32, 5]),
        (37, [32, 5, 4, 1], 20, None),  # two blocks cost 77, one 57
        (37, [40, 32, 5], 4, [40]),
        (30, [10], 0, [10, 10, 10]),
        (26, [10], 0, [10, 10, 10]),
        (50, [10], 0, None),  # five blocks
        (3, [], 0, None),
    ],
)
def test_the_cheapest_blocks_are_found(rows: int, sizes: list[int], overhead: float, found: list[int] | None) -> None:
    assert cover(rows, sizes, overhead) == found


class Prepared:
    """What a replica that keeps so many preparations would be prepared for."""

    def __init__(self, kept: int, row_seconds: float = 100 * BLOCK_SECONDS) -> None:
        self.sizes = BlockSizes()
        self.kept: dict[int, float] = {}
        self.made = 0
        self._most = kept
        self._row_seconds = row_seconds

    def run(self, rows: int) -> list[int] | None:
        found = self.sizes.blocks("images", rows, self.kept)
        for size in found or [rows]:
            self.made += size not in self.kept
            self.kept[size] = self.kept.pop(size, size * self._row_seconds)
        for size in list(self.kept)[: -self._most]:
            del self.kept[size]
        return found


def test_a_thousand_numbers_of_rows_need_few_preparations() -> None:
    prepared = Prepared(1000)
    numbers = list(range(1, 1001))
    random.Random(0).shuffle(numbers)
    whole = sum(prepared.run(rows) is None for rows in numbers)
    assert whole == prepared.made <= 25


def test_a_number_that_comes_back_soon_is_prepared_for() -> None:
    prepared = Prepared(10)
    assert prepared.run(32) is None
    assert prepared.run(30) == [32]
    assert prepared.run(32) is None
    assert prepared.run(30) is None
    assert prepared.run(30) is None
    assert prepared.made == 2
    for rows in (29, *range(200, 299), 29):
        assert prepared.run(rows) != [29], "it came back late"


def test_what_was_given_up_is_prepared_again_rather_than_yet_another_number() -> None:
    prepared = Prepared(1)
    for rows in (100, 10):
        assert prepared.run(rows) is None
    assert prepared.run(99) == [100]
    assert prepared.run(9) == [10]
    prepared.run(1000)
    assert prepared.run(109) is None, "two would have to be prepared again"


def test_kinds_of_inputs_have_nothing_in_common() -> None:
    sizes = BlockSizes()
    assert sizes.blocks("images", 8, {}) is None
    assert sizes.blocks("texts", 7, {}) is None
    assert sizes.blocks("texts", 7, {8: 1.0}) == [8]
    assert sizes.blocks("images", 7, {}) is None
