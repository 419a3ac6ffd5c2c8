"""Windows over images N, D, H, W, C as machine code: the largest or smallest number, the sum, the mean, a norm of each.

A call computes neighboring pixels of a row of the result whose windows have as many pixels of the image, in some
channels. Each number is one chain along the planes, rows and columns of its window; NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep
from dagexec.ops.base.geometry import Axis
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import GREATER
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

MAXIMUM, MINIMUM, SUM, MEAN, MAGNITUDE, LENGTH = "maximum", "minimum", "sum", "mean", "magnitude", "length"
"""The last two are the sum of magnitudes, and the root of the sum of squares."""

_PIXELS, _CHANNELS, _PLANES, _ROWS, _COLUMNS, _PLANE, _ROW, _COLUMN, _READ, _WRITTEN, _SIZE = range(11)
"""Places of the 64-bit numbers that a kernel gets: how many pixels, channels, and planes, rows and columns of a window;
bytes from the end of each of its planes and rows to the next, from column to column, and from pixel to pixel of the
image and of the result; and the number that a sum is divided by, as float32."""

_TOGETHER = 4
"""Vectors of channels that go along a window together."""


@dataclass(frozen=True)
class _Run:
    """Neighbors along an axis of the result: how many there are from the first on, the taps of each, and its size."""

    first: int
    count: int
    tap: int
    taps: int
    size: int


def _runs(axis: Axis, with_padding: bool) -> Iterator[_Run]:
    """Those of an axis; no window is without a pixel."""
    start = np.arange(axis.out) * axis.stride - axis.head
    tap = np.maximum(-(start // axis.dilation), 0)
    taps = np.minimum(-((start - axis.size) // axis.dilation), axis.kernel) - tap
    alike = zip(tap.tolist(), taps.tolist(), axis.window_sizes(with_padding=with_padding), strict=True)
    first = 0
    for (own_tap, own_taps, size), same in groupby(alike):
        count = len(list(same))
        yield _Run(first, count, own_tap, own_taps, int(size))
        first += count


def pool_step(
    machine: Machine, kind: str, x: Array, y: Array, axes: Sequence[Axis], with_padding: bool, label: str
) -> NativeStep | None:
    """The step that pools `x` to `y`, packed float32 images of one to three axes; None where no kernel runs.

    A mean is over the pixels of a window, or over those of the padding, too.
    """
    is_plain = all(array.dtype == np.float32 and array.flags.c_contiguous for array in (x, y))
    kernel = _pooling(machine.lanes, kind) if machine.can_run and is_plain else None
    if kernel is None:
        return None
    planes, rows, columns = *(Axis(1, 1, 1, 1, 0, 0, 1),) * (3 - len(axes)), *axes
    channels, pieces = x.shape[-1], pieces_of_bytes(x.nbytes)
    lines = len(x) * planes.out * rows.out
    unit = _TOGETHER * machine.lanes
    by_lines = lines >= pieces
    work = [(part, range(channels)) for part in shares(lines, pieces)] if by_lines else [
        (range(lines), range(part.start * unit, min(part.stop * unit, channels)))
        for part in shares(-(-channels // unit), pieces)
    ]  # fmt: skip
    calls = _Calls(kernel, x, y, (planes, rows, columns), with_padding)
    return in_pieces([calls.table(*part) for part in work], (x, y, calls), label)


class _Calls:
    """Writes the calls for lines of the result; it holds the numbers that they point at."""

    def __init__(self, kernel: int, x: Array, y: Array, axes: tuple[Axis, Axis, Axis], with_padding: bool) -> None:
        self._kernel, self._x, self._y = kernel, address_of(x), address_of(y)
        self._planes, self._rows, self._columns = planes, rows, columns = axes
        self._pixel = BYTES * x.shape[-1]
        self._of_plane = [one for one in _runs(planes, with_padding) for _ in range(one.count)]
        self._of_row = [one for one in _runs(rows, with_padding) for _ in range(one.count)]
        self._of_line = list(_runs(columns, with_padding))
        self._known: dict[tuple[int, ...], Array] = {}

    def table(self, lines: range, channels: range) -> list[tuple[int, int, int, int, int]]:
        """The calls of lines of all images together, in some channels."""
        planes, rows, columns, pixel = self._planes, self._rows, self._columns, self._pixel
        line, table = columns.size * pixel, []
        for number in lines:
            image, place = divmod(number, planes.out * rows.out)
            deep, out = divmod(place, rows.out)
            plane, row = self._of_plane[deep], self._of_row[out]
            before = image * planes.size + deep * planes.stride - planes.head + plane.tap * planes.dilation
            above = before * rows.size + out * rows.stride - rows.head + row.tap * rows.dilation
            for run in self._of_line:
                before = run.first * columns.stride - columns.head + run.tap * columns.dilation
                source = self._x + above * line + before * pixel + channels.start * BYTES
                target = self._y + (number * columns.out + run.first) * pixel + channels.start * BYTES
                table.append((self._kernel, self._numbers(plane, row, run, len(channels)), source, target, 0))
        return table

    def _numbers(self, plane: _Run, row: _Run, run: _Run, channels: int) -> int:
        """The address of what a kernel is told."""
        columns, pixel = self._columns, self._pixel
        size = int(np.float32(plane.size * row.size * run.size).view(np.int32))
        next_column, next_row = columns.dilation * pixel, self._rows.dilation * columns.size * pixel
        next_plane = self._planes.dilation * self._rows.size * columns.size * pixel
        steps = next_plane - row.taps * next_row, next_row - run.taps * next_column, next_column
        numbers = run.count, channels, plane.taps, row.taps, run.taps, *steps, columns.stride * pixel, pixel, size
        if numbers not in self._known:
            self._known[numbers] = np.array(numbers, np.int64)
        return address_of(self._known[numbers])


@lru_cache
def _pooling(lanes: int, kind: str) -> int | None:
    """The address of a function of numbers, and of where the first pixel is read and written."""
    build = Builder(lanes)
    numbers, x, y = build.arguments(3)

    def number(place: int) -> Scalar:
        return build.number(numbers, 8 * place)

    extremes = {MAXIMUM: (build.maximum, -math.inf), MINIMUM: (build.minimum, math.inf)}
    join, start = extremes.get(kind, (None, 0.0))

    def joined(total: Vector, value: Vector) -> Vector:
        if kind == LENGTH:
            return build.fma(value, value, total)
        if join is None:
            return total + (build.absolute(value) if kind == MAGNITUDE else value)
        return build.select(build.is_nan(total), total, join(total, value))  # an instruction gives its second operand

    def window(place: Scalar, vectors: int, mask: Mask | None = None) -> None:
        """Of some vectors of channels."""
        totals = [build.constant(start) for _ in range(vectors)]
        tap = x + place
        with build.repeat(number(_PLANES)):
            with build.repeat(number(_ROWS)):
                with build.repeat(number(_COLUMNS)):
                    for vector, total in enumerate(totals):
                        total.set(joined(total, build.load(tap, offset=vector * lanes * BYTES, mask=mask)))
                    tap.set(tap + number(_COLUMN))
                tap.set(tap + number(_ROW))
            tap.set(tap + number(_PLANE))
        for vector, total in enumerate(totals):
            if kind == MEAN:
                total = total / build.broadcast(numbers, offset=8 * _SIZE)
            elif kind == LENGTH:
                total = build.square_root(total)
            build.store(total, y, place, vector * lanes * BYTES, mask=mask)

    with build.repeat(number(_PIXELS)):
        place, vector = build.zero(), lanes * BYTES
        for vectors in (_TOGETHER, 1):
            stop = (number(_CHANNELS) - (vectors * lanes - 1)) << 2
            with build.range(stop, vectors * vector, place):
                window(place, vectors)
        rest = number(_CHANNELS) & (lanes - 1)
        with build.when(rest, GREATER, 0):
            window(place, 1, build.first(rest))
        x.set(x + number(_READ))
        y.set(y + number(_WRITTEN))
    return build.function()
