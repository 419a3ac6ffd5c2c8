"""PreparationCache: preparations of a net, kept for shapes that come back, within a number of bytes.

A preparation counts with what it has to itself: steps, code that a library generated, tables, and tensors that no
memory plan places. The arena is shared by all (`dagexec.scheduler.memory.arena_memory`).
"""

from __future__ import annotations

from collections import OrderedDict

from dagexec.platform.host_memory import physical_bytes
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
        budget_bytes: the limit of that; the preparation of the latest shapes is kept in any case.
        arena_bytes: the memory that they share, as large as the largest needs.
    """

    made: int
    reused: int
    evicted: int
    kept: int
    kept_bytes: int
    budget_bytes: int
    arena_bytes: int


_MOST_BYTES, _PART = 256 << 20, 64


def default_budget() -> int:
    """256 MiB, as much as a thousand lengths of a small encoder take; on small machines a 64th of their memory."""
    return min(_MOST_BYTES, physical_bytes() // _PART)


class PreparationCache:
    """Preparations by signature. The least recently used are evicted when they exceed a number of bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        """With None, the `default_budget`."""
        self._budget = default_budget() if budget_bytes is None else budget_bytes
        self._kept: OrderedDict[Signature, Preparation] = OrderedDict()
        self._nbytes = self._made = self._reused = self._evicted = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, signature: Signature) -> Preparation | None:
        """The preparation for `signature`, which is no longer kept then; None when there is none."""
        preparation = self._kept.pop(signature, None)
        if preparation is not None:
            self._nbytes -= preparation.nbytes
        return preparation

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
        while self._nbytes > self._budget and len(self._kept) > 1:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._nbytes -= oldest.nbytes
        self._evicted += 1

    def clear(self) -> None:
        """Evict all of them."""
        while self._kept:
            self._evict_oldest()

    def statistics(self, arena_bytes: int) -> PreparationStatistics:
        """Counts at this moment."""
        return PreparationStatistics(
            made=self._made,
            reused=self._reused,
            evicted=self._evicted,
            kept=len(self._kept),
            kept_bytes=self._nbytes,
            budget_bytes=self._budget,
            arena_bytes=arena_bytes,
        )
