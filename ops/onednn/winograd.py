"""Winograd's algorithm for windows of 3x3 with stride 1 and images N, H, W, C, out of a primitive and own transforms.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, arXiv:1509.09308; the matrices are those of
`ops/conv/toom_cook.py`. A tile of t x t pixels gives m x m pixels of the result, t = m + 2. A row of tiles goes through

    strip: t, columns, C      B^T along H: whole rows of the image, with zeros around it
    v: tiles, t x t, C        B^T along W
    z: tiles, t x t, M        a product over the channels at each of the t x t places
    strip: t, columns, M      A^T along W
    y: m rows of the result   A^T along H, the bias and post-ops

The transforms are kernels of `winograd_kernels`, the products one primitive: a convolution of one tap in t x t groups,
or G times as many. Rows of tiles are taken in blocks whose v and z stay in a cache. Each number of the result is
computed from one tile in one order, whatever the threads and the batch. oneDNN has the algorithm for AVX-512 only, in
layout NCHW16c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.activation.post_ops import SUM, PostOp
from dagexec.ops.base.layout import NHWC
from dagexec.ops.conv.toom_cook import MinimalFilter, kronecker, minimal_filter
from dagexec.ops.onednn import winograd_kernels as kernels
from dagexec.ops.onednn.binding import Library
from dagexec.ops.onednn.native import join
from dagexec.ops.onednn.operator import reorder
from dagexec.ops.onednn.packing import packed_memory
from dagexec.ops.onednn.primitive import (
    BIAS,
    DST,
    EXEC_ARG_MD,
    FORWARD_INFERENCE,
    POST_OP,
    SCRATCHPAD,
    SCRATCHPAD_MD,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
    PrimitiveDescriptor,
    aligned_empty,
    describe,
)
from dagexec.ops.onednn.problem import COMPOSED, Assembled, Candidate, Memory, Pack, Problem
from dagexec.ops.onednn.team import Row, can_run, team_step
from dagexec.platform.processor import core_cache

TAPS = 3
_OUTPUTS = (2, 4)  # m
_FLOAT = 4  # bytes
_PRODUCT = "brgconv_1x1"  # the library's other implementations are slow in so many groups
_DIRECT = 1  # dnnl_alg_kind_t
_BLOCK = 2  # times a core's cache: v and z of a block
_PRODUCTS, _TRANSFORMED, _STREAM = 5e10, 2.2e10, 2.5e10  # a second: products, bytes of v and z, bytes of weights
_START = 3e-6  # seconds: to start the steps of a block


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        batch, height, width, channels: N, H, W, C of the image.
        filters: M.
        groups: G, of the filter.
        heads: rows and columns of zeros before the image.
        result: H and W of the result.
        finish: bias and post-ops.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
    """

    batch: int
    height: int
    width: int
    channels: int
    filters: int
    groups: int
    heads: tuple[int, int]
    result: tuple[int, int]
    finish: kernels.Epilogue
    other: int = 0


def finish(
    post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...], *, has_bias: bool
) -> tuple[kernels.Epilogue, int] | None:
    """How a layer with these post-ops ends, and the argument that is added to the result; None where it cannot.

    `operands` are the arrays that post-ops read, by input number, and `shape` is that of the result.
    """
    found: list[tuple[str, float, float]] = []
    other = 0
    for place, one in enumerate(post_ops):
        if one.kind in (kernels.RELU, kernels.CLIP):
            found.append((one.kind, one.a, one.b))
        elif one.kind == SUM and not other:
            other = DST
            found.append((kernels.ADD_OTHER, 0.0, 0.0))
        elif one.kind == kernels.ADD_OTHER and not other and _is_alike(operands[one.input], shape):
            other = POST_OP * (place + 1) | SRC_1
            found.append((kernels.ADD_OTHER, 0.0, 0.0))
        else:
            return None
    if sum(kind != kernels.ADD_OTHER for kind, _, _ in found) > kernels.MAX_LIMITS:
        return None
    return kernels.Epilogue(has_bias, tuple(found)), other


def _is_alike(operand: Array, shape: tuple[int, ...]) -> bool:
    return operand.shape == shape and operand.dtype == np.float32 and operand.flags.c_contiguous


def is_available(library: Library) -> bool:
    """True where the processor has AVX2 and FMA, within what the library is limited to, and memory may be executed."""
    return can_run() and library.isa.lanes >= kernels.LANES and library.isa.name != "AVX"


def candidates(library: Library, label: str, layer: Layer, limit: int, cold: bool, threads: int) -> Iterator[Candidate]:
    """Those for a layer, with tiles of 2 x 2 and of 4 x 4 results; none where the processor lacks AVX2 and FMA.

    `limit` is the most bytes of working memory. `cold` is True when the weights come from memory in a run.
    """
    if not is_available(library):
        return
    for outputs in _OUTPUTS:
        tiling = Tiling(layer, outputs, threads)
        try:
            description = _product(library, label, tiling, threads)
        except UnsupportedFeatureError:
            continue
        if sum(tiling.memory(description)) <= limit:
            name = f"{COMPOSED}winograd {outputs}x{TAPS} {description.name}"
            yield Candidate(name, description, partial(_assemble, tiling, description), tiling.seconds(cold))


@dataclass(frozen=True)
class Tiling:
    """A layer in tiles of m x m results, for a number of threads."""

    layer: Layer
    outputs: int
    threads: int

    @property
    def filter(self) -> MinimalFilter:
        """F(m, 3)."""
        return minimal_filter(self.outputs, TAPS)

    @property
    def places(self) -> int:
        """t x t."""
        return self.filter.tile**2

    @property
    def columns(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.layer.result[1] // self.outputs)

    @property
    def image_rows(self) -> int:
        return -(-self.layer.result[0] // self.outputs)

    @property
    def rows(self) -> int:
        """Rows of tiles in all images."""
        return self.layer.batch * self.image_rows

    @property
    def block_rows(self) -> int:
        """Rows of tiles that are computed together: as many as stay in the caches of the cores, or more.

        More where reading the weights would take longer than the rest. The last block may have fewer rows; its product
        is of as many as the others, for the weights' layout depends on that, so few should be wanting.
        """
        row = self.columns * self.places * (self.layer.channels + self.layer.filters) * _FLOAT
        most = max(self.threads, _BLOCK * core_cache() * self.threads // row, -(-self._weights_nbytes // (2 * row)))
        most = min(most, self.rows)
        return min(range(-(-most // 2), most + 1), key=lambda size: (-(-self.rows // size) * size, -size))

    @property
    def blocks(self) -> list[range]:
        """The rows of tiles of each block."""
        size = self.block_rows
        return [range(start, min(start + size, self.rows)) for start in range(0, self.rows, size)]

    @property
    def _weights_nbytes(self) -> int:
        return self.places * self.layer.channels * self.layer.filters // self.layer.groups * _FLOAT

    @property
    def filter_shape(self) -> tuple[int, ...]:
        """The filter of the product."""
        layer = self.layer
        return self.places * layer.groups, layer.filters // layer.groups, layer.channels // layer.groups, 1, 1

    def memory(self, description: PrimitiveDescriptor) -> tuple[int, ...]:
        """Bytes of v, of z, of the product's working memory, and of a strip for each thread."""
        layer, tiles = self.layer, self.block_rows * self.columns
        read = (self.columns * self.outputs + TAPS - 1) * layer.channels
        strip = self.filter.tile * max(read, self.columns * self.outputs * layer.filters) * _FLOAT
        images = (tiles * self.places * channels * _FLOAT for channels in (layer.channels, layer.filters))
        return *images, description.scratchpad_bytes, *[strip] * min(self.threads, self.block_rows)

    def seconds(self, cold: bool) -> float:
        """An estimate of what a run takes on one core; with `cold` weights they are read from memory."""
        layer, blocks = self.layer, len(self.blocks)
        tiles = blocks * self.block_rows * self.columns
        products = tiles * self.places * layer.channels * layer.filters / layer.groups / _PRODUCTS
        transforms = tiles * self.places * (layer.channels + layer.filters) * _FLOAT / _TRANSFORMED
        read = self._weights_nbytes / _STREAM if cold else 0.0
        return products + transforms + read + blocks * _START


def _product(library: Library, label: str, tiling: Tiling, threads: int) -> PrimitiveDescriptor:
    """The product for a block. Raises UnsupportedFeatureError when there is no fast one."""
    layer, places = tiling.layer, tiling.places
    tiles = tiling.block_rows * tiling.columns
    source, target = (
        Descriptor.of_order(library, (1, places * channels, tiles, 1), FLOAT32, NHWC)
        for channels in (layer.channels, layer.filters)
    )
    weights = Descriptor.any_layout(library, tiling.filter_shape, FLOAT32)
    images = source.handle, weights.handle, library.ffi.NULL, target.handle
    ones, zeros = library.dims((1, 1)), library.dims((0, 0))
    geometry = ones, zeros, zeros, zeros, Attributes(library).handle
    kind = FORWARD_INFERENCE, _DIRECT
    found = describe(library, threads, label, "convolution_forward", library.engine, *kind, *images, *geometry)
    for one in found.implementations():
        if one.name.startswith(_PRODUCT):
            return one
    raise UnsupportedFeatureError(f"{label}: oneDNN has no fast product of many groups")


def _assemble(
    tiling: Tiling,
    description: PrimitiveDescriptor,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    """The steps of a layer, all blocks one after another."""
    layouts = {number: description.descriptor(EXEC_ARG_MD, number) for number in (SRC, WEIGHTS, DST)}
    filters, given = arrays[WEIGHTS], problem.tensors[WEIGHTS][0]
    compute = partial(_transformed, tiling, problem, filters, layouts[WEIGHTS])
    weights, _ = pack(WEIGHTS, filters, given, layouts[WEIGHTS], compute)
    v, z, scratchpad, *strips = (memory(nbytes) for nbytes in tiling.memory(description))
    bound = description.create().bind(
        {
            SRC: (layouts[SRC], v),
            WEIGHTS: (layouts[WEIGHTS], weights),
            DST: (layouts[DST], z),
            SCRATCHPAD: (description.descriptor(SCRATCHPAD_MD), scratchpad),
        },
        problem.label,
    )
    tables = _Tables(tiling, arrays, v, z, strips)
    steps: list[Step] = []
    team = partial(
        team_step, problem.library, tiling.threads, keeps=(tables, v, z, strips, dict(arrays)), label=problem.label
    )
    for block in tiling.blocks:
        parts = _parts(block, len(strips))
        steps.append(team([tables.read(part, block.start, strip) for strip, part in enumerate(parts)]))
        steps.append(bound.step)
        steps.append(team([tables.write(part, block.start, strip) for strip, part in enumerate(parts)]))
    return Assembled(join(steps, [0.0] * len(steps), 1.0), bound, frozenset())


def _parts(block: range, count: int) -> list[range]:
    """The rows of a block for each of so many threads."""
    ends = [block.start + len(block) * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


class _Tables:
    """Writes tables of kernel calls for rows of tiles, and the lines that each call goes along."""

    def __init__(
        self, tiling: Tiling, arrays: Mapping[int, Array], v: Array, z: Array, strips: Sequence[Array]
    ) -> None:
        layer = tiling.layer
        self._tiling = tiling
        self._strips = [strip.ctypes.data for strip in strips]
        self._x, self._y, self._v, self._z = (array.ctypes.data for array in (arrays[SRC], arrays[DST], v, z))
        self._bias = arrays[BIAS].ctypes.data if layer.finish.bias else 0
        self._other = arrays[layer.other].ctypes.data - self._y if layer.other else 0
        self._zeros = _zeros(layer.width * layer.channels * _FLOAT)
        self._lines: list[Array] = []

    def read(self, rows: range, first: int, strip: int) -> list[Row]:
        """The calls from the image to v, where row `first` is at the beginning."""
        if not rows:
            return []
        tiling, layer, start = self._tiling, self._tiling.layer, self._strips[strip]
        pixel, tile = layer.channels * _FLOAT, tiling.filter.tile
        across = (tiling.columns * tiling.outputs + TAPS - 1) * pixel
        head = layer.heads[1] * pixel
        inside = min(layer.width * pixel, across - head)
        kernel = kernels.line_kernel(tiling.filter.data)
        lines = [start + across * number for number in range(tile)]
        outside = ((0, head), (head + inside, across - head - inside))
        table = [(_memset(), line + begin, 0, size, 0) for line in lines for begin, size in outside if size]
        for row in rows:
            inner = [line + head for line in lines]
            table.append(self._call(kernel, self._image_lines(row), inner, inside))
            v = self._v + (row - first) * tiling.columns * tiling.places * pixel
            for number, line in enumerate(lines):
                places = _spread(v + number * tile * pixel, tile, pixel)
                steps = tiling.outputs * pixel, tiling.places * pixel
                table.append(self._call(kernel, _spread(line, tile, pixel), places, pixel, tiling.columns, *steps))
        return table

    def write(self, rows: range, first: int, strip: int) -> list[Row]:
        """The calls from z, which begins with row `first`, to the result."""
        tiling, layer, start = self._tiling, self._tiling.layer, self._strips[strip]
        pixel, tile = layer.filters * _FLOAT, tiling.filter.tile
        lines = _spread(start, tile, tiling.columns * tiling.outputs * pixel)
        matrix = tiling.filter.output
        kernel = kernels.line_kernel(matrix)
        height, width = layer.result
        table: list[Row] = []
        for row in rows:
            z = self._z + (row - first) * tiling.columns * tiling.places * pixel
            for number, line in enumerate(lines):
                places = _spread(z + number * tile * pixel, tile, pixel)
                steps = tiling.places * pixel, tiling.outputs * pixel
                results = _spread(line, tiling.outputs, pixel)
                table.append(self._call(kernel, places, results, pixel, tiling.columns, *steps))
            image, number = divmod(row, tiling.image_rows)
            top = number * tiling.outputs
            matrix = tiling.filter.output[: height - top]
            results = _spread(self._y + (image * height + top) * width * pixel, len(matrix), width * pixel)
            last = kernels.line_kernel(matrix, layer.finish)
            table.append(self._call(last, lines, results, pixel, width, pixel, pixel))
        return table

    def _image_lines(self, row: int) -> list[int]:
        """The rows of the image that a row of tiles reads; zeros outside."""
        tiling, layer = self._tiling, self._tiling.layer
        image, number = divmod(row, tiling.image_rows)
        top = number * tiling.outputs - layer.heads[0]
        across = layer.width * layer.channels * _FLOAT
        return [
            self._x + (image * layer.height + at) * across if 0 <= at < layer.height else self._zeros.ctypes.data
            for at in range(top, top + tiling.filter.tile)
        ]

    def _call(
        self,
        kernel: int | None,
        read: Sequence[int],
        written: Sequence[int],
        inner: int,
        outer: int = 1,
        read_step: int = 0,
        write_step: int = 0,
    ) -> Row:
        if kernel is None:
            raise UnsupportedFeatureError("code generated at run time is no longer allowed to run")
        lines = np.zeros(kernels.FIELDS, np.int64)
        lines[kernels.READ : kernels.READ + len(read)] = read
        lines[kernels.WRITTEN : kernels.WRITTEN + len(written)] = written
        lines[kernels.INNER :] = (inner, outer, read_step, write_step, self._bias, self._other)
        self._lines.append(lines)
        return kernel, lines.ctypes.data, 0, 0, 0


def _spread(start: int, count: int, step: int) -> list[int]:
    return [start + number * step for number in range(count)]


def _transformed(tiling: Tiling, problem: Problem, array: Array, wanted: Descriptor) -> Array:
    """The filter at every place, G w G^T, in the layout of the product."""
    library, label = problem.library, problem.label
    plain, layout = aligned_empty(problem.plain[WEIGHTS].nbytes), problem.plain[WEIGHTS]
    values = plain.view(np.float32)
    try:
        reorder(library, 1, label, problem.tensors[WEIGHTS][0], layout, array, plain, aligned_empty).step()
    except UnsupportedFeatureError:  # the library has no such copy
        np.copyto(values.reshape(array.shape), array)
    matrix = kronecker([tiling.filter.filter] * 2, np.float32)
    transformed = matrix @ values.reshape(-1, TAPS * TAPS).T  # t * t, M * C/G
    source = Descriptor.of(library, transformed.reshape(tiling.filter_shape), FLOAT32)
    packed = packed_memory.take(wanted.nbytes)
    reorder(library, 1, label, source, wanted, transformed, packed, aligned_empty).step()
    packed.flags.writeable = False
    return packed


@lru_cache(maxsize=1)
def _memset() -> int:
    return ctypes.cast(ctypes.CDLL(None).memset, ctypes.c_void_p).value or 0


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Array:
    """Zeros that nothing writes to."""
    found = aligned_empty(nbytes)
    found[...] = 0
    return found
