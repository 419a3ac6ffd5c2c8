"""Tables of native calls that are pointed at other arrays: what lets a run read a caller's memory where it lies.

A kernel is told where to read and write by its arguments. Those that lie in an array's memory move with it; numbers
that kernels look up (strides, counts) are the same for all arrays of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep
from dagexec.core.operator import Step, parts_of
from dagexec.platform.addresses import address_of

Array = npt.NDArray[Any]

NativeRows = npt.NDArray[np.uint64]
_ARGUMENTS = slice(1, 5)  # columns of a table; before them is the function


class TableRebind:
    """Has the native calls of a step be about another array of the same shape and strides."""

    __slots__ = ("_places",)

    def __init__(self, places: Sequence[tuple[Array, Array, Array]]) -> None:
        """`places`: the numbers of a table as one row, which of them are addresses in the array, and their offsets."""
        self._places = places

    def __call__(self, array: Array) -> None:
        address = address_of(array)
        for numbers, indices, offsets in self._places:
            numbers[indices] = offsets + np.uint64(address)


def table_rebind(step: Step, array: Array) -> TableRebind | None:
    """What points the native calls of `step` at another array in place of the packed `array`.

    None where no call has an address in it. That the steps beside the tables leave the array alone, and that no
    table leads to an address in other ways than by an argument, is for the caller to know.
    """
    return rebind_in(tables_of(step), array)


def tables_of(step: Step) -> list[NativeRows]:
    """The tables of the native calls of `step`."""
    return [table for part in parts_of(step) if isinstance(part, NativeStep) for table in part.native_tables]


def rebind_in(tables: Sequence[NativeRows], array: Array) -> TableRebind | None:
    """What points calls in tables at another array in place of the packed `array`; None where none is about it."""
    first, behind = np.uint64(address_of(array)), np.uint64(address_of(array) + array.nbytes)
    places = []
    for table in tables:
        inside = np.zeros(table.shape, bool)
        arguments = table[:, _ARGUMENTS]
        inside[:, _ARGUMENTS] = (arguments >= first) & (arguments < behind)
        indices = np.flatnonzero(inside)
        if len(indices):
            numbers = table.reshape(-1)
            places.append((numbers, indices, numbers[indices] - first))
    return TableRebind(places) if places else None
