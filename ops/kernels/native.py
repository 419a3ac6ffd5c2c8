"""Calls of C functions one after another, without the interpreter between them.

A small operator of a library takes less time than Python needs to call it. Steps that are nothing but such a call say
so (`declare`), and `join` makes one step of several: fifty bytes of machine code, written at run time for the one
calling convention that is known here (System V, x86-64), go through a table of functions and arguments and end at the
first one that does not return 0. Where that cannot be had - another processor or system, one that forbids to run
memory that was written to, or DAGEXEC_JOIN=off - steps are called one by one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import FAILED_STEP, Step
from dagexec.ops.kernels.machine_code import executable
from dagexec.platform.forking import ProcessLock

Array = npt.NDArray[Any]

_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53 55 4883ec08"  # push rbx; push rbp; sub rsp, 8: the stack is aligned for calls
    "4889fb 4889f5"  # rbx = table (first argument), rbp = rows (second argument)
    "4885ed 7420"  # 0: test rbp, rbp; jz 1f
    "488b7b08 488b7310 488b5318 488b4b20"  # the four arguments: rdi, rsi, rdx, rcx
    "ff13"  # call [rbx]
    "234328 7509"  # and eax, [rbx + 40]; jnz 1f
    "4883c330 48ffcd ebdb"  # rbx += 48; --rbp; jmp 0b
    "4889e8 4883c408 5d 5b c3"  # 1: return rbp, the rows left
)

_ROW_BYTES = 48
_ALL_BITS = 0xFFFFFFFF
"""Of a result, those that count: all for a status, none for a function that returns nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class NativeCall:
    """What a step does, when it is no more than a call of a C function that returns 0 (an int) for success.

    Attributes:
        function: its address.
        arguments: integers or addresses.
        before: a function that returns nothing, and its argument, to be called before all of a row of such calls that
            have the same; None for nothing.
        failure: makes what is raised when it returns something else.
        keeps: whatever has to live as long as the step.
        on_failure: called in place of raising `failure`; the row continues when it returns.
    """

    function: int
    arguments: tuple[int, int, int, int]
    before: tuple[int, int] | None
    failure: Callable[[], Exception]
    keeps: object
    on_failure: Callable[[], None] | None = None


_ATTRIBUTE = "native_call"


def declare(step: Step, call: NativeCall) -> None:
    """Say that `step`, a function, does just `call`."""
    setattr(step, _ATTRIBUTE, call)


def native_call(step: Step) -> NativeCall | None:
    """What `declare` said of `step`."""
    return getattr(step, _ATTRIBUTE, None)


Remake = Callable[..., Step]
"""Makes such a step for other arrays of the same types and shapes, and the label of another operator."""

_REMAKING = "remaking"


def declare_remade(step: Step, make: Remake, arrays: Sequence[Array]) -> None:
    """Say that `step`, a function, is what `make` makes for `arrays` and a label."""
    setattr(step, _REMAKING, (make, tuple(arrays)))


def remade(step: Step) -> tuple[Remake, tuple[Array, ...]] | None:
    """What `declare_remade` said of `step`."""
    return getattr(step, _REMAKING, None)


def join(steps: Sequence[Step], seconds: Sequence[float], longest: float) -> list[Step]:
    """The steps, neighbors that are native calls made one step where that is estimated to take `longest` at most.

    `seconds` are the estimates for each of `steps`.
    """
    code = _code()
    if code is None:
        return list(steps)
    found: list[Step] = []
    group: list[tuple[Step, NativeCall]] = []
    length = 0.0

    def close() -> None:
        found.append(group[0][0] if len(group) == 1 else _joined(code, group))
        group.clear()

    for step, estimate in zip(steps, seconds, strict=True):
        call = native_call(step)
        if group and (call is None or length + estimate > longest):
            close()
        if call is None:
            found.append(step)
            continue
        length = length + estimate if group else estimate
        group.append((step, call))
    if group:
        close()
    return found


_Code = Callable[[int, int], int]


def _joined(code: _Code, group: Sequence[tuple[Step, NativeCall]]) -> Step:
    rows: list[tuple[int, ...]] = []
    called: list[tuple[Step, NativeCall]] = []  # for each row
    before: tuple[int, int] | None = None
    for one, call in group:
        if call.before is not None and call.before != before:
            rows.append((*call.before, 0, 0, 0, 0))
            called.append((one, call))
            before = call.before
        rows.append((call.function, *call.arguments, _ALL_BITS))
        called.append((one, call))
    table = np.array(rows, np.uint64)
    address, count = table.ctypes.data, len(rows)
    kept = (table, called)

    def step() -> None:
        left = code(address, count)
        while left:
            failed, call = kept[1][count - left]
            try:
                if call.on_failure is None:
                    raise call.failure()
                call.on_failure()
            except Exception as error:
                setattr(error, FAILED_STEP, failed)
                raise
            left -= 1
            left = code(address + _ROW_BYTES * (count - left), left) if left else 0

    return step


_lock = ProcessLock()
_made: list[_Code | None] = []


def _code() -> _Code | None:
    """The machine code as a function of a table and its rows; None where it does not run."""
    if not _made:
        with _lock.own:
            if not _made:
                _made.append(_make())
    return _made[0]


def _make() -> _Code | None:
    if os.environ.get("DAGEXEC_JOIN") == "off":
        return None
    address = table_code()
    return None if address is None else ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t)(address)


@cache
def table_code() -> int | None:
    """The address of the machine code, a C function of a table and its rows that returns the rows left; or None.

    A row is six 64-bit numbers: a function, four arguments, and the bits of its result that must be 0.
    """
    return executable(_CODE)
