"""Tables of native calls as steps: pieces that threads may share, in one phase or in several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep, Phases, native_rows, table_code, table_piece

Table = npt.ArrayLike
"""Calls, [calls, 5]: a function and its arguments each, whose result does not count."""


def in_pieces(tables: Sequence[Table], keeps: object, label: str) -> NativeStep:
    """The step that runs all tables, each in order, which threads may share. `keeps` lives as long as the step.

    How many tables there are follows from the operator's geometry, not from threads. Call it only where `can_run`.
    """
    return in_phases([tables], keeps, label)


def in_phases(phases: Sequence[Sequence[Table]], keeps: object, label: str) -> NativeStep:
    """As `in_pieces`; each phase begins when all tables of the one before have ended."""
    made = [[rows for table in tables if len(rows := native_rows(table))] for tables in phases]
    found: Phases = tuple(tuple(table_piece(rows, keeps, label) for rows in tables) for tables in made if tables)
    return NativeStep(found, [rows for tables in made for rows in tables])


def step_of_rows(rows: npt.NDArray[np.uint64], ends: Sequence[int], keeps: object, label: str) -> NativeStep:
    """As `in_pieces`, of rows as of `native_rows`: those of each piece end at one of `ends`; none is empty."""
    pieces = tuple([table_piece(rows[start:end], keeps, label) for start, end in pairwise((0, *ends))])
    return NativeStep((pieces,), [rows])


def shares(count: int, parts: int) -> list[range]:
    """About equal parts of range(count), those with one more before others; those that are empty left out.

    So threads that take them in order end at about the same time.
    """
    size, larger = divmod(count, parts)
    ends = [size * number + min(number, larger) for number in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends) if start < stop]


def even_shares(count: int, parts: int) -> list[range]:
    """As `shares`, in few parts whose largest has no more than it would have in so many; an even number of them."""
    fewest = -(-count // max(1, -(-count // parts)))
    return shares(count, min(parts, fewest + (fewest > 1 and fewest % 2)))


@cache
def can_run() -> bool:
    """True where tables can be run."""
    return table_code() is not None


@cache
def c_function(name: str) -> int:
    """The address of a function of the C library, as `memcpy`."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
