"""What tasks do for so many seconds: compute, read memory, or sleep; natively, where machine code runs.

Work is counted, not clocked: a rate that is measured once, with nobody else at work, says how many units are so many
seconds. So a task takes longer where others take the processor or the memory away from it, as other work does.

`compute` multiplies a number in a register, again and again. `memory` reads a number of each line of 64 bytes of a
buffer larger than most caches, which nobody writes. `sleep` leaves its core to others. Where there is no machine code,
NumPy computes and reads, with the interpreter lock released.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import can_run, table_code
from dagexec.platform.assembly.instructions import A0, A1, A2, A3, LESS, NOT_ZERO, RESULT
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable

Row = tuple[int, int, int, int, int]
"""A native call: a function and its arguments."""

KINDS = ("compute", "memory", "sleep")

BUFFER_BYTES = 64 << 20
_LINE = 64

_CALIBRATION_UNITS = {"compute": 100_000, "memory": BUFFER_BYTES // _LINE}
_CALIBRATION_ROUNDS = 7


def work_rows(kind: str, seconds: float, number: int) -> tuple[list[Row], object]:
    """The native calls of a task's work, and what has to live as long. Only where machine code runs.

    `number` says where in the buffer the task begins to read.
    """
    if kind == "sleep":
        pause = _pause(seconds)
        return [(_nanosleep(), pause.ctypes.data, 0, 0, 0)] * (seconds > 0), pause
    return unit_rows(kind, round(seconds * rate(kind)), number)


def unit_rows(kind: str, units: int, number: int) -> tuple[list[Row], object]:
    """As `work_rows`, for so many units of `compute`, or lines of `memory`."""
    if kind == "compute":
        return [(_code("compute"), units, 0, 0, 0)] * (units > 0), None
    buffer = _buffer()
    lines = buffer.nbytes // _LINE
    place = number * 40_503 % lines
    rows: list[Row] = []
    while units > 0:
        part = min(units, lines - place)
        rows.append((_code("memory"), buffer.ctypes.data + place * _LINE, part, 0, 0))
        units, place = units - part, 0
    return rows, buffer


def work_step(kind: str, seconds: float) -> Callable[[], object]:
    """A function that does the same without machine code, with the interpreter lock released most of the time."""
    if kind == "sleep":
        return lambda: time.sleep(seconds) if seconds > 0 else None
    units = round(seconds * rate(kind))
    return lambda: _units_by_numpy(kind, units)


def mark_row(result: int, own_and_inputs: npt.NDArray[np.uint64]) -> Row:
    """The native call that writes a task's mark: its own, times 31 plus each input's, one after another."""
    return _code("mark"), result, own_and_inputs.ctypes.data, len(own_and_inputs) - 1, 0


@cache
def rate(kind: str) -> float:
    """Units of `compute`, or lines of `memory`, in a second of one core; measured once in a process, the fastest."""
    units = _CALIBRATION_UNITS[kind]
    run: Callable[[str, int], None] = run_natively if can_run() else _units_by_numpy
    run(kind, units)
    return units / min(_timed(lambda: run(kind, units)) for _ in range(_CALIBRATION_ROUNDS))


def run_natively(kind: str, units: int, number: int = 0) -> None:
    """Do so many units of `compute` or `memory` on this thread, with the interpreter lock released."""
    rows, _keeps = unit_rows(kind, units, number)
    for function, *arguments in rows:
        _function(function)(*arguments)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)


@cache
def _function(address: int) -> Callable[[int, int, int, int], int]:
    return _FUNCTION(address)


@cache
def _code(name: str) -> int:
    assert table_code() is not None, "no machine code runs here"
    code = GeneralAssembler()
    {"compute": _write_compute, "memory": _write_memory, "mark": _write_mark}[name](code)
    code.clear(RESULT)
    code.end_call()
    address = executable(code.code())
    assert address is not None, "no machine code runs here"
    return address


def _write_compute(code: GeneralAssembler) -> None:
    """rdi = units; each is eight products, of which one waits for the other."""
    code.mark("next")
    for _ in range(8):
        code.multiply(RESULT, RESULT)
    code.add_number(A0, -1)
    code.jump("next", NOT_ZERO)


def _write_memory(code: GeneralAssembler) -> None:
    """rdi = address, rsi = lines."""
    code.mark("next")
    code.load_field(RESULT, 0)
    code.add_number(A0, _LINE)
    code.add_number(A1, -1)
    code.jump("next", NOT_ZERO)


def _write_mark(code: GeneralAssembler) -> None:
    """rdi = where the result goes, rsi = the task's mark and the addresses of its inputs' marks, rdx = inputs."""
    code.load_field(RESULT, 0, A1)
    code.mark("next")
    code.add_number(A2, -1)
    code.jump("end", LESS)
    code.multiply_number(RESULT, RESULT, 31)
    code.add_number(A1, 8)
    code.load_field(A3, 0, A1)
    code.add_field(RESULT, 0, A3)
    code.jump("next")
    code.mark("end")
    code.store_number(RESULT, A0)


@cache
def _nanosleep() -> int:
    return ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p).value or 0


def _pause(seconds: float) -> npt.NDArray[np.int64]:
    """As the C library has it, a `timespec`."""
    return np.array(divmod(round(seconds * 1e9), 1_000_000_000), np.int64)


@cache
def _buffer() -> npt.NDArray[np.uint8]:
    """Written once, as memory that never was is one page of zeros for all addresses."""
    return np.ones(BUFFER_BYTES, np.uint8)


_STRETCH = 2048
"""Numbers, or lines, of one call of NumPy."""


def _units_by_numpy(kind: str, units: int) -> None:
    numbers: npt.NDArray[Any] = np.ones(_STRETCH)
    buffer = _buffer() if kind == "memory" else None
    for first in range(0, units, _STRETCH):
        if buffer is None:
            np.sin(numbers[: units - first])
        else:
            place = first * _LINE % (buffer.nbytes - _STRETCH * _LINE)
            buffer[place : place + min(_STRETCH, units - first) * _LINE].max()
