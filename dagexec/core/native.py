"""Native steps, which only call C functions: phases in sequence, each of pieces that threads may share.

A small operator of a library takes less time than Python needs to call it, and a large one can be computed by several
threads. So a step may say which native calls it is made of (`declare`, `NativeStep`). Whoever runs it may call the
step, which makes all calls on its thread, or hand out the pieces (`dagexec.scheduler.run.engine`): pieces of a phase
are independent of each other, and a phase begins when all pieces of the previous one have ended.

Pieces follow from the geometry of an example alone, never from the number of threads. So bytes do not depend on who
computes them.

A loop in machine code, generated at run time for the calling convention of System V on x86-64, goes through a table of
functions and arguments and ends at the first call that does not return 0. Where it cannot run - another processor or
system, one that forbids executing written memory, or DAGEXEC_JOIN=off - steps are called one by one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, nothing_to_do
from dagexec.errors import DagexecError
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import A0, A1, A2, A3, NOT_ZERO, RESULT, S0, S1, ZERO
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

Array = npt.NDArray[Any]
Tables = Sequence[npt.NDArray[np.uint64]]

ROW_BYTES = 48
_STRETCHES = 4
"""Parts of a table in controlled schedules."""

ALL_BITS = 0xFFFFFFFF
"""The bits of a result that count: all for a status, none for a function that returns nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class NativeCall:
    """A call of a C function that returns 0 (an int) for success.

    Attributes:
        function: its address.
        arguments: integers or addresses.
        before: a function without result, and its argument, called once before a piece's calls with the same `before`;
            None for nothing.
        failure: makes the error for another result.
        keeps: objects that must live as long as the step.
        on_failure: called instead of raising `failure`; when it returns, the calls continue.
    """

    function: int
    arguments: tuple[int, int, int, int]
    before: tuple[int, int] | None
    failure: Callable[[], Exception]
    keeps: object
    on_failure: Callable[[], None] | None = None


Piece = tuple[NativeCall, ...]
"""Calls in sequence, on one thread."""

Phases = tuple[tuple[Piece, ...], ...]
"""Phases in sequence, each of pieces that may run in any order and concurrently."""


def declare(step: Step, call: NativeCall) -> None:
    """Declare that `step`, a function, does just `call`."""
    step.native_call = call  # type: ignore[attr-defined]


def native_call(step: Step) -> NativeCall | None:
    """The one call that `step` is, if it is one."""
    return getattr(step, "native_call", None)


_PHASES = "phases"


def phases_of(step: Step) -> Phases | None:
    """The native calls that `step` consists of; None where it does something else."""
    phases: Phases | None = getattr(step, _PHASES, None)
    if phases is not None:
        return phases
    call = native_call(step)
    return None if call is None else (((call,),),)


Remake = Callable[..., Any]
"""Makes the same step, or what has it as `step`, for other arrays of the same types and shapes and another label."""

_REMAKING = "remaking"


def declare_remade(step: Step, make: Remake, arrays: Sequence[Array]) -> None:
    """Declare that `step`, a function, is the result of `make` for `arrays` and a label."""
    setattr(step, _REMAKING, (make, tuple(arrays)))


def remade(step: Step) -> tuple[Remake, tuple[Array, ...]] | None:
    """What `declare_remade` said of `step`."""
    return getattr(step, _REMAKING, None)


class NativeStep:
    """A step of native calls, which makes all of them in order on the calling thread. Only where `can_run`.

    Its errors have the failed call in `failed_call`.

    Attributes:
        phases: the calls.
        table: the same as rows for `table_code`.
    """

    __slots__ = ("__weakref__", "_address", "_calls", "_code", "_rows", "native_tables", "phases", "remaking", "table")

    def __init__(self, phases: Phases, native_tables: Tables = ()) -> None:
        """`native_tables`: those that a caller's arrays may be put into (`dagexec.ops.kernels.moving`)."""
        self.phases = phases
        self.native_tables = native_tables
        self._code = required_code()
        self.table, self._calls = rows_of([call for phase in phases for piece in phase for call in piece])
        self._address, self._rows = address_of(self.table), len(self.table)

    def __call__(self) -> None:
        """Make all calls. Raises the error of a call that fails, unless that recovers."""
        remaining = self._code(self._address, self._rows)
        if remaining:
            go_on(self.table, remaining, self._calls)

    def calls(self) -> Sequence[NativeCall]:
        """The call that each row of the table is of."""
        return self._calls


def go_on(table: Array, remaining: int, calls: Sequence[NativeCall]) -> None:
    """The first of the `left` last calls of a table has failed: go on behind it if it recovers.

    Raises its error otherwise, with the call in `failed_call`.
    """
    while remaining:
        call = calls[len(table) - remaining]
        try:
            recover(call)
        except Exception as error:
            error.failed_call = call  # type: ignore[attr-defined]
            raise
        remaining = call_rows(table[len(table) - remaining + 1 :])


def recover(call: NativeCall) -> None:
    """After `call` has failed: raises its error, or returns when the calls behind it are to be made."""
    if call.on_failure is None:
        raise call.failure()
    call.on_failure()


def grouped(phase: Sequence[Piece], count: int) -> list[Piece]:
    """The pieces of a phase, in at most `count` groups."""
    if len(phase) <= count:
        return list(phase)
    ends = [len(phase) * number // count for number in range(count + 1)]
    return [tuple(call for piece in phase[start:stop] for call in piece) for start, stop in pairwise(ends)]


def piece_step(piece: Piece) -> Step:
    """The step that executes a piece. In a controlled schedule other threads may go on in the middle of it."""
    if threads().concurrent or not piece:
        return NativeStep(((piece,),)) if piece else nothing_to_do
    stretches = [NativeStep((((part,),),)) for call in piece for part in _cut(call)]

    def execute() -> None:
        for number, stretch in enumerate(stretches):
            if number:
                threads().point("go on with a piece")
            stretch()

    setattr(execute, _PHASES, ((piece,),))  # tells whose piece it is
    return execute


def _cut(call: NativeCall) -> list[NativeCall]:
    """The call, or several that each run a part of its table."""
    address, rows = call.arguments[:2]
    if call.function != table_code() or rows < 2:
        return [call]
    count = min(rows, _STRETCHES)
    ends = [rows * number // count for number in range(count + 1)]
    return [replace(call, arguments=(address + ROW_BYTES * a, b - a, 0, 0)) for a, b in pairwise(ends)]


def rows_of(calls: Sequence[NativeCall]) -> tuple[Array, list[NativeCall]]:
    """A table of the calls, in order, for `table_code`, and the call that each of its rows is of."""
    rows: list[tuple[int, ...]] = []
    called: list[NativeCall] = []
    before: tuple[int, int] | None = None
    for call in calls:
        if call.before is not None and call.before != before:
            rows.append((*call.before, 0, 0, 0, 0))
            called.append(call)
            before = call.before
        rows.append((call.function, *call.arguments, ALL_BITS))
        called.append(call)
    return np.array(rows, np.uint64).reshape(-1, 6), called


def call_rows(table: Array) -> int:
    """Make the calls of rows from `rows_of`; returns how many are left, of which the first has failed."""
    return required_code()(address_of(table), len(table)) if len(table) else 0


def native_rows(calls: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """The rows of calls, [calls, 5]: a function and its arguments each, whose result does not count."""
    calls_array = np.asarray(calls, np.int64).reshape(-1, 5)
    rows = np.zeros((len(calls_array), 6), np.uint64)
    rows[:, :-1] = calls_array
    return rows


def table_piece(rows: npt.NDArray[np.uint64], keeps: object, label: str) -> Piece:
    """The piece that makes the calls of `rows`. Only where `can_run`."""
    run = table_code()
    assert run is not None, "no machine code runs here"

    def failure() -> DagexecError:
        return DagexecError(f"{label}: a table of native calls did not end")

    return (NativeCall(run, (address_of(rows), len(rows), 0, 0), None, failure, (rows, keeps)),)


PIECE_SECONDS = 60e-6
"""The work of a piece; a third of it where there are two. With more such pieces one thread was 1.5% slower."""

MOST_PIECES = 16
"""The pieces of a step that is cut over its whole batch."""


def pieces_of(seconds: float, most: int = MOST_PIECES, part: int = 3) -> int:
    """The number of pieces, even if more than 1, for work of `seconds` on one core.

    Two pieces pay from 1/`part` of `PIECE_SECONDS` each.
    """
    count = max(1, min(most, max(int(seconds / PIECE_SECONDS), min(2, int(part * seconds / PIECE_SECONDS)))))
    return count - (count > 1 and count % 2)


_Code = Callable[[int, int], int]


@cache
def _code() -> _Code | None:
    """The machine code as a function of a table and its rows; None where it does not run."""
    address = table_code()
    return None if address is None else ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t)(address)


def required_code() -> _Code:
    """The same, where it runs; an error elsewhere."""
    code = _code()
    assert code is not None, "no machine code runs here"
    return code


def can_run() -> bool:
    """True where steps can be native calls."""
    return table_code() is not None


def may_merge() -> bool:
    """True where native calls of several steps may be merged."""
    return can_run() and os.environ.get("DAGEXEC_JOIN") != "off"


@cache
def table_code() -> int | None:
    """The address of the machine code, a C function of a table and its rows that returns the rows left; or None.

    A row is six 64-bit numbers: a function, four arguments, and the bits of its result that must be 0.
    """
    code = GeneralAssembler()
    code.open_frame(S0, S1)
    code.move(S0, A0)  # rbx = the row
    code.move(S1, A1)  # rbp = the rows left
    code.mark("next row")
    code.compare_number(S1, 0)
    code.jump("end", ZERO)
    for place, register in enumerate((A0, A1, A2, A3), 1):
        code.load_field(register, 8 * place, S0)
    code.call_field(S0, 0)
    code.load_field(A3, 40, S0)
    code.intersect(RESULT, A3)
    code.jump("end", NOT_ZERO)
    code.add_number(S0, ROW_BYTES)
    code.add_number(S1, -1)
    code.jump("next row")
    code.mark("end")
    code.move(RESULT, S1)
    code.close_frame(S0, S1)
    code.end_call()
    return executable(code.code())
