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
from dagexec.platform.assembly.instructions import NOT_LESS, R8, R9, R10, R12, R13, RAX, RBP, RBX, RCX, RDI, RDX, RSI
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
        self.push(RAX, RCX)
        if not batch:
            self.load_number(RAX, RBP, None, offset=8 * Slot.TASK)
        self.set_number(RCX, event)
        self.call_place("log")
        self.pop(RAX, RCX)

    def code(self) -> bytes:
        """The machine code, with the function that writes a line: event rcx of the task rax."""
        used = (RDX, R8)
        self.mark("log")
        self.push(*used)
        _next_line(self, R8)
        self.store_number(RAX, R8, 8 * Entry.TASK)
        self.store_number(RDI, R8, 8 * Entry.TABLE)
        for entry, base, place in (
            (Entry.WORKER, RBP, Slot.WORKER), (Entry.PIECE, RBP, Slot.PIECE), (Entry.FROM_LAST, RBP, Slot.FROM_LAST),
            (Entry.LOCK, RBX, Header.LOCK),
        ):  # fmt: skip
            self.load_number(RDX, base, None, offset=8 * place)
            self.store_number(RDX, R8, 8 * entry)
        self.store_number(RCX, R8, 8 * Entry.EVENT)  # last: then the line is whole
        self.mark("log is full")
        self.pop(*used)
        self.end_call()
        return super().code()


def _next_line(code: GeneralAssembler, register: int) -> None:
    """register = the address of a line of this thread's own; jumps where there is none left. Changes rdx."""
    code.load_number(RDX, RBX, None, offset=8 * Header.LOG)
    code.set_number(register, 8 * Entry.SIZE)
    code.fetch_and_add(register, RDX, _NEXT)
    code.compare_with_memory(register, RDX, _END)
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
    saved = (RBX, R12, R13)
    code.push(*saved)
    code.move(RBX, RDI)
    code.move(R12, RDX)
    code.move(R13, RCX)
    code.call_place("lock")
    _next_line(code, R10)
    for entry, register in (
        (Entry.WORKER, R12), (Entry.TASK, R13), (Entry.PIECE, R8), (Entry.TABLE, R9), (Entry.EVENT, RSI),
    ):  # fmt: skip
        code.store_number(register, R10, 8 * entry)
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
