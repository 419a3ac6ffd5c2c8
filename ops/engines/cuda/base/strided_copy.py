"""Copies between arrays of any strides: what slices, transposes, broadcasts and joined tensors are made of.

Elements are moved as bits, several in one wide item where both sides have them side by side. Where the axis that is
packed in the source is not the one that is packed in the target, tiles of 32 x 32 elements go through shared memory,
so that reads and writes are both of neighbors (Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA", 2009).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type, reach, require_axes
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.platform.records import dataclass

MAX_AXES = 8
TILE = 32
_MAX_BLOCKS = 1 << 16
_MIN_TILED = 8  # elements along both axes for which tiles are worth it

_ITEM_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "u32", 8: "u64", 16: "ulonglong2"}

_COPY = (
    INDICES
    + r"""
struct walk_t { i64 axes; divider size[8]; i64 source[8], target[8]; };
extern "C" __global__ void strided_copy(const T* source, T* target, walk_t walk, i64 n) {
    FOR_EACH(i, n) {
        I rest = (I)i, from = 0, to = 0;
        for (int d = (int)walk.axes - 1; d >= 0; --d) {
            I at = split(rest, walk.size[d]);
            from += at * (I)walk.source[d];
            to += at * (I)walk.target[d];
        }
        target[to] = source[from];
    }
}
"""
)

_TILED = (
    INDICES
    + r"""
struct walk_t { i64 axes; divider size[8]; i64 source[8], target[8]; };
struct tiles_t { i64 rows, columns, source_row, target_column; divider down, across; };
extern "C" __global__ void tiled_copy(const T* source, T* target, walk_t walk, tiles_t tiles, i64 count) {
    __shared__ T tile[32][33];
    I x = (I)(threadIdx.x & 31), y = (I)(threadIdx.x >> 5);
    for (i64 number = blockIdx.x; number < count; number += gridDim.x) {
        I rest = (I)number, from = 0, to = 0;
        I column = split(rest, tiles.across) * 32, row = split(rest, tiles.down) * 32;
        for (int d = (int)walk.axes - 1; d >= 0; --d) {
            I at = split(rest, walk.size[d]);
            from += at * (I)walk.source[d];
            to += at * (I)walk.target[d];
        }
        for (I j = y; j < 32; j += 8)
            if (row + j < (I)tiles.rows && column + x < (I)tiles.columns)
                tile[j][x] = source[from + (row + j) * (I)tiles.source_row + column + x];
        __syncthreads();
        for (I j = y; j < 32; j += 8)
            if (row + x < (I)tiles.rows && column + j < (I)tiles.columns)
                target[to + (column + j) * (I)tiles.target_column + row + x] = tile[x][j];
        __syncthreads();
    }
}
"""
)


def item_type(size: int) -> str:
    """The C type that elements of `size` bytes are moved as."""
    return _ITEM_TYPES[size]


@dataclass(slots=True)
class _Walk:
    """The axes of a copy, the last the fastest: sizes, and strides of both sides in items of `item` bytes."""

    sizes: list[int]
    source: list[int]
    target: list[int]
    item: int

    def reorder(self) -> None:
        """Walk in the order of the target's memory; axes of one element go."""
        kept = [axis for axis, size in enumerate(self.sizes) if size != 1]
        kept.sort(key=lambda axis: -abs(self.target[axis]))
        self.sizes, self.source, self.target = (
            [row[axis] for axis in kept] for row in (self.sizes, self.source, self.target)
        )

    def join(self) -> None:
        """Make one of neighboring axes that both sides step through as one."""
        for axis in range(len(self.sizes) - 2, -1, -1):
            size = self.sizes[axis + 1]
            if all(row[axis] == row[axis + 1] * size for row in (self.source, self.target)):
                self.sizes[axis] *= self.sizes.pop(axis + 1)
                for row in (self.source, self.target):
                    row[axis] = row.pop(axis + 1)

    def widen(self, *addresses: int) -> None:
        """Make items wider, up to 16 bytes, while both sides have pairs of them side by side where they may lie."""
        if not self.sizes or self.source[-1] != 1 or self.target[-1] != 1:
            return
        outer = [*self.source[:-1], *self.target[:-1], self.sizes[-1]]
        while self.item < 16 and not any(number % 2 for number in outer):
            if any(place % (2 * self.item) for place in addresses):
                break
            self.item *= 2
            self.sizes[-1] //= 2
            for row in (self.source, self.target):
                row[:-1] = [step // 2 for step in row[:-1]]
            outer = [number // 2 for number in outer]

    @property
    def is_packed(self) -> bool:
        """One axis that both sides step through."""
        return not self.sizes or (len(self.sizes) == 1 and self.source == self.target == [1])

    def argument(self) -> Any:
        """The argument walk_t."""
        require_axes(len(self.sizes), MAX_AXES, "a copy on CUDA")
        empty = [0] * (MAX_AXES - len(self.sizes))
        dividers = [number for size in [*self.sizes, *(1 for _ in empty)] for number in divider(size)]
        return by_value([len(self.sizes), *dividers, *self.source, *empty, *self.target, *empty])

    def index_type(self) -> str:
        """The type I for all items."""
        return index_type(prod(self.sizes), *(reach(self.sizes, row) for row in (self.source, self.target)))


def broadcast_strides(array: Array, shape: tuple[int, ...]) -> list[int]:
    """The strides, in elements, with which an array is read over `shape`, to which it broadcasts as in NumPy."""
    missing = len(shape) - array.ndim
    steps = [step // array.itemsize if size > 1 else 0 for size, step in zip(array.shape, array.strides, strict=True)]
    return [0] * missing + steps


def strided_copy(operator: CudaOperator, target: Array, source: Array) -> Step:
    """A step that copies `source`, broadcast as NumPy does, to `target`, an array of the same element type.

    Both may be views of any strides; the target must not overlap itself or the source. Raises ShapeError for more than
    8 axes that cannot be joined.
    """
    if not target.size:
        return nothing_to_do
    size = int(target.itemsize)
    read, written = (broadcast_strides(array, target.shape) for array in (source, target))
    walk = _Walk(list(target.shape), read, written, size)
    walk.reorder()
    walk.join()
    if walk.is_packed and target.size == source.size:
        return copy_step(target, source)
    tiled = _tiled(operator, walk, target, source)
    if tiled is not None:
        return tiled
    walk.widen(address(target), address(source))
    n = prod(walk.sizes)
    arguments = [source, target, walk.argument(), np.int64(n)]
    kind = walk.index_type()
    return operator.launch("strided_copy", _COPY, arguments, elements=n, T=item_type(walk.item), I=kind)


def _tiled(operator: CudaOperator, walk: _Walk, target: Array, source: Array) -> Step | None:
    """The step through shared memory; None where that is of no use."""
    if len(walk.sizes) < 2 or walk.target[-1] != 1 or walk.source[-1] == 1 or 1 not in walk.source[:-1]:
        return None
    fast, last = walk.source.index(1), len(walk.sizes) - 1
    rows, columns = walk.sizes[last], walk.sizes[fast]
    if min(rows, columns) < _MIN_TILED:
        return None
    kind = walk.index_type()
    batch = [axis for axis in range(last) if axis != fast]
    sizes, read, written = ([row[axis] for axis in batch] for row in (walk.sizes, walk.source, walk.target))
    outer = _Walk(sizes, read, written, walk.item)
    down, across = -(-rows // TILE), -(-columns // TILE)
    tiles = by_value([rows, columns, walk.source[last], walk.target[fast], *divider(down), *divider(across)])
    count = prod(outer.sizes) * down * across
    arguments = [source, target, outer.argument(), tiles, np.int64(count)]
    blocks = min(count, _MAX_BLOCKS)
    return operator.launch("tiled_copy", _TILED, arguments, blocks=blocks, threads=256, T=item_type(walk.item), I=kind)
