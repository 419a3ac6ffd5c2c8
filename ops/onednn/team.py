"""Tables of native calls run by the threads of oneDNN's own OpenMP team, one table a thread.

A few bytes of machine code take the place of what a compiler makes of `omp parallel for`: thread i of n runs tables i,
i + n and so on, so that every table runs whatever the number of threads that the runtime grants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.errors import DagexecError
from dagexec.ops.onednn.alone import is_alone
from dagexec.ops.onednn.binding import Library
from dagexec.ops.onednn.machine_code import executable
from dagexec.ops.onednn.native import NativeCall, declare, table_code

Table = npt.ArrayLike
"""Calls, [calls, 5]: a function and its arguments each, whose result does not count."""

_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53 55 4154"  # push rbx; push rbp; push r12: the stack is aligned for calls
    "4889fb"  # rbx = what is to be done
    "ff13 89c5"  # ebp = omp_get_thread_num()
    "ff5308 4189c4"  # r12d = omp_get_num_threads()
    "483b6b18 7319"  # 0: cmp rbp, tables; jae 1f
    "4889e8 48c1e004"  # rax = 16 rbp
    "488b7c0320 488b740328 ff5310"  # rdi = table, rsi = rows: call
    "4c01e5 ebe1"  # rbp += r12; jmp 0b
    "415c 5d 5b c3"  # 1:
)


_Team = tuple[int, int, int, int]
"""The addresses of `GOMP_parallel`, `omp_get_thread_num`, `omp_get_num_threads` and the code."""

_FUNCTIONS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


def team_step(library: Library, threads: int, tables: Sequence[Table], keeps: object, label: str) -> Step:
    """The step that runs all tables, each in order, on so many threads of the library's team, or on the caller's.

    `keeps` lives as long as the step. Call it only where `can_run`.
    """
    if is_alone():
        threads = 1
    made = [native_rows(calls) for table in tables if len(calls := np.asarray(table, np.int64))]
    team = _team(library) if threads > 1 and len(made) > 1 else None
    if team is None:
        return _step(np.concatenate(made), keeps, label)
    parallel, thread_number, thread_count, code = team
    ends = [number for table in made for number in (table.ctypes.data, len(table))]
    data = np.array([thread_number, thread_count, table_code() or 0, len(made), *ends], np.uint64)
    call = np.array([(parallel, code, data.ctypes.data, min(threads, len(made)), 0, 0)], np.uint64)
    return _step(call, (made, data, keeps), label)


def native_rows(calls: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The rows of native calls whose results do not count."""
    rows = np.zeros((len(calls), 6), np.uint64)
    rows[:, :-1] = calls
    return rows


@cache
def can_run() -> bool:
    """True where tables can be run."""
    return table_code() is not None


def _step(table: npt.NDArray[np.uint64], keeps: object, label: str) -> Step:
    run = table_code()
    assert run is not None, "no machine code runs here"
    function = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t)(run)
    address, rows = table.ctypes.data, len(table)

    def step() -> None:
        function(address, rows)

    def failure() -> DagexecError:
        return DagexecError(f"{label}: a table of native calls did not end")

    declare(step, NativeCall(run, (address, rows, 0, 0), None, failure, (table, keeps)))
    return step


_teams: dict[int, _Team | None] = {}


def _team(library: Library) -> _Team | None:
    """What is called for the team of `library`; None without."""
    if id(library) not in _teams:
        _teams[id(library)] = _find_team(library)
    return _teams[id(library)]


def _find_team(library: Library) -> _Team | None:
    code = _code()
    if library.openmp is None or code is None:
        return None
    try:
        functions = [getattr(library.openmp, name) for name in _FUNCTIONS]
    except AttributeError:
        return None
    parallel, number, count = (int(library.ffi.cast("uintptr_t", function)) for function in functions)
    return parallel, number, count, code


def parallel_function(library: Library) -> int | None:
    """The address of `GOMP_parallel`, by which a function is called by every thread of the team; None without."""
    team = _team(library)
    return None if team is None else team[0]


@cache
def _code() -> int | None:
    """The address of the code that a thread of the team runs."""
    return executable(_CODE)
