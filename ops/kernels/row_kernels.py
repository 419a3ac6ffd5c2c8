"""Rows of a table as machine code: products with a matrix, distances from its columns, columns scaled or filled.

A row's bytes depend on that row alone: its sums are four, of every fourth column each, whatever the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.standardizing import row_sum
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import MUL

Array = npt.NDArray[Any]
Call = tuple[int, int, int, int, int]
"""A function, the address of its fields, those of the first rows that it reads and writes, and the number of rows."""

_WEIGHTS, _WEIGHT_BYTES, _COLUMNS, _X_BYTES, _OUT_BYTES, _BIAS = 0, 8, 16, 24, 32, 40
_MOST_VECTORS = 4
_SUMS = 4


def product_calls(
    machine: Machine, x: Array, weights: Array, bias: Array, out: Array, *, distances: bool = False
) -> tuple[list[Call], object] | None:
    """Calls that leave x @ weights + bias in `out` [rows, targets]; all are packed, float32.

    With `distances`, the sums of squares of x - weights in place of those of products. None where no kernel runs.
    """
    if not machine.can_run:
        return None
    width = machine.lanes * _MOST_VECTORS
    targets = weights.shape[1]
    calls, kept = [], list[Array]()
    for first in range(0, targets, width):
        count = min(width, targets - first)
        kernel = _product(machine.lanes, count, distances)
        if kernel is None:
            return None
        part = np.ascontiguousarray(weights[:, first : first + count])
        own = np.ascontiguousarray(bias[first : first + count])
        sizes = part.strides[0], len(part), x.strides[0], out.strides[0]
        fields = np.array([address_of(part), *sizes, address_of(own)], np.int64)
        kept += [part, own, fields]
        calls.append((kernel, address_of(fields), address_of(x), address_of(out) + first * BYTES, len(x)))
    return calls, (x, out, kept)


@lru_cache
def _product(lanes: int, count: int, distances: bool) -> int | None:
    """The address of a function of fields, x, where to write and a number of rows, for so many targets."""
    build = Builder(lanes)
    fields, x, out, rows = build.arguments(4)
    vectors = -(-count // lanes)
    last = build.first(build.number_of(count % lanes)) if count % lanes else None
    masks = [last if number == vectors - 1 else None for number in range(vectors)]
    with build.repeat(rows):
        weights, row = build.copied(build.number(fields, _WEIGHTS)), build.copied(x)
        parts = [build.constant(0.0) for _ in range(vectors * (_SUMS if vectors == 1 else 1))]

        def add(column: int, total: Vector, number: int) -> None:
            weight = build.load(weights, offset=BYTES * lanes * number, mask=masks[number])
            value = build.broadcast(row, offset=BYTES * column)
            if distances:
                value = weight = value - weight
            total.set(build.fma(weight, value, total))

        columns = build.number(fields, _COLUMNS)
        if vectors == 1:
            with build.repeat(columns >> 2):
                for column, part in enumerate(parts):
                    add(column, part, 0)
                    weights.set(weights + build.number(fields, _WEIGHT_BYTES))
                row.set(row + BYTES * _SUMS)
            columns = columns & (_SUMS - 1)
        with build.repeat(columns):
            for number in range(vectors):
                add(0, parts[number], number)
            weights.set(weights + build.number(fields, _WEIGHT_BYTES))
            row.set(row + BYTES)
        if vectors == 1:
            parts = [(parts[0] + parts[1]) + (parts[2] + parts[3])]
        bias = build.number(fields, _BIAS)
        for number, part in enumerate(parts):
            at = BYTES * lanes * number
            build.store(part + build.load(bias, offset=at, mask=masks[number]), out, offset=at, mask=masks[number])
        x.set(x + build.number(fields, _X_BYTES))
        out.set(out + build.number(fields, _OUT_BYTES))
    return build.function()


SCALED, FILLED, L1, L2 = "scaled", "filled", "L1", "L2"


def column_call(machine: Machine, kind: str, x: Array, y: Array, numbers: Array) -> tuple[Call, object] | None:
    """The call that makes rows of `y` of those of `x`, packed float32 [rows, columns]. None where no kernel runs.

    SCALED: (x - numbers[0]) * numbers[1]. FILLED: `numbers[1]` where x is `numbers[0]`, or both are NaN, else x.
    L1, L2: over the norm of the row. Rows of `numbers` have a number for each column.
    """
    kernel = _columns(machine.lanes, kind) if machine.can_run else None
    if kernel is None or not x.size:
        return None
    numbers = np.ascontiguousarray(np.broadcast_to(numbers, (2, x.shape[1])), np.float32)
    fields = np.array([address_of(numbers), numbers.strides[0], x.shape[1], x.strides[0]], np.int64)
    return (kernel, address_of(fields), address_of(x), address_of(y), len(x)), (x, y, numbers, fields)


@lru_cache
def _columns(lanes: int, kind: str) -> int | None:
    """The address of a function of fields, x, where to write and a number of rows."""
    build = Builder(lanes)
    fields, x, out, rows = build.arguments(4)
    with build.repeat(rows):
        columns = build.number(fields, _COLUMNS)
        value_of = _scaled_by_norm(build, kind, x, columns) if kind in _NORMS else _by_numbers(build, kind, fields)

        def body(place: Scalar, mask: Mask | None) -> None:
            build.store(value_of(build.load(x, place, mask=mask), place, mask), out, place, mask=mask)

        build.each(columns, body)
        x.set(x + build.number(fields, _X_BYTES))
        out.set(out + build.number(fields, _X_BYTES))
    return build.function()


_Change = Callable[[Vector, Scalar, Mask | None], Vector]
_NORMS = (L1, L2)


def _by_numbers(build: Builder, kind: str, fields: Scalar) -> _Change:
    """A difference and a product, or a choice."""
    first = build.number(fields, _WEIGHTS)
    second = first + build.number(fields, _WEIGHT_BYTES)

    def change(value: Vector, place: Scalar, mask: Mask | None) -> Vector:
        one, other = (build.load(base, place, mask=mask) for base in (first, second))
        if kind == SCALED:
            return build.compute(MUL, value - one, other)
        filled = build.select(build.equal(value, one), other, value)
        both = build.select(build.is_nan(one), other, value)
        return build.select(build.is_nan(value), both, filled)

    return change


def _scaled_by_norm(build: Builder, kind: str, x: Scalar, columns: Scalar) -> _Change:
    """A quotient; of a row of zeros by 1."""
    term = build.absolute if kind == L1 else _square
    total = row_sum(build, x, columns, term)
    norm = total if kind == L1 else build.square_root(total)
    norm = build.select(build.equal(norm, 0.0), 1.0, norm)
    return lambda value, _place, _mask: value / norm


def _square(value: Vector) -> Vector:
    return value * value
