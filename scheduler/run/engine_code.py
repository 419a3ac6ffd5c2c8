"""The scheduler of a run in machine code: what `machine.Machine` decides, for threads that hold no interpreter lock.

A thread `enter`s with the state of a run (`Header`, tasks, two sets of tasks) and a slot of its own. It takes and
executes pieces until Python has to act, and says why. One lock guards the state, and is held for some tens of
instructions; apart from that, threads wait only for work, and for a bounded time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from dagexec.platform.assembly.instructions import (
    LESS,
    NOT_LESS,
    NOT_ZERO,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    ZERO,
)
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.scheduler.run.engine_layout import Header, Kind, Logged, Mode, Outcome, PoolWords, Record, Slot, Task

_SAVED = (RBX, RBP, R12, R13, R14, R15)
_PATIENCE = 200
"""Tries for a lock before the core is left to other threads, among them perhaps its holder."""


Enter = Callable[[int, int, int], int]
"""The outcome for the addresses of a state and a slot, and a mode."""


class EngineAssembler(GeneralAssembler):
    """An assembler for code without a log."""

    is_ordered = True

    def log(self, event: Logged, *, batch: bool = False) -> None:
        """Record an event, of the task in rax with `batch`, else of that in the slot. Not before a jump."""


@cache
def engine_code() -> Enter | None:
    """The machine code; None where none runs."""
    return entered(executable(written(EngineAssembler())))


def entered(address: int | None) -> Enter | None:
    """The code at `address` as a function."""
    if address is None:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)(address)


def written(code: EngineAssembler) -> bytes:
    """Registers: rbx the state, rbp the slot, r12 the task, r13 its number or what is left to take, r14 a clock."""
    code.open_frame(*_SAVED)
    code.move(RBX, RDI)
    code.move(RBP, RSI)
    code.compare_number(RDX, Mode.CONTINUE)
    code.jump("execute", ZERO)
    code.move(R13, RDX)
    code.call_place("lock")
    code.compare_number(R13, Mode.CALLED)
    code.jump("called", ZERO)
    code.compare_number(R13, Mode.DONE)
    code.jump("pick", NOT_ZERO)
    _load_task(code)
    code.jump("done")
    _pick(code)
    _execute(code)
    _end(code)
    _wait(code)
    for outcome in Outcome:
        code.mark(f"unlock and {outcome.name}")
        unlock(code)
        code.mark(outcome.name)
        code.set_number(RAX, outcome)
        code.jump("leave")
    code.mark("leave")
    code.close_frame(*_SAVED)
    code.end_call()
    lock(code)
    _sets(code)
    return code.code()


def _load_task(code: GeneralAssembler) -> None:
    """r12 = the task in the slot."""
    code.load_number(R12, RBP, None, offset=8 * Slot.TASK)
    code.multiply_number(R12, R12, 8 * Task.SIZE)
    code.add_memory(R12, RBX, 8 * Header.TASKS)


def _pick(code: EngineAssembler) -> None:
    """With the lock, take a piece: of a fresh task before those of others."""
    code.mark("pick")
    code.compare_memory(RBX, 8 * Header.STOP, 0)
    code.jump("unlock and STOPPED", NOT_ZERO)
    code.compare_memory(RBX, 8 * Header.REMAINING, 0)
    code.jump("unlock and OVER", ZERO)
    _leave_in_time(code, "pick on")
    code.load_number(RAX, RBX, None, offset=8 * Header.POOL)
    code.compare_memory(RAX, 8 * PoolWords.WAITING, 0)
    code.jump("stay", ZERO)
    code.compare_memory(RBP, 8 * Slot.STAYS, 0)
    code.jump("stay", NOT_ZERO)
    code.compare_memory(RBX, 8 * Header.ACTIVE, 2)
    code.jump("unlock and IDLE", NOT_LESS)  # another thread goes on with this run
    code.mark("stay")
    _choose(code, fresh=True)
    code.call_place("find")
    code.compare_number(RAX, 0)
    code.jump("fresh", NOT_LESS)
    _choose(code, fresh=False)
    code.call_place("find")
    code.compare_number(RAX, 0)
    code.jump("open", NOT_LESS)
    code.log(Logged.NOTHING)
    unlock(code)
    code.jump("wait")

    code.mark("fresh")
    code.store_number(RAX, RBP, 8 * Slot.TASK)
    code.call_place("remove")
    _load_task(code)
    code.compare_memory(R12, 8 * Task.COUNT, 2)
    code.jump("one of several", NOT_LESS)
    code.set_number(RCX, 1)
    code.store_number(RCX, R12, 8 * Task.TAKEN)
    code.clear(RCX)
    code.store_number(RCX, RBP, 8 * Slot.PIECE)
    code.compare_memory(R12, 8 * Task.KIND, Kind.NATIVE)
    code.jump("taken", ZERO)
    code.mark("python")
    code.store_number(RCX, RBP, 8 * Slot.CALLS)
    code.load_number(RAX, RBP, None, offset=8 * Slot.TASK)
    code.load_number(R9, R12, None, offset=8 * Task.KIND)
    code.mark("one more call")  # of the task in rax, of the kind in r9
    code.log(Logged.TAKE, batch=True)
    code.load_number(RCX, RBP, None, offset=8 * Slot.CALLS)
    code.store_number(RAX, RBP, 8 * Slot.FIRST_CALL, RCX, 8)
    code.add_number(RCX, 1)
    code.store_number(RCX, RBP, 8 * Slot.CALLS)
    code.compare_number(R9, Kind.SHORT_PYTHON)
    code.jump("unlock and PYTHON", NOT_ZERO)
    code.compare_number(RCX, Slot.SIZE - Slot.FIRST_CALL)
    code.jump("unlock and PYTHON", ZERO)
    code.load_number(RAX, RBX, None, offset=8 * Header.AVAILABLE)
    code.compare_with_memory(RAX, RBX, 8 * Header.WIDTH)
    code.jump("unlock and PYTHON", LESS)  # other threads want some, too
    _choose(code, fresh=True)
    code.call_place("find")
    code.compare_number(RAX, 0)
    code.jump("unlock and PYTHON", LESS)
    code.multiply_number(R10, RAX, 8 * Task.SIZE)
    code.add_memory(R10, RBX, 8 * Header.TASKS)
    code.load_number(R9, R10, None, offset=8 * Task.KIND)
    code.compare_number(R9, Kind.SHORT_PYTHON)
    code.jump("unlock and PYTHON", NOT_ZERO)
    code.set_number(RCX, 1)
    code.store_number(RCX, R10, 8 * Task.TAKEN)
    code.call_place("remove")
    code.jump("one more call")

    code.mark("one of several")
    _choose(code, fresh=False)
    code.load_number(RAX, RBP, None, offset=8 * Slot.TASK)
    code.call_place("insert")
    code.jump("next piece")

    code.mark("open")  # rax is the task
    code.store_number(RAX, RBP, 8 * Slot.TASK)
    _load_task(code)
    code.mark("next piece")  # of the task in r12 and the slot, which has one
    code.load_number(RCX, R12, None, offset=8 * Task.TAKEN)
    code.load_number(RDX, R12, None, offset=8 * Task.TAKEN_LAST)
    code.compare_memory(RBP, 8 * Slot.FROM_LAST, 0)
    code.jump("from the last", NOT_ZERO)
    code.move(RAX, RCX)
    code.subtract(RAX, RDX)
    code.jump("found piece")
    code.mark("from the last")
    code.load_number(RAX, R12, None, offset=8 * Task.COUNT)
    code.add_to_memory(R12, 8 * Task.TAKEN_LAST, 1)
    code.subtract(RAX, RDX)
    code.add_number(RAX, -1)
    code.mark("found piece")
    code.store_number(RAX, RBP, 8 * Slot.PIECE)
    code.add_number(RCX, 1)
    code.store_number(RCX, R12, 8 * Task.TAKEN)
    code.compare_with_memory(RCX, R12, 8 * Task.COUNT)
    code.jump("taken", NOT_ZERO)
    _choose(code, fresh=False)
    code.load_number(RAX, RBP, None, offset=8 * Slot.TASK)
    code.call_place("remove")

    code.mark("taken")
    code.log(Logged.TAKE)
    code.load_number(R13, RBX, None, offset=8 * Header.EXPECTED)
    unlock(code)  # before reading which workers sleep: they look for work after they have said that they do
    code.compare_with_memory(R13, RBX, 8 * Header.WORTH_WAKING)
    code.jump("execute", LESS)
    code.load_number(RAX, RBX, None, offset=8 * Header.POOL)
    code.compare_memory(RAX, 8 * PoolWords.IDLE, 0)
    code.jump("execute", ZERO)
    code.load_number(RAX, RBX, None, offset=8 * Header.ACTIVE)
    code.compare_with_memory(RAX, RBX, 8 * Header.WIDTH)
    code.jump("WAKE", LESS)


def _leave_in_time(code: GeneralAssembler, name: str) -> None:
    """With the lock, leave when it is time to look for signals."""
    code.compare_memory(RBP, 8 * Slot.UNTIL, 0)
    code.jump(name, ZERO)
    code.read_clock(RAX)
    code.compare_with_memory(RAX, RBP, 8 * Slot.UNTIL)
    code.jump("unlock and LOOK", NOT_LESS)
    code.mark(name)


def _execute(code: EngineAssembler) -> None:
    """Without the lock, the piece in the slot."""
    code.mark("execute")
    _load_task(code)
    code.read_clock(R14)
    code.load_number(R10, RBP, None, offset=8 * Slot.PIECE)
    code.shift_left(R10, 4)
    code.add_memory(R10, R12, 8 * Task.PIECES)
    code.load_number(RDI, R10, None)
    code.load_number(RSI, R10, None, offset=8)
    code.log(Logged.EXECUTE)
    code.call_field(RBX, 8 * Header.TABLE_CODE)
    code.store_number(RAX, RBP, 8 * Slot.ROWS_LEFT)
    code.compare_number(RAX, 0)
    code.jump("FAILED", NOT_ZERO)
    code.read_clock(R15)
    code.call_place("lock")
    code.move(RAX, R15)
    code.subtract(RAX, R14)
    code.add_memory(RAX, R12, 8 * Task.TICKS)
    code.store_number(RAX, R12, 8 * Task.TICKS)
    code.load_number(RDX, RBX, None, offset=8 * Header.TRACE)
    code.compare_number(RDX, 0)
    code.jump("done", ZERO)
    code.load_number(RCX, RDX, None)
    for field, place in ((Record.TASK, Slot.TASK), (Record.PIECE, Slot.PIECE), (Record.WORKER, Slot.WORKER)):
        code.load_number(RAX, RBP, None, offset=8 * place)
        code.store_number(RAX, RCX, 8 * field)
    code.store_number(R14, RCX, 8 * Record.BEGAN)
    code.store_number(R15, RCX, 8 * Record.ENDED)
    code.add_to_memory(RDX, 0, 8 * Record.SIZE)


def _end(code: EngineAssembler) -> None:
    """With the lock, a piece of the task in r12 has ended: go on with the next one, or let its children begin."""
    code.mark("done")
    code.log(Logged.END)
    code.add_to_memory(R12, 8 * Task.DONE, 1)
    code.load_number(RAX, R12, None, offset=8 * Task.DONE)
    code.compare_with_memory(RAX, R12, 8 * Task.COUNT)
    code.jump("all done", ZERO)
    code.load_number(RAX, R12, None, offset=8 * Task.TAKEN)
    code.compare_with_memory(RAX, R12, 8 * Task.COUNT)
    code.jump("pick", ZERO)
    code.compare_memory(RBX, 8 * Header.STOP, 0)
    code.jump("unlock and STOPPED", NOT_ZERO)
    code.load_number(RAX, RBX, None, offset=8 * Header.POOL)
    code.compare_memory(RAX, 8 * PoolWords.WAITING, 0)
    code.jump("pick", NOT_ZERO)
    _leave_in_time(code, "on with it")
    code.log(Logged.GO_ON)
    code.jump("next piece")

    code.mark("called")
    code.clear(R15)
    code.mark("next called")
    code.load_number(RAX, RBP, R15, 8, 8 * Slot.FIRST_CALL)
    code.store_number(RAX, RBP, 8 * Slot.TASK)
    _load_task(code)
    code.log(Logged.END)
    code.add_to_memory(R12, 8 * Task.DONE, 1)
    code.call_place("end")
    code.add_number(R15, 1)
    code.compare_with_memory(R15, RBP, 8 * Slot.CALLS)
    code.jump("next called", NOT_ZERO)
    code.jump("ended")

    code.mark("all done")
    code.call_place("end")
    code.mark("ended")
    code.compare_memory(RBX, 8 * Header.REMAINING, 0)
    code.jump("pick", NOT_ZERO)
    unlock(code)
    code.call_place("after the caller")
    code.jump("FINISHED")

    code.mark("after the caller")  # a function: a thread that works for another asks later for the interpreter lock
    code.mark("grace")
    code.add_to_memory(RBP, 8 * Slot.GRACE, -1)
    code.jump("gone", LESS)
    code.pause()
    code.jump("grace")
    code.mark("gone")
    code.end_call()

    code.mark("end")  # a function: the task in r12 has ended
    code.add_to_memory(RBX, 8 * Header.REMAINING, -1)
    code.load_number(R13, R12, None, offset=8 * Task.CHILDREN)
    code.mark("children")
    code.compare_with_memory(R13, R12, 8 * Task.CHILDREN_END)
    code.jump("no more children", ZERO)
    code.load_number(RAX, R13, None)
    code.add_number(R13, 8)
    code.multiply_number(R9, RAX, 8 * Task.SIZE)
    code.add_memory(R9, RBX, 8 * Header.TASKS)
    code.add_to_memory(R9, 8 * Task.LEFT, -1)
    code.jump("children", NOT_ZERO)
    _choose(code, fresh=True)
    code.call_place("insert")
    code.jump("children")
    code.mark("no more children")
    code.end_call()


def _wait(code: GeneralAssembler) -> None:
    """Without the lock, look for work for a while."""
    code.mark("wait")
    code.load_number(RCX, RBX, None, offset=8 * Header.SPINS)
    code.load_number(RDX, RBX, None, offset=8 * Header.POOL)
    code.mark("look")
    code.compare_memory(RBX, 8 * Header.AVAILABLE, 0)
    code.jump("lock and pick", NOT_ZERO)
    code.compare_memory(RBX, 8 * Header.REMAINING, 0)
    code.jump("over", ZERO)
    code.compare_memory(RBX, 8 * Header.STOP, 0)
    code.jump("STOPPED", NOT_ZERO)
    code.compare_memory(RDX, 8 * PoolWords.WAITING, 0)
    code.jump("IDLE", NOT_ZERO)  # even if it stays: another thread needs the core
    code.pause()
    code.add_number(RCX, -1)
    code.jump("look", NOT_ZERO)
    code.jump("IDLE")
    code.mark("over")
    code.call_place("after the caller")
    code.jump("OVER")
    code.mark("lock and pick")
    code.call_place("lock")
    code.jump("pick")


def lock(code: GeneralAssembler) -> None:
    """A function: take the lock. Changes rax, rcx, rdx and r11."""
    code.mark("lock")
    code.set_number(RAX, 1)
    code.exchange(RAX, RBX, 8 * Header.LOCK)
    code.compare_number(RAX, 0)
    code.jump("locked", ZERO)
    code.set_number(RDX, _PATIENCE)
    code.mark("still locked")
    code.compare_memory(RBX, 8 * Header.LOCK, 0)
    code.jump("lock", ZERO)
    code.pause()
    code.add_number(RDX, -1)
    code.jump("still locked", NOT_ZERO)
    code.yield_core()
    code.jump("lock")
    code.mark("locked")
    code.end_call()


def unlock(code: GeneralAssembler) -> None:
    """Release the lock; other threads see earlier writes before anything is read later. Changes rax."""
    code.clear(RAX)
    code.exchange(RAX, RBX, 8 * Header.LOCK)


def _choose(code: GeneralAssembler, *, fresh: bool) -> None:
    """rdi, rsi = the set that the next function works on."""
    top, words = (Header.FRESH_TOP, Header.FRESH) if fresh else (Header.OPEN_TOP, Header.OPEN)
    code.load_number(RDI, RBX, None, offset=8 * top)
    code.load_number(RSI, RBX, None, offset=8 * words)


def _sets(code: GeneralAssembler) -> None:
    """Functions on a set of tasks: a bit each, and above, a bit for each nonzero word. Change rcx, rdx, r8 and r11.

    `find` gives the lowest number in rax, or -1; `insert` and `remove` take the number in rax.
    """
    code.mark("find")
    code.clear(RDX)
    code.mark("next top")
    code.load_number(R8, RDI, RDX, 8)
    code.compare_number(R8, 0)
    code.jump("found", NOT_ZERO)
    code.add_number(RDX, 1)
    code.compare_with_memory(RDX, RBX, 8 * Header.TOPS)
    code.jump("next top", NOT_ZERO)
    code.set_number(RAX, -1)
    code.end_call()
    code.mark("found")
    code.first_bit(RCX, R8)
    code.shift_left(RDX, 6)
    code.add(RCX, RDX)
    code.load_number(R8, RSI, RCX, 8)
    code.first_bit(RAX, R8)
    code.shift_left(RCX, 6)
    code.add(RAX, RCX)
    code.end_call()

    for name in ("insert", "remove"):
        code.mark(name)
        code.add_to_memory(RBX, 8 * Header.AVAILABLE, 1 if name == "insert" else -1)
        code.multiply_number(R11, RAX, 8 * Task.SIZE)
        code.add_memory(R11, RBX, 8 * Header.TASKS)
        code.load_number(R11, R11, None, offset=8 * Task.EXPECTED)
        if name == "remove":
            code.negate(R11)
        code.add_memory(R11, RBX, 8 * Header.EXPECTED)
        code.store_number(R11, RBX, 8 * Header.EXPECTED)
        code.move(RCX, RAX)
        code.shift_right(RCX, 6)
        code.move(RDX, RCX)
        code.shift_right(RDX, 6)
        code.load_number(R8, RSI, RCX, 8)
        change = code.set_bit if name == "insert" else code.clear_bit
        change(R8, RAX)
        code.store_number(R8, RSI, 0, RCX, 8)
        if name == "remove":
            code.compare_number(R8, 0)
            code.jump("removed", NOT_ZERO)
        code.load_number(R8, RDI, RDX, 8)
        change(R8, RCX)
        code.store_number(R8, RDI, 0, RDX, 8)
        if name == "remove":
            code.mark("removed")
        code.end_call()
