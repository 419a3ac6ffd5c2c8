"""Cutting an elementwise computation of several passes into pieces that stay in the cache, with small scratch memory.

An operator that needs several NumPy calls an element works piece by piece: the scratch array then has the size of a
piece and not of the tensor. float16 and bfloat16 pieces are widened to float32, computed, and narrowed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Operator, Step, in_sequence

Array = npt.NDArray[Any]
Index = tuple[int | slice | EllipsisType, ...]

BLOCK = 1 << 16  # elements of a piece: 256 KiB of float32, so that input, output and scratch fit in a core's L2 cache


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to compute in: float32 for the 16-bit float types, otherwise `dtype` itself."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """True for float16 and bfloat16."""
    return compute_dtype(dtype) != dtype


def convert(source: Array, target: Array) -> Step:
    """A step that copies `source` to `target`, converting the element type."""
    return partial(np.copyto, target, source, casting="unsafe")


def block_indices(shape: tuple[int, ...], limit: int = BLOCK) -> list[Index]:
    """Indices that cut an array of `shape` into contiguous pieces of at most `limit` elements, in memory order.

    An array without elements has no pieces; a scalar has one, `...`, which gives an array and not a number.
    """
    if 0 in shape:
        return []
    inner, axis = 1, len(shape)
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        return [(slice(None),) * len(shape) or (...,)]
    cut = axis - 1
    step = max(1, limit // inner)
    ranges = [slice(start, min(start + step, shape[cut])) for start in range(0, shape[cut], step)]
    return [(*outer, piece) for outer in product(*map(range, shape[:cut])) for piece in ranges]


def row_pieces(rows: int, count: int) -> list[slice]:
    """Ranges of at most `count` rows, in order."""
    return [slice(start, min(start + count, rows)) for start in range(0, rows, count)]


def even_ranges(shape: Sequence[int], most: int) -> list[list[slice]]:
    """For each axis, ranges that cut an array of `shape` (sizes of 1 or more) into boxes of at most `most` elements.

    A box is a run of elements in memory order, and along an axis boxes are of one length but for the last.
    """
    ranges: list[list[slice]] = []
    room = most
    for size in reversed(shape):
        length = max(1, min(size, room))
        length = -(-size // -(-size // length))
        ranges.insert(0, [slice(start, min(start + length, size)) for start in range(0, size, length)])
        room //= size  # 0, for one at a time, unless this axis is whole
    return ranges


class Scratch:
    """Scratch arrays of one operator, each as large as the largest piece asked for, shared by all its pieces."""

    def __init__(self, owner: Operator, elements: int, dtype: np.dtype[Any], *, is_own: bool = False) -> None:
        """Arrays that `is_own` are of the operator alone: small ones need not be shared with others."""
        self._owner = owner
        self._is_own = is_own
        self._elements = elements
        self._dtype = dtype
        self._arrays: list[Array] = []

    def __call__(self, index: int, shape: tuple[int, ...]) -> Array:
        """Scratch array number `index` (counted from 0 without gaps), as an array of `shape`."""
        while len(self._arrays) <= index:
            if self._is_own:
                self._arrays.append(self._owner.scratch((self._elements,), self._dtype))
                continue
            self._arrays.append(self._owner.working_memory(self._elements * self._dtype.itemsize).view(self._dtype))
        count = int(np.prod(shape, dtype=np.int64))
        return self._arrays[index][:count].reshape(shape)


Passes = Callable[[Index, Array, Array, Scratch], list[Step]]
"""The NumPy calls for one piece: its index, input piece, output piece, and scratch (number 0 and up) for the work."""


def blockwise(owner: Operator, x: Array, y: Array, passes: Passes) -> Step:
    """A step that computes `y` from `x`, two arrays of one shape, piece by piece.

    `passes` gets pieces of the compute dtype; they may be one array, when `x` and `y` are. A computation of one pass
    is not cut.
    """
    work = compute_dtype(x.dtype)
    indices = block_indices(x.shape)
    largest = min(x.size, BLOCK)
    scratch = Scratch(owner, largest, work)
    if not is_narrow(x.dtype):
        if len(indices) > 1 and len(passes(indices[0], x[indices[0]], y[indices[0]], scratch)) == 1:
            indices = [(slice(None),) * x.ndim]
        return in_sequence([step for index in indices for step in passes(index, x[index], y[index], scratch)])
    wide = Scratch(owner, largest, work)
    steps: list[Step] = []
    for index in indices:
        shape = x[index].shape
        source, target = wide(0, shape), wide(1, shape)
        steps.append(convert(x[index], source))
        steps.extend(passes(index, source, target, scratch))
        steps.append(convert(target, y[index]))
    return in_sequence(steps)
