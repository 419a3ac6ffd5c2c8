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
    BELOW,
    LESS,
    NOT_LESS,
    NOT_ZERO,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
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
    fields, indices, count, size, lowest, table, tables = RBX, R8, R9, R10, R11, R12, R13
    code = Assembler()
    saved = fields, RBP, table, tables
    code.push(*saved)
    code.move(fields, RDI)
    for place, register in enumerate((indices, count, size, lowest, table, RDI, tables, RBP)):
        code.load_number(register, fields, None, offset=8 * place)
    code.clear(RCX)
    code.mark("check")
    _load_index(code, index_bytes, RCX)
    code.add_number(RCX, 1)
    code.compare(RCX, count)
    code.jump("check", BELOW)
    code.mark("next table")
    code.clear(RDX)
    code.mark("pick")
    _load_index(code, index_bytes, RDX)
    code.move(RSI, RAX)
    code.shift_right(RSI, 63)
    code.intersect(RSI, size)
    code.add(RSI, RAX)  # rsi = the index from the start of the axis
    code.multiply(RSI, RBP)
    code.add(RSI, table)
    _copy_row(code, row)
    code.add_number(RDX, 1)
    code.compare(RDX, count)
    code.jump("pick", BELOW)
    code.move(RAX, size)
    code.multiply(RAX, RBP)
    code.add(table, RAX)
    code.add_number(tables, -1)
    code.jump("next table", NOT_ZERO)
    code.clear(RAX)
    code.jump("end")
    code.mark("out of range")
    code.set_number(RAX, 1)
    code.mark("end")
    code.pop(*saved)
    code.end_call()
    return executable(code.code())


def _load_index(code: Assembler, index_bytes: int, number: int) -> None:
    """rax = the index with the number in register `number`."""
    load = code.load_short_number if index_bytes == 4 else code.load_number
    load(RAX, R8, number, index_bytes)
    for bound, condition in ((R10, NOT_LESS), (R11, LESS)):
        code.compare(RAX, bound)
        code.jump("out of range", condition)


def _copy_row(code: Assembler, row: int) -> None:
    """Copy a row of rbp bytes from rsi to rdi, which moves on behind it."""
    if row % 4:
        code.move(RCX, RBP)
        code.copy_bytes()
        return
    many, few = divmod(row // _LINE, _TOGETHER)
    if many:
        code.set_number(RCX, many)
        again = code.here()
        _copy_lines(code, _TOGETHER)
        code.add_number(RCX, -1)
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
    for register in (RSI, RDI):
        code.add_number(register, _LINE * count)
