"""Machine code around the engine's: to wait for a moment, to listen for a call, and to read the processor's clock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from dagexec.platform.assembly.instructions import A0, A1, A2, A3, NOT_ZERO, RESULT, SP
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.scheduler.run.engine_layout import PoolWords


@cache
def pausing_code() -> Callable[[int], int] | None:
    """Code that looks for work in vain, a number of times; None where none runs."""
    code = GeneralAssembler()
    code.move(A3, A0)
    code.mark("again")
    for _ in range(3):
        code.compare_memory(SP, 0, 0)  # as many loads as `_wait` makes
    code.pause()
    code.add_number(A3, -1)
    code.jump("again", NOT_ZERO)
    code.clear(RESULT)
    code.end_call()
    address = executable(code.code())
    return None if address is None else ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)


@cache
def listening_code() -> Callable[[int, int, int, int], int] | None:
    """Code that polls a number until it is not 0, up to a number of times, and while a pool is not full.

    Its arguments are the address of the number, that of the pool's words, how often to poll, and how long to wait after
    that, in polls: the thread that changed the number holds the interpreter lock a little longer, and a thread that
    asks for that lock meanwhile is put to sleep. None where no machine code runs.
    """
    code = GeneralAssembler()
    code.mark("again")
    code.compare_memory(A0, 0, 0)
    code.jump("called", NOT_ZERO)
    code.compare_memory(A1, 8 * PoolWords.FULL, 0)
    code.jump("leave", NOT_ZERO)
    code.pause()
    code.add_number(A2, -1)
    code.jump("again", NOT_ZERO)
    code.jump("leave")
    code.mark("called")
    code.pause()
    code.add_number(A3, -1)
    code.jump("called", NOT_ZERO)
    code.mark("leave")
    code.clear(RESULT)
    code.end_call()
    address = executable(code.code())
    if address is None:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long)(address)


@cache
def clock_code() -> Callable[[], int] | None:
    """Code that reads the processor's clock; None where none runs."""
    code = GeneralAssembler()
    code.read_clock(RESULT)
    code.end_call()
    address = executable(code.code())
    return None if address is None else ctypes.CFUNCTYPE(ctypes.c_long)(address)
