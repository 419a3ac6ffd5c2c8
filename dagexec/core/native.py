"""Calls of C functions one after another, without the interpreter between them.

A small operator of a library takes less time than Python needs to call it. Steps that are nothing but such a call say
so (`declare`), and `join` makes one step of several: fifty bytes of machine code, written at run time for the one
calling convention that is known here (System V, x86-64), go through a table of functions and arguments and end at the
first one that does not return 0. Where that cannot be had - another processor or system, one that forbids to run
memory that was written to, or DAGEXEC_JOIN=off - steps are called one by one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dagexec.core.operator import Step

logger = logging.getLogger("dagexec")

ARGUMENTS = 4

_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53 55 4883ec08"  # push rbx; push rbp; sub rsp, 8: the stack is aligned for calls
    "4889fb 4889f5"  # rbx = table (first argument), rbp = rows (second argument)
    "4885ed 741f"  # 0: test rbp, rbp; jz 1f
    "488b7b08 488b7310 488b5318 488b4b20"  # the four arguments: rdi, rsi, rdx, rcx
    "ff13"  # call [rbx]
    "85c0 7509"  # test eax, eax; jnz 1f
    "4883c328 48ffcd ebdc"  # rbx += 40; --rbp; jmp 0b
    "4889e8 4883c408 5d 5b c3"  # 1: return rbp, the rows left
)


@dataclass(frozen=True, eq=False)
class NativeCall:
    """What a step does, when it is no more than a call of a C function that returns 0 (an int) for success.

    Attributes:
        function: its address.
        arguments: integers or addresses.
        before: to be called before it, or before several for which it is the same object; None for nothing.
        failure: what to raise when it returns something else.
        keeps: whatever has to live as long as the step.
    """

    function: int
    arguments: tuple[int, int, int, int]
    before: Callable[[], object] | None
    failure: Callable[[], Exception]
    keeps: object


_ATTRIBUTE = "native_call"


def declare(step: Step, call: NativeCall) -> None:
    """Say that `step`, a function, does just `call`."""
    setattr(step, _ATTRIBUTE, call)


def native_call(step: Step) -> NativeCall | None:
    """What `declare` said of `step`."""
    return getattr(step, _ATTRIBUTE, None)


def join(steps: Sequence[Step], seconds: Sequence[float], longest: float) -> list[Step]:
    """The steps, neighbours that are native calls made one step where that is estimated to take `longest` at most.

    `seconds` are the estimates for each of `steps`.
    """
    if _code() is None:
        return list(steps)
    found: list[Step] = []
    for _, members in groupby(_groups(steps, seconds, longest), lambda member: member[0]):
        group = [member[1:] for member in members]
        calls = [call for _, call in group if call is not None]
        found.append(_joined(calls) if len(calls) > 1 else group[0][0])
    return found


def _groups(
    steps: Sequence[Step], seconds: Sequence[float], longest: float
) -> list[tuple[int, Step, NativeCall | None]]:
    """Each step with the number of its group."""
    rows: list[tuple[int, Step, NativeCall | None]] = []
    number, length = 0, 0.0
    before: NativeCall | None = None
    for step, estimate in zip(steps, seconds, strict=True):
        call = native_call(step)
        fits = call is not None and before is not None and call.before is before.before and length + estimate <= longest
        if not fits:
            number, length = number + 1, 0.0
        rows.append((number, step, call))
        length += estimate
        before = call
    return rows


def _joined(calls: Sequence[NativeCall]) -> Step:
    table = np.array([(call.function, *call.arguments) for call in calls], np.uint64)
    code, address, rows, before = _code(), table.ctypes.data, len(calls), calls[0].before
    kept = (table, tuple(calls))
    assert code is not None

    def step() -> None:
        if before is not None:
            before()
        left = code(address, rows)
        if left:
            raise kept[1][rows - left].failure()

    return step


_lock = threading.Lock()
_made: list[Callable[[int, int], int] | None] = []


def _code() -> Callable[[int, int], int] | None:
    """The machine code as a function of a table and its rows; None where it does not run."""
    if not _made:
        with _lock:
            if not _made:
                _made.append(_make())
    return _made[0]


def _make() -> Callable[[int, int], int] | None:
    if os.environ.get("DAGEXEC_JOIN") == "off":
        return None
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return None
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(_CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # keeps `memory` from being closed
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")
    except (OSError, AttributeError) as error:
        logger.info("native calls are not joined: %s", error)
        return None
    function = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t)(address)
    _pages.append(memory)
    return function


_pages: list[mmap.mmap] = []
