"""Offsets: where each buffer begins in one block of memory, so that no two that conflict overlap.

This is dynamic storage allocation, NP-hard already for lifetimes that are intervals (Garey, Johnson 1979, SR2).
Buffers are placed one by one, each in the smallest gap between those that it conflicts with, or after them: the "greedy
by size" of Pisarchyk and Lee (2020), here on a conflict graph instead of intervals. Several orders are tried, then
orders that place a buffer at the top first, and the best is kept. All of it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.lifetime import Numbers

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

_PROMOTIONS = 24  # orders tried after the fixed ones, at most
_PATIENCE = 8  # orders in a row without improvement
_TOLERANCE = 1.02  # of an extent over that of a search, relative to the bytes placed
_FEW = 16  # buffers, for which NumPy does not pay
_MAX_PROMOTED = 400  # buffers; with more of them an order takes too long to try many

Integers = npt.NDArray[np.int64]
Conflicting = Callable[[int], Numbers]


@dataclass(frozen=True)
class BufferOffsets:
    """An offset for each buffer, and the bytes from the first to the end of the last."""

    offsets: Integers
    extent: int


class OrderHint:
    """The order in which buffers were placed best, for the same buffers in other sizes.

    It replaces a search where its placement then fits into the available bytes, or is as dense as the search's.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._density = 0.0

    def place(self, room: Integers, conflicting: Conflicting, there: int) -> BufferOffsets | None:
        """The buffers placed in that order, if that is good enough; `there` is the size of an arena."""
        if len(self._order) != len(room):
            return None
        offsets = place_in_order(room, conflicting, self._order)
        return offsets if offsets.extent <= max(there, self._density * int(room.sum())) else None

    def note(self, room: Integers, order: list[int], extent: int) -> None:
        """Remember the order of a search."""
        self._order, self._density = order, _TOLERANCE * extent / max(1, int(room.sum()))


def aligned(nbytes: int) -> int:
    """`nbytes`, up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(
    sizes: Sequence[int],
    conflicting: Conflicting,
    bound: int = 0,
    hint: OrderHint | None = None,
    there: int = 0,
    crowds: Callable[[Integers], Integers] | None = None,
) -> BufferOffsets:
    """Offsets, multiples of the alignment, for buffers of `sizes` bytes; `conflicting(a)` lists those to keep apart.

    The search ends when the extent is down to `bound`, the lower bound, and is skipped where the order of `hint` will
    do in an arena of `there` bytes. `crowds` gives, for each buffer, the total size of those it conflicts with.
    """
    room = np.array([aligned(size) for size in sizes], np.int64)
    whole = int(room.sum())
    if whole <= bound:  # all are in use at once
        return BufferOffsets(np.cumsum(room) - room, whole)
    offsets = None if hint is None else hint.place(room, conflicting, there)
    if offsets is not None:
        return offsets
    best, order = _searched(room, conflicting, bound, crowds)
    if hint is not None:
        hint.note(room, order, best.extent)
    return best


def _searched(
    room: Integers, conflicting: Conflicting, bound: int, crowds: Callable[[Integers], Integers] | None
) -> tuple[BufferOffsets, list[int]]:
    """The best offsets, and the order that gave them."""
    best: BufferOffsets | None = None
    best_order: list[int] = []
    if len(room) <= _MAX_PROMOTED:
        conflicting = [conflicting(buffer) for buffer in range(len(room))].__getitem__
    for order in _orders(room, conflicting, crowds):
        offsets = place_in_order(room, conflicting, order)
        if best is None or offsets.extent < best.extent:
            best, best_order = offsets, order
        if best.extent <= bound:
            return best, best_order
    assert best is not None
    if len(room) <= _MAX_PROMOTED:
        return _promoted(room, conflicting, best, best_order, bound)
    return best, best_order


def _orders(
    room: Integers, conflicting: Conflicting, crowds: Callable[[Integers], Integers] | None
) -> Iterator[list[int]]:
    """Largest first; largest total with its conflicting ones first; by list order. Ties in list order."""
    if crowds is None:
        crowd = np.array([room[conflicting(buffer)].sum() for buffer in range(len(room))], np.int64)
    else:
        crowd = crowds(room)
    listed = np.arange(len(room))
    yield np.lexsort((listed, -crowd, -room)).tolist()
    yield np.lexsort((listed, -room, -crowd)).tolist()
    yield listed.tolist()


def _promoted(
    room: Integers, conflicting: Conflicting, best: BufferOffsets, order: list[int], bound: int
) -> tuple[BufferOffsets, list[int]]:
    """The best of `best` and of orders that place the buffer at the top of the last attempt first."""
    current, tried = best, order
    fruitless = 0
    for _ in range(_PROMOTIONS):
        if best.extent <= bound or fruitless == _PATIENCE:
            break
        fruitless += 1
        top = int(np.argmax(current.offsets + room))
        tried = [top, *(buffer for buffer in tried if buffer != top)]
        current = place_in_order(room, conflicting, tried)
        if current.extent < best.extent:
            best, order, fruitless = current, tried, 0
    return best, order


def place_in_order(room: Integers, conflicting: Conflicting, order: Sequence[int]) -> BufferOffsets:
    """Place the buffers one by one in `order`, each in the smallest gap that takes it."""
    offsets = np.zeros(len(room), np.int64)
    placed = np.zeros(len(room), np.bool_)
    extent = 0
    for buffer in order:
        others = conflicting(buffer)
        others = others[placed[others]]
        size = int(room[buffer])
        offset = best_fit(offsets[others], room[others], size)
        offsets[buffer] = offset
        placed[buffer] = True
        extent = max(extent, offset + size)
    return BufferOffsets(offsets, extent)


def best_fit(offsets: npt.NDArray[Any], room: npt.NDArray[Any], size: int) -> int:
    """The offset for `size` bytes among buffers at `offsets` of sizes `room`: in the smallest gap, or after all."""
    if len(offsets) <= _FEW:
        return _best_of_few(sorted(zip(offsets.tolist(), room.tolist(), strict=True)), size)
    order = np.argsort(offsets)
    starts = offsets[order]
    reached = np.concatenate(([0], np.maximum.accumulate(starts + room[order])))
    gaps = starts - reached[:-1]
    fitting = (gaps >= size).nonzero()[0]
    return int(reached[fitting[np.argmin(gaps[fitting])]] if len(fitting) else reached[-1])


def _best_of_few(placed: Sequence[tuple[int, int]], size: int) -> int:
    """The same for a few buffers, ascending."""
    reached, least, best = 0, 0, -1
    for start, length in placed:
        gap = start - reached
        if gap >= size and (best < 0 or gap < least):
            least, best = gap, reached
        reached = max(reached, start + length)
    return reached if best < 0 else best
