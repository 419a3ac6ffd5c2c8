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
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    LESS,
    NOT_LESS,
    NOT_ZERO,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    T0,
    T1,
    ZERO,
)
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.scheduler.run.engine_layout import Header, Kind, Logged, Mode, Outcome, PoolWords, Record, Slot, Task

_SAVED = (S0, S1, S2, S3, S4, S5)
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
    code.move(S0, A0)
    code.move(S1, A1)
    code.compare_number(A2, Mode.CONTINUE)
    code.jump("execute", ZERO)
    code.move(S3, A2)
    code.call_place("lock")
    code.compare_number(S3, Mode.CALLED)
    code.jump("called", ZERO)
    code.compare_number(S3, Mode.DONE)
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
        code.set_number(RESULT, outcome)
        code.jump("leave")
    code.mark("leave")
    code.close_frame(*_SAVED)
    code.end_call()
    lock(code)
    _sets(code)
    return code.code()


def _load_task(code: GeneralAssembler) -> None:
    """r12 = the task in the slot."""
    code.load_number(S2, S1, None, offset=8 * Slot.TASK)
    code.multiply_number(S2, S2, 8 * Task.SIZE)
    code.add_memory(S2, S0, 8 * Header.TASKS)


def _pick(code: EngineAssembler) -> None:
    """With the lock, take a piece: of a fresh task before those of others."""
    code.mark("pick")
    code.compare_memory(S0, 8 * Header.STOP, 0)
    code.jump("unlock and STOPPED", NOT_ZERO)
    code.compare_memory(S0, 8 * Header.REMAINING, 0)
    code.jump("unlock and OVER", ZERO)
    _leave_in_time(code, "pick on")
    code.load_number(RESULT, S0, None, offset=8 * Header.POOL)
    code.compare_memory(RESULT, 8 * PoolWords.WAITING, 0)
    code.jump("stay", ZERO)
    code.compare_memory(S1, 8 * Slot.STAYS, 0)
    code.jump("stay", NOT_ZERO)
    code.compare_memory(S0, 8 * Header.ACTIVE, 2)
    code.jump("unlock and IDLE", NOT_LESS)  # another thread goes on with this run
    code.mark("stay")
    _choose(code, fresh=True)
    code.call_place("find")
    code.compare_number(RESULT, 0)
    code.jump("fresh", NOT_LESS)
    _choose(code, fresh=False)
    code.call_place("find")
    code.compare_number(RESULT, 0)
    code.jump("open", NOT_LESS)
    code.log(Logged.NOTHING)
    unlock(code)
    code.jump("wait")

    code.mark("fresh")
    code.store_number(RESULT, S1, 8 * Slot.TASK)
    code.call_place("remove")
    _load_task(code)
    code.compare_memory(S2, 8 * Task.COUNT, 2)
    code.jump("one of several", NOT_LESS)
    code.set_number(A3, 1)
    code.store_number(A3, S2, 8 * Task.TAKEN)
    code.clear(A3)
    code.store_number(A3, S1, 8 * Slot.PIECE)
    code.compare_memory(S2, 8 * Task.KIND, Kind.NATIVE)
    code.jump("taken", ZERO)
    code.mark("python")
    code.store_number(A3, S1, 8 * Slot.CALLS)
    code.load_number(RESULT, S1, None, offset=8 * Slot.TASK)
    code.load_number(A5, S2, None, offset=8 * Task.KIND)
    code.mark("one more call")  # of the task in rax, of the kind in r9
    code.log(Logged.TAKE, batch=True)
    code.load_number(A3, S1, None, offset=8 * Slot.CALLS)
    code.store_number(RESULT, S1, 8 * Slot.FIRST_CALL, A3, 8)
    code.add_number(A3, 1)
    code.store_number(A3, S1, 8 * Slot.CALLS)
    code.compare_number(A5, Kind.SHORT_PYTHON)
    code.jump("unlock and PYTHON", NOT_ZERO)
    code.compare_number(A3, Slot.SIZE - Slot.FIRST_CALL)
    code.jump("unlock and PYTHON", ZERO)
    code.load_number(RESULT, S0, None, offset=8 * Header.AVAILABLE)
    code.compare_with_memory(RESULT, S0, 8 * Header.WIDTH)
    code.jump("unlock and PYTHON", LESS)  # other threads want some, too
    _choose(code, fresh=True)
    code.call_place("find")
    code.compare_number(RESULT, 0)
    code.jump("unlock and PYTHON", LESS)
    code.multiply_number(T0, RESULT, 8 * Task.SIZE)
    code.add_memory(T0, S0, 8 * Header.TASKS)
    code.load_number(A5, T0, None, offset=8 * Task.KIND)
    code.compare_number(A5, Kind.SHORT_PYTHON)
    code.jump("unlock and PYTHON", NOT_ZERO)
    code.set_number(A3, 1)
    code.store_number(A3, T0, 8 * Task.TAKEN)
    code.call_place("remove")
    code.jump("one more call")

    code.mark("one of several")
    _choose(code, fresh=False)
    code.load_number(RESULT, S1, None, offset=8 * Slot.TASK)
    code.call_place("insert")
    code.jump("next piece")

    code.mark("open")  # rax is the task
    code.store_number(RESULT, S1, 8 * Slot.TASK)
    _load_task(code)
    code.mark("next piece")  # of the task in r12 and the slot, which has one
    code.load_number(A3, S2, None, offset=8 * Task.TAKEN)
    code.load_number(A2, S2, None, offset=8 * Task.TAKEN_LAST)
    code.compare_memory(S1, 8 * Slot.FROM_LAST, 0)
    code.jump("from the last", NOT_ZERO)
    code.move(RESULT, A3)
    code.subtract(RESULT, A2)
    code.jump("found piece")
    code.mark("from the last")
    code.load_number(RESULT, S2, None, offset=8 * Task.COUNT)
    code.add_to_memory(S2, 8 * Task.TAKEN_LAST, 1)
    code.subtract(RESULT, A2)
    code.add_number(RESULT, -1)
    code.mark("found piece")
    code.store_number(RESULT, S1, 8 * Slot.PIECE)
    code.add_number(A3, 1)
    code.store_number(A3, S2, 8 * Task.TAKEN)
    code.compare_with_memory(A3, S2, 8 * Task.COUNT)
    code.jump("taken", NOT_ZERO)
    _choose(code, fresh=False)
    code.load_number(RESULT, S1, None, offset=8 * Slot.TASK)
    code.call_place("remove")

    code.mark("taken")
    code.log(Logged.TAKE)
    code.load_number(S3, S0, None, offset=8 * Header.EXPECTED)
    unlock(code)  # before reading which workers sleep: they look for work after they have said that they do
    code.compare_with_memory(S3, S0, 8 * Header.WORTH_WAKING)
    code.jump("execute", LESS)
    code.load_number(RESULT, S0, None, offset=8 * Header.POOL)
    code.compare_memory(RESULT, 8 * PoolWords.IDLE, 0)
    code.jump("execute", ZERO)
    code.load_number(RESULT, S0, None, offset=8 * Header.ACTIVE)
    code.compare_with_memory(RESULT, S0, 8 * Header.WIDTH)
    code.jump("WAKE", LESS)


def _leave_in_time(code: GeneralAssembler, name: str) -> None:
    """With the lock, leave when it is time to look for signals."""
    code.compare_memory(S1, 8 * Slot.UNTIL, 0)
    code.jump(name, ZERO)
    code.read_clock(RESULT)
    code.compare_with_memory(RESULT, S1, 8 * Slot.UNTIL)
    code.jump("unlock and LOOK", NOT_LESS)
    code.mark(name)


def _execute(code: EngineAssembler) -> None:
    """Without the lock, the piece in the slot."""
    code.mark("execute")
    _load_task(code)
    code.read_clock(S4)
    code.load_number(T0, S1, None, offset=8 * Slot.PIECE)
    code.shift_left(T0, 4)
    code.add_memory(T0, S2, 8 * Task.PIECES)
    code.load_number(A0, T0, None)
    code.load_number(A1, T0, None, offset=8)
    code.log(Logged.EXECUTE)
    code.call_field(S0, 8 * Header.TABLE_CODE)
    code.store_number(RESULT, S1, 8 * Slot.ROWS_LEFT)
    code.compare_number(RESULT, 0)
    code.jump("FAILED", NOT_ZERO)
    code.read_clock(S5)
    code.call_place("lock")
    code.move(RESULT, S5)
    code.subtract(RESULT, S4)
    code.add_memory(RESULT, S2, 8 * Task.TICKS)
    code.store_number(RESULT, S2, 8 * Task.TICKS)
    code.load_number(A2, S0, None, offset=8 * Header.TRACE)
    code.compare_number(A2, 0)
    code.jump("done", ZERO)
    code.load_number(A3, A2, None)
    for field, place in ((Record.TASK, Slot.TASK), (Record.PIECE, Slot.PIECE), (Record.WORKER, Slot.WORKER)):
        code.load_number(RESULT, S1, None, offset=8 * place)
        code.store_number(RESULT, A3, 8 * field)
    code.store_number(S4, A3, 8 * Record.BEGAN)
    code.store_number(S5, A3, 8 * Record.ENDED)
    code.add_to_memory(A2, 0, 8 * Record.SIZE)


def _end(code: EngineAssembler) -> None:
    """With the lock, a piece of the task in r12 has ended: go on with the next one, or let its children begin."""
    code.mark("done")
    code.log(Logged.END)
    code.add_to_memory(S2, 8 * Task.DONE, 1)
    code.load_number(RESULT, S2, None, offset=8 * Task.DONE)
    code.compare_with_memory(RESULT, S2, 8 * Task.COUNT)
    code.jump("all done", ZERO)
    code.load_number(RESULT, S2, None, offset=8 * Task.TAKEN)
    code.compare_with_memory(RESULT, S2, 8 * Task.COUNT)
    code.jump("pick", ZERO)
    code.compare_memory(S0, 8 * Header.STOP, 0)
    code.jump("unlock and STOPPED", NOT_ZERO)
    code.load_number(RESULT, S0, None, offset=8 * Header.POOL)
    code.compare_memory(RESULT, 8 * PoolWords.WAITING, 0)
    code.jump("pick", NOT_ZERO)
    _leave_in_time(code, "on with it")
    code.log(Logged.GO_ON)
    code.jump("next piece")

    code.mark("called")
    code.clear(S5)
    code.mark("next called")
    code.load_number(RESULT, S1, S5, 8, 8 * Slot.FIRST_CALL)
    code.store_number(RESULT, S1, 8 * Slot.TASK)
    _load_task(code)
    code.log(Logged.END)
    code.add_to_memory(S2, 8 * Task.DONE, 1)
    code.call_place("end")
    code.add_number(S5, 1)
    code.compare_with_memory(S5, S1, 8 * Slot.CALLS)
    code.jump("next called", NOT_ZERO)
    code.jump("ended")

    code.mark("all done")
    code.call_place("end")
    code.mark("ended")
    code.compare_memory(S0, 8 * Header.REMAINING, 0)
    code.jump("pick", NOT_ZERO)
    unlock(code)
    code.call_place("after the caller")
    code.jump("FINISHED")

    code.mark("after the caller")  # a function: a thread that works for another asks later for the interpreter lock
    code.mark("grace")
    code.add_to_memory(S1, 8 * Slot.GRACE, -1)
    code.jump("gone", LESS)
    code.pause()
    code.jump("grace")
    code.mark("gone")
    code.end_call()

    code.mark("end")  # a function: the task in r12 has ended
    code.add_to_memory(S0, 8 * Header.REMAINING, -1)
    code.load_number(S3, S2, None, offset=8 * Task.CHILDREN)
    code.mark("children")
    code.compare_with_memory(S3, S2, 8 * Task.CHILDREN_END)
    code.jump("no more children", ZERO)
    code.load_number(RESULT, S3, None)
    code.add_number(S3, 8)
    code.multiply_number(A5, RESULT, 8 * Task.SIZE)
    code.add_memory(A5, S0, 8 * Header.TASKS)
    code.add_to_memory(A5, 8 * Task.LEFT, -1)
    code.jump("children", NOT_ZERO)
    _choose(code, fresh=True)
    code.call_place("insert")
    code.jump("children")
    code.mark("no more children")
    code.end_call()


def _wait(code: GeneralAssembler) -> None:
    """Without the lock, look for work for a while."""
    code.mark("wait")
    code.load_number(A3, S0, None, offset=8 * Header.SPINS)
    code.load_number(A2, S0, None, offset=8 * Header.POOL)
    code.mark("look")
    code.compare_memory(S0, 8 * Header.AVAILABLE, 0)
    code.jump("lock and pick", NOT_ZERO)
    code.compare_memory(S0, 8 * Header.REMAINING, 0)
    code.jump("over", ZERO)
    code.compare_memory(S0, 8 * Header.STOP, 0)
    code.jump("STOPPED", NOT_ZERO)
    code.compare_memory(A2, 8 * PoolWords.WAITING, 0)
    code.jump("IDLE", NOT_ZERO)  # even if it stays: another thread needs the core
    code.pause()
    code.add_number(A3, -1)
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
    code.set_number(RESULT, 1)
    code.exchange(RESULT, S0, 8 * Header.LOCK)
    code.compare_number(RESULT, 0)
    code.jump("locked", ZERO)
    code.set_number(A2, _PATIENCE)
    code.mark("still locked")
    code.compare_memory(S0, 8 * Header.LOCK, 0)
    code.jump("lock", ZERO)
    code.pause()
    code.add_number(A2, -1)
    code.jump("still locked", NOT_ZERO)
    code.yield_core()
    code.jump("lock")
    code.mark("locked")
    code.end_call()


def unlock(code: GeneralAssembler) -> None:
    """Release the lock; other threads see earlier writes before anything is read later. Changes rax."""
    code.clear(RESULT)
    code.exchange(RESULT, S0, 8 * Header.LOCK)


def _choose(code: GeneralAssembler, *, fresh: bool) -> None:
    """rdi, rsi = the set that the next function works on."""
    top, words = (Header.FRESH_TOP, Header.FRESH) if fresh else (Header.OPEN_TOP, Header.OPEN)
    code.load_number(A0, S0, None, offset=8 * top)
    code.load_number(A1, S0, None, offset=8 * words)


def _sets(code: GeneralAssembler) -> None:
    """Functions on a set of tasks: a bit each, and above, a bit for each nonzero word. Change rcx, rdx, r8 and r11.

    `find` gives the lowest number in rax, or -1; `insert` and `remove` take the number in rax.
    """
    code.mark("find")
    code.clear(A2)
    code.mark("next top")
    code.load_number(A4, A0, A2, 8)
    code.compare_number(A4, 0)
    code.jump("found", NOT_ZERO)
    code.add_number(A2, 1)
    code.compare_with_memory(A2, S0, 8 * Header.TOPS)
    code.jump("next top", NOT_ZERO)
    code.set_number(RESULT, -1)
    code.end_call()
    code.mark("found")
    code.first_bit(A3, A4)
    code.shift_left(A2, 6)
    code.add(A3, A2)
    code.load_number(A4, A1, A3, 8)
    code.first_bit(RESULT, A4)
    code.shift_left(A3, 6)
    code.add(RESULT, A3)
    code.end_call()

    for name in ("insert", "remove"):
        code.mark(name)
        code.add_to_memory(S0, 8 * Header.AVAILABLE, 1 if name == "insert" else -1)
        code.multiply_number(T1, RESULT, 8 * Task.SIZE)
        code.add_memory(T1, S0, 8 * Header.TASKS)
        code.load_number(T1, T1, None, offset=8 * Task.EXPECTED)
        if name == "remove":
            code.negate(T1)
        code.add_memory(T1, S0, 8 * Header.EXPECTED)
        code.store_number(T1, S0, 8 * Header.EXPECTED)
        code.move(A3, RESULT)
        code.shift_right(A3, 6)
        code.move(A2, A3)
        code.shift_right(A2, 6)
        code.load_number(A4, A1, A3, 8)
        change = code.set_bit if name == "insert" else code.clear_bit
        change(A4, RESULT)
        code.store_number(A4, A1, 0, A3, 8)
        if name == "remove":
            code.compare_number(A4, 0)
            code.jump("removed", NOT_ZERO)
        code.load_number(A4, A0, A2, 8)
        change(A4, A3)
        code.store_number(A4, A0, 0, A2, 8)
        if name == "remove":
            code.mark("removed")
        code.end_call()
