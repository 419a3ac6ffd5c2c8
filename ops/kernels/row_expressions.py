"""Expressions of rows as machine code: passes over the members of a row, each of which joins what it can.

A pass reads the inputs' elements and what the passes before it have joined, and computes in registers. What took long
in an earlier pass is kept in memory beside the rows, so that it is not computed twice. Sums are those of 1024 members
each, in vectors of sums, so that errors grow with the number of these; a row's bytes depend on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.expressions import ELEMENT, NUMBER, PRIMITIVES, ROW_COUNT, Expression, flops_of, in_order
from dagexec.core.operator import Step
from dagexec.ops.base.row_runs import RowRuns
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.expression_kernels import Values, as_vector, has_kernel
from dagexec.ops.kernels.formulas import MOST_CALLS
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import GREATER
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Join = Callable[[Builder, Vector, Vector], Vector]

_CHUNK = 1024
_TOGETHER = 2
_LONG = 10
"""Operations: a value that takes so many is kept."""

_ROWS, _MEMBERS, _SIZE, _MEMORY, _ARRAYS = range(5)
"""Places of the 64-bit numbers that a kernel gets: rows, members, these as float32, and the addresses of memory for
what is kept of a row, of the outputs and of the inputs, behind which are the bytes from each one's row to the next."""

_AS_ARGUMENTS = 3
"""Of so many arrays the addresses are arguments, which may be those of a caller's arrays."""


def row_step(
    machine: Machine,
    results: tuple[Expression, ...],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    members: int,
    label: str,
) -> Step | None:
    """The step that computes `results`, of inputs in order of position, for float32 arrays.

    Their last axis has the members, or is of size 1 for one value a row; along the others the inputs are stretched to
    the outputs, which have one shape there and may be some of them. None where the kernel cannot run.
    """
    arrays = [array if array.ndim else array.reshape(1) for array in (*outputs, *inputs)]
    is_plain = all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays)
    leading = outputs[0].shape[:-1]
    if not machine.can_run or not is_plain or not math.prod(leading) * members:
        return None
    runs = RowRuns(leading, arrays)
    are_rows = tuple(output.shape[-1] < members for output in outputs)
    kernel = row_kernel(results, are_rows, machine.lanes) if has_kernel(*results, of_rows=True) else None
    if kernel is None or runs.rows // runs.count > MOST_CALLS:
        return None
    passes = Passes(results)
    size = int(np.float32(members).view(np.int32))
    tables, kept = [], list[Array]()
    for part in shares(runs.rows, pieces_of_bytes((passes.joining + 2) * runs.rows * members * BYTES)):
        memory = np.empty((len(passes.kept), members), np.float32)
        kept.append(memory)
        table = []
        for piece in runs.cut(part):
            starts = [address_of(array) + at for array, at in zip(arrays, runs.offsets(piece.start), strict=True)]
            numbers = len(piece), members, size, address_of(memory), *starts, *runs.steps
            kept.append(np.array(numbers, np.int64))
            table.append((kernel, address_of(kept[-1]), *[*starts, 0, 0][:_AS_ARGUMENTS]))
        tables.append(table)
    return in_pieces(tables, (kept, arrays), label)


@dataclass(frozen=True)
class Passes:
    """In which pass over a row's members each node is computed: one behind those of the reductions it follows from."""

    results: tuple[Expression, ...]

    @cached_property
    def number(self) -> Mapping[Expression, int]:
        """The pass of each node; a reduction's is that which joins it."""
        numbers: dict[Expression, int] = {}
        for node in in_order(*self.results):
            numbers[node] = max((numbers[one] + one.is_reduction for one in node.operands), default=0)
        return numbers

    @property
    def joining(self) -> int:
        """How many join something; elements are computed in one behind them."""
        return max((1 + number for node, number in self.number.items() if node.is_reduction), default=0)

    @cached_property
    def kept(self) -> list[Expression]:
        """The elements that took long and are read by later passes."""
        later = {
            operand
            for node, number in self.number.items()
            for operand in node.operands
            if number > self.number[operand] and not operand.is_of_row
        }
        return [node for node in self.number if node in later and node.operands and flops_of(node) >= _LONG]

    def reductions(self, number: int) -> list[Expression]:
        """What a pass joins."""
        return [node for node, own in self.number.items() if own == number and node.is_reduction]

    def of_row(self, number: int) -> list[Expression]:
        """What has one value a row, and is computed before a pass."""
        return [
            node for node, own in self.number.items() if own == number and _has_vector(node) and not node.is_reduction
        ]


def _has_vector(node: Expression) -> bool:
    """It has one value a row, and a vector of its own in a kernel."""
    return node.is_of_row and node.kind != NUMBER and not (node.operands and PRIMITIVES[node.kind].is_condition)


def _add(_build: Builder, total: Vector, value: Vector) -> Vector:
    return total + value


def _keeping_nan(join: Callable[[Builder, Vector, Vector], Vector]) -> Join:
    """The instruction gives its second operand for NaN in either."""
    return lambda build, total, value: build.select(build.is_nan(total), total, join(build, total, value))


_JOINS: Mapping[str, tuple[float, Join]] = {
    "row_sum": (0.0, _add),
    "row_max": (-math.inf, _keeping_nan(Builder.maximum)),
    "row_min": (math.inf, _keeping_nan(Builder.minimum)),
}
"""What a reduction begins with, and how it joins vectors."""


@lru_cache(maxsize=256)
def row_kernel(results: tuple[Expression, ...], are_rows: tuple[bool, ...], lanes: int) -> int | None:
    """The address of a function of fields and addresses; None where it cannot run or registers are too few."""
    for together in (_TOGETHER, 1):
        writer = _Writer(results, are_rows, lanes, together)
        writer.write()
        if writer.build.fits():
            return writer.build.function()
    return None


class _Writer:
    """A kernel that is being written; the results of `are_rows` are written once a row."""

    def __init__(self, results: tuple[Expression, ...], are_rows: tuple[bool, ...], lanes: int, together: int) -> None:
        self.build = Builder(lanes)
        self._results, self._are_rows, self._together = results, are_rows, together
        self._passes = Passes(results)
        self._elements_read = [node for node in self._passes.number if node.kind == ELEMENT]
        self._elements_read.sort(key=lambda node: node.value)

    def write(self) -> None:
        """The rows, one after another."""
        build, passes = self.build, self._passes
        count = len(self._are_rows) + len(self._elements_read)
        fields, *places = build.arguments(1 + min(_AS_ARGUMENTS, count))
        self._members = build.number(fields, 8 * _MEMBERS)
        others = range(len(places), count)
        self._places = [*places, *(build.number(fields, 8 * (_ARRAYS + place)) for place in others)]
        memory, self._memory = build.number(fields, 8 * _MEMORY), dict[Expression, Scalar]()
        for node in passes.kept:
            self._memory[node] = memory
            memory = memory + (self._members << 2)
        with build.repeat(build.number(fields, 8 * _ROWS)):
            self._of_row = Values(build, self._results, lambda position: build.broadcast(self._input(position)))
            if ROW_COUNT in passes.number:
                self._of_row.set(ROW_COUNT, build.broadcast(fields, offset=8 * _SIZE))
            for number in range(passes.joining + 1):
                for node in passes.of_row(number):
                    self._of_row.of(node)
                if number < passes.joining:
                    self._join(number)
            if not all(self._are_rows):
                build.each(self._members, self._elements, self._together)
            for place, result, is_row in zip(self._places, self._results, self._are_rows, strict=False):
                if is_row:
                    build.store_first(as_vector(build, self._of_row.of(result)), place)
            for number, place in enumerate(self._places, _ARRAYS + count):
                place.set(place + build.number(fields, 8 * number))

    def _input(self, position: int) -> Scalar:
        """Where an input's row begins."""
        positions = [int(node.value) for node in self._elements_read]
        return self._places[len(self._results) + positions.index(position)]

    def _values(self, number: int, place: Scalar, offset: int, mask: Mask | None) -> Values:
        """The values of a pass for a vector of members."""
        build = self.build

        def read(position: int) -> Vector:
            return build.load(self._input(position), place, offset, mask=mask)

        values = Values(build, self._results, read)
        for node, own in self._passes.number.items():
            if _has_vector(node) and (own < number or (own == number and not node.is_reduction)):
                values.set(node, as_vector(build, self._of_row.of(node)))
            elif node in self._memory and own < number:
                values.set(node, build.load(self._memory[node], place, offset, mask=mask))
        return values

    def _elements(self, place: Scalar, mask: Mask | None) -> None:
        """The last pass."""
        values = self._values(self._passes.joining, place, 0, mask)
        for result, target, is_row in zip(self._results, self._places, self._are_rows, strict=False):
            if not is_row:
                self.build.store(as_vector(self.build, values.of(result)), target, place, mask=mask)

    def _join(self, number: int) -> None:
        """A pass that joins; what it keeps is written."""
        build, reductions = self.build, self._passes.reductions(number)
        kept = [node for node in self._passes.kept if self._passes.number[node] == number]

        def start() -> list[Vector]:
            return [build.constant(_JOINS[node.kind][0]) for node in reductions]

        def join(totals: Sequence[Vector], parts: Sequence[Vector]) -> None:
            for node, total, part in zip(reductions, totals, parts, strict=True):
                total.set(_JOINS[node.kind][1](build, total, part))

        def members(place: Scalar, offset: int = 0, mask: Mask | None = None) -> list[Vector]:
            values = self._values(number, place, offset, mask)
            found = [as_vector(build, values.of(node.operands[0])) for node in reductions]
            for node in kept:
                build.store(as_vector(build, values.of(node)), self._memory[node], place, offset, mask=mask)
            return found

        totals, place, vector = start(), build.zero(), build.lanes * BYTES
        with build.range((self._members & -_CHUNK) << 2, 0, place):
            stop = place + _CHUNK * BYTES
            parts = [start() for _ in range(self._together)]
            with build.range(stop, self._together * vector, place):
                for turn, part in enumerate(parts):
                    join(part, members(place, turn * vector))
            for part in parts:
                join(totals, part)
        last = start()
        with build.range((self._members & -build.lanes) << 2, vector, place):
            join(last, members(place))
        rest = self._members & (build.lanes - 1)
        with build.when(rest, GREATER, 0):
            mask = build.first(rest)
            inside = [
                build.select(mask, value, _JOINS[node.kind][0])
                for node, value in zip(reductions, members(place, mask=mask), strict=True)
            ]
            join(last, inside)
        join(totals, last)
        for node, total in zip(reductions, totals, strict=True):
            self._of_row.set(node, build.over_lanes(total, partial(_JOINS[node.kind][1], build)))
