"""Tensors joined along an axis and cut again: one kernel moves many pieces, each a part of every row of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.kernels import Launch, compiled
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.strided_copy import item_type

MAX_PIECES = 16
"""Pieces of one launch."""

_MOVE = (
    INDICES
    + r"""
struct pieces_t { i64 count, pitch, first; divider span; i64 end[16]; T* at[16]; };
extern "C" __global__ void move_pieces(T* whole, pieces_t pieces, int cut, i64 n) {
    FOR_EACH(i, n) {
        I row = (I)i, column = split(row, pieces.span);
        int k = 0;
        I start = 0;
        while (column >= (I)pieces.end[k]) start = (I)pieces.end[k++];
        T* piece = pieces.at[k] + (row * ((I)pieces.end[k] - start) + column - start);
        T* place = whole + (row * (I)pieces.pitch + (I)pieces.first + column);
        if (cut) *piece = *place;
        else *place = *piece;
    }
}
"""
)


class PieceLaunch(Launch):
    """A Launch of `move_pieces`, which has the pieces' addresses in a struct.

    Attributes:
        pieces: the arrays, which live as long as it does.
    """

    __slots__ = ("pieces",)

    pieces: Sequence[Array]


def joining(operator: CudaOperator, whole: Array, pieces: Sequence[Array], axis: int) -> Step:
    """A step that copies the pieces, one after another along `axis`, to `whole`, all of them packed.

    With a new axis of `whole` the pieces have size 1 along it. Pieces that lie where they belong are left alone.
    """
    return _moving(operator, whole, pieces, axis, cut=False)


def cutting(operator: CudaOperator, whole: Array, pieces: Sequence[Array], axis: int) -> Step:
    """A step that copies the parts of `whole`, one after another along `axis`, to the pieces; see `joining`."""
    return _moving(operator, whole, pieces, axis, cut=True)


def in_place(whole: Array, pieces: Sequence[Array], axis: int) -> tuple[int, ...]:
    """The pieces, by index, that are their part of `whole` already."""
    if prod(whole.shape[:axis]) != 1:
        return ()
    found, place = [], address(whole)
    for index, piece in enumerate(pieces):
        if piece.size and address(piece) == place:
            found.append(index)
        place += piece.nbytes
    return tuple(found)


def _moving(operator: CudaOperator, whole: Array, pieces: Sequence[Array], axis: int, *, cut: bool) -> Step:
    rows = prod(whole.shape[:axis])
    there = in_place(whole, pieces, axis)
    steps: list[Step] = []
    start = 0
    run: list[Array] = []
    first = 0
    for index, piece in enumerate(pieces):
        width = piece.size // rows if rows else 0
        if width and index not in there:
            if not run:
                first = start
            run.append(piece)
        if run and (index in there or len(run) == MAX_PIECES):
            steps.append(_launch(operator, whole, run, rows, first, cut=cut))
            run = []
        start += width
    if run:
        steps.append(_launch(operator, whole, run, rows, first, cut=cut))
    return in_sequence(steps)


def _launch(operator: CudaOperator, whole: Array, pieces: Sequence[Array], rows: int, first: int, *, cut: bool) -> Step:
    """Pieces that follow one another from element `first` of every row on."""
    if rows == 1 and len(pieces) == 1:
        part = whole.reshape(-1)[first : first + pieces[0].size]
        return copy_step(pieces[0], part) if cut else copy_step(part, pieces[0])
    item, pitch = int(whole.itemsize), whole.size // rows
    ends = [int(end) for end in np.cumsum([piece.size // rows for piece in pieces])]
    places = [address(whole), *map(address, pieces)]
    while item < 16 and not any(number % 2 for number in (first, pitch, *ends)):
        if any(place % (2 * item) for place in places):
            break
        item, pitch, first, ends = 2 * item, pitch // 2, first // 2, [end // 2 for end in ends]
    empty = [0] * (MAX_PIECES - len(pieces))
    addresses = [*places[1:], *empty]
    layout: Any = by_value([len(pieces), pitch, first, *divider(ends[-1]), *ends, *empty, *addresses])
    n = rows * ends[-1]
    kind = index_type(rows * pitch, n)
    function = compiled("move_pieces", _MOVE, operator.device_index, T=item_type(item), I=kind)
    arguments = (whole, layout, np.int32(cut), np.int64(n))
    launch = PieceLaunch(function, arguments, elements=n, device=operator.device_index)
    launch.pieces = tuple(pieces)
    return launch
