"""PreparationCache: preparations of a net, kept for shapes that come back, within a number of bytes.

A preparation counts with what it has to itself: steps, code that a library generated, tables, and tensors that no
memory plan places. The arena is shared by all (`dagexec.scheduler.memory.arena_memory`).

The budget is used only as far as it helps. A few preparations are kept at first. Sizes of evicted ones are remembered
(as the ghost lists of ARC do: Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003), and
when shapes come back whose preparation a larger limit would have kept, the limit grows to that. It does not grow for a
thousand shapes in turn, none of which could be kept until it comes back. Without a given budget, it stays below a tenth
of the process's memory.
"""

from __future__ import annotations

from collections import OrderedDict

from dagexec.platform.host_memory import resident_bytes
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.preparation import Preparation

Signature = tuple[object, ...]


@dataclass(frozen=True)
class PreparationStatistics:
    """Numbers about the preparations of a net.

    Attributes:
        made: preparations made so far, each for shapes that were new or evicted.
        reused: how often a preparation was there when its shapes came back.
        evicted: preparations dropped for others.
        kept: preparations there are now.
        kept_bytes: an estimate of what these have to themselves.
        limit_bytes: the current limit of that; the preparation of the latest shapes is kept in any case, those of the
            latest four if the budget allows them.
        budget_bytes: up to which the limit grows, when shapes come back whose preparations were evicted.
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
"""The limit until shapes come back for which it is too small."""

MOST_BYTES = 64 << 20
"""The default budget."""

_PART = 10  # of the memory of the process, without a given budget

KEPT_AT_LEAST = 4
"""Preparations that the budget alone limits. A run may be made of several (`dagexec.executor.batching.row_blocks`)."""


class PreparationCache:
    """Preparations by signature. The least recently used are evicted when they exceed a limit of bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        """With None, the budget is `MOST_BYTES`, or a tenth of the memory of the process if that is less."""
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
        preparation = self._kept.pop(signature, None)
        if preparation is not None:
            self._nbytes -= preparation.nbytes
        elif signature in self._given_up:
            self._widen_for(signature)
        return preparation

    def _widen_for(self, signature: Signature) -> None:
        """Raise the limit so that it would have kept the preparation for `signature`, if the budget allows."""
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
        """Keep a preparation that was taken, as the latest."""
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
        """Evict all of them."""
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
