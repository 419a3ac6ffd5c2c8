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
from dagexec.platform.machine_code import executable

Array = npt.NDArray[Any]

_CODE = (
    "f30f1efa"  # endbr64
    "53 55 4154 4155"  # push rbx; push rbp; push r12; push r13
    "4889fb 4c8b03 4c8b4b08 4c8b5310 4c8b5b18"  # rbx = fields: r8 = indices, r9 = count, r10 = size, r11 = low
    "31c9"  # ecx = 0
    "{first}"  # 1: rax = indices[rcx]
    "4c39d0 7d73 4c39d8 7c6e"  # cmp rax, size; jge 9f; cmp rax, low; jl 9f
    "48ffc1 4c39c9 72ea"  # inc rcx; cmp rcx, count; jb 1b
    "4c8b6320 488b7b28 4c8b6b30 488b6b38"  # r12 = table, rdi = where to write, r13 = tables, rbp = bytes of a row
    "31d2"  # 2: edx = 0
    "{second}"  # 3: rax = indices[rdx]
    "4c39d0 7d4b 4c39d8 7c46"  # the same comparisons
    "4889c6 48c1fe3f 4c21d6 4801c6"  # rsi = rax, plus size where it is negative
    "480faff5 4c01e6 4889e9"  # rsi = table + rsi * bytes; rcx = bytes
    "{copy}"  # rcx bytes from [rsi] to [rdi], which goes on behind them
    "48ffc2 4c39ca 72bf"  # inc rdx; cmp rdx, count; jb 3b
    "4c89d0 480fafc5 4901c4"  # r12 += size * bytes
    "49ffcd 75ae"  # dec r13; jnz 2b
    "31c0 eb05"  # return 0
    "b801000000"  # 9: return 1
    "415d 415c 5d 5b c3"
)
_INDEX = {4: ("49630488", "49630490"), 8: ("498b04c8", "498b04d0")}
"""By the bytes of an index, how it is loaded with rcx and with rdx."""

_COPY_BYTES = 20
_SINGLE = {4: "a5", 8: "48a5"}  # movsd, movsq
_ANY = "f3a4"  # rep movsb
_LINES = "0f1006 0f1107 4883c610 4883c710 4883e910 75ec"  # 16 bytes at a time, by xmm0
_LINE, _MOST_LINES = 16, 128  # rows of more lines are for `rep movsb`


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


def _code(index_bytes: int, row: int) -> int | None:
    """The address of a function of the fields, which returns 1 for an index out of range."""
    if row in _SINGLE:
        return _made(index_bytes, _SINGLE[row])
    by_lines = row % _LINE == 0 and row <= _LINE * _MOST_LINES
    return _made(index_bytes, _LINES if by_lines else _ANY)


@cache
def _made(index_bytes: int, copy: str) -> int | None:
    first, second = _INDEX[index_bytes]
    return executable(bytes.fromhex(_CODE.format(first=first, second=second, copy=_filled(copy))))


def _filled(copy: str) -> str:
    """`copy` with a jump to the end of its place in the code."""
    left = _COPY_BYTES - len(bytes.fromhex(copy))
    return copy if not left else f"{copy} eb{left - 2:02x} {'90' * (left - 2)}"
