"""Windows unrolled into a column matrix, block by block, and summed back into an image.

The column matrix of a block is (G, depth, pixels) with depth = C/G * taps, or (G, pixels, taps * C/G) for NHWC. A block
holds some windows of one image, or all windows of several small images, so that the workspace stays within a limit
and, where that does not matter, in a core's cache. Windows that reach into padding are read from a tile: the pixels
of the block with zeros around them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import even_ranges
from dagexec.ops.base.geometry import Axis, output_sizes, tap_count
from dagexec.ops.families.conv.problem import Allocate, Array, ConvProblem
from dagexec.platform.records import dataclass

_FEW_PIXELS = 512  # an image with fewer windows is taken together with others: its matrix product alone is too narrow


@dataclass(frozen=True)
class Block:
    """Some images of a batch, and the windows of them that are unrolled together."""

    images: slice
    windows: tuple[slice, ...]

    def axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes with only the windows of this block."""
        return tuple(axis.part(part.start, part.stop) for axis, part in zip(axes, self.windows, strict=True))

    @property
    def count(self) -> int:
        """Number of images."""
        return int(self.images.stop - self.images.start)

    @property
    def pixels(self) -> int:
        """Number of windows, over all images."""
        return self.count * math.prod(int(part.stop - part.start) for part in self.windows)

    def start(self, out: Sequence[int]) -> int:
        """The number of the first window in an image's windows of sizes `out`; the others follow it without a gap."""
        return int(np.ravel_multi_index([part.start for part in self.windows], tuple(out)))


class ColumnBlocks:
    """The column matrix of a convolution in blocks, in memory from `allocate`.

    Attributes:
        blocks: all of them, in the order of images and pixels.
    """

    def __init__(self, problem: ConvProblem, allocate: Allocate, wanted: int, *, unrolled: bool = True) -> None:
        """Blocks of about `wanted` bytes of columns, and less where `problem.limit` says so.

        Without `unrolled`, the columns are only summed back.
        """
        self._problem = problem
        self._depth = problem.channels * tap_count(problem.axes)
        ranges = _ranges(problem, wanted, unrolled)
        self.blocks = [Block(parts[0], parts[1:]) for parts in product(*ranges)]
        self._buffer = allocate((self._depth * math.prod(map(_longest, ranges)),), problem.work)
        tile = _largest_tile(problem, ranges) if unrolled else 0
        self._tile = allocate((tile,), problem.work) if tile else None

    def matrix(self, block: Block) -> Array:
        """The column matrix of a block: (G, depth, pixels), or (G, pixels, depth) for NHWC."""
        groups = self._problem.group
        flat = self._buffer[: self._depth * block.pixels]
        return flat.reshape((groups, block.pixels, -1) if self._problem.channels_last else (groups, -1, block.pixels))

    def unroll(self, block: Block) -> list[Step]:
        """The steps that write the column matrix of a block from x: im2col."""
        problem = self._problem
        images = problem.x[block.images]
        axes = block.axes(problem.axes)
        shape = _tile_shape(problem, block)
        elements = math.prod(shape)
        calls: list[Step] = []
        if self._tile is not None and elements:
            tile = self._tile[:elements].reshape(shape)
            calls = _load_tile(images, tile, axes, 1 if problem.channels_last else 2)
            images, axes = tile, tuple(replace(axis, size=axis.covered, head=0, tail=0) for axis in axes)
        view = _windows(images, axes, problem.channels_last)
        if problem.channels_last:  # G, n, out, kernel, C/G
            view = np.moveaxis(_split_last(view, problem.group), -2, 0)
        return [*calls, partial(np.copyto, self.matrix(block).reshape(view.shape), view)]

    def sum_back(self, block: Block, images: Array) -> list[Step]:
        """The steps that add each element of the column matrix to its pixel: col2im.

        `images` is of the shape of x[block.images]. The taps are added one after the other, in row-major order.
        """
        problem, groups = self._problem, self._problem.group
        axes = block.axes(problem.axes)
        out, taps = output_sizes(axes), problem.kernel
        matrix = self.matrix(block)
        every = slice(None)
        index: tuple[slice | int, ...]
        calls: list[Step] = []
        for tap in product(*map(range, taps)):
            parts = [axis.tap(index) for axis, index in zip(axes, tap, strict=True)]
            inside, pixels = [part for part, _ in parts], [part for _, part in parts]
            if problem.channels_last:
                columns = matrix.reshape(groups, block.count, *out, *taps, -1)
                index = (every, every, *inside, *tap)
                source = np.moveaxis(columns[index], 0, -2)  # n, windows, G, C/G
                target = _split_last(images[(every, *pixels)], groups)
            else:
                columns = matrix.reshape(problem.channels, *taps, block.count, *out)
                index = (every, *tap, every, *inside)
                source = columns[index].swapaxes(0, 1)  # n, C, windows
                target = images[(every, every, *pixels)]
            if target.size:
                calls.append(partial(np.add, target, source, out=target))
        return calls


def column_bytes(problem: ConvProblem) -> int:
    """Bytes of workspace for the window of one pixel: the least that unrolling needs."""
    return _nbytes(problem, _cut(1, problem.out, 1), unrolled=True)


Ranges = list[list[slice]]
"""Of images, and of windows along each axis: one of each is a block."""


def _ranges(problem: ConvProblem, wanted: int, unrolled: bool) -> Ranges:
    """Those for about `wanted` bytes of columns; no block takes more than the limit."""
    depth = problem.channels * tap_count(problem.axes)
    most = max(1, wanted // (depth * problem.work.itemsize))
    while True:
        ranges = _cut(problem.batch, problem.out, most)
        if most == 1 or _nbytes(problem, ranges, unrolled) <= problem.limit:
            return ranges
        most -= max(1, most // 8)


def _cut(batch: int, out: tuple[int, ...], most: int) -> Ranges:
    """For blocks of at most `most` windows, each a range of an image's windows in row-major order."""
    return even_ranges((batch, *out), min(most, math.prod(out)) if math.prod(out) >= _FEW_PIXELS else most)


def _longest(ranges: Sequence[slice]) -> int:
    return max(int(part.stop - part.start) for part in ranges)


def outputs_are_staged(problem: ConvProblem, images: int) -> bool:
    """True when the outputs of a block of so many images are no matrix of the work dtype in y, and are copied."""
    return problem.work != problem.y.dtype or (images > 1 and not problem.channels_last)


def _nbytes(problem: ConvProblem, ranges: Ranges, unrolled: bool) -> int:
    """Bytes of workspace that blocks take: the largest columns, staged outputs, and what is beside the columns.

    Beside columns that are unrolled is a tile. Those that are summed back go to images in the work dtype: for 16-bit
    data to copies, of which one is not counted.
    """
    images, pixels = _longest(ranges[0]), math.prod(map(_longest, ranges))
    columns = problem.channels * tap_count(problem.axes) * pixels
    if unrolled:
        beside = _largest_tile(problem, ranges)
    else:
        beside = (images - 1) * problem.x[0].size if problem.work != problem.x.dtype else 0
    staged = pixels if outputs_are_staged(problem, images) else 0
    return (columns + beside + problem.filters * staged) * problem.work.itemsize


def _largest_tile(problem: ConvProblem, ranges: Ranges) -> int:
    """The most elements of a tile of a block."""
    channels = _longest(ranges[0]) * problem.channels
    longest = [axis.part(0, _longest(of)).covered for axis, of in zip(problem.axes, ranges[1:], strict=True)]
    if problem.work != problem.x.dtype:
        return channels * math.prod(longest)
    edges = [_leaving(axis, of) for axis, of in zip(problem.axes, ranges[1:], strict=True)]
    leaving = [axis.part(0, _longest(of)).covered if of else 0 for axis, of in zip(problem.axes, edges, strict=True)]
    return channels * max(math.prod((*longest[:i], size, *longest[i + 1 :])) for i, size in enumerate(leaving))


def _leaving(axis: Axis, ranges: Sequence[slice]) -> list[slice]:
    """The ranges of windows of which one has a tap outside the input."""
    first = -(-axis.head // axis.stride)
    last = (axis.size + axis.head - axis.extent) // axis.stride
    return [part for part in ranges if part.start < first or part.stop - 1 > last]


def _tile_shape(problem: ConvProblem, block: Block) -> tuple[int, ...]:
    """n, C, pixels (or n, pixels, C) of the tile of a block; without elements when x itself will do."""
    axes = block.axes(problem.axes)
    if problem.work == problem.x.dtype and not any(axis.leaves_input for axis in axes):
        return (0,)
    covered = tuple(axis.covered for axis in axes)
    channels = (problem.channels,)
    return (block.count, *covered, *channels) if problem.channels_last else (block.count, *channels, *covered)


def _load_tile(images: Array, tile: Array, axes: Sequence[Axis], first: int) -> list[Step]:
    """The steps that fill a tile: the pixels its windows read, zeros where there are none."""
    inner, outer = [slice(None)] * first, [slice(None)] * first
    for axis in axes:
        inside, pixels = replace(axis, kernel=1, stride=1, dilation=1, out=axis.covered).tap(0)
        inner.append(inside)
        outer.append(pixels)
    calls: list[Step] = [partial(tile.fill, 0)] if any(axis.leaves_input for axis in axes) else []
    return [*calls, partial(np.copyto, tile[tuple(inner)], images[tuple(outer)])]


def _windows(images: Array, axes: Sequence[Axis], channels_last: bool) -> Array:
    """All windows of images that no window leaves, as a view: C, kernel, n, out (or n, out, kernel, C for NHWC)."""
    first = 1 if channels_last else 2
    inside = images[(slice(None),) * first + tuple(slice(-axis.head, None) for axis in axes)]
    strides = inside.strides[first : first + len(axes)]
    steps = [stride * axis.stride for stride, axis in zip(strides, axes, strict=True)]
    taps = [stride * axis.dilation for stride, axis in zip(strides, axes, strict=True)]
    kernel, out = [axis.kernel for axis in axes], output_sizes(axes)
    if channels_last:
        shape: tuple[int, ...] = (len(images), *out, *kernel, images.shape[-1])
        return as_strided(inside, shape, (inside.strides[0], *steps, *taps, inside.strides[-1]), writeable=False)
    shape = (images.shape[1], *kernel, len(images), *out)
    return as_strided(inside, shape, (inside.strides[1], *taps, inside.strides[0], *steps), writeable=False)


def _split_last(array: Array, groups: int) -> Array:
    """The view (..., C) as (..., G, C/G)."""
    per_group = array.shape[-1] // groups
    *outer, last = array.strides
    return as_strided(array, (*array.shape[:-1], groups, per_group), (*outer, per_group * last, last))
