"""Rows normalized by their own mean and variance: instance, group and root mean square normalization, as machine code.

Y = (X - mean) / sqrt(variance + epsilon) * scale + bias, where a row is one channel or several, each with a scale and a
bias. Sums are those of 1024 elements each, in a vector of sums, so that errors grow with the number of these; a row's
bytes depend on the row alone. 256 x 1000 elements take 60 us on one core of an AMD EPYC (Zen 4), by NumPy 230.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.assembler import GREATER

Array = npt.NDArray[Any]

_ROWS, _CHANNELS, _WIDTH, _MEMBERS, _NUMBERS, _SCALE, _BIAS = range(7)
"""Places of the 64-bit numbers that a kernel gets: rows; channels of a row; elements of a channel and of a row; the
addresses of two numbers, which are the elements of a row and epsilon; and of the first row's scales and biases."""

_CHUNK = 1024
_TOGETHER = 2
_PASSES = 3  # over X and Y


def standardizing_step(
    machine: Machine, x: Array, y: Array, scale: Array, bias: Array, epsilon: float, label: str
) -> Step | None:
    """The step for float32 `x` and `y` [rows, channels, width]; `scale` and `bias` [..., channels] repeat over rows.

    Their size is a multiple of `channels`: that of one image. None where the kernel cannot run.
    """
    arrays = (x, y, scale, bias)
    if not machine.can_run or any(one.dtype != np.float32 or not one.flags.c_contiguous for one in arrays):
        return None
    kernel = _kernel(machine.lanes)
    rows, channels, width = x.shape
    if kernel is None or not x.size:
        return None
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
            sizes = count, channels, width, channels * width, numbers.ctypes.data
            fields = np.array([*sizes, scale.ctypes.data + group * row, bias.ctypes.data + group * row], np.int64)
            kept.append(fields)
            offset = start * row * width
            table.append((kernel, x.ctypes.data + offset, y.ctypes.data + offset, fields.ctypes.data, 0))
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
            _scaled(build, (x, y), (mean, inverse * build.broadcast(scale), build.broadcast(bias)), fields)
            scale.set(scale + BYTES)
            bias.set(bias + BYTES)
    return build.function()


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
        fields = np.array([len(part), width, numbers.ctypes.data, scale.ctypes.data], np.int64)
        kept.append(fields)
        offset = part.start * width * BYTES
        call = kernel, x.ctypes.data + offset, y.ctypes.data + offset, fields.ctypes.data, 0
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


def _scaled(build: Builder, places: tuple[Scalar, Scalar], numbers: tuple[Vector, ...], fields: Scalar) -> None:
    """One channel, (x - mean) * factor + bias; both places move on behind it."""
    x, y = places
    mean, factor, bias = numbers

    def body(place: Scalar, mask: Mask | None) -> None:
        value = build.load(x, place, mask=mask) - mean
        build.store(build.fma(value, factor, bias), y, place, mask=mask)

    build.each(build.number(fields, 8 * _WIDTH), body)
    nbytes = build.number(fields, 8 * _WIDTH) << 2
    x.set(x + nbytes)
    y.set(y + nbytes)


def row_sum(build: Builder, row: Scalar, count: Scalar, term: Callable[[Vector], Vector]) -> Vector:
    """The sum of `term` of `count` elements from `row` on, as every element of a vector."""
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
    return build.over_lanes(total + last, lambda one, other: one + other)
