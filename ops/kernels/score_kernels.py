"""Scores of rows as machine code: base values, a logistic function or softmax, and the number of the best score.

A row of scores is one to four vectors, so that nothing depends on the rows beside it. What NumPy needs ten calls for,
several microseconds for one row, takes a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.registers import OutOfRegistersError
from dagexec.ops.kernels.row_kernels import Call
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_NUMBERS, _LABELS, _TABLE = 0, 8, 16
"""Places in the fields of a call: the vectors of numbers that a kernel has; where labels go; and the label of each."""

_MOST_VECTORS = 4
LOGISTIC, SOFTMAX = "LOGISTIC", "SOFTMAX"


@dataclass(frozen=True)
class ScoreForm:
    """What is computed of a row.

    Attributes:
        count: the scores that it becomes.
        transform: LOGISTIC, SOFTMAX, or anything else for none.
        divides: sums are divided by a number first.
        spreads: one score becomes two, by factors and addends.
        names: the label of a row is written, too.
    """

    count: int
    transform: str
    divides: bool
    spreads: bool
    names: bool


def score_call(
    machine: Machine, form: ScoreForm, sums: Array, out: Array, base: Array, extra: Sequence[float | Array],
    labels: Array | None, table: Array | None,
) -> tuple[Call, object] | None:  # fmt: skip
    """The call that makes rows `out` [rows, count] of `sums`, float32 [rows, count or 1]; both may be one array.

    `extra`: the divisor where the form divides; factors, addends and the threshold where it spreads. `labels`, int64,
    get the entries of `table`. None where no kernel does that.
    """
    if not machine.can_run or not len(out):
        return None
    kernel = _kernel(machine.lanes, form)
    if kernel is None:
        return None
    width = _vectors(form.count, machine.lanes) * machine.lanes
    numbers = np.zeros((2 + len(extra), width), np.float32)
    numbers[0, : base.size] = base
    numbers[1] = np.arange(width)
    for number, row in zip(numbers[2:], extra, strict=True):
        number[: form.count] = row
    places = [0 if one is None else address_of(one) for one in (labels, table)]
    fields = np.array([address_of(numbers), *places], np.int64)
    call = kernel, address_of(fields), address_of(sums), address_of(out), len(out)
    return call, (numbers, fields, sums, out, labels, table)


def _vectors(count: int, lanes: int) -> int:
    return -(-count // lanes)


@lru_cache
def _kernel(lanes: int, form: ScoreForm) -> int | None:
    """The address of a function of fields, sums, where to write and a number of rows."""
    if _vectors(form.count, lanes) > _MOST_VECTORS:
        return None
    try:
        return _Writer(lanes, form).written()
    except OutOfRegistersError:
        return None


class _Writer:
    """Writes a kernel."""

    def __init__(self, lanes: int, form: ScoreForm) -> None:
        self.form = form
        self.build = Builder(lanes)
        self.fields, self.sums, self.out, self.rows = self.build.arguments(4)
        self.numbers = self.build.number(self.fields, _NUMBERS)
        self.count = _vectors(form.count, lanes)
        rest = form.count % lanes
        self.last: Mask | None = None
        if rest:
            places = self.build.load(self.numbers, offset=BYTES * lanes * self.count)  # the first of 0, 1, 2 ...
            self.last = self.build.less(places, float(rest))

    def written(self) -> int | None:
        build, form = self.build, self.form
        labels = build.number(self.fields, _LABELS)
        with build.repeat(self.rows):
            chosen = self._spread() if form.spreads else self._scored()
            if chosen is not None:
                self._name(chosen, labels)
                labels.set(labels + 8)
            self.sums.set(self.sums + BYTES * (1 if form.spreads else form.count))
            self.out.set(self.out + BYTES * form.count)
        return build.function()

    def _scored(self) -> Vector | None:
        """Write a score for each sum; the number of the greatest."""
        build, form = self.build, self.form
        values = []
        for number in range(self.count):
            value = build.load(self.sums, offset=self._at(number), mask=self._mask(number))
            if form.divides:
                value = value / self._number(2, number)
            values.append(value + self._number(0, number))
        low = [
            value if (mask := self._mask(number)) is None else build.select(mask, value, -np.inf)
            for number, value in enumerate(values)
        ]
        most = build.over_lanes(_joined(low, build.maximum), build.maximum)
        if form.transform == SOFTMAX:
            powers = [elementary.exp(build, value - most) for value in low]
            total = build.over_lanes(_joined(powers, lambda one, other: one + other), lambda one, other: one + other)
            values = [power / total for power in powers]
        elif form.transform == LOGISTIC:
            values = [elementary.sigmoid(build, value) for value in values]
        self._store(values)
        if not form.names:
            return None
        places = [build.select(build.equal(one, most), self._number(1, i), np.inf) for i, one in enumerate(low)]
        return build.minimum(build.over_lanes(_joined(places, build.minimum), build.minimum), self._most_place())

    def _spread(self) -> Vector:
        """Write two scores of one sum; 1.0 where the sum is above the threshold, else 0.0."""
        build = self.build
        score = build.broadcast(self.sums) + build.broadcast(self.numbers)
        value = build.fma(score, self._number(2, 0), self._number(3, 0))
        if self.form.transform == LOGISTIC:
            value = elementary.sigmoid(build, value)
        self._store([value])
        return build.select(build.less(self._number(4, 0), score), 1.0, 0.0)

    def _most_place(self) -> Vector:
        return self.build.constant(self.form.count - 1.0)

    def _store(self, values: Sequence[Vector]) -> None:
        for number, value in enumerate(values):
            self.build.store(value, self.out, offset=self._at(number), mask=self._mask(number))

    def _name(self, chosen: Vector, labels: Scalar) -> None:
        """Write the label of a number, by way of where it goes."""
        build = self.build
        build.store_first(build.to_integer(chosen), labels)
        place = build.short_number(labels) << 3
        build.store_number(build.number(place + build.number(self.fields, _TABLE)), labels)

    def _number(self, row: int, number: int) -> Vector:
        """A vector of one of the rows of numbers."""
        width = self._at(self.count)
        return self.build.load(self.numbers, offset=row * width + self._at(number))

    def _at(self, number: int) -> int:
        return BYTES * self.build.lanes * number

    def _mask(self, number: int) -> Mask | None:
        return self.last if number == self.count - 1 else None


def _joined(values: Sequence[Vector], join: Any) -> Vector:
    found = values[0]
    for value in values[1:]:
        found = join(found, value)
    return found
