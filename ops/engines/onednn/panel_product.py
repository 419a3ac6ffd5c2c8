"""Products with constant float32 weights in panels: Y = X W + b, by the kernels of `panel_kernels`.

Of 64 x 1536 by 1536 x 384 on one core of an AMD EPYC (Zen 4), on which 118 GFLOP/s are possible, they reach 100 with
AVX2 and 106 with AVX-512, beside other processes; those of oneDNN that give a row the same bytes in all batches 88
(with AVX2 on one thread, where sums are long) and 93.

W is kept as panels of two or three vectors of columns (the last may have fewer), each with its rows one after another.
A panel is read from memory once, for a chunk of rows of X that stays in the second cache. A thread takes some panels,
or some blocks of rows; an element's bytes depend on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade, native_rows
from dagexec.core.operator import Step
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.packing import Making, offer_unpacking, packed_form
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.panel_kernels import FETCHED_LINES, LINE, MAX_ROWS, STEP, VECTORS, length_of, panel_kernel
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.ops.kernels.sharing import pieces_of_weights
from dagexec.ops.kernels.tables import even_shares, step_of_rows
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache, nearest_cache_ways
from dagexec.platform.records import dataclass

MIN_WEIGHTS = 1 << 14
"""Elements of W: with fewer, calls count, of which the library needs one."""

_FAR = 1024
"""Elements of X's rows that make lines of all rows contend for the same places of the first cache; see MAX_ROWS. Of
those rows a block has one less where there are places for MAX_ROWS lines alone, which leaves one for the panel:
128 x 3072 x 768 runs at 109 GFLOP/s in place of 101 with AVX-512 on a processor with eight."""

_PART = 2
"""The part of the second cache, one in so many, for rows of X whose products with a panel follow each other. The larger
they are, the less often W is read: of 197 x 768 by 768 x 3072, 512 KiB run at 180 GFLOP/s, 1 MiB of 2 at 214."""

_AT_ONCE = 16
"""Columns that are packed at a time: as many lines of W stay in the first cache until all of each has been read."""

_LARGE = 2 << 20
"""Bytes of weights that kernels pack in half the time that NumPy takes; for fewer the calls have to be made first."""

_Calls = npt.NDArray[np.int64]


def is_for_panels(library: Library, weights: Array) -> bool:
    """True for weights [units, inner] that products beside the library's are for, where the kernels can run.

    Beside oneDNN those are of many elements, of whole vectors and passes; without it all.
    """
    if weights.dtype != np.float32 or not weights.size or not library.machine.can_run:
        return False
    units, inner = weights.shape
    is_large = weights.size >= MIN_WEIGHTS and fits_panels(units, inner, library.isa.lanes)
    return is_large or not library.has_primitives


def fits_panels(units: int, inner: int, lanes: int) -> bool:
    """True for whole vectors and passes."""
    return units % lanes == inner % STEP == 0


def panels_of(
    tensor: Tensor, shape: tuple[int, int], is_turned: bool, weights: Callable[[], Array], lanes: int, label: str
) -> Array:
    """The constant `tensor`, whose `weights` [units, inner] are of `shape`, in panels, of which it can be made anew.

    They lie as [inner, units] if they are turned.
    """
    constant, (units, inner) = tensor.constant, shape
    assert constant is not None, "panels are of constants"

    def fill(packed: Array) -> None:
        pack_panels(weights(), lanes, packed)

    form = f"{'turned' if is_turned else 'straight'} {units} x {inner}"
    making = Making(f"panels of {lanes}", panel_bytes(units, inner, lanes), fill)
    panels = packed_form(constant, form, making).view(np.float32)
    if not tensor.is_elsewhere:
        offer_unpacking(tensor, weights(), partial(out_of_panels, panels, lanes), label, surely=True)
    return panels


def panel_bytes(units: int, inner: int, lanes: int) -> int:
    """Bytes of weights [units, inner] as panels: of whole vectors."""
    return 4 * -(-units // lanes) * lanes * inner


def pack_panels(weights: Array, lanes: int, packed: Array) -> None:
    """Set `packed`, of `panel_bytes`, to weights [units, inner] as panels one after another, filled up with 0."""
    over = len(weights) % lanes
    if over:
        weights = np.concatenate([weights, np.zeros((lanes - over, weights.shape[1]), np.float32)])
    pairs = [(rows.transpose(0, 2, 1), panels) for rows, panels in _rows_and_panels(weights, packed, lanes)]
    if _copied_by_kernels(pairs, lanes):
        return
    for rows, panels in pairs:
        for column in range(0, panels.shape[2], _AT_ONCE):
            part = slice(column, column + _AT_ONCE)
            np.copyto(panels[:, :, part], rows[:, :, part])


def out_of_panels(packed: Array, lanes: int, weights: Array) -> None:
    """Write to `weights` [units, inner] what `pack_panels` packed."""
    over = len(weights) % lanes
    if over:
        whole = np.empty((len(weights) + lanes - over, weights.shape[1]), np.float32)
        out_of_panels(packed, lanes, whole)
        weights[...] = whole[: len(weights)]
        return
    pairs = [(panels.transpose(0, 2, 1), rows) for rows, panels in _rows_and_panels(weights, packed, lanes)]
    if _copied_by_kernels(pairs, lanes):
        return
    for panels, rows in pairs:
        for panel, units in zip(panels, rows, strict=True):
            units[...] = panel


def _copied_by_kernels(pairs: Sequence[tuple[Array, Array]], lanes: int) -> bool:
    """True where the first of each of these pairs of large arrays has been copied to the second."""
    if sum(target.nbytes for _, target in pairs) < _LARGE:
        return False
    step = copy_step(Machine(lanes), pairs, "weights")
    if step is not None:
        step()
    return step is not None


def _rows_and_panels(weights: Array, packed: Array, lanes: int) -> Iterator[tuple[Array, Array]]:
    """By width of panels, the weights [panels, columns, inner] that are in them, and these [panels, inner, columns]."""
    packed, inner = packed.view(np.float32), weights.shape[1]
    for first, last, columns in widths(len(weights), lanes):
        panels = packed[first * inner : last * inner].reshape(-1, inner, columns)
        yield weights[first:last].reshape(-1, columns, inner), panels


def widths(units: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """The units in panels of one width, of whole vectors: the first, the one behind the last, and the width."""
    width = lanes * VECTORS[lanes]
    whole = units // width * width
    if whole:
        yield 0, whole, width
    if whole < units:
        yield whole, units, -(-(units - whole) // lanes) * lanes


def product_step(
    x: Array,
    panels: Array,
    bias: Array,
    y: Array,
    addend: Array | None,
    label: str,
    lanes: int,
    post_ops: tuple[PostOp, ...] = (),
) -> Step | None:
    """The step Y = X W + b, plus `addend`, which has the shape of `y` and may be `y`, and post-ops. All are packed.

    `x` and `y` may also be [lines, rows, columns], and then lines of `y` may lie apart, without an addend. None where
    the kernels cannot run.
    """
    *lines, line, inner = x.shape
    block = _block_rows(lanes, line, inner)
    chunk = max(1, core_cache() // _PART // (4 * inner * block)) * block
    units, line_bytes = y.shape[-1], y.strides[0] if lines else 0
    pieces = pieces_of_weights(prod(lines) * line, units * inner, lanes)
    shape = _Shape(lanes, prod(lines), line, inner, units, line_bytes, block, chunk, pieces)
    calls = _calls(shape, post_ops, addend is not None)
    if calls is None:
        return None
    fields = calls.fields.copy()
    place = address_of(y)
    fields[:, _BIAS] += address_of(bias) - place
    if addend is not None:
        fields[:, _ADDEND] = address_of(addend) - place
    begins = np.array([0, address_of(x), address_of(panels), place, address_of(fields), 0], np.uint64)
    step = step_of_rows(calls.rows + begins, calls.ends, (x, panels, bias, y, addend, fields), label)
    arrays = [x, panels, bias, y, *([] if addend is None else [addend])]
    if all(array.flags.c_contiguous for array in arrays):
        declare_remade(step, partial(_again, [array.shape for array in arrays], lanes, post_ops), arrays)
    return step


def _again(shapes: Sequence[tuple[int, ...]], lanes: int, post_ops: tuple[PostOp, ...], *arrays_and_label: Any) -> Step:
    """The step of `product_step` for other arrays, which have the elements of these shapes."""
    *arrays, label = arrays_and_label
    x, panels, bias, y, *others = (
        array.view(np.float32).reshape(shape) for array, shape in zip(arrays, shapes, strict=True)
    )
    step = product_step(x, panels, bias, y, others[0] if others else None, label, lanes, post_ops)
    assert step is not None, "the kernels are there"
    return step


class _Shape(NamedTuple):
    """The sizes of a product, whose result has lines that may lie apart.

    Attributes:
        lines, line: their number, and the rows of each.
        inner, units: columns of X and of Y.
        line_bytes: from a line of Y to the next.
        block: rows that a kernel computes at once.
        chunk: rows whose products with a panel follow each other.
        pieces: in how many, about, the work is cut.
    """

    lanes: int
    lines: int
    line: int
    inner: int
    units: int
    line_bytes: int
    block: int
    chunk: int
    pieces: int

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.lanes * VECTORS[self.lanes]

    def parts(self) -> list[tuple[range, range]]:
        """The panels and the rows of each piece: panels are shared, or rows where that divides the work better."""
        rows = self.lines * self.line
        panels = -(-self.units // self.width)
        blocks = -(-rows // self.block)
        if -(-panels // self.pieces) * blocks <= -(-blocks // self.pieces) * panels:
            return [(part, range(rows)) for part in even_shares(panels, self.pieces)]
        return [
            (range(panels), range(part.start * self.block, min(part.stop * self.block, rows)))
            for part in even_shares(blocks, self.pieces)
        ]

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """What is one call each: the first row, rows of a block, and blocks, which are within a line."""
        while first < last:
            end = min(last, (first // self.line + 1) * self.line)
            whole, rest = divmod(end - first, self.block)
            if whole:
                yield first, self.block, whole
            if rest:
                yield end - rest, rest, 1
            first = end

    def place(self, row: int) -> int:
        """Where a row of Y is."""
        line, within = divmod(row, self.line)
        return line * self.line_bytes + within * 4 * self.units


def _block_rows(lanes: int, line: int, inner: int) -> int:
    """Rows of a line that a kernel computes at once."""
    most = MAX_ROWS[lanes] - (inner % _FAR == 0 and MAX_ROWS[lanes] >= nearest_cache_ways())
    return -(-line // -(-line // most))


@dataclass(frozen=True)
class _ShapeCalls:
    """The calls of kernels for all products of one shape, whose addresses are counted from where arrays begin.

    Attributes:
        rows: of all pieces; of the function, X, panels, Y and the fields.
        ends: where the rows of each piece end.
        fields: a line for each of the fields that calls read.
    """

    rows: npt.NDArray[np.uint64]
    ends: tuple[int, ...]
    fields: npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def _calls(shape: _Shape, post_ops: tuple[PostOp, ...], has_addend: bool) -> _ShapeCalls | None:
    """The calls for a shape; None where the kernels cannot run."""
    writer = _Writer(shape, post_ops, has_addend)
    tables = [writer.calls(panels, rows) for panels, rows in shape.parts()]
    calls = native_rows(np.concatenate(tables))
    if not calls[:, 0].all():
        return None
    ends = tuple(np.cumsum([len(table) for table in tables]).tolist())
    return _ShapeCalls(calls, ends, np.array(writer.fields, np.int64))


class _Writer:
    """Writes the calls for a shape.

    Attributes:
        fields: those that calls read.
    """

    def __init__(self, shape: _Shape, post_ops: tuple[PostOp, ...], has_addend: bool) -> None:
        self._shape, self._post_ops, self._has_addend = shape, post_ops, has_addend
        self.fields: list[tuple[int, ...]] = []
        self._kernels: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def calls(self, panels: range, rows: range) -> _Calls:
        """Those that compute these rows in these panels, [calls, 5]; kernels that cannot run are 0."""
        chunk = self._shape.chunk
        self._rows_of_panel = min(chunk, len(rows))
        firsts = range(rows.start, rows.stop, chunk)
        return np.concatenate([self._columns(panels, first, min(first + chunk, rows.stop)) for first in firsts])

    def _columns(self, panels: range, first: int, last: int) -> _Calls:
        """One panel after another for rows from `first` to `last`, of which each is read for all pieces of them."""
        shape = self._shape
        blocks = list(shape.blocks(first, last))
        columns = np.arange(panels.start, panels.stop)[:, np.newaxis] * shape.width
        calls = np.empty((len(panels), len(blocks), 5), np.int64)
        calls[:, :, 1] = [4 * start * shape.inner for start, _, _ in blocks]
        calls[:, :, 2] = 4 * shape.inner * columns
        calls[:, :, 3] = np.array([shape.place(start) for start, _, _ in blocks]) + 4 * columns
        left = shape.units - panels[-1] * shape.width
        for part, width in ((slice(0, -1), shape.width), (slice(-1, None), min(left, shape.width))):
            if len(calls[part]):
                calls[part, :, ::4] = [self._kernel(block, count, width, start) for start, block, count in blocks]
        return calls.reshape(-1, 5)

    def _kernel(self, block: int, count: int, width: int, first: int) -> tuple[int, int]:
        """The kernel for a panel with so many columns, 0 where it cannot run, and where its fields are."""
        key = block, count, width, first
        if key not in self._kernels:
            shape = self._shape
            vectors, ends = -(-width // shape.lanes), (length_of(shape.inner), width % shape.lanes)
            kernel = panel_kernel(block, vectors, shape.lanes, self._has_addend, self._post_ops, False, *ends)
            row = 4 * shape.inner
            panel = row * vectors * shape.lanes
            numbers = (count, panel, row, 3 * row, 5 * row, block * row, 4 * shape.units)
            ahead = _ahead(panel, self._rows_of_panel // block * (shape.inner // STEP))
            self._kernels[key] = kernel or 0, 8 * (_AHEAD + 1) * len(self.fields)
            self.fields.append((*numbers, -shape.place(first), 0, ahead))
        return self._kernels[key]


_BIAS, _ADDEND, _AHEAD = range(7, 10)  # fields that differ from product to product, and the last one


def _ahead(nbytes: int, passes: int) -> int:
    """Bytes to go on in the next panel, of `nbytes`, in each pass over this one; 0 where that leaves out lines."""
    step = -(-nbytes // max(1, passes))
    return step if step <= LINE * FETCHED_LINES else 0
