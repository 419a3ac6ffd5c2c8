"""Tables of native calls run by the threads of an OpenMP team, one table a thread.

The runtime is the one that a library brought into the process, so that its primitives and our kernels share threads.

A few bytes of machine code take the place of what a compiler makes of `omp parallel for`: thread i of n runs tables i,
i + n and so on, so that every table runs whatever the number of threads that the runtime grants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.errors import DagexecError
from dagexec.ops.kernels.alone import is_alone
from dagexec.ops.kernels.machine_code import executable
from dagexec.ops.kernels.moving import declare_tables
from dagexec.ops.kernels.native import NativeCall, declare, table_code

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


_PHASED_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53 55 4154 4155 4156 4157 4883ec08"  # push rbx, rbp, r12 to r15; sub rsp, 8: the stack is aligned for calls
    "4889fb"  # rbx = what is to be done
    "ff13 89c5"  # ebp = omp_get_thread_num()
    "ff5308 4189c4"  # r12d = omp_get_num_threads()
    "4c8d6b30 4c8b7320"  # r13 = the first phase's tables; r14 = phases
    "4989ef"  # 0: r15 = rbp
    "4c3b7b28 7319"  # 1: cmp r15, tables; jae 2f
    "4c89f8 48c1e004"  # rax = 16 r15
    "498b7c0500 498b740508 ff5310"  # rdi = table, rsi = rows: call
    "4d01e7 ebe1"  # r15 += r12; jmp 1b
    "ff5318"  # 2: GOMP_barrier()
    "488b4328 48c1e004 4901c5"  # r13 += 16 tables
    "49ffce 75cb"  # --r14; jnz 0b
    "4883c408 415f 415e 415d 415c 5d 5b c3"
)


@dataclass(frozen=True)
class Team:
    """The threads of an OpenMP runtime, by the addresses of functions.

    Attributes:
        parallel: `GOMP_parallel`, by which a function is called by every thread of a team.
        thread_number: `omp_get_thread_num`.
        thread_count: `omp_get_num_threads`.
        barrier: `GOMP_barrier`, where every thread of the team waits for the others.
    """

    parallel: int
    thread_number: int
    thread_count: int
    barrier: int


def team_step(team: Team | None, threads: int, tables: Sequence[Table], keeps: object, label: str) -> Step:
    """The step that runs all tables, each in order, on so many threads of the team, or on the caller's.

    `keeps` lives as long as the step. Call it only where `can_run`.
    """
    if is_alone():
        threads = 1
    made = [native_rows(calls) for table in tables if len(calls := np.asarray(table, np.int64))]
    code = _code()
    if team is None or code is None or threads == 1 or len(made) == 1:
        whole = np.concatenate(made)
        return _declared(_step(whole, keeps, label), [whole])
    ends = [number for table in made for number in (table.ctypes.data, len(table))]
    data = np.array([team.thread_number, team.thread_count, table_code() or 0, len(made), *ends], np.uint64)
    call = np.array([(team.parallel, code, data.ctypes.data, min(threads, len(made)), 0, 0)], np.uint64)
    return _declared(_step(call, (made, data, keeps), label), made)


def phased_step(team: Team | None, threads: int, phases: Sequence[Sequence[Table]], keeps: object, label: str) -> Step:
    """As `team_step`, with as many tables in every phase, which begins when all tables of the one before have ended."""
    if len(phases) == 1:
        return team_step(team, threads, phases[0], keeps, label)
    code = _phased_code()
    if team is None or code is None or threads == 1 or is_alone() or len(phases[0]) == 1:
        calls = [np.asarray(table, np.int64).reshape(-1, 5) for tables in phases for table in tables]
        return team_step(None, 1, [np.concatenate(calls)], keeps, label)
    made = [[native_rows(np.asarray(table, np.int64).reshape(-1, 5)) for table in tables] for tables in phases]
    ends = [number for tables in made for table in tables for number in (table.ctypes.data, len(table))]
    counts = len(phases), len(phases[0])
    functions = team.thread_number, team.thread_count, table_code() or 0, team.barrier
    data = np.array([*functions, *counts, *ends], np.uint64)
    call = np.array([(team.parallel, code, data.ctypes.data, min(threads, counts[1]), 0, 0)], np.uint64)
    return _step(call, (made, data, keeps), label)


def shares(count: int, threads: int) -> list[range]:
    """About equal parts of range(count), those that are empty left out."""
    ends = [count * number // threads for number in range(threads + 1)]
    return [range(start, stop) for start, stop in pairwise(ends) if start < stop]


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


def _declared(step: Step, tables: Sequence[npt.NDArray[np.uint64]]) -> Step:
    declare_tables(step, tables)
    return step


@cache
def _phased_code() -> int | None:
    """The address of the code that a thread of the team runs where there are phases."""
    return executable(_PHASED_CODE)


@cache
def _code() -> int | None:
    """The address of the code that a thread of the team runs."""
    return executable(_CODE)
