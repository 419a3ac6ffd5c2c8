"""Sharing: in how many pieces work is cut, which follows from the work alone.

To hand out a piece costs about a microsecond, and a thread that takes it has to fetch what it reads from other cores'
caches. So a piece is worth having where these are small beside it, even if the estimate is twice what the work takes.

Measured on two cores of an AMD EPYC (Zen 4), beside other processes, as the sum of the times from the end of an
operator to that of the next, of each the 10th percentile, with two pieces from 24 us on in place of 40: of all
operators RegNetX 0.92, MobileViTv2 0.91 to 0.95, ConvNeXt 0.96, EdgeNeXt 0.99, XCiT, HGNet, EfficientNet and
SqueezeNet 1.00, but NASNet with one thread 1.01 to 1.03, since a further convolution of oneDNN costs 0.7 us. So these
have two from 40 us on (MobileViTv2 still 0.98), and are estimated to be no faster than they are (RegNetX). With AVX2,
from 20 us on, 0.89 to 1.02, but XCiT 1.11, whose operators are cut along other axes than their neighbors. Where
neighbors are cut alike even rows of 3 us gain by two threads (1.98 us), because there is nothing to fetch.
"""

from __future__ import annotations

from dagexec.core.native import MOST_PIECES, PIECE_SECONDS, pieces_of
from dagexec.core.schema import Cost

__all__ = [
    "MOST_OF_ONE",
    "MOST_PIECES",
    "PIECE_SECONDS",
    "SMALL_PART",
    "pieces_of",
    "pieces_of_bytes",
    "pieces_of_products",
    "pieces_of_weights",
    "products_seconds",
    "work_seconds",
]

MOST_OF_ONE = 8
"""Of one example."""

SMALL_PART = 5
"""One in so many of a piece is worth it where there are two, of what is no convolution."""

_FLOAT = 4  # bytes

_FLOPS_PER_LANE, _BYTES_PER_SECOND = 6.25e9, 10e9
"""Of one core: 50 GFLOP/s with the 8 lanes of AVX2 and 100 with the 16 of AVX-512, as convolutions of the zoo reach."""


_WEIGHTS_PER_SECOND = 20e9
"""Bytes of weights that one core reads: 13 GB/s from memory, 30 from the last cache. N-BEATS, whose layers have 256 KiB
that stay there, takes 0.21 ms, and took 0.26 with each cut in two (AVX2)."""


def work_seconds(cost: Cost, lanes: int) -> float:
    """About what the work takes on one thread with vectors of so many float32, without what a call costs."""
    moved = cost.bytes_read + cost.bytes_written
    return max(cost.flops / (_FLOPS_PER_LANE * lanes), moved / _BYTES_PER_SECOND)


def products_seconds(count: float, lanes: int) -> float:
    """About what so many multiplications and additions take by vectors of so many float32."""
    return 2 * count / (_FLOPS_PER_LANE * lanes)


def pieces_of_products(count: int, lanes: int, most: int = MOST_PIECES) -> int:
    """As `pieces_of`, of so many multiplications and additions by vectors of so many float32."""
    return pieces_of(products_seconds(count, lanes), most, SMALL_PART)


def pieces_of_weights(rows: int, weights: int, lanes: int, most: int = MOST_PIECES) -> int:
    """As `pieces_of_products`, of rows with so many float32 weights, which few rows wait for."""
    reading = _FLOAT * weights / _WEIGHTS_PER_SECOND
    return pieces_of(max(products_seconds(rows * weights, lanes), reading), most, SMALL_PART)


def pieces_of_bytes(nbytes: int, most: int = MOST_PIECES) -> int:
    """As `pieces_of`, of work that takes as long as moving so many bytes."""
    return pieces_of(nbytes / _BYTES_PER_SECOND, most, SMALL_PART)
