"""Rows normalized by their own mean and variance: instance, group and root mean square normalization, as machine code.

Y = (X - mean) / sqrt(variance + epsilon) * scale + bias, where a row is one channel or several, each with a scale and a
bias. Sums are those of 1024 elements each, in a vector of sums, so that errors grow with the number of these; a row's
bytes depend on the row alone. 256 x 1000 elements take 60 us on one core of an AMD EPYC (Zen 4), by NumPy 230.

Rows of many elements (LONG_ROW) are cut within, into stretches of so many that follow from the row alone. What they sum
to is kept, and whatever needs the mean or the variance adds that up again, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_phases, in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import GREATER

Array = npt.NDArray[Any]

_ROWS, _CHANNELS, _WIDTH, _MEMBERS, _NUMBERS, _SCALE, _BIAS = range(7)
"""Places of the 64-bit numbers that a kernel gets: rows; channels of a row; elements of a channel and of a row; the
addresses of two numbers, which are the elements of a row and epsilon; and of the first row's scales and biases."""

_CHUNK = 1024
_TOGETHER = 2
_PASSES = 3  # over X and Y

LONG_ROW = 1 << 15
"""Elements of a row from which on it is cut within."""

_STRETCH, _MOST_STRETCHES = 1 << 13, 64
"""Elements of a stretch, of which a row has no more than so many, because each adds up what all of them sum to."""


def standardizing_step(
    machine: Machine, x: Array, y: Array, scale: Array, bias: Array, epsilon: float, label: str
) -> Step | None:
    """The step for float32 `x` and `y` [rows, channels, width]; `scale` and `bias` [..., channels] repeat over rows.

    Their size is a multiple of `channels`: that of one image. None where the kernel cannot run. Rows of LONG_ROW and
    more elements may come in pieces.
    """
    arrays = (x, y, scale, bias)
    if not machine.can_run or any(one.dtype != np.float32 or not one.flags.c_contiguous for one in arrays):
        return None
    kernel = _kernel(machine.lanes)
    rows, channels, width = x.shape
    if kernel is None or not x.size:
        return None
    if channels * width >= LONG_ROW:
        return _long_rows_step(machine.lanes, x, y, scale, bias, epsilon, label)
    numbers = np.array([channels * width, epsilon], np.float32)
    kept: list[Array] = [numbers]
    groups, row = scale.size // channels, channels * BYTES
    tables: list[list[tuple[int, int, int, int, int]]] = []
    for part in shares(rows, pieces_of_bytes(_PASSES * x.nbytes)):
        start, stop = part.start, part.stop
        table: list[tuple[int, int, int, int, int]] = []
        tables.append(table)
        while start < stop:
            group = start % groups
            count = min(stop - start, groups - group)
            sizes = count, channels, width, channels * width, address_of(numbers)
            fields = np.array([*sizes, address_of(scale) + group * row, address_of(bias) + group * row], np.int64)
            kept.append(fields)
            offset = start * row * width
            table.append((kernel, address_of(x) + offset, address_of(y) + offset, address_of(fields), 0))
            start += count
    return in_pieces(tables, (kept, arrays), label)


@lru_cache
def _kernel(lanes: int) -> int | None:
    """The address of a function of x, y and numbers for so many rows, one after another; None where it cannot run."""
    build = Builder(lanes)
    x, y, fields = build.arguments(3)
    scale, bias = build.number(fields, 8 * _SCALE), build.number(fields, 8 * _BIAS)
    with build.repeat(build.number(fields, 8 * _ROWS)):
        members = build.number(fields, 8 * _MEMBERS)
        count = build.broadcast(build.number(fields, 8 * _NUMBERS))
        mean = row_sum(build, x, members, lambda value: value) / count
        spread = row_sum(build, x, members, lambda value: _square(value - mean)) / count
        epsilon = build.broadcast(build.number(fields, 8 * _NUMBERS), offset=BYTES)
        inverse = 1.0 / build.square_root(spread + epsilon)
        with build.repeat(build.number(fields, 8 * _CHANNELS)):
            width = build.number(fields, 8 * _WIDTH)
            _scaled(build, (x, y), (mean, inverse * build.broadcast(scale), build.broadcast(bias)), width)
            scale.set(scale + BYTES)
            bias.set(bias + BYTES)
    return build.function()


_Call = tuple[int, int, int, int, int]

_SUMS, _SQUARES, _STRETCHES, _OWN_NUMBERS, _OWN_CHANNELS, _OWN_WIDTH, _OWN_SCALE, _OWN_BIAS = range(8)
"""Likewise for stretches: the addresses of what those of the row sum to, and of their squares' sums, how many there
are; as above; and channels that a call scales, elements of each, and their first scale and bias."""


def _long_rows_step(
    lanes: int, x: Array, y: Array, scale: Array, bias: Array, epsilon: float, label: str
) -> Step | None:
    """As `standardizing_step`, in three phases where there are more pieces than rows."""
    kernels = _sum_kernel(lanes), _squares_kernel(lanes), _scale_kernel(lanes, x.shape[2] == 1)
    if None in kernels:
        return None
    rows, channels, width = x.shape
    members = channels * width
    stretch = max(_STRETCH, -(-members // (_MOST_STRETCHES * _CHUNK)) * _CHUNK)
    starts = range(0, members, stretch)
    numbers = np.array([members, epsilon], np.float32)
    sums = np.empty((rows, 2, len(starts), lanes), np.float32)
    kept: list[Array] = [numbers, sums]

    def fields(row: int, *scaled: int) -> int:
        found = [address_of(one) for one in sums[row]]
        kept.append(np.array([*found, len(starts), address_of(numbers), *scaled], np.int64))
        return address_of(kept[-1])

    def summed(which: int, row: int, part: range) -> Iterator[_Call]:
        of_row = fields(row)
        for number in part:
            start = starts[number]
            source = address_of(x) + BYTES * (row * members + start)
            count = min(stretch, members - start)
            yield kernels[which] or 0, source, count, address_of(sums[row, which, number]), of_row

    def scaled(row: int, part: range) -> Iterator[_Call]:
        group = row * channels % scale.size
        stop = min(part.stop * stretch, members)
        for channel, count, size, first in _channels(part.start * stretch, stop, width):
            place = BYTES * (group + channel)
            own = fields(row, count, size, address_of(scale) + place, address_of(bias) + place)
            offset = BYTES * (row * members + first)
            yield kernels[2] or 0, address_of(x) + offset, address_of(y) + offset, own, 0

    phases = partial(summed, 0), partial(summed, 1), scaled
    pieces, keeps = pieces_of_bytes(_PASSES * x.nbytes), (kept, x, y, scale, bias)
    if rows >= pieces:
        every = range(len(starts))
        tables = [
            [call for row in part for phase in phases for call in phase(row, every)] for part in shares(rows, pieces)
        ]
        return in_pieces(tables, keeps, label)
    parts = shares(rows * len(starts), pieces)

    def table(phase: Callable[[int, range], Iterator[_Call]], part: range) -> list[_Call]:
        """The calls for stretches, numbered over all rows."""
        found: list[_Call] = []
        for row in range(part.start // len(starts), -(-part.stop // len(starts))):
            first = row * len(starts)
            own = range(max(part.start - first, 0), min(part.stop - first, len(starts)))
            found += phase(row, own)
        return found

    return in_phases([[table(phase, part) for part in parts] for phase in phases], keeps, label)


def _channels(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """The elements from `start` to `stop` of a row as channels: the first, how many, elements of each, and their place.

    Those of one element, which have scales one after another, are one.
    """
    if width == 1:
        yield start, 1, stop - start, start
        return
    while start < stop:
        channel, within = divmod(start, width)
        count = (stop - start) // width if not within else 0
        size = width if count else min(width - within, stop - start)
        yield channel, count or 1, size, start
        start += (count or 1) * size


@lru_cache
def _sum_kernel(lanes: int) -> int | None:
    """The address of a function of x, a number of elements, and where to write a vector that has their sum."""
    build = Builder(lanes)
    x, count, out = build.arguments(3)
    build.store(_lane_sums(build, x, count, lambda value: value), out)
    return build.function()


@lru_cache
def _squares_kernel(lanes: int) -> int | None:
    """The same of the squares of their differences from the mean, with fields as the last argument."""
    build = Builder(lanes)
    x, count, out, fields = build.arguments(4)
    mean = _mean(build, fields, _SUMS)
    build.store(_lane_sums(build, x, count, lambda value: _square(value - mean)), out)
    return build.function()


@lru_cache
def _scale_kernel(lanes: int, by_element: bool) -> int | None:
    """The address of a function of x, y and fields for some channels of a row, or for elements with scales of their
    own."""
    build = Builder(lanes)
    x, y, fields = build.arguments(3)
    mean = _mean(build, fields, _SUMS)
    epsilon = build.broadcast(build.number(fields, 8 * _OWN_NUMBERS), offset=BYTES)
    inverse = 1.0 / build.square_root(_mean(build, fields, _SQUARES) + epsilon)
    scale, bias = build.number(fields, 8 * _OWN_SCALE), build.number(fields, 8 * _OWN_BIAS)
    width = build.number(fields, 8 * _OWN_WIDTH)
    if by_element:

        def body(place: Scalar, mask: Mask | None) -> None:
            value = (build.load(x, place, mask=mask) - mean) * inverse
            factor, shift = (build.load(base, place, mask=mask) for base in (scale, bias))
            build.store(build.fma(value, factor, shift), y, place, mask=mask)

        build.each(width, body)
        return build.function()
    with build.repeat(build.number(fields, 8 * _OWN_CHANNELS)):
        _scaled(build, (x, y), (mean, inverse * build.broadcast(scale), build.broadcast(bias)), width)
        scale.set(scale + BYTES)
        bias.set(bias + BYTES)
    return build.function()


def _mean(build: Builder, fields: Scalar, which: int) -> Vector:
    """The mean over a row of what its stretches sum to, as every element of a vector."""
    place, total = build.copied(build.number(fields, 8 * which)), build.constant(0.0)
    with build.repeat(build.number(fields, 8 * _STRETCHES)):
        total.set(total + build.load(place))
        place.set(place + BYTES * build.lanes)
    return _over_lanes(build, total) / build.broadcast(build.number(fields, 8 * _OWN_NUMBERS))


_RMS_ROWS, _RMS_WIDTH, _RMS_NUMBERS, _RMS_SCALE = range(4)
"""Likewise for `_rms_kernel`: the scale has as many elements as a row."""


def root_mean_square_step(
    machine: Machine, x: Array, y: Array, scale: Array, epsilon: float, label: str
) -> Step | None:
    """The step Y = X / sqrt(mean of X^2 + epsilon) * scale for float32 `x` and `y` [rows, width], `scale` [width].

    None where the kernel cannot run.
    """
    arrays = (x, y, scale)
    if not machine.can_run or any(one.dtype != np.float32 or not one.flags.c_contiguous for one in arrays):
        return None
    kernel = _rms_kernel(machine.lanes)
    rows, width = x.shape
    if kernel is None or not x.size:
        return None
    numbers = np.array([width, epsilon], np.float32)
    kept: list[Array] = [numbers]
    tables: list[list[tuple[int, int, int, int, int]]] = []
    for part in shares(rows, pieces_of_bytes(_PASSES * x.nbytes)):
        fields = np.array([len(part), width, address_of(numbers), address_of(scale)], np.int64)
        kept.append(fields)
        offset = part.start * width * BYTES
        call = kernel, address_of(x) + offset, address_of(y) + offset, address_of(fields), 0
        tables.append([call])
    return in_pieces(tables, (kept, arrays), label)


@lru_cache
def _rms_kernel(lanes: int) -> int | None:
    """The address of a function of x, y and numbers for so many rows; None where it cannot run."""
    build = Builder(lanes)
    x, y, fields = build.arguments(3)
    scale, width = build.number(fields, 8 * _RMS_SCALE), build.number(fields, 8 * _RMS_WIDTH)
    with build.repeat(build.number(fields, 8 * _RMS_ROWS)):
        numbers = build.number(fields, 8 * _RMS_NUMBERS)
        mean = row_sum(build, x, width, _square) / build.broadcast(numbers)
        inverse = 1.0 / build.square_root(mean + build.broadcast(numbers, offset=BYTES))

        def body(place: Scalar, mask: Mask | None) -> None:
            value = build.load(x, place, mask=mask) * inverse
            build.store(value * build.load(scale, place, mask=mask), y, place, mask=mask)

        build.each(width, body)
        nbytes = width << 2
        x.set(x + nbytes)
        y.set(y + nbytes)
    return build.function()


def _square(value: Vector) -> Vector:
    return value * value


def _scaled(build: Builder, places: tuple[Scalar, Scalar], numbers: tuple[Vector, ...], width: Scalar) -> None:
    """One channel of so many elements, (x - mean) * factor + bias; both places move on behind it."""
    x, y = places
    mean, factor, bias = numbers

    def body(place: Scalar, mask: Mask | None) -> None:
        value = build.load(x, place, mask=mask) - mean
        build.store(build.fma(value, factor, bias), y, place, mask=mask)

    build.each(width, body)
    nbytes = width << 2
    x.set(x + nbytes)
    y.set(y + nbytes)


def row_sum(build: Builder, row: Scalar, count: Scalar, term: Callable[[Vector], Vector]) -> Vector:
    """The sum of `term` of `count` elements from `row` on, as every element of a vector."""
    return _over_lanes(build, _lane_sums(build, row, count, term))


def _over_lanes(build: Builder, sums: Vector) -> Vector:
    return build.over_lanes(sums, lambda one, other: one + other)


def _lane_sums(build: Builder, row: Scalar, count: Scalar, term: Callable[[Vector], Vector]) -> Vector:
    """The same as a vector whose elements have that sum."""
    total, place = build.constant(0.0), build.zero()
    width = _TOGETHER * build.lanes * BYTES
    with build.range((count & -_CHUNK) << 2, 0, place):
        stop = place + _CHUNK * BYTES
        parts = [build.constant(0.0) for _ in range(_TOGETHER)]
        with build.range(stop, width, place):
            for number, part in enumerate(parts):
                part.set(part + term(build.load(row, place, number * build.lanes * BYTES)))
        total.set(total + (parts[0] + parts[1]))
    last = build.constant(0.0)
    with build.range((count & -build.lanes) << 2, build.lanes * BYTES, place):
        last.set(last + term(build.load(row, place)))
    rest = count & (build.lanes - 1)
    with build.when(rest, GREATER, 0):
        mask = build.first(rest)
        value = term(build.load(row, place, mask=mask))
        last.set(last + build.select(mask, value, 0.0))
    return total + last
