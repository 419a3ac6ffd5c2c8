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
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem, add_bias
from dagexec.ops.families.conv.tiles import Block, Tiling, cut, gather, load, needs_staging, row_pitch, store
from dagexec.ops.families.conv.toom_cook import Matrix, kronecker, minimal_filter

_TAPS = 3
_SMALL = 1_000_000  # multiplications of a product that OpenBLAS computes without copying its operands first
_PART, _MIN_PART = 64, 8  # filters in a product
_NARROW = 60  # tiles in a product: with fewer, reading the transformed filter takes longer than multiplying with it
_TILES = 192  # wanted in a block
_BLOCK_BYTES = 1 << 20  # more tiles, where there are so few channels and filters that these fit
_READ = 4  # multiplications in the time that one number of the transformed filter is read from memory
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


def _buffer_sizes(problem: ConvProblem, block: Block) -> tuple[int, int]:
    """The elements of two buffers, of which every stage of a block reads one and writes the other."""
    itemsize = problem.work.itemsize
    sizes = [math.prod(rows) * row_pitch(width, itemsize) for rows, width in _stages(problem, block)]
    return max(sizes[0::2]), max(sizes[1::2])


def _rows(buffer: Array, rows: tuple[int, ...], width: int) -> Array:
    """The first elements of `buffer` as (*rows, width)."""
    pitch = row_pitch(width, buffer.itemsize)
    return buffer[: math.prod(rows) * pitch].reshape(*rows, pitch)[..., :width]


def _block_steps(problem: ConvProblem, block: Block, filters: Array, buffers: Sequence[Array]) -> list[Step]:
    """The steps that compute the pixels of one block. `filters` is f, G, parts, C/G, M/G/parts."""
    written = [_rows(buffers[i % 2], *stage) for i, stage in enumerate(_stages(problem, block))]
    axes = len(problem.axes)
    staged, flat_pixels, d, *transformed = written[: axes + 3]
    z, *partly, flat = written[axes + 3 :]
    pixels = flat_pixels.reshape(*block.pixels, problem.channels)  # images, rows, ..., C
    return [
        *load(problem, block, pixels, staged),
        gather(block, pixels, d),
        *_transform_data(problem, block, [d, *transformed]),
        _multiply(problem, block, filters, transformed[-1], z),
        *_transform_products(problem, block, [z, *partly]),
        *_finish(problem, block, [z, *partly][-1], flat),
    ]


def _transform_data(problem: ConvProblem, block: Block, arrays: Sequence[Array]) -> list[Step]:
    """The steps of v = B^T d, from the last axis to the first; `arrays` are d and what each axis gives."""
    filters, counts, spans = block.tiling.filters, block.counts[1:], block.pixels[1:]
    last, lines = filters[-1], math.prod(block.pixels[:-1])
    # t along the last axis, lines of pixels, tiles * C -> lines, t, tiles * C
    source, target = (array.reshape(last.tile, lines, -1).swapaxes(0, 1) for array in arrays[:2])
    calls = [_small_product(_matrix(last.data, problem.work), source, target, counts[-1])]
    for number in reversed(range(len(filters) - 1)):
        one, source, target = filters[number], arrays[len(calls)], arrays[len(calls) + 1]
        rows, outer = math.prod(source.shape[:-1]), block.counts[0] * math.prod(spans[:number])
        width = math.prod(counts[number + 1 :]) * problem.channels
        line = width * source.itemsize
        tiles = as_strided(  # they overlap
            source,
            (rows, outer, counts[number], one.tile, width),
            (source.strides[-2], spans[number] * line, one.outputs * line, line, source.itemsize),
            writeable=False,
        )
        # t, rows, outer, tiles, width -> rows, outer, tiles, t, width
        values = np.moveaxis(target.reshape(one.tile, *tiles.shape[:3], width), 0, -2)
        calls.append(_small_product(_matrix(one.data, problem.work), tiles, values, counts[-1]))
    return calls


def _small_product(matrix: Array, source: Array, target: Array, lead: int, *, transposed: bool = False) -> Step:
    """The step of target = matrix @ source over their last two axes; the target may be transposed.

    The last axis of the source is a multiple of `lead`, and is taken in parts.
    """
    width = source.shape[-1]
    parts = next(n for n in range(1, lead + 1) if lead % n == 0 and (width // n <= _COLUMNS or n == lead))
    source = source.reshape(*source.shape[:-1], parts, -1).swapaxes(-3, -2)  # ..., parts, rows, columns
    if transposed:
        target = target.reshape(*target.shape[:-2], parts, -1, target.shape[-1])
        return partial(np.matmul, source.swapaxes(-2, -1), matrix.T, out=target)
    target = target.reshape(*target.shape[:-1], parts, -1).swapaxes(-3, -2)
    return partial(np.matmul, matrix, source, out=target)


def _multiply(problem: ConvProblem, block: Block, filters: Array, v: Array, z: Array) -> Step:
    """The step of z = u^T v^T for every frequency, group and part, or z = v u for NHWC."""
    frequencies, groups, parts, channels, part = filters.shape
    data = v.reshape(frequencies, block.size, groups, 1, channels)  # f, tiles, G, 1, C/G
    if problem.channels_last:
        # f, G, parts, tiles, M/G/parts
        out = np.moveaxis(z.reshape(frequencies, block.size, groups, parts, part), 1, 3)
        return partial(np.matmul, np.moveaxis(data, 1, 3), filters, out=out)
    out = z.reshape(frequencies, groups, parts, part, block.size)  # f, G, parts, M/G/parts, tiles
    return partial(np.matmul, filters.swapaxes(-2, -1), np.moveaxis(data, 1, -1), out=out)


def _transform_products(problem: ConvProblem, block: Block, arrays: Sequence[Array]) -> list[Step]:
    """The steps of A^T z along all axes but the last; `arrays` are z and what each axis gives."""
    lead = block.size if problem.channels_last else problem.filters
    calls = []
    for number, one in enumerate(block.tiling.filters[:-1]):
        source, target = (np.moveaxis(array, number, -2) for array in arrays[number : number + 2])
        calls.append(_small_product(_matrix(one.output, problem.work), source, target, lead))
    return calls


def _finish(problem: ConvProblem, block: Block, source: Array, flat: Array) -> list[Step]:
    """The steps of A^T z along the last axis, the bias, and writing to y.

    With channels last the results are m, m, tiles, M in memory. Otherwise they are m, M, tiles, m: so pixels of a tile
    that are neighbors in y are neighbors here too.
    """
    matrix = _matrix(block.tiling.filters[-1].output, problem.work)
    *outputs, last = block.tiling.outputs
    axes, filters = len(problem.axes), problem.filters
    if problem.channels_last:
        transform = _small_product(matrix, source, flat.reshape(*outputs, last, -1), block.size)
        results = flat.reshape(*outputs, last, *block.counts, filters)  # m, ..., m, images, tiles, ..., M
        results = np.moveaxis(results, range(axes), range(axes + 1, 2 * axes + 1))
        pixels: Array = flat.reshape(-1, filters)
    else:
        transform = _small_product(matrix, source, flat.reshape(*outputs, -1, last), filters, transposed=True)
        results = flat.reshape(*outputs, filters, *block.counts, last)  # m, ..., M, images, tiles, ..., m
        results = results.transpose(*range(axes, 2 * axes + 1), *range(axes - 1), 2 * axes + 1, axes - 1)
        pixels = flat.reshape(math.prod(outputs), filters, -1)
    return [transform, *add_bias(pixels, problem.bias, problem.channels_last), *store(problem, block, results)]


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
    # G * parts, M/G/parts, taps, C/G -> taps, G * parts, C/G, M/G/parts
    ordered = np.moveaxis(weights.reshape(-1, part, *weights.shape[1:]), (0, -1, 1), (-3, -2, -1))
    matrix = kronecker([one.filter for one in tiling.filters], problem.work)
    width = problem.filters * channels
    pitch = row_pitch(width, problem.work.itemsize)
    u, w = (_rows(allocate((rows * pitch,), problem.work), (rows,), width) for rows in matrix.shape)
    order = partial(np.copyto, w.reshape(ordered.shape), ordered)
    transform = _small_product(matrix, w, u, problem.filters // part)
    return u.reshape(-1, problem.group, problem.filters // problem.group // part, channels, part), [order, transform]


def _part(problem: ConvProblem) -> int:
    """Filters that are multiplied together: a divisor of those of a group, few enough for small products.

    It depends on the weights alone, so that all who keep what is derived from these can share it.
    """
    per_group = problem.filters // problem.group
    most = min(_PART, _SMALL // (_NARROW * (problem.channels // problem.group)))
    return next((part for part in range(most, _MIN_PART - 1, -1) if per_group % part == 0), per_group)


def _filter_nbytes(problem: ConvProblem, tiling: Tiling) -> int:
    """Bytes of workspace that the filter takes."""
    if problem.constant is not None:
        return 0
    taps, itemsize = math.prod(problem.kernel), problem.work.itemsize
    return (math.prod(tiling.sizes) + taps) * row_pitch(problem.weights.size // taps, itemsize) * itemsize


def _tilings(problem: ConvProblem, outputs: Sequence[int]) -> list[Tiling]:
    """The choices of F(m, r) along the axes, the one with the fewest multiplications first."""
    found = []
    for sizes in product(*(outputs if axis.kernel == _TAPS else (1,) for axis in problem.axes)):
        filters = tuple(minimal_filter(m, axis.kernel) for m, axis in zip(sizes, problem.axes, strict=True))
        counts = tuple(-(-axis.out // m) for m, axis in zip(sizes, problem.axes, strict=True))
        found.append(Tiling(filters, counts))
    return sorted(found, key=lambda tiling: _multiplications(problem, tiling))


def _multiplications(problem: ConvProblem, tiling: Tiling) -> int:
    """About the multiplications of products and transforms; reading the transformed filter counts as some."""
    tiles, frequencies = problem.batch * math.prod(tiling.counts), math.prod(tiling.sizes)
    products = problem.filters * (problem.channels // problem.group) * (tiles + _READ)
    transforms = tiles * (problem.channels * sum(tiling.sizes) + problem.filters * sum(tiling.outputs))
    return frequencies * (products + transforms)


def _nbytes(problem: ConvProblem, largest: Block) -> int:
    """Bytes of workspace for blocks up to `largest` and the filter."""
    buffers = sum(_buffer_sizes(problem, largest)) * problem.work.itemsize
    return buffers + _filter_nbytes(problem, largest.tiling)


def _blocks(problem: ConvProblem, tiling: Tiling) -> list[Block]:
    """Blocks that stay in the cache and make small products, but not too narrow ones, within the limit."""
    tile = math.prod(tiling.sizes) * (problem.channels + problem.filters) * problem.work.itemsize
    small = _SMALL // (_part(problem) * problem.channels // problem.group)
    most = max(_NARROW, min(small, max(_TILES, _BLOCK_BYTES // tile)))
    while True:
        blocks = cut(tiling, problem.batch, most)
        if most == 1 or _nbytes(problem, blocks[0]) <= problem.limit:
            return blocks
        most -= max(1, most // 8)


def _least_nbytes(problem: ConvProblem, tiling: Tiling) -> int:
    """Bytes of workspace for blocks of a single tile."""
    return _nbytes(problem, Block(tiling, slice(0, 1), (slice(0, 1),) * len(tiling.counts)))


def _tiling(problem: ConvProblem, outputs: Sequence[int]) -> Tiling | None:
    """The tiling with the fewest multiplications, of those whose workspace can be within the limit."""
    tilings = _tilings(problem, outputs)
    return next((tiling for tiling in tilings if _least_nbytes(problem, tiling) <= problem.limit), None)


def _refusal(outputs: Sequence[int], problem: ConvProblem) -> str:
    """Why Winograd does not apply: the window, depthwise groups, float16 sums or the workspace limit."""
    if any(axis.stride != 1 or axis.dilation != 1 for axis in problem.axes):
        strides, dilations = ([getattr(axis, name) for axis in problem.axes] for name in ("stride", "dilation"))
        return f"it needs strides and dilations of 1, found strides {strides} and dilations {dilations}"
    if not {_TAPS} <= set(problem.kernel) <= {1, _TAPS}:
        return f"it needs 3 taps along an axis, and 3 or 1 along the others, found kernel {list(problem.kernel)}"
    if problem.half:
        return "its transforms would lose too much in float16"
    if problem.group > 1 and problem.group == problem.channels:
        return f"each of the {problem.group} groups has one channel, so there are no channels to sum over"
    if not problem.x.size or not problem.y.size:
        return f"there is nothing to compute from {problem.x.shape} to {problem.y.shape}"
    if _tiling(problem, outputs) is None:
        least = min(_least_nbytes(problem, tiling) for tiling in _tilings(problem, outputs))
        return f"it needs {least} bytes of workspace, the limit is {problem.limit}"
    return ""


def _steps(outputs: Sequence[int], problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """The filter's transform (unless it is kept), then block by block."""
    tiling = _tiling(problem, outputs)
    assert tiling is not None, _refusal(outputs, problem)
    blocks = _blocks(problem, tiling)
    filters, calls = _filters(problem, tiling, allocate)
    buffers = [allocate((size,), problem.work) for size in _buffer_sizes(problem, blocks[0])]
    for block in blocks:
        calls += _block_steps(problem, block, filters, buffers)
    return calls


@cache
def _matrix(matrix: Matrix, dtype: np.dtype[Any]) -> Array:
    return kronecker([matrix], dtype)


def winograd(outputs: tuple[int, ...] = (2, 4)) -> Algorithm:
    """The algorithm with tiles of these numbers of pixels along an axis, of which the geometry chooses."""
    return Algorithm(name="WINOGRAD", refusal=partial(_refusal, outputs), steps=partial(_steps, outputs))


WINOGRAD = winograd()
