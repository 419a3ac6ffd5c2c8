"""Runs in machine code that keep a log: the code of `engine_code`, with a line about each decision.

A line is written within the same critical section as the decision, so lines are in the order in which the state of the
run changed. What Python does with the run is logged under the same lock. The code without a log has no part of this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import A0, A1, A2, A3, A4, A5, NOT_LESS, RESULT, S0, S1, S2, S3, T0
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.scheduler.run import engine_code
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.engine_code import EngineAssembler, Enter
from dagexec.scheduler.run.engine_layout import Entry, Header, Logged, Slot

_NEXT, _END, _FIRST = 0, 8, 16  # in a log: the address of the next line, that of the end, and the first line
_SPARE_LINES = 4096


class LoggingAssembler(EngineAssembler):
    """An assembler for code that keeps a log."""

    def log(self, event: Logged, *, batch: bool = False) -> None:
        """Write a line."""
        self.push(RESULT, A3)
        if not batch:
            self.load_number(RESULT, S1, None, offset=8 * Slot.TASK)
        self.set_number(A3, event)
        self.call_place("log")
        self.pop(RESULT, A3)

    def code(self) -> bytes:
        """The machine code, with the function that writes a line: event rcx of the task rax."""
        used = (A2, A4)
        self.mark("log")
        self.push(*used)
        _next_line(self, A4)
        self.store_number(RESULT, A4, 8 * Entry.TASK)
        self.store_number(A0, A4, 8 * Entry.TABLE)
        for entry, base, place in (
            (Entry.WORKER, S1, Slot.WORKER), (Entry.PIECE, S1, Slot.PIECE), (Entry.FROM_LAST, S1, Slot.FROM_LAST),
            (Entry.LOCK, S0, Header.LOCK),
        ):  # fmt: skip
            self.load_number(A2, base, None, offset=8 * place)
            self.store_number(A2, A4, 8 * entry)
        self.store_number(A3, A4, 8 * Entry.EVENT)  # last: then the line is whole
        self.mark("log is full")
        self.pop(*used)
        self.end_call()
        return super().code()


def _next_line(code: GeneralAssembler, register: int) -> None:
    """register = the address of a line of this thread's own; jumps where there is none left. Changes rdx."""
    code.load_number(A2, S0, None, offset=8 * Header.LOG)
    code.set_number(register, 8 * Entry.SIZE)
    code.fetch_and_add(register, A2, _NEXT)
    code.compare_with_memory(register, A2, _END)
    code.jump("log is full", NOT_LESS)


@cache
def logging_code() -> Enter | None:
    """The machine code that keeps a log; None where none runs."""
    return engine_code.entered(executable(engine_code.written(LoggingAssembler())))


@cache
def _telling_code() -> Callable[[int, int, int, int, int, int], int]:
    """Code that writes a line with the lock of the run.

    Its arguments are a state, an event, a worker, a task, a piece, and what else there is to say.
    """
    code = EngineAssembler()
    saved = (S0, S2, S3)
    code.push(*saved)
    code.move(S0, A0)
    code.move(S2, A2)
    code.move(S3, A3)
    code.call_place("lock")
    _next_line(code, T0)
    for entry, register in (
        (Entry.WORKER, S2), (Entry.TASK, S3), (Entry.PIECE, A4), (Entry.TABLE, A5), (Entry.EVENT, A1),
    ):  # fmt: skip
        code.store_number(register, T0, 8 * entry)
    code.mark("log is full")
    engine_code.unlock(code)
    code.pop(*saved)
    code.end_call()
    engine_code.lock(code)
    address = executable(code.code())
    assert address is not None, "no machine code runs here"
    numbers = [ctypes.c_long] * 5
    return ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, *numbers)(address)


class LoggedRun(NativeRun):
    """A run that keeps a log from here on.

    The log has room for each piece and `_SPARE_LINES` more; further events are left out.
    """

    __slots__ = ("_lines",)

    def __init__(self, run: NativeRun) -> None:
        """Continue `run`, which no thread has entered, as this one."""
        super().__init__(run.tasks, run._state, None)
        pieces = sum(run.tasks.graph.pieces)
        self._lines = np.zeros(_FIRST // 8 + Entry.SIZE * (4 * pieces + _SPARE_LINES), np.int64)
        start = address_of(self._lines)
        self._lines[0], self._lines[1] = start + _FIRST, start + self._lines.nbytes
        self._state[Header.LOG] = start

    @property
    def code(self) -> Enter | None:
        """The code that its threads enter."""
        return logging_code()

    @property
    def is_cut(self) -> bool:
        """The log was too short."""
        return bool(self._lines[0] > self._lines[1])

    def tell(self, event: int, worker: int, task: int = -1, piece: int = -1, more: int = 0) -> None:
        """Write a line, with the lock of the run; `more` takes the place of a table."""
        _telling_code()(self._address, event, worker, task, piece, more)

    def lines(self) -> Iterator[tuple[int, ...]]:
        """The lines so far; see `Entry`."""
        written = min(int(self._lines[0]), int(self._lines[1])) - address_of(self._lines) - _FIRST
        for row in self._lines[_FIRST // 8 :][: written // 8].reshape(-1, Entry.SIZE):
            if not row[Entry.EVENT]:  # a thread is writing it
                return
            yield tuple(map(int, row))
