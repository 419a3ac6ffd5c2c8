"""Products of two matrices that a run brings, or of stacks of them, by the kernel of `attention_kernels`.

Each element is one chain of fused products and sums in the order of the inner axis, however a product is cut and
wherever its operands lie: a row's bytes depend neither on the other rows nor on the stack. The left matrix is read by
rows, the right one by panels of a few vectors of columns. Where their rows do not lie so they are laid out before it in
every run; so is a large right matrix that many rows are multiplied with.

A matrix times a vector would leave vectors empty. Its elements are inner products, by `dot_kernels`.

On one core of an AMD EPYC with AVX2, in us, in brackets NumPy and oneDNN: queries times keys of 12 heads of 128 tokens
362 (466, 406), of one token after 256 15 (18, 23), of 192 windows of 49 pixels 670 (830, 940); 512 x 512 x 512 3400
(6700, 3600), 16 x 768 x 768 430 (650, 900).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade, native_rows
from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.onednn.attention import Lying
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.panel_rows import MOST_ROWS, blocks_of_rows
from dagexec.ops.kernels.attention_kernels import most_rows, most_vectors, product_kernel
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.dot_kernels import dot_kernel
from dagexec.ops.kernels.machine import AVX2, Machine
from dagexec.ops.kernels.panel_kernels import VECTORS
from dagexec.ops.kernels.sharing import pieces_of_products
from dagexec.ops.kernels.tables import even_shares, step_of_rows
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache, nearest_cache_ways
from dagexec.platform.records import dataclass

_FLOAT = 4  # bytes
_FAR = 4096  # bytes: rows a multiple of it apart contend for few places of the first cache
_PASS = 4  # elements of the inner axis in a pass of the kernel's loop
_GRAIN = 12  # rows that stay together: whole blocks of four and of six
_PART = 2  # the part of the second cache, one in so many, for rows whose products with a panel follow each other

_PACKED_ROWS, _PACKED_BYTES = 128, 1 << 18
"""So many rows pay for laying out a right matrix of so many bytes: with AVX2 512 x 512 x 512 takes 0.79 of the time,
128 x 256 x 2048 0.63, but 64 x 768 x 768 1.15 and 128 x 64 x 64 1.15."""

_UNITS = 8  # inner products that a kernel computes at once

_Stack = tuple[int, ...]
_CallAndFields = tuple[tuple[int, int, int, int], tuple[int, ...]]


def matrix_step(
    owner: OneDNNOperator, a: Array, b: Array, y: Array, *, has_examples: bool, has_vectors: bool = True
) -> Step | None:
    """The step Y = A B of float32 [..., rows, inner] and [..., inner, columns], with as many axes.

    Y is packed, and A and B broadcast to each other in the axes before the last two. With `has_examples` the rows of A
    may be examples, so that a single one is computed as several are; unless it `has_vectors` so may the columns of B.
    None where the kernels cannot run, and where Y is in the memory of the others.
    """
    machine, arrays = owner.onednn.machine, (a, b, y)
    if not machine.can_run or not all(one.size and one.dtype == np.float32 for one in arrays):
        return None
    if np.may_share_memory(a, y) or np.may_share_memory(b, y):
        return None
    if y.shape[-2] == 1 and not _has_rows(b):  # Y^T = B^T A^T: both are read where they lie
        a, b, y = b.swapaxes(-1, -2), a.swapaxes(-1, -2), y.swapaxes(-1, -2)
        is_vector = not has_examples
    else:
        is_vector = has_vectors and y.shape[-1] == 1 and b.strides[-2] == _FLOAT
    *stack, rows, columns = y.shape
    inner = a.shape[-1]
    lanes = machine.lanes if (inner if is_vector else columns) >= machine.lanes else AVX2
    is_vector = is_vector and inner >= lanes
    panels = _panels_of(rows, columns, lanes)
    before: list[Step] = []
    left = a if _has_rows(a) else _laid_out(owner, a, before)
    pays = rows >= _PACKED_ROWS and _FLOAT * inner * columns >= _PACKED_BYTES
    is_packed = not is_vector and (pays or not _has_rows(b))
    right = _in_panels(owner, b, panels, lanes, before) if is_packed else b
    pieces = pieces_of_products(prod(stack) * rows * inner * columns, lanes)
    right_row = 0 if is_packed else right.strides[-2]
    sizes = _Sizes(lanes, rows, inner, columns, left.strides[-2], right_row, y.strides[-2], -(-pieces // prod(stack)))
    calls = (_inner_products if is_vector else _calls)(sizes)
    if calls is None:
        return None
    operands = (right, left) if is_vector else (left, right)
    starts = [_starts(one, tuple(stack)) for one in (*operands, y)]
    return in_sequence([*before, calls.over(starts, pieces)(*operands, y, owner.label)])


def _has_rows(matrix: Array) -> bool:
    """True where the elements of a row are neighbors."""
    return matrix.strides[-1] == _FLOAT or matrix.shape[-1] == 1


def _starts(matrices: Array, stack: _Stack) -> npt.NDArray[np.int64]:
    """The bytes from the first of these matrices to that of each product of the stack."""
    found = np.zeros((), np.int64)
    for size, stride in zip(matrices.shape[:-2], matrices.strides[:-2], strict=True):
        found = found[..., np.newaxis] + stride * np.arange(size)
    return np.broadcast_to(found, stack).reshape(-1)


def _laid_out(owner: OneDNNOperator, matrices: Array, before: list[Step]) -> Array:
    """Memory in which the elements of rows are neighbors; what lays them out goes to `before`."""
    laid = owner.working_memory(_FLOAT * matrices.size).view(np.float32).reshape(matrices.shape)
    before.append(_copying(owner.onednn.machine, [(matrices, laid)], owner.label))
    return laid


def _copying(machine: Machine, pairs: Sequence[tuple[Array, Array]], label: str) -> Step:
    """The step that copies the first of each pair to the second."""
    step = copy_step(machine, pairs, label)
    return step or in_sequence([partial(np.copyto, target, source) for source, target in pairs])


class _Panel(NamedTuple):
    """Columns that a kernel computes at once.

    Attributes:
        first: column.
        vectors: of a row.
        columns: those that are there, if they fill no vector; else 0.
    """

    first: int
    vectors: int
    columns: int


def _panels_of(rows: int, columns: int, lanes: int) -> list[_Panel]:
    """All panels of a product. Columns that fill no vector are the last ones together, some of them twice."""
    most, vectors = most_vectors(rows, lanes) if rows < most_rows(lanes) else VECTORS[lanes], columns // lanes
    found = [_Panel(lanes * start, min(most, vectors - start), 0) for start in range(0, vectors, most)]
    if not vectors:
        return [_Panel(0, 1, columns)]
    return [*found, _Panel(columns - lanes, 1, 0)] if columns % lanes else found


def _runs(panels: Sequence[_Panel], lanes: int) -> Iterator[tuple[_Panel, int]]:
    """Of equal panels that follow each other, the first, and how many they are."""
    for _, alike in groupby(panels, lambda one: (one.vectors, one.columns, one.first % lanes)):
        run = list(alike)
        yield run[0], len(run)


def _place_of(panel: _Panel, inner: int, lanes: int) -> int:
    """Where a panel begins among panels one behind the other, in elements."""
    return inner * (-(-panel.first // lanes) * lanes)


def _in_panels(
    owner: OneDNNOperator, matrices: Array, panels: Sequence[_Panel], lanes: int, before: list[Step]
) -> Array:
    """Memory with the panels of each matrix one behind the other, [..., 1, elements]; the step goes to `before`."""
    *stack, inner, _ = matrices.shape
    last = panels[-1]
    size = _place_of(last, inner, lanes) + inner * last.vectors * lanes
    laid = owner.working_memory(_FLOAT * prod(stack) * size).view(np.float32).reshape(*stack, 1, size)
    source, target = (Lying(one.shape, one.strides, one.dtype) for one in (matrices, laid))
    before.append(_packing(panels, lanes, owner.onednn.machine, source, target, matrices, laid, owner.label))
    return laid


def _packing(
    panels: Sequence[_Panel],
    lanes: int,
    machine: Machine,
    source: Lying,
    target: Lying,
    matrices: Array,
    laid: Array,
    label: str,
) -> Step:
    """The step that lays out matrices, in memory that begins where these arrays do."""
    given, packed = source.at(address_of(matrices)), target.at(address_of(laid))
    *stack, inner, _ = given.shape
    pairs = []
    for panel, count in _runs(panels, lanes):
        width, start = panel.vectors * lanes, _place_of(panel, inner, lanes)
        columns = panel.columns or width
        read = given[..., panel.first : panel.first + count * columns].reshape(*stack, inner, count, columns)
        written = packed[..., 0, start : start + count * inner * width].reshape(*stack, count, inner, width)
        pairs.append((np.moveaxis(read, -2, -3), written[..., :columns]))
    step = _copying(machine, pairs, label)
    declare_remade(step, partial(_packing, panels, lanes, machine, source, target), (matrices, laid))
    return step


class _Sizes(NamedTuple):
    """What decides the calls for one product of a stack.

    Attributes:
        left_row, right_row, row: bytes of rows of A, B and Y; 0 for B in panels.
        parts: in how many it is cut, about.
    """

    lanes: int
    rows: int
    inner: int
    columns: int
    left_row: int
    right_row: int
    row: int
    parts: int

    def shared(self, panels: Sequence[_Panel]) -> Iterator[tuple[range, Sequence[_Panel]]]:
        """The rows and the panels of each part."""
        grains = -(-self.rows // _GRAIN)
        if grains >= len(panels):
            for part in even_shares(grains, self.parts):
                yield range(part.start * _GRAIN, min(part.stop * _GRAIN, self.rows)), panels
        else:
            for part in even_shares(len(panels), self.parts):
                yield range(self.rows), panels[part.start : part.stop]

    def chunks(self, rows: range) -> Iterator[range]:
        """Rows that stay in the second cache while one panel after another is multiplied with them."""
        chunk = max(1, core_cache() // _PART // (_FLOAT * self.inner * _GRAIN)) * _GRAIN
        for start in range(rows.start, rows.stop, chunk):
            yield range(start, min(start + chunk, rows.stop))

    def calls(self, rows: range, panel: _Panel, count: int) -> Iterator[_CallAndFields]:
        """Those of some rows and `count` panels: kernel, bytes to what it reads and writes, and its fields."""
        vectors, lanes, inner = panel.vectors, self.lanes, self.inner
        most = MOST_ROWS[lanes].get(vectors, self.rows)
        if self.left_row % _FAR == 0:
            most = min(most, nearest_cache_ways() - 1)
        width = _FLOAT * vectors * lanes
        of_right = (self.right_row, width) if self.right_row else (width, inner * width)
        start = _FLOAT * panel.first if self.right_row else _FLOAT * _place_of(panel, inner, lanes)
        for first, block, blocks in blocks_of_rows(len(rows), most):
            kernel = product_kernel(block, vectors, lanes, inner >= _PASS, inner % _PASS, panel.columns)
            row = rows.start + first
            left = self.left_row, 3 * self.left_row, 5 * self.left_row, block * self.left_row
            fields = count, blocks, *left, *of_right, self.row, width, inner // _PASS * _PASS * _FLOAT
            yield (kernel or 0, row * self.left_row, start, row * self.row + _FLOAT * panel.first), fields


@lru_cache(maxsize=64)
def _calls(sizes: _Sizes) -> _Calls | None:
    """Those of one product; None where the kernels cannot run."""
    panels, ends = _panels_of(sizes.rows, sizes.columns, sizes.lanes), list[int]()
    calls: list[_CallAndFields] = []
    for rows, own in sizes.shared(panels):
        for chunk in sizes.chunks(rows):
            for panel, count in _runs(own, sizes.lanes):
                calls += sizes.calls(chunk, panel, count)
        ends.append(len(calls))
    return _with_fields(calls, ends)


@lru_cache(maxsize=64)
def _inner_products(sizes: _Sizes) -> _Calls | None:
    """Likewise, of A and a vector, whose elements are neighbors; the vector is the first argument."""
    calls, ends = list[_CallAndFields](), list[int]()
    whole, rest = divmod(sizes.inner, sizes.lanes)
    row = sizes.left_row
    for part in even_shares(-(-sizes.rows // _UNITS), sizes.parts):
        start, stop = part.start * _UNITS, min(part.stop * _UNITS, sizes.rows)
        for first, units, blocks in blocks_of_rows(stop - start, _UNITS):
            kernel = dot_kernel(1, units, sizes.lanes, rest, has_bias=False) or 0
            steps = 0, units * row, _FLOAT * units, 0
            fields = 0, 0, row, *steps, _FLOAT * whole * sizes.lanes, blocks, 0
            calls.append(((kernel, 0, (start + first) * row, (start + first) * _FLOAT), fields))
        ends.append(len(calls))
    return _with_fields(calls, ends)


def _with_fields(calls: Sequence[_CallAndFields], ends: Sequence[int]) -> _Calls | None:
    """The calls of parts that end there; None where there is no kernel for one."""
    if not all(kernel for (kernel, *_), _ in calls):
        return None
    fields = np.array([one for _, one in calls], np.int64)
    places = address_of(fields) + fields.strides[0] * np.arange(len(fields))
    return _Calls(np.column_stack([np.array([call for call, _ in calls], np.int64), places]), np.array(ends), fields)


@dataclass(frozen=True)
class _Calls:
    """The calls of kernels for one product.

    Attributes:
        rows: function, bytes to the first element that it reads or writes of each array, and the address of fields.
        ends: where the rows of each part end.
        fields: what calls read.
    """

    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    fields: npt.NDArray[np.int64]

    def over(self, starts: Sequence[npt.NDArray[np.int64]], pieces: int) -> partial[Step]:
        """What makes the step for a stack, of three arrays and a label; `starts` are the bytes to matrices in these."""
        count = len(starts[0])
        rows = np.tile(self.rows, (count, 1, 1))
        rows[:, :, 1:4] += np.stack(starts, -1)[:, np.newaxis]
        ends = (len(self.rows) * np.arange(count)[:, np.newaxis] + self.ends).reshape(-1)
        shared = tuple([int(ends[part.stop - 1]) for part in even_shares(len(ends), pieces)])
        return partial(_placed, native_rows(rows), shared, self)


def _placed(
    rows: npt.NDArray[np.uint64], ends: tuple[int, ...], calls: _Calls, a: Array, b: Array, y: Array, label: str
) -> Step:
    """The step of these rows for arrays."""
    begins = np.array([0, address_of(a), address_of(b), address_of(y), 0, 0], np.uint64)
    step = step_of_rows(rows + begins, ends, (calls, a, b, y), label)
    declare_remade(step, partial(_placed, rows, ends, calls), (a, b, y))
    return step
