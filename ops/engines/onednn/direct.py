"""Grouped convolutions, those of few channels, and those of channels in blocks, by the kernels of `direct_kernels`.

They are made where oneDNN has products of narrow matrices, or less: depthwise ones, also of one axis and with
dilations, and groups that are a part of a vector of channels, or some vectors. A whole image of few channels is read in
NCHW as well as in NHWC; with channels in blocks the library cannot cut an image by rows, and few blocks are few pieces.
Filters are kept as [vectors, taps of a
column, taps of a row, channels read, lanes]. A row of the result is one call for as many vectors as follow each other;
pieces are rows, or vectors where that divides the work better. Of depthwise channels that are no whole vectors the
last vector begins earlier, and writes some results a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import BLOCKS, NHWC
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import (
    BIAS,
    DST,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    in_plain_order,
)
from dagexec.ops.families.activation.post_ops import SUM
from dagexec.ops.families.activation.post_ops import PostOp as GivenPostOp
from dagexec.ops.kernels.direct_kernels import MOST_OTHERS, PLAIN, Row, row_kernel
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.post_ops import ADD_OTHER, FUNCTIONS, PostOp
from dagexec.ops.kernels.sharing import pieces_of, pieces_of_bytes
from dagexec.ops.kernels.tables import even_shares, in_pieces
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

MOST_READ = 64
"""Channels that a group reads, or an image for one vector of 8, of which the library fills half of one of 16."""

_MOST_READ_WHOLE = 8  # channels of a whole image
_MOST_READ_IN_BLOCKS = 512
"""Channels of a whole image in blocks. With AVX2 it takes half the time of the library's, of 1 and 2 blocks that are
written; with AVX-512 it takes as long."""


_FLOAT = 4  # bytes
_MOST_BYTES = 1 << 31  # of an image: code has numbers of 32 bits
_PRODUCTS, _PRODUCTS_BESIDE_NARROW = 5.7e10, 8e10
"""A second, of one core; and in the measure of `implementation` where the library's take longer than it estimates."""


@dataclass(frozen=True)
class Lying:
    """How an image lies in memory, in numbers.

    Attributes:
        channels, row, plane: channels; from a row to the next, and from a run of channels to the next.
        run: channels that lie beside one another.
    """

    channels: int
    run: int
    row: int
    plane: int

    @classmethod
    def of(cls, order: str, channels: int, rows: int, columns: int) -> Lying:
        """That of an image in an order."""
        run = channels if order == NHWC else BLOCKS.get(order, 1)
        return cls(channels, run, columns * run, rows * columns * run)

    def offset(self, channel: int) -> int:
        """Where a channel begins."""
        return channel // self.run * self.plane + channel % self.run

    def is_in_vectors(self, lanes: int) -> bool:
        """True where channels lie beside one another, all or as many as a vector has."""
        return self.run in (self.channels, lanes)

    @property
    def nbytes(self) -> int:
        """Of an image."""
        return self.offset(self.channels) * _FLOAT


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        batch, channels, filters, groups: N, C, M, G.
        rows, columns: the axes of the window.
        has_bias: a number for each channel is added.
        post_ops: in order, as the kernels have them.
        others: the arguments that are added to the result, in order; DST for what it held before.
        orders: of the image and of the result.
    """

    batch: int
    channels: int
    filters: int
    groups: int
    rows: Axis
    columns: Axis
    has_bias: bool
    post_ops: tuple[PostOp, ...]
    others: tuple[int, ...]
    orders: tuple[str, str] = (NHWC, NHWC)

    def fits(self, lanes: int) -> bool:
        """True where groups are a part of a vector or some vectors, and results of a vector can be written at once."""
        read, group = self.channels // self.groups, self.filters // self.groups
        image, result = self.image, self.result
        singly = image.run == 1 and self.groups == 1
        if not (image.is_in_vectors(lanes) or singly) or not result.is_in_vectors(lanes):
            return False
        if max(image.nbytes, result.nbytes) >= _MOST_BYTES:
            return False
        if group % lanes == 0:
            is_alike = image.run == self.channels or read % image.run == 0
            has_taps = self.rows.kernel * self.columns.kernel > 1
            return read <= self._most_read and is_alike and (has_taps or self._is_one_tap_in_blocks(lanes))
        ragged = self.filters % lanes != 0
        return read == group and lanes % group == 0 and self.filters >= lanes and not (ragged and DST in self.others)

    def _is_one_tap_in_blocks(self, lanes: int) -> bool:
        """True where that takes no longer than the library's: with AVX2 functions leave few registers to sums."""
        has_registers = lanes > AVX2 or all(kind in PLAIN for kind, _, _ in self.post_ops)
        return self.orders[0] in BLOCKS and self.together(lanes) > 1 and has_registers

    @property
    def _most_read(self) -> int:
        """Channels of a group that writes whole vectors: with more, oneDNN's products are as fast."""
        if self.groups == 1 and self.orders[0] in BLOCKS:
            return _MOST_READ_IN_BLOCKS
        return MOST_READ if self.groups > 1 or self.filters == AVX2 else _MOST_READ_WHOLE

    def together(self, lanes: int) -> int:
        """Vectors that are computed at once: more than one where a pixel is for few taps, and to read it takes long."""
        vectors, rest = divmod(self.filters // self.groups, lanes)
        if rest or self.columns.kernel >= 2 * self.columns.stride:
            return 1
        return next(count for count in (2, 3, 1) if vectors % count == 0)

    def row(self, lanes: int) -> Row:
        """What a kernel computes."""
        axis, groups, image, result = self.columns, self.groups, self.image, self.result
        return Row(
            lanes,
            self.filters // groups,
            self.channels // groups,
            axis.kernel,
            axis.stride,
            axis.dilation,
            axis.head,
            axis.size,
            axis.out,
            image.run,
            image.plane,
            result.run,
            result.offset(lanes),
            self.rows.kernel,
            self.together(lanes),
            self.has_bias,
            self.post_ops,
        )

    @property
    def image(self) -> Lying:
        """How the image lies."""
        return Lying.of(self.orders[0], self.channels, self.rows.size, self.columns.size)

    @property
    def result(self) -> Lying:
        """How the result lies."""
        return Lying.of(self.orders[1], self.filters, self.rows.out, self.columns.out)

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core."""
        is_slower = self.groups == 1 and self.orders[0] in BLOCKS
        return self.products / (_PRODUCTS if is_slower else _PRODUCTS_BESIDE_NARROW)

    @property
    def products(self) -> int:
        """Products that are summed up."""
        results = self.batch * self.rows.out * self.columns.out * self.filters
        return results * self.rows.kernel * self.columns.kernel * self.channels // self.groups


def finish(
    post_ops: Sequence[GivenPostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
) -> tuple[tuple[PostOp, ...], tuple[int, ...]] | None:
    """Post-ops as the kernels have them, and the arguments that are added to a result of `shape`; None if they cannot.

    `operands` are the arrays that post-ops read, by input number.
    """
    found: list[PostOp] = []
    others: list[int] = []
    for place, one in enumerate(post_ops):
        if one.kind in FUNCTIONS:
            found.append((one.kind, one.a, one.b))
            continue
        alike = one.kind == SUM or (one.kind == ADD_OTHER and _is_alike(operands[one.input], shape))
        if not alike or len(others) == MOST_OTHERS:
            return None
        others.append(DST if one.kind == SUM else POST_OP * (place + 1) | SRC_1)
        found.append((ADD_OTHER, 0.0, 0.0))
    return tuple(found), tuple(others)


def _is_alike(operand: Array, shape: tuple[int, ...]) -> bool:
    return operand.shape == shape and operand.dtype == np.float32 and operand.flags.c_contiguous


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer, with the widest vectors that fit; none where the processor lacks AVX2 and FMA."""
    machine = library.machine
    if not machine.can_run:
        return
    for lanes in (AVX512, AVX2):
        if lanes <= machine.lanes and layer.fits(lanes):
            isa = "avx512" if machine.lanes == AVX512 else "avx2"
            name = f"{COMPOSED}direct, vectors of {lanes}:{isa}"
            assembled = partial(_assemble, layer, lanes)
            yield Candidate(name, None, assembled, layer.seconds, is_in_pieces=True, keeps_nan=True)
            return


def _assemble(
    layer: Layer,
    lanes: int,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    width = lanes * layer.together(lanes)
    spans = list(_spans(layer, width))
    weights = _weights(layer, lanes, spans, problem, arrays[WEIGHTS], pack)
    calls = _Calls(layer, lanes, arrays, weights)
    moved = arrays[SRC].nbytes + arrays[DST].nbytes  # which takes longer than the products of one channel each
    pieces = max(pieces_of(layer.products / _PRODUCTS), pieces_of_bytes(moved) if layer.groups == layer.channels else 1)
    tables = [calls.table(rows, part) for rows, part in _parts(layer.batch * layer.rows.out, spans, pieces, width)]
    kept = {number: array for number, array in arrays.items() if number != WEIGHTS}  # they are packed
    step = in_pieces(tables, (calls, kept), problem.label)
    moved_with = {SRC: arrays[SRC]} if layer.others else {SRC: arrays[SRC], DST: arrays[DST]}
    moving = MovedArguments(step.native_tables, moved_with)
    return Assembled([step], moving, moving.numbers, sum(table.nbytes for table in tables))


@dataclass(frozen=True)
class _Span:
    """Vectors of channels that one call computes.

    Attributes:
        vectors: their number.
        vector: the first, in the order of the weights.
        source, target: the first channel of the image, and that of the result.
        step: channels of the image from those of a vector to those of the next.
    """

    vectors: int
    vector: int
    source: int
    target: int
    step: int


def _spans(layer: Layer, width: int) -> Iterator[_Span]:
    """All vectors of a layer, of `width` channels: those that are computed at once are one."""
    read, group = layer.channels // layer.groups, layer.filters // layer.groups
    if group > width:
        wide = group // width
        for number in range(layer.groups):
            yield _Span(wide, number * wide, number * read, number * group, 0)
        return
    step = read * width // group
    whole = layer.filters // width
    yield _Span(whole, 0, 0, 0, step)
    if layer.filters % width:
        yield _Span(1, whole, layer.channels - width, layer.filters - width, step)


def _parts(rows: int, spans: Sequence[_Span], pieces: int, width: int) -> list[tuple[range, list[_Span]]]:
    """The rows and vectors of each piece: rows are shared, or vectors where that divides the work better."""
    vectors = sum(span.vectors for span in spans)
    if -(-rows // pieces) * vectors <= -(-vectors // pieces) * rows:
        return [(part, list(spans)) for part in even_shares(rows, pieces)]
    apart = len(spans) < 2 or spans[-1].target % width == 0  # else the last vector writes what the one before has, too
    found = even_shares(vectors - (not apart), pieces)
    found[-1] = range(found[-1].start, vectors)
    return [(range(rows), list(_within(spans, part, width))) for part in found]


def _within(spans: Sequence[_Span], part: range, width: int) -> Iterator[_Span]:
    """The vectors whose number is in `part`."""
    for span in spans:
        skipped = max(part.start - span.vector, 0)
        count = min(part.stop - span.vector, span.vectors) - skipped
        if count > 0:
            source, target = span.source + skipped * span.step, span.target + skipped * width
            yield _Span(count, span.vector + skipped, source, target, span.step)


def _weights(layer: Layer, lanes: int, spans: Sequence[_Span], problem: Problem, filters: Array, pack: Pack) -> Array:
    """The filter in the layout of the kernels."""
    row = layer.row(lanes)
    shape = sum(span.vectors for span in spans), row.window, row.taps, row.read, row.together * lanes
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    target = Descriptor.strided(problem.library, shape, FLOAT32, strides)
    fill, unpack = partial(_pack, layer, spans, shape, problem, filters), partial(_unpack, layer, spans, shape)
    making = Making("direct", target.nbytes, fill, unpack)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0]


def _pack(
    layer: Layer, spans: Sequence[_Span], shape: tuple[int, ...], problem: Problem, filters: Array, packed: Array
) -> None:
    """Set `packed` to the filter as [vectors, taps of a column, taps of a row, channels read, width]."""
    _, window, taps, read, width = shape
    plain = in_plain_order(problem, filters).reshape(layer.filters, read, window, taps)
    vectors = packed.view(np.float32).reshape(shape)
    for span in spans:
        part = plain[span.target : span.target + span.vectors * width]
        values = part.reshape(span.vectors, width, read, window, taps).transpose(0, 3, 4, 2, 1)
        np.copyto(vectors[span.vector : span.vector + span.vectors], values)


def _unpack(layer: Layer, spans: Sequence[_Span], shape: tuple[int, ...], packed: Array, plain: Array) -> None:
    """Set `plain`, an array like the filter, to what `_pack` packed."""
    _, window, taps, read, width = shape
    vectors = packed.view(np.float32).reshape(shape)
    found = np.empty((layer.filters, read, window, taps), np.float32)
    for span in spans:
        values = vectors[span.vector : span.vector + span.vectors].transpose(0, 4, 3, 1, 2)
        found[span.target : span.target + span.vectors * width] = values.reshape(-1, read, window, taps)
    np.copyto(plain, found.reshape(plain.shape))


class _Calls:
    """Writes tables of calls, [calls, 5], for rows of the result and spans; it holds the fields that they point at."""

    def __init__(self, layer: Layer, lanes: int, arrays: Mapping[int, Array], weights: Array) -> None:
        row = layer.row(lanes)
        kernel, self._of_sizes = row_kernel(row)
        if kernel is None:
            raise UnsupportedFeatureError("no machine code can be written here")
        self._layer, self._row, self._kernel = layer, row, kernel
        self._x, self._y, self._weights = (address_of(array) for array in (arrays[SRC], arrays[DST], weights))
        self._bias = address_of(arrays[BIAS]) if layer.has_bias else 0
        others = [address_of(arrays[number]) - self._y for number in layer.others]
        self._others = [*others, *[0] * (MOST_OTHERS - len(others))]
        self._kept: list[Array] = [weights]

    def table(self, rows: range, spans: Sequence[_Span]) -> Array:
        """The calls for rows of all images together."""
        axis, row = self._layer.rows, self._row
        images, out = np.divmod(np.arange(rows.start, rows.stop), axis.out)
        start = out * axis.stride - axis.head
        first = np.maximum(-(start // axis.dilation), 0)
        taps = np.maximum(np.minimum(-((start - axis.size) // axis.dilation), axis.kernel) - first, 0)
        image, result = self._layer.image, self._layer.result
        source = self._x + images * image.nbytes + (start + first * axis.dilation) * (image.row * _FLOAT)
        target = self._y + images * result.nbytes + out * (result.row * _FLOAT)
        calls = np.empty((len(images), len(spans), 5), np.int64)
        for number, span in enumerate(spans):
            fields = self._fields(span)
            calls[:, number, 0] = self._kernel
            calls[:, number, 1] = source + image.offset(span.source) * _FLOAT
            calls[:, number, 2] = self._weights + (span.vector * row.window + first) * row.row_weights
            calls[:, number, 3] = target + result.offset(span.target) * _FLOAT
            calls[:, number, 4] = address_of(fields) + taps * fields.strides[0]
        return calls.reshape(-1, 5)

    def _fields(self, span: _Span) -> Array:
        """What a call is told, for each number of rows of taps."""
        row, image = self._row, self._layer.image
        image_row = image.row * self._layer.rows.dilation * _FLOAT
        bias = self._bias + span.target * _FLOAT
        numbers = (image_row, span.vectors, image.offset(span.step) * _FLOAT, bias, *self._others, *self._of_sizes)
        fields = np.array([(taps, *numbers) for taps in range(row.window + 1)], np.int64)
        self._kept.append(fields)
        return fields
