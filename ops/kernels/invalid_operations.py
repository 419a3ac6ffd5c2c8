"""The flag of invalid operations: whether a million maxima have met a NaN, for the price of one instruction.

A processor's maximum gives the other operand for a NaN, so that Relu makes 0 of it. But x86-64 notes every invalid
operation in a flag of the thread that stays set until it is cleared: one that makes a NaN of numbers, and a maximum, a
minimum or an ordered comparison that meets a NaN (Intel, "64 and IA-32 Architectures Software Developer's Manual",
volume 1, 11.5.2.1, and MAXPS in volume 2). So a native call is put between two others: one clears the flag, one looks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from dagexec.core.native import NativeCall, declare, table_code
from dagexec.core.operator import Step
from dagexec.ops.kernels.team import Team
from dagexec.platform.machine_code import executable

_CLEAR = bytes.fromhex(
    "f30f1efa"  # endbr64
    "0fae5c24fc 806424fcfe 0fae5424fc"  # stmxcsr [rsp - 4]; and byte [rsp - 4], ~1; ldmxcsr [rsp - 4]
    "31c0 c3"  # return 0
)
_NOTE = bytes.fromhex(
    "f30f1efa"
    "0fae5c24fc f64424fc01 7410"  # stmxcsr [rsp - 4]; test byte [rsp - 4], 1; jz 1f
    "c70701000000 806424fcfe 0fae5424fc"  # dword [rdi] = 1; and byte [rsp - 4], ~1; ldmxcsr [rsp - 4]
    "31c0 c3"  # 1: return 0
)
_READ = bytes.fromhex("f30f1efa 8b07 c3")  # return dword [rdi]

_ALL_BITS, _NO_BITS = 0xFFFFFFFF, 0

_Row = tuple[int, int, int, int, int, int]


@cache
def _codes() -> tuple[int, int, int, int] | None:
    """The addresses of the code that runs tables, clears the flag, notes it, and reads a note; None without."""
    found = table_code(), executable(_CLEAR), executable(_NOTE), executable(_READ)
    return None if None in found else found  # type: ignore[return-value]


def can_be_seen() -> bool:
    """True where machine code runs that looks at the flag."""
    return _codes() is not None


@cache
def _runner(code: int) -> Callable[[int, int], int]:
    """The machine code of tables as a function of a table and its rows."""
    return ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t)(code)


class Watch:
    """Notes whether an invalid operation happened in the native calls that it guards. One thread at a time.

    Attributes:
        note: 1 when one happened, until it is set to 0.
    """

    def __init__(self, team: Team | None) -> None:
        """`team` is needed for calls whose work is done by a team of threads."""
        codes = _codes()
        assert codes is not None, "nothing can be seen here"
        self._run, clear, self._code, self._read = codes
        self._clearing: _Row = (clear, 0, 0, 0, 0, _NO_BITS)
        self._team = team
        self.note = np.zeros(1, np.int32)

    def _looking(self, threads: int) -> _Row:
        """The row that notes what the flags of so many threads say, and clears them."""
        place = self.note.ctypes.data
        if threads == 1:
            return self._code, place, 0, 0, 0, _NO_BITS
        assert self._team is not None, "the team cannot be asked"
        return self._team.parallel, self._code, place, threads, 0, _NO_BITS

    def around(self, step: Step, threads: int) -> Step:
        """The step that does `step`, the work of so many threads, and notes what happened."""
        run = _runner(self._run)
        clear, look = (np.array([row], np.uint64) for row in (self._clearing, self._looking(threads)))
        places = clear.ctypes.data, look.ctypes.data

        def watched() -> None:
            run(places[0], 1)
            step()
            run(places[1], 1)

        watched.keeps = clear, look  # type: ignore[attr-defined]
        return watched

    def guarded(self, call: NativeCall, threads: int, recover: Callable[[], None] | None) -> Step:
        """The step that does `call` and notes; with `recover` it is called, and the note taken back, after a note.

        It is a native call itself.
        """
        rows = [(*call.before, 0, 0, 0, _NO_BITS)] if call.before else []
        rows += [self._clearing, (call.function, *call.arguments, _ALL_BITS), self._looking(threads)]
        if recover is not None:
            rows.append((self._read, self.note.ctypes.data, 0, 0, 0, _ALL_BITS))
        table = np.array(rows, np.uint64)
        address, count = table.ctypes.data, len(rows)
        run = _runner(self._run)

        def on_failure() -> None:
            if recover is None or not self.note[0]:
                raise call.failure()
            self.note[0] = 0
            recover()

        def step() -> None:
            if run(address, count):
                on_failure()

        arguments = (address, count, 0, 0)
        declare(step, NativeCall(self._run, arguments, None, call.failure, (table, call, self), on_failure))
        return step
