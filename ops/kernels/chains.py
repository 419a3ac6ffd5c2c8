"""Chains of element-wise operators as one kernel: functions of one tensor, and operands that broadcast to it.

A chain is a sequence of links, as post-ops are (`ops/activation/post_ops.py`). All of them are computed in registers: a
tensor is read once and written once, however long the chain is. Operands are read as they lie: of the shape of the
result, one number for each row, or one row for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.base.pieces import is_same_memory
from dagexec.ops.kernels import elementary, post_ops
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector, fitting
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.native import declare_remade
from dagexec.ops.kernels.team import team_step

Array = npt.NDArray[Any]

Link = tuple[str, float, float, int]
"""What is done: its kind, two numbers, and the place of its operand among those of the chain, or -1."""

PRELU = "prelu"
"""x where it is positive, else x times the operand: a link beside those of post-ops."""

_MOST_CALLS = 1 << 12


def _maximum(build: Builder, x: Vector, other: Vector) -> Vector:
    """NaN where one of them is."""
    return build.select(build.is_nan(x), x, build.maximum(x, other))


def _minimum(build: Builder, x: Vector, other: Vector) -> Vector:
    return build.select(build.is_nan(x), x, build.minimum(x, other))


def _power(build: Builder, x: Vector, factor: float, exponent: float) -> Vector:
    value = elementary.power(build, x, exponent)
    assert value is not None, "`is_known` says which exponents there are"
    return value if factor == 1 else value * factor


BINARY: Mapping[str, Callable[[Builder, Vector, Vector], Vector]] = {
    "add": lambda build, x, other: x + other,
    "sum": lambda build, x, other: x + other,
    "mul": lambda build, x, other: x * other,
    "sub": lambda build, x, other: x - other,
    "div": lambda build, x, other: x / other,
    "max": _maximum,
    "min": _minimum,
    PRELU: lambda build, x, other: build.select(build.less(x, 0.0), x * other, x),
}

FUNCTIONS: Mapping[str, Callable[[Builder, Vector, float, float], Vector]] = {
    **post_ops.FUNCTIONS,
    "elu": lambda build, x, a, b: elementary.elu(build, x, a),
    "abs": lambda build, x, a, b: build.absolute(x),
    "sqrt": lambda build, x, a, b: build.square_root(x),
    "square": lambda build, x, a, b: x * x,
    "exp": lambda build, x, a, b: elementary.exp(build, x),
    "log": lambda build, x, a, b: elementary.log(build, x),
    "linear": lambda build, x, a, b: build.fma(x, build.constant(a), b),
    "pow": _power,
    "softplus": lambda build, x, a, b: elementary.softplus(build, x),
}


def is_known(link: Link) -> bool:
    """True where there is code for a link."""
    kind, _, exponent, _ = link
    return kind in BINARY or (kind in FUNCTIONS and (kind != "pow" or elementary.has_power(exponent)))


def chain_step(
    machine: Machine,
    threads: int,
    links: Sequence[Link],
    x: Array,
    y: Array,
    operands: Sequence[Array],
    label: str,
) -> Step | None:
    """The step that applies `links` to float32 `x`, of the shape of `y`, which may be `x`; operands broadcast to it.

    None where the kernels do not serve: other processors, links, types or strides, or operands that `y` overwrites.
    """
    arrays = (x, y, *operands)
    views = [np.broadcast_to(array, y.shape) for array in arrays]
    is_plain = all(view.dtype == np.float32 for view in views) and all(map(is_known, links))
    if not machine.can_run or not is_plain or not y.size or _is_overwritten(y, (x, *operands)):
        return None
    shape, strides = _joined(y.shape, [view.strides for view in views])
    if any(one[-1] != BYTES for one in strides[:2]) or any(one[-1] not in (0, BYTES) for one in strides[2:]):
        return None
    kernel = chain_kernel(tuple(links), tuple(one[-1] == BYTES for one in strides[2:]), machine.lanes)
    if kernel is None or math.prod(shape[:-2]) > _MOST_CALLS:
        return None

    def make(*arrays_and_label: Any) -> Step:
        *arrays, label = arrays_and_label
        plan = _Plan(kernel, shape, strides, [array.ctypes.data for array in arrays])
        return team_step(machine.team, threads, plan.tables(threads, machine.lanes), (plan, arrays), label)

    step = make(*arrays, label)
    declare_remade(step, make, arrays)
    return step


def _is_overwritten(y: Array, others: Sequence[Array]) -> bool:
    """True where elements of `y` are written before they are read as those of an array that is not the same."""
    return any(np.may_share_memory(y, other) and not is_same_memory(y, other) for other in others)


def _joined(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape and strides of several arrays in as few axes as say the same, at least two."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(before == size * step for before, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = axes[-1][0] * size, tuple(steps)
        else:
            axes.append((size, tuple(steps)))
    while len(axes) < 2:
        axes.insert(0, (1, (0,) * len(strides)) if axes else (1, (BYTES,) * len(strides)))
    return tuple(size for size, _ in axes), list(zip(*(steps for _, steps in axes), strict=True))


class _Plan:
    """The calls of a kernel; it holds what they read."""

    def __init__(
        self, kernel: int, shape: tuple[int, ...], strides: list[tuple[int, ...]], addresses: Sequence[int]
    ) -> None:
        self._kernel, self._shape, self._strides, self._addresses = kernel, shape, strides, addresses
        self._kept: list[Array] = []

    def tables(self, threads: int, lanes: int) -> list[list[tuple[int, int, int, int, int]]]:
        """A table a thread: of the outer axes, rows, or parts of rows that are whole vectors."""
        *outer, rows, count = self._shape
        parts = [(range(*pair), range(count)) for pair in _parts(rows, threads)]
        if rows < threads:
            ends = [min(count, -(-count * number // threads // lanes) * lanes) for number in range(threads + 1)]
            parts = [(range(rows), range(*pair)) for pair in pairwise(ends)]
        tables: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(threads)]
        if math.prod(outer) >= threads:
            parts = [(range(rows), range(count))]
        places = list(product(*map(range, outer)))
        for number, (rows_of_part, columns) in enumerate(parts):
            for which, place in enumerate(places):
                thread = number if len(parts) > 1 else which * threads // len(places)
                if len(rows_of_part) and len(columns):
                    tables[thread].append(self._call(place, rows_of_part, columns))
        return tables

    def _call(self, outer: Sequence[int], rows: range, columns: range) -> tuple[int, int, int, int, int]:
        place = (*outer, rows.start, columns.start)
        addresses = [
            address + sum(index * step for index, step in zip(place, steps, strict=True))
            for address, steps in zip(self._addresses, self._strides, strict=True)
        ]
        fields = np.array([len(rows), len(columns), *addresses, *(steps[-2] for steps in self._strides)], np.int64)
        self._kept.append(fields)
        return self._kernel, fields.ctypes.data, 0, 0, 0


def _parts(count: int, parts: int) -> Iterator[tuple[int, int]]:
    return pairwise(count * number // parts for number in range(parts + 1))


@lru_cache(maxsize=256)
def chain_kernel(links: tuple[Link, ...], is_alike: tuple[bool, ...], lanes: int) -> int | None:
    """The address of a function of numbers, for rows of a chain; None where it cannot run.

    The numbers, of 64 bits, are how many rows, elements in a row, the addresses of x, y and the operands, and the bytes
    from each one's row to the next. `is_alike` says of each operand whether it goes on along a row, as x does.
    """
    build = fitting(lambda together: _chain(links, is_alike, lanes, together), 3)
    return build.function() if build.fits() else None


def _chain(links: tuple[Link, ...], is_alike: tuple[bool, ...], lanes: int, together: int) -> Builder:
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    count = build.number(fields, 8)
    places = [build.number(fields, 8 * (2 + number)) for number in range(2 + len(is_alike))]
    with build.repeat(build.number(fields)):
        fixed = {number: build.broadcast(places[2 + number]) for number, alike in enumerate(is_alike) if not alike}

        def body(place: Scalar, mask: Mask | None) -> None:
            value = build.load(places[0], place, mask=mask)
            for kind, a, b, operand in links:
                if kind in BINARY:
                    other = fixed.get(operand) or build.load(places[2 + operand], place, mask=mask)
                    value = BINARY[kind](build, value, other)
                else:
                    value = FUNCTIONS[kind](build, value, a, b)
            build.store(value, places[1], place, mask=mask)

        build.each(count, body, together)
        for number, place in enumerate(places):
            place.set(place + build.number(fields, 8 * (2 + len(places) + number)))
    return build
