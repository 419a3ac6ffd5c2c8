"""Convolutions of several taps on images N, H, W, C as products of our own with constant weights in panels.

What the windows of a row of the result read of a row of the image lies one behind another, and that of neighbors
overlaps: a matrix whose rows are a stride of pixels apart, so that a product reads windows where they are. A window is
some segments (`panel_kernels`): a row of taps each, or a tap where they lie apart. Where there is padding, rows of the
image are copied between zeros before, some at a time, which stay in the second cache; long rows in parts.

Kernels know neither height nor width: an image of another size is other numbers in a table of calls. An element of the
result is one chain of products and sums in the order of taps and channels; its bytes depend on no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.native import native_rows
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import out_of_panels, pack_panels
from dagexec.ops.engines.onednn.panel_rows import Panels, Rows, on_panels, panels_of_rows
from dagexec.ops.engines.onednn.problem import (
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    in_one,
    in_plain_order,
)
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

_LEAST_COLUMNS = 64
"""Of a part of long rows."""

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
        return max(1, min(self.rows.out, (_room() // self.line - self.rows.extent) // self.rows.stride + 1))

    def parts(self) -> list[tuple[int, Layer]]:
        """Parts of all rows, with the column of the result where each begins.

        Of a part the cache has room for the rows that one row of the result reads; a single row is cut for pieces, too.
        """
        axis = self.columns
        count = -(-self.line * self.rows.extent // _room())
        if self.rows.out == 1:
            count = max(count, pieces_of(self.seconds / self.batch, MOST_OF_ONE))
        found = even_shares(axis.out, min(count, -(-axis.out // _LEAST_COLUMNS)))
        return [(part.start, replace(self, columns=axis.part(part.start, part.stop))) for part in found]


def _room() -> int:
    """Bytes of rows that stay in the second cache."""
    return core_cache() // _PART


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer; none where the processor lacks AVX2 and FMA."""
    return on_panels(library, "windows", layer, _assemble)


def _assemble(
    layer: Layer, lanes: int, problem: Problem, arrays: Mapping[int, Array], memory: Memory, pack: Pack
) -> Assembled:
    panels = _panels(layer, lanes, problem, arrays[WEIGHTS], pack)
    bias = arrays[BIAS] if layer.has_bias else np.zeros(layer.filters, np.float32)
    parts = [_Calls(part, column, lanes, {**arrays, WEIGHTS: panels, BIAS: bias}) for column, part in layer.parts()]
    shares = _shares(layer, parts[0].panels, parts[0].width, len(parts))
    strips = in_one(memory, [max(parts[number].strip(rows) for number, rows in work) for _, work in shares])
    alike: dict[tuple[range, int], list[tuple[int, range]]] = {}  # pieces of the same filters and part of rows
    for piece, (columns, work) in enumerate(shares):
        for number, rows in work:
            alike.setdefault((columns, number), []).append((piece, rows))
    tables: list[list[Array]] = [[] for _ in shares]
    for (columns, number), found in alike.items():
        written = parts[number].tables(columns, [(rows, address_of(strips[piece])) for piece, rows in found])
        for (piece, _), calls in zip(found, written, strict=True):
            tables[piece] += calls
    table = native_rows(np.concatenate([calls for piece in tables for calls in piece]))
    ends = np.cumsum([sum(map(len, piece)) for piece in tables]).tolist()
    kept = {number: array for number, array in arrays.items() if number != WEIGHTS}, panels, bias, strips, parts
    step = step_of_rows(table, ends, kept, problem.label)
    moved = {SRC: arrays[SRC], WEIGHTS: panels} | ({} if layer.other else {DST: arrays[DST]})
    moving = MovedArguments(step.native_tables, moved)
    return Assembled([step], moving, moving.numbers, table.nbytes)


def _shares(layer: Layer, panels: int, width: int, parts: int) -> list[tuple[range, list[tuple[int, range]]]]:
    """The filters of each piece, and of parts of rows, by number, those which it computes, of all images together.

    There are so many panels of a width, and parts.
    """
    rows = layer.batch * layer.rows.out
    pieces = pieces_of(layer.seconds, MOST_OF_ONE * layer.batch)
    if -(-panels // pieces) * rows * parts <= -(-rows * parts // pieces) * panels:
        whole = [(number, range(rows)) for number in range(parts)]
        return [(range(one.start * width, one.stop * width), whole) for one in even_shares(panels, pieces)]
    found = []
    for share in even_shares(rows * parts, pieces):
        work = [(number, range(max(share.start - number * rows, 0), min(share.stop - number * rows, rows)))
                for number in range(share.start // rows, -(-share.stop // rows))]  # fmt: skip
        found.append((range(layer.filters), work))
    return found


def _panels(layer: Layer, lanes: int, problem: Problem, filters: Array, pack: Pack) -> Array:
    """The filter in panels, whose rows are in the order of taps and channels."""
    shape = -(-layer.filters // lanes), layer.inner, lanes
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
    """Writes tables of calls, [calls, 5], for a part of the rows of a result; it holds the fields that they point at.

    Attributes:
        width: columns of a panel.
        panels: their number.
    """

    def __init__(self, layer: Layer, column: int, lanes: int, arrays: Mapping[int, Array]) -> None:
        """`layer`: that of the part, which begins at a column of the result in `arrays`."""
        self._layer, self.width = layer, lanes * VECTORS[lanes]
        self._x, self._weights, self._y = (address_of(arrays[number]) for number in (SRC, WEIGHTS, DST))
        self._line = arrays[DST].nbytes // (layer.batch * layer.rows.out)
        pixel, step = _FLOAT * layer.filters, layer.columns.stride * layer.pixel
        rows = Rows(layer.columns.out, step, pixel, layer.inner, layer.segment, layer.skipped)
        bias = address_of(arrays[BIAS])
        addend = address_of(arrays[layer.other]) - self._y if layer.other else None
        self._y += column * pixel
        self._panels = panels_of_rows(rows, layer.filters, lanes, bias, addend=addend, post_ops=layer.post_ops)
        self.panels = sum(len(one.columns) for one in self._panels)

    def strip(self, rows: range) -> int:
        """Bytes of the memory for what so many rows copy."""
        layer = self._layer
        return layer.line * layer.read(min(layer.chunk, len(rows))) if layer.is_padded else 0

    def tables(self, columns: range, pieces: Sequence[tuple[range, int]]) -> list[list[Array]]:
        """The calls of pieces that are some rows each, one behind another, in these columns, by strips at addresses."""
        layer = self._layer
        chunks = [_Chunk(rows, strip) for piece, strip in pieces for rows in self._chunks(piece)]
        first = chunks[0].rows.start
        panels = [one for every in self._panels if len((one := every.within(columns)).columns)]
        products = [self._products(one, chunks) for one in panels]
        copies = iter(self._copies(chunks)) if layer.is_padded else None
        tables: list[list[Array]] = []
        for piece, strip in pieces:
            tables.append([] if copies is None else [self._margins(strip, layer.read(min(layer.chunk, len(piece))))])
            for rows in self._chunks(piece):
                tables[-1] += [] if copies is None else [next(copies)]
                within = slice(rows.start - first, rows.stop - first)
                tables[-1] += [calls[:, within].reshape(-1, 5) for calls in products]
        return tables

    def _chunks(self, rows: range) -> Iterator[range]:
        """These rows in parts of one image each, for which strips have room."""
        out, start = self._layer.rows.out, rows.start
        while start < rows.stop:
            stop = min(start + self._layer.chunk, (start // out + 1) * out, rows.stop)
            yield range(start, stop)
            start = stop

    @property
    def _before(self) -> int:
        """Pixels of padding before a row."""
        return max(self._layer.columns.head, 0)

    @property
    def _first(self) -> int:
        """The first pixel of a row that windows read."""
        return max(-self._layer.columns.head, 0)

    @property
    def _copied(self) -> int:
        """Pixels of a row that windows read."""
        columns = self._layer.columns
        return max(0, min(columns.size - self._first, columns.covered - self._before))

    def _margins(self, strip: int, rows: int) -> Array:
        """What sets the zeros beside so many rows: those behind a row and before the next lie together."""
        layer = self._layer
        before = self._before * layer.pixel
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
        row = np.repeat(image * axis.size, counts) + read
        calls = np.zeros((len(places), 5), np.int64)
        calls[:, 0] = np.where(is_inside, c_function("memcpy"), c_function("memset"))
        calls[:, 1] = np.repeat([chunk.strip for chunk in chunks], counts) + layer.line * places
        calls[:, 1] += self._before * layer.pixel
        source = self._x + (row * layer.columns.size + self._first) * layer.pixel
        calls[:, 2] = np.where(is_inside, source, 0)
        calls[:, 3] = self._copied * layer.pixel
        return np.split(calls, ends[:-1])

    def _products(self, panels: Panels, chunks: Sequence[_Chunk]) -> Array:
        """The calls of all rows in these panels, [panels, rows, calls, 5]."""
        layer, axis = self._layer, self._layer.rows
        row = np.arange(chunks[0].rows.start, chunks[-1].rows.stop)
        if layer.is_padded:
            counts = [len(chunk.rows) for chunk in chunks]
            starts = [chunk.strip - chunk.rows.start * axis.stride * layer.line for chunk in chunks]
            read = np.repeat(starts, counts) + row * (axis.stride * layer.line)
        else:
            image, place = np.divmod(row, axis.out)
            read = (image * axis.size + place * axis.stride - axis.head) * layer.line
            read += self._x + self._first * layer.pixel
        calls = np.empty((len(panels.columns), len(row), len(panels.rows), 5), np.int64)
        calls[..., 0] = panels.kernels
        calls[..., 1] = read[:, None] + panels.rows * (layer.columns.stride * layer.pixel)
        calls[..., 2] = (self._weights + _FLOAT * layer.inner * panels.columns)[:, None, None]
        calls[..., 3] = self._y + (row * self._line)[:, None] + panels.rows * (_FLOAT * layer.filters)
        calls[..., 3] += (_FLOAT * panels.columns)[:, None, None]
        calls[..., 4] = panels.addresses[:, None]
        return calls
