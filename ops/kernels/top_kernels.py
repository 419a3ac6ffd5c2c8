"""The largest or smallest numbers of rows, and where they are, as machine code: a pass over the row for each.

A pass finds, of the numbers that come behind the one before it - smaller, or as large and at a later place -, the one
that comes first. So it takes no memory, and is for a few of a row. Of NaN it notes that there are some.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.invalid_operations import can_be_seen, reading
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import MOST_PIECES, SMALL_PART, pieces_of
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import GREATER

Array = npt.NDArray[Any]

MOST_PLACES = 1 << 24
"""Numbers of a row, whose places are float32 numbers."""

_ROWS, _COUNT, _WANTED, _PLACES = range(4)
"""Places of the 64-bit numbers that a kernel gets: rows, numbers of a row, how many are wanted, and where 0, 1, 2, ...
are as float32."""

_SECONDS = 0.3e-9
"""Of a number in a pass."""


def top_step(
    machine: Machine, x: Array, places: Array, largest: bool, recover: Callable[[], None], label: str
) -> tuple[NativeStep, NativeStep] | None:
    """The step that leaves in `places` where the first numbers of each row of `x` are, in order, and one for the end.

    Both are packed matrices, of float32 and of int64. At the end `recover` is called where there is a NaN. None where
    no kernel runs.
    """
    kernel = _kernel(machine.lanes, largest) if machine.can_run and can_be_seen() else None
    if kernel is None:
        return None
    (rows, count), wanted = x.shape, places.shape[1]
    parts = shares(rows, pieces_of(_SECONDS * x.size * wanted, MOST_PIECES, SMALL_PART))
    notes, numbers = np.zeros(len(parts), np.float32), np.arange(count, dtype=np.float32)
    tables, kept = [], []
    for number, part in enumerate(parts):
        kept.append(np.array([len(part), count, wanted, address_of(numbers)], np.int64))
        starts = address_of(x[part.start :]), address_of(places[part.start :]), address_of(notes[number:])
        tables.append([(kernel, address_of(kept[-1]), *starts)])

    def on_failure() -> None:
        notes[:] = 0
        recover()

    ends = tuple(reading(notes[number:], on_failure) for number in range(len(parts)))
    return in_pieces(tables, (x, places, notes, numbers, kept), label), NativeStep(((ends,),))


class _Best:
    """What comes first of each lane, and where it is; nothing yet."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self.value, self.at = build.constant(-math.inf), build.constant(math.inf)

    def take(self, value: Vector, at: Vector) -> None:
        """A value is in its place where it is larger, or as large at an earlier place; NaN is not."""
        build = self._build
        is_larger = build.less(self.value, value)
        as_large = build.select(build.equal(self.value, value), build.minimum(at, self.at), self.at)
        self.at.set(build.select(is_larger, at, as_large))
        self.value.set(build.select(is_larger, value, self.value))


@lru_cache
def _kernel(lanes: int, largest: bool) -> int | None:
    """The address of a function of numbers, and of where rows are read, and places and a note are written."""
    build = Builder(lanes)
    numbers, x, places, note = build.arguments(4)
    count, numbered = build.number(numbers, 8 * _COUNT), build.number(numbers, 8 * _PLACES)
    none = build.constant(math.nan)
    seen = build.constant(0.0)

    def look(place: Scalar, mask: Mask | None) -> None:
        seen.set(build.select(build.is_nan(build.load(x, place, mask=mask)), 1.0, seen))

    with build.repeat(build.number(numbers, 8 * _ROWS)):
        build.each(count, look)
        before, before_at = build.constant(math.inf), build.constant(-1.0)
        with build.repeat(build.number(numbers, 8 * _WANTED)):
            together = [_Best(build), _Best(build)]

            def value_at(place: Scalar, offset: int = 0, mask: Mask | None = None) -> tuple[Vector, Vector]:
                value, at = (build.load(array, place, offset, mask=mask) for array in (x, numbered))
                value = value if largest else 0.0 - value
                later = build.select(build.less(before_at, at), value, none)
                later = build.select(build.equal(value, before), later, none)
                return build.select(build.less(value, before), value, later), at

            place, vector = build.zero(), lanes * BYTES
            with build.range((count & -2 * lanes) << 2, 2 * vector, place):
                for turn, best in enumerate(together):
                    best.take(*value_at(place, turn * vector))
            best, other = together
            best.take(other.value, other.at)
            with build.range((count & -lanes) << 2, vector, place):
                best.take(*value_at(place))
            rest = count & (lanes - 1)
            with build.when(rest, GREATER, 0):
                mask = build.first(rest)
                value, at = value_at(place, mask=mask)
                best.take(build.select(mask, value, none), at)
            before.set(build.over_lanes(best.value, build.maximum))
            of_best = build.select(build.equal(best.value, before), best.at, math.inf)
            before_at.set(build.over_lanes(of_best, build.minimum))
            within = build.minimum(before_at, build.broadcast(numbered, (count + -1) << 2))  # what NaN left no place
            build.store_first(build.to_integer(within), places)
            build.store_first(build.constant(0.0), places, offset=BYTES)
            places.set(places + 2 * BYTES)
        x.set(x + (count << 2))
    build.store_first(build.over_lanes(seen, build.maximum), note)
    return build.function()
