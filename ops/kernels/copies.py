"""Strided copies: what Transpose, Slice, Split, Concat and Expand come to, by the kernels of `copy_kernels`.

Axes that lie in memory alike are joined. Rows that are packed on both sides are copied as vectors; where another axis
is packed in the source, squares of 8 x 8 are transposed. Bytes are moved as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade
from dagexec.core.operator import Step
from dagexec.ops.kernels.copy_kernels import (
    ACROSS_BLOCKS,
    DOWN_BLOCKS,
    HEIGHT,
    MATRICES,
    ROWS,
    SIDE,
    outline,
    row_kernel,
    transposing_kernel,
)
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import MOST_PIECES, SMALL_PART, pieces_of, pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_Call = tuple[int, int, int, int, int]

BYTES = 4
_SECONDS_ALONE = 2e-9
"""Of a row, however short, or of an element that is in no block."""

MOST_CALLS = 1 << 12
"""Of an array: a table takes 48 bytes for each."""


@dataclass(frozen=True)
class Axis:
    """One axis of a copy: its size, and the bytes from an element to the next in the source and in the target."""

    size: int
    source: int
    target: int


def copy_step(machine: Machine, pairs: Sequence[tuple[Array, Array]], label: str) -> Step | None:
    """The step that copies the first array of each pair, of any strides, to the second, of the same shape and type.

    None where the kernels do not serve: other processors, objects, and elements of less than four bytes whose rows are
    no words. The arrays must not overlap.
    """
    plans = [_planned(machine, *pair) for pair in pairs]
    if not pairs or any(plan is None for plan in plans):
        return None

    alone = sum(plan.alone for plan in plans if plan is not None)
    pieces = max(
        pieces_of_bytes(2 * sum(target.nbytes for _, target in pairs)),
        pieces_of(_SECONDS_ALONE * alone, MOST_PIECES, SMALL_PART),
    )

    def make(*arrays_and_label: Any) -> Step:
        *arrays, label = arrays_and_label
        tables: list[list[_Call]] = [[] for _ in range(pieces)]
        kept: list[Array] = []
        for plan, source, target in zip(plans, arrays[::2], arrays[1::2], strict=True):
            assert plan is not None
            plan.share(address_of(source), address_of(target), tables, kept)
        return in_pieces(tables, (kept, arrays), label)

    arrays = [array for pair in pairs for array in pair]
    step = make(*arrays, label)
    declare_remade(step, make, arrays)
    return step


def joined_axes(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Axis]:
    """The axes of a copy, as few as do, the one with the least target stride last."""
    axes = [Axis(*one) for one in zip(shape, source, target, strict=True) if one[0] != 1]
    found: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: -axis.target):
        before = found[-1] if found else None
        if before is not None and (before.source, before.target) == (axis.size * axis.source, axis.size * axis.target):
            found[-1] = replace(axis, size=before.size * axis.size)
        else:
            found.append(axis)
    return found


@dataclass(frozen=True)
class _Plan:
    """A kernel and what it is called for.

    Attributes:
        kernel: its address.
        whole: that of the one for all parts but the last, which leave nothing over.
        fields: its numbers.
        outer: the axes over which it is called.
        alone: rows, or elements that are in no block.
        counted: the place of a number that counts steps along `inner`, which pieces may divide.
        inner: these steps; one where there is nothing to divide.
    """

    kernel: int
    whole: int
    fields: tuple[int, ...]
    outer: tuple[Axis, ...]
    alone: int
    counted: int = 0
    inner: Axis = Axis(1, 0, 0)

    def share(self, source: int, target: int, tables: Sequence[list[_Call]], kept: list[Array]) -> None:
        """Add its calls to the tables, one for each piece, and to `kept` the numbers that they read."""
        calls = list(self._calls(source, target, len(tables), kept))
        for number, table in enumerate(tables):
            table += calls[len(calls) * number // len(tables) : len(calls) * (number + 1) // len(tables)]

    def _calls(self, source: int, target: int, pieces: int, kept: list[Array]) -> Iterator[_Call]:
        """All of its calls."""
        parts = min(self.inner.size, 1 if math.prod(axis.size for axis in self.outer) >= pieces else pieces)
        ends = [self.inner.size * number // parts for number in range(parts + 1)]
        for start, stop in pairwise(ends):
            fields = np.array(self.fields, np.int64)
            if self.inner.size > 1:
                fields[self.counted] = stop - start
            kept.append(fields)
            for places in product(*(range(axis.size) for axis in self.outer)):
                steps = [(start, self.inner), *zip(places, self.outer, strict=True)]
                read = source + sum(place * axis.source for place, axis in steps)
                write = target + sum(place * axis.target for place, axis in steps)
                kernel = self.kernel if stop == self.inner.size else self.whole
                yield kernel, read, write, address_of(fields), 0


def _planned(machine: Machine, source: Array, target: Array) -> _Plan | None:
    is_same_type = source.dtype == target.dtype and not source.dtype.hasobject
    if not machine.can_run or not is_same_type or not target.size or min((1, *target.strides)) < 0:
        return None
    axes = _words(source, target)
    if axes is None:
        return None
    last = axes[-1]
    is_spread = last.source == 0 and last.size < SIDE and any(axis.source == BYTES for axis in axes)
    plan = _rows(machine, axes) if last.source in (0, BYTES) and not is_spread else _turned(axes)
    return plan if plan is not None and math.prod(axis.size for axis in plan.outer) <= MOST_CALLS else None


def _words(source: Array, target: Array) -> list[Axis] | None:
    """The axes of a copy of words of BYTES, the last of which is packed in the target; None where there are none."""
    shape = (*target.shape, target.itemsize)
    *outer, last = joined_axes(shape, (*source.strides, 1), (*target.strides, 1)) or [Axis(1, 1, 1)]
    if (last.source, last.target) != (1, 1) or last.size % BYTES:
        return None
    if any(stride % BYTES for axis in outer for stride in (axis.source, axis.target)):
        return None
    if last.size == BYTES and outer and outer[-1].target == BYTES:
        return outer
    return [*outer, Axis(last.size // BYTES, BYTES, BYTES)]


def _rows(machine: Machine, axes: list[Axis]) -> _Plan | None:
    """Packed rows, or rows of one number each: the longest other axis is the kernel's."""
    *outer, last = axes
    kernel = row_kernel(machine.lanes, last.source == 0)
    inner = max(outer, key=lambda axis: axis.size, default=Axis(1, 0, 0))
    rest = tuple(axis for axis in outer if axis is not inner)
    fields = last.size, inner.size, inner.source, inner.target
    rows = math.prod(axis.size for axis in outer)
    return None if kernel is None else _Plan(kernel, kernel, fields, rest, rows, ROWS, inner)


def _turned(axes: list[Axis]) -> _Plan | None:
    """Blocks of the last axis and of that which is packed in the source, or of single elements.

    They follow one another along the shorter axis, so that what lies near in either array is used while it is cached.
    The kernel goes along the nearest of the other axes, too, or along the longest where that takes fewer calls.
    """
    *outer, down = axes
    across = next((axis for axis in outer if axis.source == BYTES), Axis(1, BYTES, BYTES))
    others = [axis for axis in outer if axis is not across]
    matrices = min(others, key=lambda axis: axis.source, default=Axis(1, 0, 0))
    if math.prod(axis.size for axis in others) > MOST_CALLS * matrices.size:
        matrices = max(others, key=lambda axis: axis.size)
    is_down_first = down.size < across.size
    is_packed = down.size < SIDE and across.target == down.size * BYTES
    rows, columns = outline(down.size, HEIGHT), outline(across.size, SIDE)
    if is_down_first:
        counted, blocks = ACROSS_BLOCKS, Axis(across.size // SIDE, SIDE * BYTES, SIDE * across.target)
        in_the_middle = rows, SIDE
    else:
        counted, blocks = DOWN_BLOCKS, Axis(down.size // HEIGHT, HEIGHT * down.source, HEIGHT * BYTES)
        in_the_middle = HEIGHT, columns
    kernel = transposing_kernel(rows, columns, is_down_first, is_packed)
    whole = kernel
    if matrices.size >= blocks.size:
        counted, blocks = MATRICES, matrices
    else:
        whole = transposing_kernel(*in_the_middle, is_down_first, is_packed)
    if kernel is None or whole is None:
        return None
    shape = down.source, across.target, down.size // HEIGHT, across.size // SIDE
    fields = *shape, matrices.size, matrices.source, matrices.target
    rest = tuple(axis for axis in others if axis is not matrices)
    in_blocks = (down.size - down.size % HEIGHT) * (across.size - across.size % SIDE)
    alone = math.prod(axis.size for axis in others) * (down.size * across.size - in_blocks)
    return _Plan(kernel, whole, fields, rest, alone, counted, blocks)
