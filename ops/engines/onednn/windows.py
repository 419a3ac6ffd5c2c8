"""Convolutions of several taps on images N, H, W, C as products of our own with constant weights in panels.

What the windows of a row of the result read of a row of the image lies one behind another, and that of neighbors
overlaps: a matrix whose rows are a stride of pixels apart, so that a product reads windows where they are. A window is
some segments (`panel_kernels`): a row of taps each, or a tap where they lie apart. Where there is padding, rows of the
image are copied between zeros before, some at a time, which stay in the second cache.

Kernels know neither height nor width: an image of another size is other numbers in a table of calls. An element of the
result is one chain of products and sums in the order of taps and channels; its bytes depend on no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.native import native_rows
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import out_of_panels, pack_panels, slowdown
from dagexec.ops.engines.onednn.panel_rows import Panels, Rows, panels_of_rows
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    in_one,
    in_plain_order,
)
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.panel_kernels import STEP, VECTORS
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import c_function, even_shares, step_of_rows
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache
from dagexec.platform.records import dataclass

_PRODUCTS, _STREAM = 7e10, 2.5e10
"""A second of one core: products, bytes of weights. The library takes as long, but is to be asked for each size."""

_PART = 2
"""The part of the second cache, one in so many, for rows of the image."""

_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        batch, channels, filters: N, C, M.
        rows, columns: the axes of the window.
        has_bias: a number for each channel is added.
        cold: the weights come from memory in a run.
        post_ops: what is done then; ADD_OTHER is among them where it is not the first.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
    """

    batch: int
    channels: int
    filters: int
    rows: Axis
    columns: Axis
    has_bias: bool
    cold: bool
    post_ops: tuple[PostOp, ...]
    other: int

    def fits(self, lanes: int) -> bool:
        """True for whole vectors and passes."""
        return self.filters % lanes == self.channels % STEP == 0

    @property
    def inner(self) -> int:
        """Products that are summed up for an element."""
        return self.rows.kernel * self.columns.kernel * self.channels

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core."""
        results = self.batch * self.rows.out * self.columns.out * self.filters
        return results * self.inner / _PRODUCTS + self.cold * _FLOAT * self.filters * self.inner / _STREAM

    @property
    def pixel(self) -> int:
        """Bytes of a pixel of the image."""
        return _FLOAT * self.channels

    @property
    def is_padded(self) -> bool:
        """True where windows read padding."""
        return self.rows.leaves_input or self.columns.leaves_input

    @property
    def line(self) -> int:
        """Bytes from a row that is read to the next."""
        return self.pixel * (self.columns.covered if self.is_padded else self.columns.size)

    def read(self, rows: int) -> int:
        """Rows that so many rows of the result read."""
        return (rows - 1) * self.rows.stride + self.rows.extent

    @property
    def segment(self) -> int:
        """Numbers of a window that lie beside one another."""
        return self.channels * (self.columns.kernel if self.columns.dilation == 1 else 1)

    @property
    def skipped(self) -> list[int]:
        """Bytes from the end of each segment to the next."""
        starts = [
            row * self.rows.dilation * self.line + column * self.columns.dilation * self.pixel
            for row in range(self.rows.kernel)
            for column in range(self.columns.kernel)
        ]
        taps = self.segment // self.channels
        return [after - before - _FLOAT * self.segment for before, after in pairwise([*starts[::taps], 0])]

    @property
    def chunk(self) -> int:
        """Rows of the result, of those that are read for which the cache has room."""
        room = core_cache() // _PART // self.line - self.rows.extent
        return max(1, min(self.rows.out, room // self.rows.stride + 1))


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer, with the widest vectors that fit; none where the processor lacks AVX2 and FMA."""
    machine = library.machine
    if not machine.can_run:
        return
    for lanes in (AVX512, AVX2):
        if lanes <= machine.lanes and layer.fits(lanes):
            isa = "avx512" if machine.lanes == AVX512 else "avx2"
            name = f"{COMPOSED}windows, vectors of {lanes}:{isa}"
            seconds = layer.seconds * slowdown(layer.filters, lanes, machine.lanes)
            yield Candidate(name, None, partial(_assemble, layer, lanes), seconds, is_in_pieces=True)
            return


def _assemble(
    layer: Layer, lanes: int, problem: Problem, arrays: Mapping[int, Array], memory: Memory, pack: Pack
) -> Assembled:
    panels = _panels(layer, lanes, problem, arrays[WEIGHTS], pack)
    bias = arrays[BIAS] if layer.has_bias else np.zeros(layer.filters, np.float32)
    calls = _Calls(layer, lanes, {**arrays, WEIGHTS: panels, BIAS: bias})
    shares = calls.shares()
    strips = in_one(memory, [calls.strip(rows) for _, rows in shares])
    tables = calls.tables(shares, [address_of(strip) for strip in strips])
    rows = native_rows(np.concatenate([calls for table in tables for calls in table]))
    ends = np.cumsum([sum(map(len, table)) for table in tables]).tolist()
    kept = {number: array for number, array in arrays.items() if number != WEIGHTS}, panels, bias, strips, calls
    step = step_of_rows(rows, ends, kept, problem.label)
    moved = {SRC: arrays[SRC], WEIGHTS: panels} | ({} if layer.other else {DST: arrays[DST]})
    moving = MovedArguments(step.native_tables, moved)
    return Assembled([step], moving, moving.numbers, rows.nbytes)


def _panels(layer: Layer, lanes: int, problem: Problem, filters: Array, pack: Pack) -> Array:
    """The filter in panels, whose rows are in the order of taps and channels."""
    shape = layer.filters // lanes, layer.inner, lanes
    target = Descriptor.strided(problem.library, shape, FLOAT32, (layer.inner * lanes, lanes, 1))
    taps = layer.rows.kernel, layer.columns.kernel

    def fill(packed: Array) -> None:
        plain = in_plain_order(problem, filters).reshape(layer.filters, layer.channels, *taps)
        pack_panels(plain.transpose(0, 2, 3, 1).reshape(layer.filters, layer.inner), lanes, packed)

    def unpack(packed: Array, plain: Array) -> None:
        matrix = np.empty((layer.filters, layer.inner), np.float32)
        out_of_panels(packed.view(np.float32), lanes, matrix)
        turned = matrix.reshape(layer.filters, *taps, layer.channels).transpose(0, 3, 1, 2)
        np.copyto(plain, turned.reshape(plain.shape))

    making = Making("windows", target.nbytes, fill, unpack)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0]


@dataclass(frozen=True)
class _Chunk:
    """Rows of the result that are computed one after another, and the address of the strip that they read."""

    rows: range
    strip: int


class _Calls:
    """Writes tables of calls, [calls, 5]; it holds the fields that they point at."""

    def __init__(self, layer: Layer, lanes: int, arrays: Mapping[int, Array]) -> None:
        self._layer, self._width = layer, lanes * VECTORS[lanes]
        self._x, self._weights, self._y = (address_of(arrays[number]) for number in (SRC, WEIGHTS, DST))
        step, columns = layer.columns.stride * layer.pixel, layer.columns.out
        rows = Rows(columns, step, _FLOAT * layer.filters, layer.inner, layer.segment, layer.skipped)
        bias = address_of(arrays[BIAS])
        addend = address_of(arrays[layer.other]) - self._y if layer.other else None
        self._panels = panels_of_rows(rows, layer.filters, lanes, bias, addend=addend, post_ops=layer.post_ops)

    def shares(self) -> list[tuple[range, range]]:
        """The columns, and the rows of all images together, of each piece."""
        layer = self._layer
        panels, rows = sum(len(one.columns) for one in self._panels), layer.batch * layer.rows.out
        pieces = pieces_of(layer.seconds, MOST_OF_ONE * layer.batch)
        if -(-panels // pieces) * rows <= -(-rows // pieces) * panels:
            parts = even_shares(panels, pieces)
            return [(range(part.start * self._width, part.stop * self._width), range(rows)) for part in parts]
        return [(range(layer.filters), part) for part in even_shares(rows, pieces)]

    def strip(self, rows: range) -> int:
        """Bytes of the memory for what a piece of so many rows copies."""
        layer = self._layer
        return layer.line * layer.read(min(layer.chunk, len(rows))) if layer.is_padded else 0

    def tables(self, shares: Sequence[tuple[range, range]], strips: Sequence[int]) -> list[list[Array]]:
        """The calls of each piece, in parts: those of its rows in its columns, by a strip at its address."""
        pieces = [(rows, strip) for (_, rows), strip in zip(shares, strips, strict=True)]
        if all(rows == shares[0][1] for _, rows in shares):
            alone = [self._tables(columns, [piece]) for (columns, _), piece in zip(shares, pieces, strict=True)]
            return [table for [table] in alone]
        return self._tables(shares[0][0], pieces)

    def _tables(self, columns: range, pieces: Sequence[tuple[range, int]]) -> list[list[Array]]:
        """The calls of pieces that are some rows each, one behind another, with their strips."""
        layer = self._layer
        chunks = [_Chunk(rows, strip) for piece, strip in pieces for rows in self._chunks(piece)]
        first = chunks[0].rows.start
        products = [
            self._products(one, chunks) for panels in self._panels if len((one := panels.within(columns)).columns)
        ]
        copies = iter(self._copies(chunks)) if layer.is_padded else None
        tables: list[list[Array]] = []
        for piece, strip in pieces:
            parts = [] if copies is None else [self._margins(strip, layer.read(min(layer.chunk, len(piece))))]
            for rows in self._chunks(piece):
                parts += [] if copies is None else [next(copies)]
                parts += [one[:, rows.start - first : rows.stop - first].reshape(-1, 5) for one in products]
            tables.append(parts)
        return tables

    def _chunks(self, rows: range) -> Iterator[range]:
        """These rows in parts of one image each, for which strips have room."""
        out, start = self._layer.rows.out, rows.start
        while start < rows.stop:
            stop = min(start + self._layer.chunk, (start // out + 1) * out, rows.stop)
            yield range(start, stop)
            start = stop

    @property
    def _copied(self) -> int:
        """Pixels of a row of the image that windows read."""
        columns = self._layer.columns
        return max(0, min(columns.size, columns.covered - columns.head))

    def _margins(self, strip: int, rows: int) -> Array:
        """What sets the zeros beside so many rows: those behind a row and before the next lie together."""
        layer = self._layer
        before = layer.columns.head * layer.pixel
        behind = layer.line - before - self._copied * layer.pixel
        calls = np.zeros((rows + 1, 5), np.int64)
        calls[:, 0] = c_function("memset")
        calls[:, 1] = strip + layer.line * np.arange(rows + 1) - behind
        calls[:, 3] = behind + before
        calls[0, 1::2], calls[-1, 3] = (strip, before), behind
        return calls

    def _copies(self, chunks: Sequence[_Chunk]) -> list[Array]:
        """What copies the rows of the image that each chunk reads; zeros for those outside."""
        layer, axis = self._layer, self._layer.rows
        counts = [layer.read(len(chunk.rows)) for chunk in chunks]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        image, start = np.divmod([chunk.rows.start for chunk in chunks], axis.out)
        read = np.repeat(start * axis.stride - axis.head, counts) + places
        is_inside = (read >= 0) & (read < axis.size)
        line = layer.columns.size * layer.pixel
        calls = np.zeros((len(places), 5), np.int64)
        calls[:, 0] = np.where(is_inside, c_function("memcpy"), c_function("memset"))
        calls[:, 1] = np.repeat([chunk.strip for chunk in chunks], counts) + layer.line * places
        calls[:, 1] += layer.columns.head * layer.pixel
        calls[:, 2] = np.where(is_inside, self._x + (np.repeat(image * axis.size, counts) + read) * line, 0)
        calls[:, 3] = self._copied * layer.pixel
        return np.split(calls, ends[:-1])

    def _products(self, panels: Panels, chunks: Sequence[_Chunk]) -> Array:
        """The calls of all rows in these panels, [panels, rows, calls, 5]."""
        layer, axis = self._layer, self._layer.rows
        pixel, row = _FLOAT * layer.filters, np.arange(chunks[0].rows.start, chunks[-1].rows.stop)
        if layer.is_padded:
            counts = [len(chunk.rows) for chunk in chunks]
            starts = [chunk.strip - chunk.rows.start * axis.stride * layer.line for chunk in chunks]
            read = np.repeat(starts, counts) + row * (axis.stride * layer.line)
        else:
            image, place = np.divmod(row, axis.out)
            read = self._x + (image * axis.size + place * axis.stride - axis.head) * layer.line
        calls = np.empty((len(panels.columns), len(row), len(panels.rows), 5), np.int64)
        calls[..., 0] = panels.kernels
        calls[..., 1] = read[:, None] + panels.rows * (layer.columns.stride * layer.pixel)
        calls[..., 2] = (self._weights + _FLOAT * layer.inner * panels.columns)[:, None, None]
        calls[..., 3] = self._y + (row * (layer.columns.out * pixel))[:, None] + panels.rows * pixel
        calls[..., 3] += (_FLOAT * panels.columns)[:, None, None]
        calls[..., 4] = panels.addresses[:, None]
        return calls
