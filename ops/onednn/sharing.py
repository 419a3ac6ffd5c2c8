"""Sharing: how many threads an operator's work is worth, where nothing is measured.

A team of two that is awake costs an operator 3 us, one that sleeps 50 us, and one whose cores other processes use up to
a slice of the system's scheduler, milliseconds (docs/tuning.md). So a thread joins in only for a share of work beside
which the first of these is small even if the estimate is twice what the work takes.
"""

from __future__ import annotations

from dagexec.core.schema import Cost

SHARE_SECONDS = 15e-6
"""The least work for each thread of a team."""

_FLOPS_PER_LANE, _BYTES_PER_SECOND = 6.25e9, 10e9
"""Of one core: 50 GFLOP/s with the 8 lanes of AVX2 and 100 with the 16 of AVX-512, as convolutions of the zoo reach."""


def work_seconds(cost: Cost, lanes: int) -> float:
    """About what the work takes on one thread with vectors of so many float32, without what a call costs."""
    moved = cost.bytes_read + cost.bytes_written
    return max(cost.flops / (_FLOPS_PER_LANE * lanes), moved / _BYTES_PER_SECOND)


def worthwhile_threads(seconds: float, most: int) -> int:
    """How many of at most `most` threads find `SHARE_SECONDS` of work each, where one needs `seconds` for all of it."""
    return max(1, min(most, int(seconds / SHARE_SECONDS)))
