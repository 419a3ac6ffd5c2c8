"""Rows of a table picked by index, as machine code: a lookup takes a tenth of what calling NumPy for it takes.

The code is plain x86-64. Many picks are in pieces: some of the tables, or of the indices of one. A piece checks all its
indices before it writes, and each once more where it is used, as an array of the caller's may change meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeCall, NativeStep
from dagexec.core.operator import Step
from dagexec.core.shapes import element_count
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import even_shares, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    BELOW,
    LESS,
    NOT_LESS,
    NOT_ZERO,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    T0,
    T1,
)
from dagexec.platform.assembly.native import Assembler
from dagexec.platform.machine_code import executable

Array = npt.NDArray[Any]

_LINE, _TOGETHER = 16, 16
"""Bytes that are copied at a time, and how often before a jump."""


def gather_step(
    data: Array, indices: Array, y: Array, axis: int, *, wraps: bool, failure: Callable[[], Exception]
) -> Step | None:
    """The step that leaves in `y` what `indices` (int32 or int64) pick from `data` along `axis`; all are packed.

    Where an index is not in the axis, or with `wraps` in the axis counted from its end, `failure` makes what is raised.
    None where the code cannot run, or elements are objects, or there is nothing to pick.
    """
    if data.dtype.hasobject or not y.size:
        return None
    size, row = data.shape[axis], element_count(data.shape[axis + 1 :]) * data.itemsize
    code = _code(indices.itemsize, row)
    if code is None:
        return None
    tables = element_count(data.shape[:axis])
    pieces = pieces_of_bytes(y.nbytes + tables * indices.nbytes)
    parts = [(part, range(indices.size)) for part in shares(tables, pieces)]
    if tables == 1:
        parts = [(range(1), part) for part in even_shares(indices.size, pieces)]
    calls = []
    for which, picked in parts:
        places = address_of(indices) + picked.start * indices.itemsize, len(picked), size, -size if wraps else 0
        start = which.start * indices.size + picked.start
        moved = address_of(data) + which.start * size * row, address_of(y) + start * row, len(which), row
        fields = np.array([*places, *moved], np.int64)
        calls.append(NativeCall(code, (address_of(fields), 0, 0, 0), None, failure, (fields, data, indices, y)))
    return NativeStep((tuple((call,) for call in calls),))


@cache
def _code(index_bytes: int, row: int) -> int | None:
    """The address of a function of the fields, which returns 1 for an index out of range; None where none runs."""
    fields, indices, count, size, lowest, table, tables = S0, A4, A5, T0, T1, S2, S3
    code = Assembler()
    saved = fields, S1, table, tables
    code.push(*saved)
    code.move(fields, A0)
    for place, register in enumerate((indices, count, size, lowest, table, A0, tables, S1)):
        code.load_number(register, fields, None, offset=8 * place)
    code.clear(A3)
    code.mark("check")
    _load_index(code, index_bytes, A3)
    code.add_number(A3, 1)
    code.compare(A3, count)
    code.jump("check", BELOW)
    code.mark("next table")
    code.clear(A2)
    code.mark("pick")
    _load_index(code, index_bytes, A2)
    code.move(A1, RESULT)
    code.shift_right(A1, 63)
    code.intersect(A1, size)
    code.add(A1, RESULT)  # rsi = the index from the start of the axis
    code.multiply(A1, S1)
    code.add(A1, table)
    _copy_row(code, row)
    code.add_number(A2, 1)
    code.compare(A2, count)
    code.jump("pick", BELOW)
    code.move(RESULT, size)
    code.multiply(RESULT, S1)
    code.add(table, RESULT)
    code.add_number(tables, -1)
    code.jump("next table", NOT_ZERO)
    code.clear(RESULT)
    code.jump("end")
    code.mark("out of range")
    code.set_number(RESULT, 1)
    code.mark("end")
    code.pop(*saved)
    code.end_call()
    return executable(code.code())


def _load_index(code: Assembler, index_bytes: int, number: int) -> None:
    """rax = the index with the number in register `number`."""
    load = code.load_short_number if index_bytes == 4 else code.load_number
    load(RESULT, A4, number, index_bytes)
    for bound, condition in ((T0, NOT_LESS), (T1, LESS)):
        code.compare(RESULT, bound)
        code.jump("out of range", condition)


def _copy_row(code: Assembler, row: int) -> None:
    """Copy a row of rbp bytes from rsi to rdi, which moves on behind it."""
    if row % 4:
        code.move(A3, S1)
        code.copy_bytes()
        return
    many, few = divmod(row // _LINE, _TOGETHER)
    if many:
        code.set_number(A3, many)
        again = code.here()
        _copy_lines(code, _TOGETHER)
        code.add_number(A3, -1)
        code.jump_if_not_zero(again)
    if few:
        _copy_lines(code, few)
    for size in (8, 4):
        if row & size:
            code.copy_number(size)


def _copy_lines(code: Assembler, count: int) -> None:
    """Copy so many lines; both registers move on behind them."""
    for number in range(count):
        code.copy_line(_LINE * number)
    for register in (A1, A0):
        code.add_number(register, _LINE * count)
