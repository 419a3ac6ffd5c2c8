"""WINOGRAD: convolution with few multiplications, for kernels of 3 taps and stride 1.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, arXiv:1509.09308; the matrices come from
`toom_cook`. The output is cut into tiles of m pixels along each axis, which read t = m + 2 pixels each. A tile is
transformed by B^T along every axis, each of its f = t^d frequencies is a matrix product over the channels, and A^T
brings the products back to the m^d pixels:

    d: f, tiles, C      the pixels of the tiles, copied from an image with zeros around it
    v: f, tiles, C      v = B^T d, all axes at once by the Kronecker product of their matrices
    z: f, M, tiles      z = u v^T for every frequency, u = G w: f, M, C/G the transformed filter
    y: M, tiles, m^d    y = A^T z

F(2, 3), F(4, 3) or both are taken along the axes, whichever makes the fewest multiplications in all. Values that are
not finite spread from a pixel to all pixels of its tile.

Rows of f are an odd number of cache lines apart: with a power of two they would all fall into the same few sets of the
cache, and the transforms take half as long again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.conv.problem import Algorithm, Allocate, Array, ConvProblem
from dagexec.ops.conv.toom_cook import MinimalFilter, kronecker, minimal_filter

_OUTPUTS = {1: (1,), 3: (2, 4)}  # taps: pixels of a tile
_LINE = 64  # bytes
_TILES = 64  # wanted in a block at least: every block reads the whole transformed filter
_BLOCK_BYTES = 1 << 20
_READ = 16  # multiplications in the time that one number of the transformed filter is read from memory


@dataclass(frozen=True)
class _Tiling:
    """F(m, r) along each axis, and the tiles that cover an output."""

    filters: tuple[MinimalFilter, ...]
    counts: tuple[int, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """m of each axis."""
        return tuple(one.outputs for one in self.filters)

    @property
    def sizes(self) -> tuple[int, ...]:
        """t of each axis."""
        return tuple(one.tile for one in self.filters)

    @property
    def frequencies(self) -> int:
        """f: numbers in a transformed tile."""
        return math.prod(self.sizes)

    @property
    def pixels(self) -> int:
        """Output pixels of a tile."""
        return math.prod(self.outputs)


@dataclass(frozen=True)
class _Block:
    """Some images of a batch, and the tiles of them that are transformed together."""

    images: slice
    tiles: tuple[slice, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Images, then tiles along each axis."""
        return tuple(part.stop - part.start for part in (self.images, *self.tiles))

    @property
    def size(self) -> int:
        """Tiles in all."""
        return math.prod(self.counts)


class _Workspace:
    """The memory that all blocks use in turn: pixels, and two buffers that every stage reads and writes in turn."""

    def __init__(self, problem: ConvProblem, tiling: _Tiling, blocks: Sequence[_Block], allocate: Allocate) -> None:
        sizes = [_elements(problem, tiling, block) for block in blocks]
        self._pixels, self._even, self._odd = (allocate((max(column),), problem.work) for column in zip(*sizes, strict=True))
        self._rows = tiling.frequencies

    def pixels(self, shape: tuple[int, ...]) -> Array:
        """The pixels of a block."""
        return self._pixels[: math.prod(shape)].reshape(shape)

    def tiles(self, width: int) -> Array:
        """d, and later z: f rows of `width` numbers."""
        return _rows(self._even, self._rows, width)

    def transformed(self, width: int) -> Array:
        """v: f rows of `width` numbers."""
        return _rows(self._odd, self._rows, width)

    def results(self, shape: tuple[int, ...]) -> Array:
        """y, in the memory of v."""
        return self._odd[: math.prod(shape)].reshape(shape)


def _elements(problem: ConvProblem, tiling: _Tiling, block: _Block) -> tuple[int, int, int]:
    """The numbers of pixels, d and z, v and y of a block."""
    channels, filters, rows = problem.channels, problem.filters, tiling.frequencies
    data = rows * _pitch(block.size * channels, problem.work.itemsize)
    products = rows * _pitch(block.size * filters, problem.work.itemsize)
    results = tiling.pixels * block.size * filters
    return math.prod(_pixel_shape(tiling, block)) * channels, max(data, products), max(data, results)


def _pixel_shape(tiling: _Tiling, block: _Block) -> tuple[int, ...]:
    """Images, and pixels that the tiles of a block read along each axis."""
    images, *tiles = block.counts
    return (images, *(one.outputs * count + one.taps - 1 for one, count in zip(tiling.filters, tiles, strict=True)))


def _pitch(width: int, itemsize: int) -> int:
    """Elements from row to row: an odd number of cache lines."""
    line = _LINE // itemsize
    return (-(-width // line) | 1) * line


def _rows(buffer: Array, count: int, width: int) -> Array:
    """`count` rows of `width` elements."""
    pitch = _pitch(width, buffer.itemsize)
    return buffer[: count * pitch].reshape(count, pitch)[:, :width]


def _load(problem: ConvProblem, tiling: _Tiling, block: _Block, pixels: Array) -> list[Step]:
    """The steps that write the pixels of a block, channels last, with zeros where no window reads any."""
    images = problem.x if problem.channels_last else np.moveaxis(problem.x, 1, -1)
    inside, source = [slice(None)], [block.images]
    calls: list[Step] = []
    for axis, part, one in zip(problem.axes, block.tiles, tiling.filters, strict=True):
        number = len(inside)
        length = pixels.shape[number]
        origin = part.start * one.outputs - axis.head
        start = min(max(0, -origin), length)
        stop = max(start, min(length, min(axis.size, axis.covered - axis.head) - origin))
        every = (slice(None),) * number
        calls += [partial(gap.fill, 0) for gap in (pixels[(*every, slice(0, start))], pixels[(*every, slice(stop, None))]) if gap.size]
        inside.append(slice(start, stop))
        source.append(slice(start + origin, stop + origin))
    target = pixels[tuple(inside)]
    if target.size:
        calls.append(partial(np.copyto, target, images[tuple(source)]))
    return calls


def _gather(tiling: _Tiling, block: _Block, pixels: Array, tiles: Array) -> Step:
    """The step that copies the pixels of each tile: t of each axis, images, tiles, C."""
    image, *steps, channel = pixels.strides
    strides = [one.outputs * step for one, step in zip(tiling.filters, steps, strict=True)]
    shape = (*tiling.sizes, *block.counts, pixels.shape[-1])
    view = as_strided(pixels, shape, (*steps, image, *strides, channel), writeable=False)
    return partial(np.copyto, tiles.reshape(shape), view)


def _store(problem: ConvProblem, tiling: _Tiling, block: _Block, results: Array) -> list[Step]:
    """The steps that write `results` (images, tiles, m of each axis, M) to their pixels of y.

    The last tile of an axis may hold pixels that y does not have.
    """
    output = (problem.y if problem.channels_last else np.moveaxis(problem.y, 1, -1))[block.images]
    *steps, filters = output.strides[1:]
    choices = []
    for axis, part, one in zip(problem.axes, block.tiles, tiling.filters, strict=True):
        whole, rest = divmod(min(part.stop * one.outputs, axis.out) - part.start * one.outputs, one.outputs)
        choices.append([(slice(0, whole), one.outputs)] * bool(whole) + [(slice(whole, whole + 1), rest)] * bool(rest))
    calls: list[Step] = []
    for pieces in product(*choices):
        tiles, pixels = [part for part, _ in pieces], [count for _, count in pieces]
        source = results[(slice(None), *tiles, *(slice(0, count) for count in pixels))]
        starts = [(part.start + tile.start) * one.outputs for part, tile, one in zip(block.tiles, tiles, tiling.filters, strict=True)]
        first = output[(slice(None), *(slice(start, None) for start in starts))]
        strides = [one.outputs * step for one, step in zip(tiling.filters, steps, strict=True)]
        target = as_strided(first, source.shape, (output.strides[0], *strides, *steps, filters))
        calls.append(_copy_runs(np.moveaxis(target, -2, -1), np.moveaxis(source, -2, -1)))
    return calls


def _copy_runs(target: Array, source: Array) -> Step:
    """The step that copies `source`, the last axis as one element if it is contiguous in both.

    NumPy moves such an element at once, where its loop over a short axis costs more than its elements.
    """
    run = target.shape[-1]
    if run > 1 and target.dtype == source.dtype and {target.strides[-1], source.strides[-1]} == {target.itemsize}:
        whole = np.dtype((np.void, run * target.itemsize))
        target, source = target.view(whole)[..., 0], source.view(whole)[..., 0]
    return partial(np.copyto, target, source, casting="same_kind")


def _block_steps(
    problem: ConvProblem, tiling: _Tiling, block: _Block, filters: Array, workspace: _Workspace
) -> list[Step]:
    """The steps that compute the pixels of one block. `filters` is f, G, M/G, C/G."""
    groups, channels, outputs, tiles = problem.group, problem.channels, problem.filters, block.size
    data, output = _data_matrix(tiling.filters, problem.work), _output_matrix(tiling.filters, problem.work)
    pixels = workspace.pixels((*_pixel_shape(tiling, block), channels))
    d, v, z = workspace.tiles(tiles * channels), workspace.transformed(tiles * channels), workspace.tiles(tiles * outputs)
    calls = [*_load(problem, tiling, block, pixels), _gather(tiling, block, pixels, d), partial(np.matmul, data, d, out=v)]
    left = v.reshape(-1, tiles, groups, channels // groups).swapaxes(1, 2)
    axes = len(problem.axes)
    if problem.channels_last:
        products = z.reshape(-1, tiles, groups, outputs // groups).swapaxes(1, 2)
        calls.append(_product(left, filters.swapaxes(2, 3), products))
        y = workspace.results((*tiling.outputs, *block.counts, outputs))
        calls += _add_bias(z.reshape(-1, tiles, outputs), problem.bias, output)
        calls.append(partial(np.matmul, output, z, out=y.reshape(len(output), -1)))
        y = np.moveaxis(y, range(axes), range(axes + 1, 2 * axes + 1))
    else:
        products = z.reshape(-1, groups, outputs // groups, tiles)
        calls.append(_product(filters, left.swapaxes(2, 3), products))
        y = workspace.results((outputs, *block.counts, *tiling.outputs))
        calls += _add_bias(z.reshape(-1, outputs, tiles).swapaxes(1, 2), problem.bias, output)
        calls.append(partial(np.matmul, z.T, output.T, out=y.reshape(-1, len(output))))
        y = np.moveaxis(y, 0, -1)
    return [*calls, *_store(problem, tiling, block, y)]


def _product(left: Array, right: Array, out: Array) -> Step:
    """The step of the products f, G; one axis less where there is one group."""
    if out.shape[1] == 1:
        left, right, out = left[:, 0], right[:, 0], out[:, 0]
    return partial(np.matmul, left, right, out=out)


def _add_bias(products: Array, bias: Array | None, output: Array) -> list[Step]:
    """The step that adds the bias at the one frequency (points 1) that A^T adds to every pixel as it is."""
    if bias is None:
        return []
    frequency = int(np.flatnonzero((output == 1).all(axis=0))[0])
    target = products[frequency]
    return [partial(np.add, target, bias, out=target, casting="same_kind")]


def _filters(problem: ConvProblem, tiling: _Tiling, allocate: Allocate) -> tuple[Array, list[Step]]:
    """The transformed filter, f, G, M/G, C/G, and the steps that compute it in a run; none when it is kept."""
    if problem.constant is None:
        return _transform_filters(problem, tiling, allocate)

    def compute() -> Array:
        found, calls = _transform_filters(problem, tiling, np.empty)
        for call in calls:
            call()
        return found

    key = ("winograd", tiling.filters, problem.group, problem.channels_last, problem.work)
    return problem.constant.derived(key, compute), []


def _transform_filters(problem: ConvProblem, tiling: _Tiling, allocate: Allocate) -> tuple[Array, list[Step]]:
    """u = G w along every axis, and the steps that compute it."""
    filters, channels = problem.filters, problem.channels // problem.group
    weights, calls = problem.weights, []
    if weights.dtype != problem.work:
        weights = allocate(weights.shape, problem.work)
        calls.append(partial(np.copyto, weights, problem.weights))
    matrix = _filter_matrix(tiling.filters, problem.work)
    width = filters * channels
    rows = _rows(allocate((len(matrix) * _pitch(width, problem.work.itemsize),), problem.work), len(matrix), width)
    if problem.channels_last:
        target = rows.reshape(-1, filters, channels).swapaxes(0, 1)
        calls.append(partial(np.matmul, matrix, weights.reshape(filters, -1, channels), out=target))
    else:
        calls.append(partial(np.matmul, matrix, weights.reshape(width, -1).T, out=rows))
    return rows.reshape(-1, problem.group, filters // problem.group, channels), calls


def _filter_nbytes(problem: ConvProblem, tiling: _Tiling) -> int:
    """Bytes of workspace that the transformed filter takes."""
    if problem.constant is not None:
        return 0
    rows = tiling.frequencies * _pitch(problem.weights.size // math.prod(problem.kernel), problem.work.itemsize)
    return (rows + (problem.weights.size if problem.weights.dtype != problem.work else 0)) * problem.work.itemsize


def _tilings(problem: ConvProblem) -> list[_Tiling]:
    """The choices of F(m, r) along the axes, the one with the fewest multiplications first."""
    found = []
    for outputs in product(*(_OUTPUTS[axis.kernel] for axis in problem.axes)):
        filters = tuple(minimal_filter(m, axis.kernel) for m, axis in zip(outputs, problem.axes, strict=True))
        counts = tuple(-(-axis.out // m) for m, axis in zip(outputs, problem.axes, strict=True))
        found.append(_Tiling(filters, counts))
    return sorted(found, key=lambda tiling: _multiplications(problem, tiling))


def _multiplications(problem: ConvProblem, tiling: _Tiling) -> int:
    """Multiplications of the products and the transforms; reading the transformed filter counts as some."""
    tiles, rows = problem.batch * math.prod(tiling.counts), tiling.frequencies
    products = rows * problem.filters * (problem.channels // problem.group) * (tiles + _READ)
    return products + rows * tiles * (rows * problem.channels + tiling.pixels * problem.filters)


def _cut(problem: ConvProblem, tiling: _Tiling, most: int) -> list[_Block]:
    """Blocks of at most `most` tiles, each a range of the tiles of an image, or all tiles of several images."""
    ranges: list[list[slice]] = []
    room = most
    for count in (*reversed(tiling.counts), problem.batch):
        length = max(1, min(count, room))
        length = -(-count // -(-count // length))  # as many blocks, but even ones
        ranges.insert(0, [slice(start, min(start + length, count)) for start in range(0, count, length)])
        room = room // count if length == count else 1
    return [_Block(images, tuple(tiles)) for images, *tiles in product(*ranges)]


def _nbytes(problem: ConvProblem, tiling: _Tiling, blocks: Sequence[_Block]) -> int:
    """Bytes of workspace, without the transformed filter."""
    sizes = (_elements(problem, tiling, block) for block in blocks)
    return sum(max(column) for column in zip(*sizes, strict=True)) * problem.work.itemsize


def _blocks(problem: ConvProblem, tiling: _Tiling) -> list[_Block]:
    """Blocks that stay in the cache, but not so small that the products are narrow, and within the limit."""
    tile = tiling.frequencies * (problem.channels + problem.filters) * problem.work.itemsize
    most = max(_TILES, _BLOCK_BYTES // max(1, tile))
    room = problem.limit - _filter_nbytes(problem, tiling)
    while True:
        blocks = _cut(problem, tiling, most)
        if most == 1 or _nbytes(problem, tiling, blocks) <= room:
            return blocks
        most -= max(1, most // 8)


def _tiling(problem: ConvProblem) -> _Tiling | None:
    """The tiling with the fewest multiplications whose workspace for a single tile is within the limit."""
    for tiling in _tilings(problem):
        if _least_nbytes(problem, tiling) <= problem.limit:
            return tiling
    return None


def _least_nbytes(problem: ConvProblem, tiling: _Tiling) -> int:
    return _nbytes(problem, tiling, _cut(problem, tiling, 1)[:1]) + _filter_nbytes(problem, tiling)


def _refusal(problem: ConvProblem) -> str:
    """Why Winograd does not apply: the window, depthwise groups, float16 sums or the workspace limit."""
    if any(axis.stride != 1 or axis.dilation != 1 for axis in problem.axes):
        strides, dilations = ([getattr(axis, name) for axis in problem.axes] for name in ("stride", "dilation"))
        return f"it needs stride 1 and dilation 1, found strides {strides} and dilations {dilations}"
    if any(axis.kernel not in _OUTPUTS for axis in problem.axes) or max(problem.kernel) == 1:
        return f"it needs 3 taps along the axes (or 1 along some), found kernel {problem.kernel}"
    if problem.half:
        return "its sums lose too much in float16"
    if problem.group > 1 and problem.group == problem.channels:
        return f"each of the {problem.group} groups has one channel: there is nothing to sum over"
    if _tiling(problem) is None:
        least = min(_least_nbytes(problem, tiling) for tiling in _tilings(problem))
        return f"it needs at least {least} bytes of workspace, the limit is {problem.limit}"
    return ""


def _steps(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """The filter's transform (unless it is kept), then block by block."""
    tiling = _tiling(problem)
    assert tiling is not None, _refusal(problem)
    blocks = _blocks(problem, tiling)
    filters, calls = _filters(problem, tiling, allocate)
    workspace = _Workspace(problem, tiling, blocks, allocate)
    for block in blocks:
        calls += _block_steps(problem, tiling, block, filters, workspace)
    return calls


@cache
def _data_matrix(filters: tuple[MinimalFilter, ...], dtype: np.dtype[Any]) -> Array:
    return kronecker([one.data for one in filters], dtype)


@cache
def _filter_matrix(filters: tuple[MinimalFilter, ...], dtype: np.dtype[Any]) -> Array:
    return kronecker([one.filter for one in filters], dtype)


@cache
def _output_matrix(filters: tuple[MinimalFilter, ...], dtype: np.dtype[Any]) -> Array:
    return kronecker([one.output for one in filters], dtype)


WINOGRAD = Algorithm(name="WINOGRAD", refusal=_refusal, steps=_steps)
