"""PreparationCache: what a net is prepared for, kept for shapes that come back, within a number of bytes.

What counts is what a preparation has to itself: steps, code that a library generated, tables, and tensors that no
memory plan places. The arena is one for all (`dagexec.scheduler.memory.arena_memory`).

The budget is used only as far as it helps. A few preparations are kept at first; sizes of those given up are remembered
(as the ghost lists of ARC do: Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003), and
when shapes come back whose preparation more bytes would have kept, so many are taken from then on. A thousand shapes
in turn, of which none could be kept until it comes back, leave it at that. Nor is more taken than a tenth of what the
process has in memory, unless its owner says how much.
"""

from __future__ import annotations

from collections import OrderedDict

from dagexec.platform.host_memory import resident_bytes
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.preparation import Preparation

Signature = tuple[object, ...]


@dataclass(frozen=True)
class PreparationStatistics:
    """What a net is prepared for, in numbers.

    Attributes:
        made: preparations made so far, each for shapes that were not known, or not any more.
        reused: how often one was there when its shapes came back.
        evicted: those given up for others.
        kept: those there are now.
        kept_bytes: an estimate of what these have to themselves.
        limit_bytes: the most that this may be now; the preparation of the latest shapes is kept in any case, those of
            the latest four if the budget allows them.
        budget_bytes: the most that the limit grows to, when shapes come back whose preparations were given up.
        arena_bytes: the memory that they share, as large as the largest needs.
    """

    made: int
    reused: int
    evicted: int
    kept: int
    kept_bytes: int
    limit_bytes: int
    budget_bytes: int
    arena_bytes: int


LIMIT_AT_FIRST = 4 << 20
"""Bytes for preparations until shapes come back for which that is too little."""

MOST_BYTES = 64 << 20
"""The budget where none is given."""

_PART = 10  # of the memory of the process, where no budget is given

KEPT_AT_LEAST = 4
"""Preparations that the budget alone limits. A run may be made up of several (`dagexec.serving.row_blocks`)."""


class PreparationCache:
    """Preparations by signature. The least recently used are given up when they take more than a limit of bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        """With None, the budget is `MOST_BYTES`, or as much less as would be a tenth of the process."""
        self._is_given = budget_bytes is not None
        self._budget = MOST_BYTES if budget_bytes is None else budget_bytes
        self._limit = min(self._budget, LIMIT_AT_FIRST)
        self._kept: OrderedDict[Signature, Preparation] = OrderedDict()
        self._given_up: OrderedDict[Signature, int] = OrderedDict()  # bytes; the latest last
        self._nbytes = self._given_up_nbytes = 0
        self._made = self._reused = self._evicted = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, signature: Signature) -> Preparation | None:
        """The preparation for `signature`, which is no longer kept then; None when there is none."""
        found = self._kept.pop(signature, None)
        if found is not None:
            self._nbytes -= found.nbytes
        elif signature in self._given_up:
            self._widen_for(signature)
        return found

    def _widen_for(self, signature: Signature) -> None:
        """Raise the limit to what would have kept the preparation for `signature`, if the budget allows that."""
        needed = self._nbytes
        for other in reversed(self._given_up):
            needed += self._given_up[other]
            if other == signature:
                break
        resident = None if self._is_given else resident_bytes()
        if needed <= (self._budget if resident is None else min(self._budget, resident // _PART)):
            self._limit = max(self._limit, needed)
        self._given_up_nbytes -= self._given_up.pop(signature)

    def put_back(self, signature: Signature, preparation: Preparation) -> None:
        """Keep what was taken, as the latest."""
        self._reused += 1
        self._keep(signature, preparation)

    def add(self, signature: Signature, preparation: Preparation) -> None:
        """Keep a new preparation, as the latest."""
        self._made += 1
        self._keep(signature, preparation)

    def _keep(self, signature: Signature, preparation: Preparation) -> None:
        self._kept[signature] = preparation
        self._nbytes += preparation.nbytes
        while self._nbytes > self._limit and len(self._kept) > (KEPT_AT_LEAST if self._nbytes <= self._budget else 1):
            other = next(iter(self._kept))
            self._given_up[other] = nbytes = self._kept[other].nbytes
            self._given_up_nbytes += nbytes
            self._give_up_oldest()
        while self._given_up and self._nbytes + self._given_up_nbytes > self._budget:
            self._given_up_nbytes -= self._given_up.popitem(last=False)[1]

    def _give_up_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._nbytes -= oldest.nbytes
        self._evicted += 1

    def clear(self) -> None:
        """Give up all of them."""
        while self._kept:
            self._give_up_oldest()
        self._given_up.clear()
        self._given_up_nbytes = 0

    def statistics(self, arena_bytes: int) -> PreparationStatistics:
        """Counts at this moment."""
        return PreparationStatistics(
            made=self._made,
            reused=self._reused,
            evicted=self._evicted,
            kept=len(self._kept),
            kept_bytes=self._nbytes,
            limit_bytes=self._limit,
            budget_bytes=self._budget,
            arena_bytes=arena_bytes,
        )
