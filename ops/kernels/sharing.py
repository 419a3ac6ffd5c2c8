"""Sharing: in how many pieces work is cut, which follows from the work alone.

To hand out a piece costs about a microsecond, and a thread that takes it has to fetch what it reads from other cores'
caches. So a piece is worth having where these are small beside it, even if the estimate is twice what the work takes.
"""

from __future__ import annotations

from dagexec.core.native import MOST_PIECES, PIECE_SECONDS, pieces_of
from dagexec.core.schema import Cost

__all__ = [
    "MOST_OF_ONE",
    "MOST_PIECES",
    "PIECE_SECONDS",
    "pieces_of",
    "pieces_of_bytes",
    "pieces_of_products",
    "work_seconds",
]

MOST_OF_ONE = 8
"""Of one example."""

_FLOPS_PER_LANE, _BYTES_PER_SECOND = 6.25e9, 10e9
"""Of one core: 50 GFLOP/s with the 8 lanes of AVX2 and 100 with the 16 of AVX-512, as convolutions of the zoo reach."""


def work_seconds(cost: Cost, lanes: int) -> float:
    """About what the work takes on one thread with vectors of so many float32, without what a call costs."""
    moved = cost.bytes_read + cost.bytes_written
    return max(cost.flops / (_FLOPS_PER_LANE * lanes), moved / _BYTES_PER_SECOND)


def pieces_of_products(count: int, lanes: int, most: int = MOST_PIECES) -> int:
    """As `pieces_of`, of so many multiplications and additions by vectors of so many float32."""
    return pieces_of(2 * count / (_FLOPS_PER_LANE * lanes), most)


def pieces_of_bytes(nbytes: int, most: int = MOST_PIECES) -> int:
    """As `pieces_of`, of work that takes as long as moving so many bytes."""
    return pieces_of(nbytes / _BYTES_PER_SECOND, most)
