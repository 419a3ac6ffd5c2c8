"""Pieces: parts of a tensor that lie in one stretch of its memory, and arrays that are such parts already."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def piece_offset(shape: Sequence[int], kept: Sequence[range]) -> int | None:
    """The element at which the part of a packed tensor begins that `kept` says, per axis; None when it has gaps.

    It has none when on every axis before the last that is cut one position is kept, and on that one neighbours are.
    """
    if any(len(positions) == 0 for positions in kept):
        return None
    cut = [axis for axis, positions in enumerate(kept) if positions != range(shape[axis])]
    last = cut[-1] if cut else 0
    if any(len(kept[axis]) != 1 for axis in range(last)):
        return None
    if kept and len(kept[last]) > 1 and kept[last].step != 1:
        return None
    return sum(kept[axis].start * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def offsets_along(shape: Sequence[int], axis: int, sizes: Sequence[int]) -> list[int | None]:
    """The element at which each part begins when a packed tensor of `shape` is cut along `axis`; None for gaps."""
    ends = np.cumsum([0, *sizes]).tolist()
    found: list[int | None] = []
    for start, end in itertools.pairwise(ends):
        kept = [range(size) for size in shape]
        kept[axis] = range(start, end)
        found.append(piece_offset(shape, kept))
    return found


def is_same_memory(one: Array, other: Array) -> bool:
    """True when both arrays have the same elements of the same memory, at the same indices."""
    return (
        one.size > 0
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.__array_interface__["data"][0] == other.__array_interface__["data"][0]
        and all(a == b for a, b, n in zip(one.strides, other.strides, one.shape, strict=True) if n > 1)
    )
