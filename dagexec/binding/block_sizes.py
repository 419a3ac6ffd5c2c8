"""Which known numbers of rows a new one is made up of, and when it had better be prepared for as a whole.

To prepare a net for another number of rows takes as long as several runs of a small net. Where rows are computed apart,
a run of a new number may be a few runs of known numbers instead: the last one may begin earlier, so that some rows are
computed twice, or have rows that nobody asked for. So numbers become known where those that are do not do; of 1 to
1,000 in random order, nineteen are enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping

MAX_BLOCKS = 4
"""Runs that one is made up of, at most."""

MAX_PRICE = 1.25
"""What the blocks may cost, in proportion to a run that was prepared for."""

BLOCK_SECONDS = 150e-6
"""What a run costs whatever its number of rows: bringing the tensors in place, and telling a worker."""

_RECENT = 32
"""Numbers of rows that ran as blocks; one that comes back while it is among the latest is prepared for."""

_MAX_KINDS = 256
"""How many kinds of inputs are remembered."""

_MAX_SIZES = 64
"""How many numbers of rows are remembered of each kind."""


def cover(rows: int, sizes: Collection[int], overhead: float) -> list[int] | None:
    """Numbers of `sizes` that add up to at least `rows`, the larger ones first; None where that costs too much.

    A run costs its rows and `overhead`. No number but the last goes beyond what is left.
    """
    best, price = None, MAX_PRICE * (rows + overhead)
    taken: list[int] = []
    left, spent = rows, 0.0
    ascending = sorted(sizes)
    for size in (rows + 1, *reversed(ascending)):  # of the first, which nobody has, none is taken
        fitting = min(left // size, MAX_BLOCKS - len(taken))
        taken += [size] * fitting
        spent += fitting * (size + overhead)
        left -= fitting * size
        if not left:
            return taken if spent <= price else best
        place = bisect_left(ascending, left)
        if place < len(ascending) and len(taken) < MAX_BLOCKS and spent + ascending[place] + overhead <= price:
            best, price = [*taken, ascending[place]], spent + ascending[place] + overhead
    return best


class BlockSizes:
    """The numbers of rows that a replica is or was prepared for, by kind of inputs: what else their types are."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Hashable, OrderedDict[int, None]] = OrderedDict()
        self._recent: OrderedDict[tuple[Hashable, int], None] = OrderedDict()

    def blocks(self, kind: Hashable, rows: int, ready: Mapping[int, float]) -> list[int] | None:
        """What a run of so many rows is made up of; None when it is to be prepared for.

        `ready` are the numbers that the replica is prepared for, with the seconds that a run of each takes. Of the
        others that it was prepared for, one may be among the blocks.
        """
        found = None if rows in ready else self._new_blocks(kind, rows, ready)
        if found is None:
            self._remember(kind, rows)
        else:
            self._recent[kind, rows] = None
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return found

    def _new_blocks(self, kind: Hashable, rows: int, ready: Mapping[int, float]) -> list[int] | None:
        if not ready or (kind, rows) in self._recent:
            self._recent.pop((kind, rows), None)
            return None
        overhead = BLOCK_SECONDS / max(1e-9, min(seconds / size for size, seconds in ready.items()))
        found = cover(rows, ready, overhead)
        if found is not None:
            return found
        given_up = [size for size in self._sizes.get(kind, ()) if size not in ready]
        more = (cover(rows, [*ready, size], overhead) for size in reversed(given_up))
        return next((blocks for blocks in more if blocks is not None), None)

    def _remember(self, kind: Hashable, rows: int) -> None:
        sizes = self._sizes.setdefault(kind, OrderedDict())
        sizes[rows] = None
        sizes.move_to_end(rows)
        self._sizes.move_to_end(kind)
        if len(sizes) > _MAX_SIZES:
            sizes.popitem(last=False)
        if len(self._sizes) > _MAX_KINDS:
            self._sizes.popitem(last=False)
