"""Operators cut into more pieces than their work is worth, so that small tests see what large operators do.

And their pieces one by one, and as threads would compute them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest

from dagexec.core import native
from dagexec.core.native import Phases, Piece, phases_of, table_code
from dagexec.core.operator import Step, parts_of


class _Count(float):
    """What any number of seconds are so many times."""

    def __rtruediv__(self, other: float) -> float:
        return float(self)


@contextmanager
def cut_into(pieces: int) -> Iterator[None]:
    """Within it operators are prepared in so many pieces if they can be cut so often, however little they do.

    With 0 they are in as many as their work is worth.
    """
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(native, "PIECE_SECONDS", _Count(pieces))
        yield


Row = tuple[int, tuple[int, ...]]
"""A function and its arguments."""

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)


def native_phases(step: Step) -> Phases:
    """The phases of all parts of a step, which are native calls."""
    found = [phases_of(part) for part in parts_of(step)]
    assert None not in found, "a part is no native calls"
    return tuple(phase for phases in found for phase in phases or ())


def rows_of_piece(piece: Piece) -> list[Row]:
    """What a piece calls, tables row by row."""
    found: list[Row] = []
    for call in piece:
        if call.before is not None:
            found.append((call.before[0], (call.before[1], 0, 0, 0)))
        found += _rows(call.function, call.arguments)
    return found


def _rows(function: int, arguments: tuple[int, ...]) -> list[Row]:
    if function != table_code():
        return [(function, arguments)]
    address, count = arguments[:2]
    table = np.ctypeslib.as_array((ctypes.c_uint64 * (6 * count)).from_address(address)).reshape(-1, 6)
    return [row for numbers in table.tolist() for row in _rows(numbers[0], tuple(numbers[1:5]))]


def run_rows(rows: Iterable[Row]) -> None:
    """Call them in order."""
    for function, arguments in rows:
        _FUNCTION(function)(*arguments)


def shuffled(pieces: Sequence[Piece], random: Random) -> Iterator[Row]:
    """The rows of pieces as if threads computed them side by side: those of each in order, all in a random one."""
    left = [rows for piece in pieces if (rows := rows_of_piece(piece)[::-1])]
    while left:
        rows = random.choice(left)
        yield rows.pop()
        left = [rows for rows in left if rows]
