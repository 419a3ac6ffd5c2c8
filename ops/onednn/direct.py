"""Grouped convolutions of images N, H, W, C, and those of few channels, by the kernels of `direct_kernels`.

They are made where oneDNN has products of narrow matrices, or less: depthwise ones, also of one axis and with
dilations, and groups that are a part of a vector of channels, or some vectors. Filters are kept as [vectors, taps of a
column, taps of a row, channels read, lanes]. A row of the result is one call for as many vectors as follow each other;
pieces are rows, or vectors where that divides the work better. Of depthwise channels that are no whole vectors the
last vector begins earlier, and writes some results a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.activation.post_ops import SUM
from dagexec.ops.activation.post_ops import PostOp as GivenPostOp
from dagexec.ops.base.geometry import Axis
from dagexec.ops.kernels.direct_kernels import ADD_OTHER, Row, row_kernel
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.post_ops import FUNCTIONS, PostOp
from dagexec.ops.kernels.sharing import pieces_of, pieces_of_bytes
from dagexec.ops.kernels.tables import even_shares, in_pieces
from dagexec.ops.onednn.binding import Library
from dagexec.ops.onednn.descriptors import (
    BIAS,
    DST,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Descriptor,
)
from dagexec.ops.onednn.packing import packed_memory
from dagexec.ops.onednn.problem import (
    COMPOSED,
    Assembled,
    Candidate,
    Memory,
    Pack,
    Problem,
    StillArguments,
    in_plain_order,
)

MOST_READ = 64
"""Channels that a group reads: with more, oneDNN's products are as fast."""

_MOST_READ_WHOLE = 4  # channels of a whole image

_FLOAT = 4  # bytes
_PRODUCTS = 8e10  # a second, of one core, in the measure of `implementation`: they take less than the library's


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        batch, channels, filters, groups: N, C, M, G.
        rows, columns: the axes of the window.
        has_bias: a number for each channel is added.
        post_ops: in order, as the kernels have them.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
    """

    batch: int
    channels: int
    filters: int
    groups: int
    rows: Axis
    columns: Axis
    has_bias: bool
    post_ops: tuple[PostOp, ...]
    other: int

    def fits(self, lanes: int) -> bool:
        """True where groups are a part of a vector or some vectors, and results of a vector can be written at once."""
        read, group = self.channels // self.groups, self.filters // self.groups
        if group % lanes == 0:
            most = MOST_READ if self.groups > 1 else _MOST_READ_WHOLE
            return read <= most and self.rows.kernel * self.columns.kernel > 1
        ragged = self.filters % lanes != 0
        return read == group and lanes % group == 0 and self.filters >= lanes and not (ragged and self.other == DST)

    def row(self, lanes: int) -> Row:
        """What a kernel computes."""
        axis, groups = self.columns, self.groups
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
            self.channels,
            self.filters,
            self.rows.kernel,
            self.has_bias,
            self.post_ops,
        )

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core."""
        results = self.batch * self.rows.out * self.columns.out * self.filters
        return results * self.rows.kernel * self.columns.kernel * self.channels // self.groups / _PRODUCTS


def finish(
    post_ops: Sequence[GivenPostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
) -> tuple[tuple[PostOp, ...], int] | None:
    """Post-ops as the kernels have them, and the argument that is added to a result of `shape`; None where they cannot.

    `operands` are the arrays that post-ops read, by input number.
    """
    found: list[PostOp] = []
    other = 0
    for place, one in enumerate(post_ops):
        if one.kind in FUNCTIONS:
            found.append((one.kind, one.a, one.b))
            continue
        alike = one.kind == SUM or (one.kind == ADD_OTHER and _is_alike(operands[one.input], shape))
        if not alike or other:
            return None
        other = DST if one.kind == SUM else POST_OP * (place + 1) | SRC_1
        found.append((ADD_OTHER, 0.0, 0.0))
    return tuple(found), other


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
            yield Candidate(name, None, partial(_assemble, layer, lanes), layer.seconds, is_in_pieces=True)
            return


def _assemble(
    layer: Layer,
    lanes: int,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    spans = list(_spans(layer, lanes))
    weights = _weights(layer, lanes, spans, problem, arrays[WEIGHTS], pack)
    calls = _Calls(layer, lanes, arrays, weights)
    moved = arrays[SRC].nbytes + arrays[DST].nbytes  # which takes longer than the products of one channel each
    pieces = max(pieces_of(layer.seconds), pieces_of_bytes(moved) if layer.groups == layer.channels else 1)
    tables = [calls.table(rows, part) for rows, part in _parts(layer.batch * layer.rows.out, spans, pieces, lanes)]
    step = in_pieces(tables, (calls, dict(arrays)), problem.label)
    return Assembled([step], StillArguments(), frozenset(), sum(table.nbytes for table in tables))


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


def _spans(layer: Layer, lanes: int) -> Iterator[_Span]:
    """All vectors of a layer."""
    read, group = layer.channels // layer.groups, layer.filters // layer.groups
    if group > lanes:
        wide = group // lanes
        for number in range(layer.groups):
            yield _Span(wide, number * wide, number * read, number * group, 0)
        return
    step = read * lanes // group
    whole = layer.filters // lanes
    yield _Span(whole, 0, 0, 0, step)
    if layer.filters % lanes:
        yield _Span(1, whole, layer.channels - lanes, layer.filters - lanes, step)


def _parts(rows: int, spans: Sequence[_Span], pieces: int, lanes: int) -> list[tuple[range, list[_Span]]]:
    """The rows and vectors of each piece: rows are shared, or vectors where that divides the work better."""
    vectors = sum(span.vectors for span in spans)
    if -(-rows // pieces) * vectors <= -(-vectors // pieces) * rows:
        return [(part, list(spans)) for part in even_shares(rows, pieces)]
    apart = len(spans) < 2 or spans[-1].target % lanes == 0  # else the last vector writes what the one before has, too
    found = even_shares(vectors - (not apart), pieces)
    found[-1] = range(found[-1].start, vectors)
    return [(range(rows), list(_within(spans, part, lanes))) for part in found]


def _within(spans: Sequence[_Span], part: range, lanes: int) -> Iterator[_Span]:
    """The vectors whose number is in `part`."""
    for span in spans:
        skipped = max(part.start - span.vector, 0)
        count = min(part.stop - span.vector, span.vectors) - skipped
        if count > 0:
            source, target = span.source + skipped * span.step, span.target + skipped * lanes
            yield _Span(count, span.vector + skipped, source, target, span.step)


def _weights(layer: Layer, lanes: int, spans: Sequence[_Span], problem: Problem, filters: Array, pack: Pack) -> Array:
    """The filter in the layout of the kernels."""
    row = layer.row(lanes)
    shape = sum(span.vectors for span in spans), row.window, row.taps, row.read, lanes
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    target = Descriptor.strided(problem.library, shape, FLOAT32, strides)
    compute = partial(_packed, layer, spans, shape, problem, filters)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, compute)[0]


def _packed(layer: Layer, spans: Sequence[_Span], shape: tuple[int, ...], problem: Problem, filters: Array) -> Array:
    """The filter as [vectors, taps of a column, taps of a row, channels read, lanes]."""
    _, window, taps, read, lanes = shape
    plain = in_plain_order(problem, filters).reshape(layer.filters, read, window, taps)
    packed = packed_memory.take(prod(shape) * _FLOAT)
    vectors = packed.view(np.float32).reshape(shape)
    for span in spans:
        part = plain[span.target : span.target + span.vectors * lanes]
        values = part.reshape(span.vectors, lanes, read, window, taps).transpose(0, 3, 4, 2, 1)
        np.copyto(vectors[span.vector : span.vector + span.vectors], values)
    packed.flags.writeable = False
    return packed


class _Calls:
    """Writes tables of calls, [calls, 5], for rows of the result and spans; it holds the fields that they point at."""

    def __init__(self, layer: Layer, lanes: int, arrays: Mapping[int, Array], weights: Array) -> None:
        row = layer.row(lanes)
        kernel = row_kernel(row)
        if kernel is None:
            raise UnsupportedFeatureError("no machine code can be written here")
        self._layer, self._row, self._kernel = layer, row, kernel
        self._x, self._y, self._weights = (array.ctypes.data for array in (arrays[SRC], arrays[DST], weights))
        self._bias = arrays[BIAS].ctypes.data if layer.has_bias else 0
        self._other = arrays[layer.other].ctypes.data - self._y if layer.other else 0
        self._kept: list[Array] = [weights]

    def table(self, rows: range, spans: Sequence[_Span]) -> Array:
        """The calls for rows of all images together."""
        axis, row = self._layer.rows, self._row
        images, out = np.divmod(np.arange(rows.start, rows.stop), axis.out)
        start = out * axis.stride - axis.head
        first = np.maximum(-(start // axis.dilation), 0)
        taps = np.maximum(np.minimum(-((start - axis.size) // axis.dilation), axis.kernel) - first, 0)
        source = self._x + (images * axis.size + start + first * axis.dilation) * (row.columns * row.channels * _FLOAT)
        target = self._y + (images * axis.out + out) * (row.result * row.filters * _FLOAT)
        calls = np.empty((len(images), len(spans), 5), np.int64)
        for number, span in enumerate(spans):
            fields = self._fields(span)
            calls[:, number, 0] = self._kernel
            calls[:, number, 1] = source + span.source * _FLOAT
            calls[:, number, 2] = self._weights + (span.vector * row.window + first) * row.row_weights
            calls[:, number, 3] = target + span.target * _FLOAT
            calls[:, number, 4] = fields.ctypes.data + taps * fields.strides[0]
        return calls.reshape(-1, 5)

    def _fields(self, span: _Span) -> Array:
        """What a call is told, for each number of rows of taps."""
        row = self._row
        image_row = row.columns * row.channels * self._layer.rows.dilation * _FLOAT
        bias = self._bias + span.target * _FLOAT
        numbers = (image_row, span.vectors, span.step * _FLOAT, bias, self._other)
        fields = np.array([(taps, *numbers) for taps in range(row.window + 1)], np.int64)
        self._kept.append(fields)
        return fields
