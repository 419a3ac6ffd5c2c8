"""How values meet those that are there already, where they are scattered: they replace them, or are reduced with them.

Values are taken one after another, in memory order, so that a place that is named twice gets the same bytes in every
run: without a reduction, the last value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.families.index.places import located_once, part_at

REDUCTIONS: Mapping[str, np.ufunc | None] = {
    "none": None,
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}

REDUCTION_HELP = "what a value does to the one that is there: none (replaces it, the default), add, mul, max or min"


def reduction_of(call: OperatorCall) -> np.ufunc | None:
    """Argument `reduction` as a function of two arrays. Raises ArgumentError, or ShapeError for what is no number."""
    name = call.arguments.string("reduction", "none")
    if name not in REDUCTIONS:
        raise ArgumentError(f"{call.label}: 'reduction' must be one of {', '.join(REDUCTIONS)}; found {name!r}")
    if name != "none":
        call.require_types(0, *NUMBER_TYPES)
    return REDUCTIONS[name]


class Scattering(Operator):
    """Base of the operators that scatter: output 0 is input 0 with the values of input 2."""

    def scattered(self, locate: Sequence[Step], places: Array, updates: Array) -> Step:
        """The step output 0 = input 0, then with `updates` where `places` say, which the steps `locate` find.

        Places are flat numbers of elements or, for `updates` with one more axis, of rows. Input 0 and output 0 may be
        one array. Sums and products of 16-bit floats are computed in float32.
        """
        data, y, ufunc = self.x(0), self.y(0), reduction_of(self.call())
        copy: list[Step] = [] if np.may_share_memory(data, y) else [partial(np.copyto, y, data)]
        if not updates.size:
            return in_sequence([*locate, *copy])
        locate = located_once(self, 1, locate)
        row = updates.shape[places.ndim :]
        table = y.reshape(-1, *row)
        part = None if locate else part_at(table, places)
        if part is not None and ufunc is None:
            return in_sequence(
                [*([] if part.size == y.size else copy), partial(np.copyto, part, updates.reshape(part.shape))]
            )
        if part is not None and ufunc is not None and not is_narrow(y.dtype):
            return in_sequence([*copy, partial(ufunc, part, updates.reshape(part.shape), out=part)])
        numbers, values = places.reshape(-1), updates.reshape(-1, *row)
        if ufunc is None or not is_narrow(y.dtype):
            return in_sequence([*locate, *copy, self.put(table, numbers, values, ufunc)])
        work = compute_dtype(y.dtype)
        total, wide = self.scratch(table.shape, work), self.scratch(values.shape, work)
        widen = [convert(data.reshape(table.shape), total), convert(values, wide)]
        return in_sequence([*locate, *widen, self.put(total, numbers, wide, ufunc), convert(total, table)])

    def put(self, table: Array, places: Array, values: Array, ufunc: np.ufunc | None) -> Step:
        """The step table[places] = values, or what `ufunc` makes of old and new ones, in order.

        There is a value for each place: an element of a flat table, or a row of one with two axes.
        """
        if table.ndim == 1:
            if ufunc is None:
                return partial(np.put, table, places, values, mode="clip")
            return partial(ufunc.at, table, places, values)
        if ufunc is None:
            return partial(table.__setitem__, places, values)
        elements = self.scratch(values.shape, np.int64)
        return in_sequence(
            [
                partial(np.multiply, places.reshape(-1, 1), table.shape[1], out=elements),
                partial(np.add, elements, np.arange(table.shape[1]), out=elements),
                partial(ufunc.at, table.reshape(-1), elements.reshape(-1), values.reshape(-1)),
            ]
        )
