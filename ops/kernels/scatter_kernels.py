"""Values put to places of a table one after another, or joined with what is there, as machine code.

Where some of them never meet others they may be in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep, call_rows, native_rows
from dagexec.ops.kernels.builder import Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.chains import BINARY
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of, pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of

Array = npt.NDArray[Any]

_BYTES = 4
_SECONDS = 1.2e-9
"""Of one element, on one core."""

_LINE = 16
"""Elements of rows that are in one piece: those of a line of the cache."""

_ROWS, _COLUMNS, _STRIDE, _PLACES, _VALUES, _TABLE = (8 * number for number in range(6))


def scatter_step(
    machine: Machine, table: Array, places: Array, values: Array, join: str | None, apart: int | None, label: str
) -> NativeStep | None:
    """The step table[places] = values in their order, or what `join`, a link of chains, makes of old and new ones.

    `table` is flat, elements have four bytes, and with `join` they are float32; `places` (int64) lie in it, as whoever
    computed them knows. Along axis `apart` of `values` no two have the same place. None where no kernel serves.
    """
    kernel = _kernel(machine.lanes, join) if _serves(machine, table, places, values, join) else None
    if kernel is None:
        return None
    axis = 0 if apart is None else apart
    size, inner = values.shape[axis], int(np.prod(values.shape[axis + 1 :], dtype=np.int64))
    parts = shares(size, 1 if apart is None else pieces_of(values.size * _SECONDS))
    kept, calls = [], []
    for part in parts:
        first = part.start * inner
        fields = np.array(
            [
                *(values.size // (size * inner), len(part) * inner, size * inner),
                *(address_of(places) + 8 * first, address_of(values) + _BYTES * first, address_of(table)),
            ],
            np.int64,
        )
        kept.append(fields)
        calls.append([(kernel, address_of(fields), 0, 0, 0)])
    return in_pieces(calls, (kept, table, places, values), label)


def scatter_rows_step(
    machine: Machine, table: Array, places: Array, values: Array, join: str | None, label: str
) -> NativeStep | None:
    """As `scatter_step`, of rows: `values` has one for each place, and `table` has two axes.

    Pieces are columns.
    """
    kernel = _row_kernel(machine.lanes, join) if _serves(machine, table, places, values, join) else None
    if kernel is None:
        return None
    count, size = values.shape
    lines = -(-size // _LINE)
    pieces = min(lines, pieces_of_bytes((2 + (join is not None)) * values.nbytes))
    kept, calls = [], []
    for part in shares(lines, pieces):
        first = part.start * _LINE
        last = min(size, part.stop * _LINE)
        offset = _BYTES * first
        addresses = address_of(places), address_of(values) + offset, address_of(table) + offset
        fields = np.array([count, last - first, _BYTES * size, *addresses], np.int64)
        kept.append(fields)
        calls.append([(kernel, address_of(fields), 0, 0, 0)])
    return in_pieces(calls, (kept, table, places, values), label)


class RowScattering:
    """What `scatter_rows_step` does, of as many rows as each call says, in one piece. Only where a kernel runs."""

    def __init__(self, kernel: int) -> None:
        self._fields = np.zeros(6, np.int64)
        self._calls = native_rows([(kernel, address_of(self._fields), 0, 0, 0)])

    @classmethod
    def of(cls, machine: Machine, join: str | None) -> RowScattering | None:
        """None where no kernel runs."""
        kernel = _row_kernel(machine.lanes, join) if machine.can_run else None
        return None if kernel is None else cls(kernel)

    def __call__(self, table: Array, places: Array, values: Array) -> None:
        """Packed float32 rows, one for each of packed `places` (int64) in the table."""
        count, size = values.shape
        addresses = address_of(places), address_of(values), address_of(table)
        self._fields[:] = (count, size, _BYTES * size, *addresses)
        call_rows(self._calls)


def _serves(machine: Machine, table: Array, places: Array, values: Array, join: str | None) -> bool:
    """True where the kernels do."""
    is_packed = all(array.flags.c_contiguous for array in (table, places, values))
    if not machine.can_run or not is_packed or table.itemsize != _BYTES or table.dtype.hasobject:
        return False
    return places.dtype == np.int64 and bool(values.size) and (join is None or table.dtype == np.float32)


@lru_cache
def _kernel(lanes: int, join: str | None) -> int | None:
    """The address of a function of the fields; None where it cannot run."""
    made: Callable[[Builder, Vector, Vector], Vector] = BINARY[join] if join else lambda build, old, new: new
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    places, values = build.number(fields, _PLACES), build.number(fields, _VALUES)
    table, columns = build.number(fields, _TABLE), build.number(fields, _COLUMNS)
    with build.repeat(build.number(fields, _ROWS)):
        with build.range(columns, 1) as column:
            place = build.number(places + (column << 3))
            new = build.load_first(values, column, scale=_BYTES)
            old = build.load_first(table, place, scale=_BYTES) if join else new
            build.store_first(made(build, old, new), table, place, scale=_BYTES)
        stride = build.number(fields, _STRIDE)
        places.set(places + (stride << 3))
        values.set(values + (stride << 2))
    return build.function()


@lru_cache
def _row_kernel(lanes: int, join: str | None) -> int | None:
    """The address of a function of the fields; None where it cannot run."""
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    places, values, table = (build.number(fields, place) for place in (_PLACES, _VALUES, _TABLE))
    columns, stride = build.number(fields, _COLUMNS), build.number(fields, _STRIDE)
    with build.repeat(build.number(fields, _ROWS)):
        row = build.number(places) * stride + table

        def body(place: Scalar, mask: Mask | None, row: Scalar = row) -> None:
            new = build.load(values, place, mask=mask)
            made = new if join is None else BINARY[join](build, build.load(row, place, mask=mask), new)
            build.store(made, row, place, mask=mask)

        build.each(columns, body, together=2)
        places.set(places + 8)
        values.set(values + stride)
    return build.function()
