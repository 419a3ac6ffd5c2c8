"""Native calls of several steps: of alike steps, and of merged neighbors.

Operators that make the same calls (`AlikeSteps`) share a table; the tables of neighbors (`JoinedStep`, a task of
`dagexec.scheduler.run.work`) are concatenated. A `NativeCall` is made from a row on demand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import overload

import numpy as np
import numpy.typing as npt

from dagexec.core.native import (
    Array,
    NativeCall,
    NativeStep,
    Phases,
    Piece,
    call_rows,
    go_on,
    may_merge,
    phases_of,
    required_code,
    rows_of,
)
from dagexec.core.operator import Step
from dagexec.platform.addresses import address_of

_NO_ROWS = np.empty((0, 6), np.uint64)


class AlikeSteps:
    """Steps of operators of one form: they make the same native calls with different arguments.

    Attributes:
        tables: of each step, the rows of its calls.
        keeps: objects that must live as long as one of the steps.
    """

    __slots__ = ("_make", "_phases", "keeps", "tables")

    def __init__(self, phases: Phases, tables: Array, make: Callable[[int, NativeCall], NativeCall], keeps: object):
        """`phases`, of one piece each, are the calls of one step.

        `make` completes a call for a step, given its number and the call with that step's arguments.
        """
        self.tables = tables
        self._phases = phases
        self._make = make
        self.keeps = keeps

    def steps(self) -> list[AlikeStep]:
        """All steps."""
        return [AlikeStep(self, number, table) for number, table in enumerate(self.tables)]

    def phases(self, number: int) -> Phases:
        """The calls of step `number`."""
        rows = iter(self.tables[number].tolist())
        phases = []
        for (piece,) in self._phases:
            calls = []
            for call in piece:
                row = next(row_of_call for row_of_call in rows if row_of_call[0] == call.function)
                calls.append(self._make(number, replace(call, arguments=tuple(row[1:5]))))
            phases.append((tuple(calls),))
        return tuple(phases)


class AlikeStep:
    """A step of `AlikeSteps`, called as a `NativeStep`."""

    __slots__ = ("__weakref__", "_alike", "_number", "table")

    def __init__(self, alike: AlikeSteps, number: int, table: Array) -> None:
        self._alike = alike
        self._number = number
        self.table = table

    @property
    def phases(self) -> Phases:
        """The calls, made on demand."""
        return self._alike.phases(self._number)

    def __call__(self) -> None:
        """Make all calls. Raises what a call that fails makes, unless that recovers."""
        remaining = call_rows(self.table)
        if remaining:
            go_on(self.table, remaining, self.calls())

    def calls(self) -> list[NativeCall]:
        """The call that each row of the table is of."""
        return rows_of([call for phase in self.phases for piece in phase for call in piece])[1]


def lie_apart(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each row of addresses of memory of these sizes, whether none of it overlaps."""
    order = np.argsort(addresses, axis=1)
    lying = np.take_along_axis(addresses, order, axis=1)
    apart: npt.NDArray[np.bool_] = np.all(lying[:, :-1] + sizes[order][:, :-1] <= lying[:, 1:], axis=1)
    return apart


NativePart = Piece | NativeStep | AlikeStep
"""Native calls in sequence, on one thread."""


def calls_in(part: NativePart) -> Piece:
    """The calls of a part."""
    return (
        part if isinstance(part, tuple) else tuple(call for phase in part.phases for piece in phase for call in piece)
    )


class JoinedCalls(Sequence[NativeCall]):
    """The concatenated calls of steps and pieces, and their rows; each call is made on demand.

    Attributes:
        table: the rows.
    """

    __slots__ = ("_calls_by_part", "_parts", "_rows", "_starts", "table")

    def __init__(self, parts: Sequence[NativePart]) -> None:
        self._parts = parts
        self._calls_by_part: dict[int, Sequence[NativeCall]] = {}
        tables = []
        for number, part in enumerate(parts):
            if isinstance(part, tuple):
                table, self._calls_by_part[number] = rows_of(part)
                tables.append(table)
            else:
                tables.append(part.table)
        self._rows: Array | None = None  # the needed rows of all tables; None for all
        self._starts: list[int] | None = None
        if len(tables) == 1:
            self.table = tables[0]
            return
        whole = np.concatenate(tables) if tables else _NO_ROWS
        self._rows = _needed(whole)
        self.table = whole if len(self._rows) == len(whole) else whole[self._rows]

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> NativeCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[NativeCall]: ...
    def __getitem__(self, index: int | slice) -> NativeCall | list[NativeCall]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index] if self._rows is None else int(self._rows[index])
        if self._starts is None:
            self._starts = [0, *accumulate(map(len, map(self._calls, range(len(self._parts)))))]
        part = bisect_right(self._starts, row) - 1
        return self._calls(part)[row - self._starts[part]]

    def _calls(self, part: int) -> Sequence[NativeCall]:
        if part not in self._calls_by_part:
            native = self._parts[part]
            assert not isinstance(native, tuple)
            self._calls_by_part[part] = native.calls()
        return self._calls_by_part[part]


def _needed(table: Array) -> Array:
    """The rows without repeated calls of functions that precede others (`NativeCall.before`)."""
    before = np.flatnonzero(table[:, -1] == 0)
    again = np.zeros(len(before), np.bool_)
    again[1:] = (table[before[1:]] == table[before[:-1]]).all(axis=1)
    return np.delete(np.arange(len(table)), before[again])


class JoinedStep:
    """Merged steps of native calls.

    Attributes:
        table: the rows.
    """

    __slots__ = ("__weakref__", "_address", "_calls", "_code", "_rows", "_steps", "table")

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._code = required_code()
        self._calls = JoinedCalls([part for step in steps for part in native_parts(step)])
        self.table = self._calls.table
        self._address, self._rows = address_of(self.table), len(self.table)

    @property
    def phases(self) -> Phases:
        """The calls."""
        return tuple(phase for step in self._steps for phase in phases_of(step) or ())

    def __call__(self) -> None:
        """Make all calls. Raises what a call that fails makes, unless that recovers."""
        remaining = self._code(self._address, self._rows)
        if remaining:
            go_on(self.table, remaining, self._calls)


def native_parts(step: Step) -> Sequence[NativePart]:
    """The parts of a native `step`, for `JoinedCalls`."""
    if isinstance(step, NativeStep | AlikeStep):
        return (step,)
    return [piece for phase in phases_of(step) or () for piece in phase]


def is_native(step: Step) -> bool:
    """True for a step of native calls."""
    return type(step) is AlikeStep or phases_of(step) is not None


def merged(steps: Sequence[Step], seconds: Sequence[float] = (), longest: float = 0.0) -> list[Step]:
    """The steps, with native neighbors merged.

    With estimated `seconds` for each, a merged step takes at most `longest`.
    """
    if not may_merge():
        return list(steps)
    steps_merged: list[Step] = []
    group: list[Step] = []
    length = 0.0

    def close() -> None:
        if group:
            steps_merged.append(group[0] if len(group) == 1 else JoinedStep(tuple(group)))
        group.clear()

    for step, estimate in zip(steps, seconds or [0.0] * len(steps), strict=True):
        native = is_native(step)
        if not native or (group and length + estimate > longest):
            close()
        if not native:
            steps_merged.append(step)
            continue
        length = length + estimate if group else estimate
        group.append(step)
    close()
    return steps_merged
