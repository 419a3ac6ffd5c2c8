"""PreparationCache: what a net is prepared for, kept for shapes that come back, within a number of bytes.

What counts is what a preparation has to itself: steps, code that a library generated, tables, and tensors that no
memory plan places. The arena is one for all (`dagexec.scheduler.memory.arena_memory`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

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
        budget_bytes: the most that this may be; the preparation of the latest shapes is kept in any case.
        arena_bytes: the memory that they share, as large as the largest needs.
    """

    made: int
    reused: int
    evicted: int
    kept: int
    kept_bytes: int
    budget_bytes: int
    arena_bytes: int


class PreparationCache:
    """Preparations by signature. The least recently used are given up when they take more than a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._kept: OrderedDict[Signature, Preparation] = OrderedDict()
        self._nbytes = 0
        self._made = self._reused = self._evicted = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, signature: Signature) -> Preparation | None:
        """The preparation for `signature`, which is no longer kept then; None when there is none."""
        found = self._kept.pop(signature, None)
        if found is not None:
            self._nbytes -= found.nbytes
        return found

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
        while self._nbytes > self._budget and len(self._kept) > 1:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._nbytes -= oldest.nbytes
        self._evicted += 1

    def clear(self) -> None:
        """Give up all of them."""
        while self._kept:
            self._give_up_oldest()

    def statistics(self, arena_bytes: int) -> PreparationStatistics:
        """Counts at this moment."""
        return PreparationStatistics(
            self._made, self._reused, self._evicted, len(self._kept), self._nbytes, self._budget, arena_bytes
        )
