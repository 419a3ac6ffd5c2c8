"""WINOGRAD: convolution with few multiplications, for kernels of 3 taps and stride 1.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, arXiv:1509.09308; the matrices come from
`toom_cook`, the tiles from `tiles`. A tile of t pixels along each axis gives m pixels of the output, with f = t^d
multiplications for each channel and filter. For a block of tiles:

    x: images, pixels, C          the pixels that the tiles read, with zeros around the image
    d: t, images, H, tiles, C     the tiles of the last axis
    v: f, tiles, C                B^T along every axis
    z: f, M, tiles                a matrix product over the channels for every frequency, u v^T or for NHWC v u^T
    y: m, M, tiles, m             A^T along every axis; m, m, tiles, M for NHWC

u (f, M, C/G) is the filter with G along every axis. All of these are matrix products, of small matrices with long
rows; two buffers hold them in turn. F(2, 3), F(4, 3) or both are taken along the axes, whichever makes the fewest
multiplications in all. Values that are not finite spread from a pixel to all pixels of the tiles that read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.conv.problem import Algorithm, Allocate, Array, ConvProblem
from dagexec.ops.conv.tiles import Block, Tiling, cut, gather, load, needs_staging, row_pitch, store
from dagexec.ops.conv.toom_cook import MinimalFilter, kronecker, minimal_filter

_OUTPUTS = {1: (1,), 3: (2, 4)}  # taps: pixels of a tile
_SMALL = 1_000_000  # multiplications of a product that OpenBLAS computes without copying its operands first
_PART, _LEAST_PART = 64, 8  # filters in a product
_NARROW = 60  # tiles in a product: with fewer, reading the transformed filter takes longer than multiplying with it
_TILES = 192  # wanted in a block
_BLOCK_BYTES = 1 << 20  # more tiles, where there are so few channels and filters that these fit
_READ = 16  # multiplications in the time that one number of the transformed filter is read from memory
_COLUMNS = 16384  # of a product with a matrix of up to 6 x 6, to be small


_Stage = tuple[tuple[int, ...], int]
"""The shape of an array that a stage writes: rows, and their width. Rows lie apart as `row_pitch` says."""


def _stages(problem: ConvProblem, block: Block) -> list[_Stage]:
    """What the stages of a block write: staged pixels, pixels, d, v after each axis, z, y after each axis."""
    tiling, channels = block.tiling, problem.channels
    shape = list(block.pixels)
    staged = math.prod(shape) if needs_staging(problem) else 0
    found: list[_Stage] = [((channels,), staged), ((), math.prod(shape) * channels)]
    axes = len(tiling.sizes)
    for number in reversed(range(axes)):
        shape[number + 1] = block.counts[number + 1]
        stage = tiling.sizes[number:], math.prod(shape) * channels
        found += [stage] if number < axes - 1 else [stage, stage]
    width = block.size * problem.filters
    found.append((tiling.sizes, width))
    found += [((*tiling.outputs[:number], *tiling.sizes[number:]), width) for number in range(1, axes)]
    return [*found, ((), math.prod(tiling.outputs) * width)]


class _Buffers:
    """Two buffers, of which every stage reads one and writes the other; shared by all blocks."""

    def __init__(self, problem: ConvProblem, blocks: Sequence[Block], allocate: Allocate) -> None:
        self._problem = problem
        self._pair = [allocate((size,), problem.work) for size in _buffer_sizes(problem, blocks)]

    def arrays(self, block: Block) -> list[Array]:
        """The arrays that the stages of a block write, in turn."""
        return [_rows(self._pair[i % 2], *stage) for i, stage in enumerate(_stages(self._problem, block))]


def _buffer_sizes(problem: ConvProblem, blocks: Sequence[Block]) -> tuple[int, int]:
    """The elements that the largest even and the largest odd stage write."""
    itemsize = problem.work.itemsize
    sizes = [[math.prod(rows) * row_pitch(width, itemsize) for rows, width in _stages(problem, block)] for block in blocks]
    return max(max(block[0::2]) for block in sizes), max(max(block[1::2]) for block in sizes)


def _rows(buffer: Array, rows: tuple[int, ...], width: int) -> Array:
    """The first elements of `buffer` as (*rows, width)."""
    pitch = row_pitch(width, buffer.itemsize)
    return buffer[: math.prod(rows) * pitch].reshape(*rows, pitch)[..., :width]


def _block_steps(problem: ConvProblem, block: Block, filters: Array, buffers: _Buffers) -> list[Step]:
    """The steps that compute the pixels of one block. `filters` is f, G, M/G, C/G."""
    staged, flat, *arrays = buffers.arrays(block)
    pixels = flat.reshape(*block.pixels, problem.channels)
    axes = len(problem.axes)
    calls = [*load(problem, block, pixels, staged), gather(block, pixels, arrays[0])]
    calls += _transform_data(problem, block, arrays[: axes + 1])
    v, z = (array.reshape(-1, array.shape[-1]) for array in arrays[axes : axes + 2])
    calls += [_multiply(problem, block, filters, v, z), *_add_bias(problem, block, z)]
    calls += _transform_products(problem, block, arrays[axes + 1 : -1])
    transform, results = _transform_last(problem, block, arrays[-2], arrays[-1])
    return [*calls, transform, *store(problem, block, results)]


def _transform_data(problem: ConvProblem, block: Block, arrays: Sequence[Array]) -> list[Step]:
    """The steps of v = B^T d, from the last axis to the first; `arrays` are d and what each axis gives."""
    filters, images, channels = block.tiling.filters, block.counts[0], problem.channels
    spans, counts = block.pixels[1:], block.counts[1:]
    calls: list[Step] = []
    for number, one in reversed(list(enumerate(filters))):
        source, target = arrays[len(calls)], arrays[len(calls) + 1]
        matrix = _data_matrix(one, problem.work)
        width = math.prod(counts[number + 1 :]) * channels
        if not calls:  # d has the t pixels of a tile already
            lines = math.prod(block.pixels[:-1])
            split = [array.reshape(one.tile, lines, -1).swapaxes(0, 1) for array in (source, target)]
            calls.append(_small_product(matrix, split[0], split[1], counts[number]))
            continue
        outer = images * math.prod(spans[:number])
        pitch, step = source.strides[-2], width * source.itemsize
        rows = math.prod(source.shape[:-1])
        shape = (rows, outer, counts[number], one.tile, width)
        strides = (pitch, spans[number] * step, one.outputs * step, step, source.itemsize)
        tiles = as_strided(source, shape, strides, writeable=False)
        out = target.reshape(one.tile, rows, outer, counts[number], width)
        calls.append(_small_product(matrix, tiles, np.moveaxis(out, 0, -2), counts[-1]))
    return calls


def _small_product(matrix: Array, source: Array, target: Array, lead: int, *, transposed: bool = False) -> Step:
    """The step of target = matrix @ source over their last two axes; the target may be transposed.

    The last axis of the source is a multiple of `lead`, and is taken in parts.
    """
    width = source.shape[-1]
    parts = next(n for n in range(1, lead + 1) if lead % n == 0 and (width // n <= _COLUMNS or n == lead))
    source = source.reshape(*source.shape[:-1], parts, -1).swapaxes(-3, -2)
    if transposed:
        target = target.reshape(*target.shape[:-2], parts, -1, target.shape[-1])
        return partial(np.matmul, source.swapaxes(-2, -1), matrix.T, out=target)
    target = target.reshape(*target.shape[:-1], parts, -1).swapaxes(-3, -2)
    return partial(np.matmul, matrix, source, out=target)


def _multiply(problem: ConvProblem, block: Block, filters: Array, v: Array, z: Array) -> Step:
    """The step of z = u^T v^T for every frequency, group and part, or z = v u for NHWC."""
    groups, tiles, part = problem.group, block.size, filters.shape[-1]
    data = v.reshape(len(v), tiles, groups, 1, -1)  # one axis for the parts
    if problem.channels_last:
        out = np.moveaxis(z.reshape(len(z), tiles, groups, -1, part), 1, 3)
        return partial(np.matmul, np.moveaxis(data, 1, 3), filters, out=out)
    out = z.reshape(len(z), groups, -1, part, tiles)
    return partial(np.matmul, filters.swapaxes(-2, -1), np.moveaxis(data, 1, -1), out=out)


def _add_bias(problem: ConvProblem, block: Block, z: Array) -> list[Step]:
    """The step that adds the bias at the one frequency, of the points 1, which A^T adds to every pixel as it is."""
    if problem.bias is None:
        return []
    tiling = block.tiling
    frequency = int(np.ravel_multi_index([one.unit for one in tiling.filters], tiling.sizes))
    rows = z[frequency].reshape(block.size, -1) if problem.channels_last else z[frequency].reshape(-1, block.size).T
    return [partial(np.add, rows, problem.bias, out=rows, casting="same_kind")]


def _transform_products(problem: ConvProblem, block: Block, arrays: Sequence[Array]) -> list[Step]:
    """The steps of A^T z along all axes but the last; `arrays` are z and what each axis gives."""
    lead = block.size if problem.channels_last else problem.filters
    calls = []
    for number, one in enumerate(block.tiling.filters[:-1]):
        source, target = (np.moveaxis(array, number, -2) for array in (arrays[number], arrays[number + 1]))
        calls.append(_small_product(_output_matrix(one, problem.work), source, target, lead))
    return calls


def _transform_last(problem: ConvProblem, block: Block, source: Array, flat: Array) -> tuple[Step, Array]:
    """The step of A^T z along the last axis, and its results as (images, tiles, m of each axis, M).

    With channels last they are m, m, tiles, M in memory; otherwise m, M, tiles, m, so that the pixels of a tile that are
    neighbours in y are neighbours here too.
    """
    matrix = _output_matrix(block.tiling.filters[-1], problem.work)
    *outputs, last = block.tiling.outputs
    axes = len(problem.axes)
    if problem.channels_last:
        target = flat.reshape(*outputs, last, -1)
        results = target.reshape(*outputs, last, *block.counts, problem.filters)
        return _small_product(matrix, source, target, block.size), np.moveaxis(results, range(axes), range(axes + 1, 2 * axes + 1))
    target = flat.reshape(*outputs, -1, last)
    results = target.reshape(*outputs, problem.filters, *block.counts, last)
    order = (*range(axes, 2 * axes + 1), *range(axes - 1), 2 * axes + 1, axes - 1)
    return _small_product(matrix, source, target, problem.filters, transposed=True), results.transpose(order)


def _filters(problem: ConvProblem, tiling: Tiling, allocate: Allocate) -> tuple[Array, list[Step]]:
    """The transformed filter, f, G, parts, C/G, M/G/parts, and the steps that compute it; none when it is kept."""
    if problem.constant is None:
        return _transform_filters(problem, tiling, allocate)

    def compute() -> Array:
        found, calls = _transform_filters(problem, tiling, np.empty)
        for call in calls:
            call()
        return found

    key = ("winograd", tiling.outputs, problem.kernel, problem.group, problem.channels_last, problem.work)
    return problem.constant.derived(key, compute), []


def _transform_filters(problem: ConvProblem, tiling: Tiling, allocate: Allocate) -> tuple[Array, list[Step]]:
    """u = G w along every axis, and the steps that compute it from the weights as taps, G, parts, C/G, M/G/parts."""
    part, channels = _part(problem), problem.channels // problem.group
    weights = problem.weights if problem.channels_last else np.moveaxis(problem.weights, 1, -1)
    ordered = np.moveaxis(weights.reshape(-1, part, *weights.shape[1:]), (1, -1), (-1, -2))  # parts, kernel, C/G, part
    ordered = np.moveaxis(ordered, 0, -3)
    matrix = kronecker([one.filter for one in tiling.filters], problem.work)
    width = problem.filters * channels
    (taps,), (frequencies,) = ((matrix.shape[axis],) for axis in (1, 0))
    pitch = row_pitch(width, problem.work.itemsize)
    w, u = (_rows(allocate((rows * pitch,), problem.work), (rows,), width) for rows in (taps, frequencies))
    shape = (frequencies, problem.group, -1, channels, part)
    load_weights = partial(np.copyto, w.reshape(ordered.shape), ordered)
    return u.reshape(shape), [load_weights, _small_product(matrix, w, u, problem.filters // part)]


def _part(problem: ConvProblem) -> int:
    """Filters that are multiplied together: a divisor of those of a group, few enough for small products.

    It depends on the weights alone, so that all who keep what is derived from these can share it.
    """
    per_group = problem.filters // problem.group
    most = min(_PART, _SMALL // (_NARROW * (problem.channels // problem.group)))
    return next((part for part in range(most, _LEAST_PART - 1, -1) if per_group % part == 0), per_group)


def _filter_nbytes(problem: ConvProblem, tiling: Tiling) -> int:
    """Bytes of workspace that the filter takes."""
    if problem.constant is not None:
        return 0
    taps, itemsize = math.prod(problem.kernel), problem.work.itemsize
    return (math.prod(tiling.sizes) + taps) * row_pitch(problem.weights.size // taps, itemsize) * itemsize


def _tilings(problem: ConvProblem) -> list[Tiling]:
    """The choices of F(m, r) along the axes, the one with the fewest multiplications first."""
    found = []
    for outputs in product(*(_OUTPUTS[axis.kernel] for axis in problem.axes)):
        filters = tuple(minimal_filter(m, axis.kernel) for m, axis in zip(outputs, problem.axes, strict=True))
        counts = tuple(-(-axis.out // m) for m, axis in zip(outputs, problem.axes, strict=True))
        found.append(Tiling(filters, counts))
    return sorted(found, key=lambda tiling: _multiplications(problem, tiling))


def _multiplications(problem: ConvProblem, tiling: Tiling) -> int:
    """About the multiplications of products and transforms; reading the transformed filter counts as some."""
    tiles, frequencies = problem.batch * math.prod(tiling.counts), math.prod(tiling.sizes)
    products = problem.filters * (problem.channels // problem.group) * (tiles + _READ)
    transforms = tiles * (problem.channels * sum(tiling.sizes) + problem.filters * sum(tiling.outputs))
    return frequencies * (products + transforms)


def _nbytes(problem: ConvProblem, blocks: Sequence[Block]) -> int:
    """Bytes of workspace for these blocks and the filter."""
    buffers = sum(_buffer_sizes(problem, blocks)) * problem.work.itemsize
    return buffers + _filter_nbytes(problem, blocks[0].tiling)


def _blocks(problem: ConvProblem, tiling: Tiling) -> list[Block]:
    """Blocks that stay in the cache and make small products, but not too narrow ones, within the limit."""
    tile = math.prod(tiling.sizes) * (problem.channels + problem.filters) * problem.work.itemsize
    small = _SMALL // (_part(problem) * problem.channels // problem.group)
    most = max(_NARROW, min(small, max(_TILES, _BLOCK_BYTES // tile)))
    while True:
        blocks = cut(tiling, problem.batch, most)
        if most == 1 or _nbytes(problem, blocks) <= problem.limit:
            return blocks
        most -= max(1, most // 8)


def _least_nbytes(problem: ConvProblem, tiling: Tiling) -> int:
    """Bytes of workspace for blocks of a single tile."""
    return _nbytes(problem, cut(tiling, problem.batch, 1)[:1])


def _tiling(problem: ConvProblem) -> Tiling | None:
    """The tiling with the fewest multiplications, of those whose workspace can be within the limit."""
    fitting = (tiling for tiling in _tilings(problem) if _least_nbytes(problem, tiling) <= problem.limit)
    return next(fitting, None)


def _refusal(problem: ConvProblem) -> str:
    """Why Winograd does not apply: the window, depthwise groups, float16 sums or the workspace limit."""
    if any(axis.stride != 1 or axis.dilation != 1 for axis in problem.axes):
        strides, dilations = ([getattr(axis, name) for axis in problem.axes] for name in ("stride", "dilation"))
        return f"it needs strides and dilations of 1, found strides {strides} and dilations {dilations}"
    if any(axis.kernel not in _OUTPUTS for axis in problem.axes) or max(problem.kernel) == 1:
        return f"it needs 3 taps along an axis, and 3 or 1 along the others, found kernel {list(problem.kernel)}"
    if problem.half:
        return "its transforms would lose too much in float16"
    if problem.group > 1 and problem.group == problem.channels:
        return f"each of the {problem.group} groups has one channel, so there are no channels to sum over"
    if not problem.x.size or not problem.y.size:
        return f"there is nothing to compute from {problem.x.shape} to {problem.y.shape}"
    if _tiling(problem) is None:
        least = min(_least_nbytes(problem, tiling) for tiling in _tilings(problem))
        return f"it needs {least} bytes of workspace, the limit is {problem.limit}"
    return ""


def _steps(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """The filter's transform (unless it is kept), then block by block."""
    tiling = _tiling(problem)
    assert tiling is not None, _refusal(problem)
    blocks = _blocks(problem, tiling)
    filters, calls = _filters(problem, tiling, allocate)
    buffers = _Buffers(problem, blocks, allocate)
    for block in blocks:
        calls += _block_steps(problem, block, filters, buffers)
    return calls


@cache
def _data_matrix(one: MinimalFilter, dtype: np.dtype[Any]) -> Array:
    return kronecker([one.data], dtype)


@cache
def _output_matrix(one: MinimalFilter, dtype: np.dtype[Any]) -> Array:
    return kronecker([one.output], dtype)


WINOGRAD = Algorithm(name="WINOGRAD", refusal=_refusal, steps=_steps)
