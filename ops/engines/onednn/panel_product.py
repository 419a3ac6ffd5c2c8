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
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade
from dagexec.core.operator import Step
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.packing import Making, offer_unpacking, packed_form
from dagexec.ops.kernels.panel_kernels import FETCHED_LINES, LINE, MAX_ROWS, STEP, VECTORS, panel_kernel
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.ops.kernels.sharing import pieces_of_weights
from dagexec.ops.kernels.tables import even_shares, in_pieces
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache, nearest_cache_ways

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

_Calls = npt.NDArray[np.int64]


def is_for_panels(library: Library, weights: Array) -> bool:
    """True for weights [units, inner] whose sizes are whole vectors and passes, where the kernels can run."""
    if weights.dtype != np.float32 or weights.size < MIN_WEIGHTS or not library.machine.can_run:
        return False
    units, inner = weights.shape
    return fits_panels(units, inner, library.isa.lanes)


def fits_panels(units: int, inner: int, lanes: int) -> bool:
    """True for whole vectors and passes."""
    return units % lanes == inner % STEP == 0


def panels_of(
    tensor: Tensor, shape: tuple[int, int], is_turned: bool, weights: Callable[[], Array], lanes: int, label: str
) -> Array:
    """The constant `tensor`, whose `weights` [units, inner] are of `shape`, in panels, of which it can be made anew.

    They lie as [inner, units] if they are turned.
    """
    constant = tensor.constant
    assert constant is not None, "panels are of constants"

    def fill(packed: Array) -> None:
        pack_panels(weights(), lanes, packed)

    form = f"{'turned' if is_turned else 'straight'} {shape[0]} x {shape[1]}"
    panels = packed_form(constant, form, Making(f"panels of {lanes}", 4 * prod(shape), fill)).view(np.float32)
    if not tensor.is_elsewhere:
        offer_unpacking(tensor, weights(), partial(out_of_panels, panels, lanes), label, surely=True)
    return panels


def pack_panels(weights: Array, lanes: int, packed: Array) -> None:
    """Set `packed`, as many bytes, to weights [units, inner] as panels, one after another."""
    units, inner = weights.shape
    packed = packed.view(np.float32)
    for first, last, columns in _widths(units, lanes):
        panels = packed[first * inner : last * inner].reshape(-1, inner, columns)
        rows = weights[first:last].reshape(-1, columns, inner)
        for column in range(0, columns, _AT_ONCE):
            part = slice(column, column + _AT_ONCE)
            np.copyto(panels[:, :, part], rows[:, part].transpose(0, 2, 1))


def out_of_panels(packed: Array, lanes: int, weights: Array) -> None:
    """Write to `weights` [units, inner] what `pack_panels` packed."""
    for first, last, columns in _widths(len(weights), lanes):
        panels = packed[first * weights.shape[1] : last * weights.shape[1]].reshape(-1, weights.shape[1], columns)
        for number, panel in enumerate(panels):
            weights[first + number * columns : first + (number + 1) * columns] = panel.T


def _widths(units: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """The units that are in panels of one width: the first, the one behind the last, and the width."""
    width = lanes * VECTORS[lanes]
    whole = units // width * width
    if whole:
        yield 0, whole, width
    if whole < units:
        yield whole, units, units - whole


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
    product = _Product(lanes, x, panels, bias, y, addend, post_ops)
    tables = [product.calls(panels, blocks) for panels, blocks in product.parts()]
    if not all(table[:, 0].all() for table in tables):
        return None
    step = in_pieces(tables, product, label)
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


class _Product:
    """The calls of kernels for one product; it holds what they read."""

    def __init__(
        self,
        lanes: int,
        x: Array,
        panels: Array,
        bias: Array,
        y: Array,
        addend: Array | None,
        post_ops: tuple[PostOp, ...],
    ) -> None:
        self._post_ops = post_ops
        *lines, self._line, inner = x.shape
        rows, units = self._line * prod(lines), y.shape[-1]
        self._line_bytes = y.strides[0] if lines else 0
        self.arrays = (x, panels, bias, y, addend)
        self._lanes, self._rows, self._inner, self._units = lanes, rows, inner, units
        self._width = lanes * VECTORS[lanes]
        most = MAX_ROWS[lanes] - (inner % _FAR == 0 and MAX_ROWS[lanes] >= nearest_cache_ways())
        count = -(-self._line // most)
        self._block = -(-self._line // count)
        self._x, self._panels, self._y = (address_of(array) for array in (x, panels, y))
        self._bias = address_of(bias)
        self._addend = 0 if addend is None else address_of(addend) - self._y
        self._kept: list[Array] = []
        self._known: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def parts(self) -> list[tuple[range, range]]:
        """The panels and the rows of each piece: panels are shared, or rows where that divides the work better."""
        pieces = pieces_of_weights(self._rows, self._units * self._inner, self._lanes)
        panels = -(-self._units // self._width)
        blocks = -(-self._rows // self._block)
        if -(-panels // pieces) * blocks <= -(-blocks // pieces) * panels:
            return [(part, range(self._rows)) for part in even_shares(panels, pieces)]
        return [
            (range(panels), range(part.start * self._block, min(part.stop * self._block, self._rows)))
            for part in even_shares(blocks, pieces)
        ]

    def calls(self, panels: range, rows: range) -> _Calls:
        """Those that compute these rows in these panels, [calls, 5]; kernels that cannot run are 0."""
        chunk = max(1, core_cache() // _PART // (4 * self._inner * self._block)) * self._block
        self._rows_of_panel = min(chunk, len(rows))
        firsts = range(rows.start, rows.stop, chunk)
        return np.concatenate([self._columns(panels, first, min(first + chunk, rows.stop)) for first in firsts])

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """What is one call each: the first row, rows of a block, and blocks, which are within a line."""
        while first < last:
            end = min(last, (first // self._line + 1) * self._line)
            whole, rest = divmod(end - first, self._block)
            if whole:
                yield first, self._block, whole
            if rest:
                yield end - rest, rest, 1
            first = end

    def _place(self, row: int) -> int:
        """The address of a row of Y."""
        line, within = divmod(row, self._line)
        return int(self._y + line * self._line_bytes + within * 4 * self._units)

    def _columns(self, panels: range, first: int, last: int) -> _Calls:
        """One panel after another for rows from `first` to `last`, of which each is read for all pieces of them."""
        pieces = list(self._pieces(first, last))
        columns = np.arange(panels.start, panels.stop)[:, np.newaxis] * self._width
        calls = np.empty((len(panels), len(pieces), 5), np.int64)
        calls[:, :, 1] = [self._x + 4 * start * self._inner for start, _, _ in pieces]
        calls[:, :, 2] = self._panels + 4 * self._inner * columns
        calls[:, :, 3] = np.array([self._place(start) for start, _, _ in pieces]) + 4 * columns
        rest = self._units - panels[-1] * self._width
        for part, width in ((slice(0, -1), self._width), (slice(-1, None), min(rest, self._width))):
            if len(calls[part]):
                vectors = width // self._lanes
                calls[part, :, ::4] = [self._kernel(block, count, vectors, start) for start, block, count in pieces]
        return calls.reshape(-1, 5)

    def _kernel(self, block: int, count: int, vectors: int, first: int) -> tuple[int, int]:
        """The kernel, 0 where it cannot run, and the address of its fields."""
        key = block, count, vectors, first
        if key not in self._known:
            kernel = panel_kernel(block, vectors, self._lanes, self.arrays[4] is not None, self._post_ops)
            row = 4 * self._inner
            panel = row * vectors * self._lanes
            numbers = (count, panel, row, 3 * row, 5 * row, block * row, 4 * self._units)
            bias = self._bias - self._place(first)
            ahead = _ahead(panel, self._rows_of_panel // block * (self._inner // STEP))
            fields = np.array((*numbers, bias, self._addend, ahead), np.int64)
            self._kept.append(fields)
            self._known[key] = kernel or 0, address_of(fields)
        return self._known[key]


def _ahead(nbytes: int, passes: int) -> int:
    """Bytes to go on in the next panel, of `nbytes`, in each pass over this one; 0 where that leaves out lines."""
    step = -(-nbytes // max(1, passes))
    return step if step <= LINE * FETCHED_LINES else 0
