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


def scattering(owner: Operator, locate: Sequence[Step], places: Array, updates: Array) -> Step:
    """The step output 0 = input 0, then with `updates` where `places` say, which the steps `locate` find.

    Places are flat numbers of elements or, for `updates` with one more axis, of rows. Input 0 and output 0 may be one
    array. Sums and products of 16-bit floats are computed in float32.
    """
    data, y, ufunc = owner.x(0), owner.y(0), reduction_of(owner.call())
    copy: list[Step] = [] if np.may_share_memory(data, y) else [partial(np.copyto, y, data)]
    if not updates.size:
        return in_sequence([*locate, *copy])
    locate = located_once(owner, 1, locate)
    table = y.reshape(-1, *updates.shape[places.ndim :])
    part = None if locate else part_at(table, places)
    if part is not None and ufunc is None:
        return in_sequence(
            [*([] if part.size == y.size else copy), partial(np.copyto, part, updates.reshape(part.shape))]
        )
    if part is not None and ufunc is not None and not is_narrow(y.dtype):
        return in_sequence([*copy, partial(ufunc, part, updates.reshape(part.shape), out=part)])
    if ufunc is None and table.ndim > 1:
        return in_sequence(
            [*locate, *copy, partial(table.__setitem__, places.reshape(-1), updates.reshape(-1, *table.shape[1:]))]
        )
    flat, numbers, values = y.reshape(-1), places.reshape(-1), updates.reshape(-1)
    if ufunc is None:
        return in_sequence([*locate, *copy, partial(np.put, flat, numbers, values, mode="clip")])
    if not is_narrow(y.dtype):
        return in_sequence([*locate, *copy, partial(ufunc.at, flat, numbers, values)])
    work = compute_dtype(y.dtype)
    total, wide = owner.scratch(flat.shape, work), owner.scratch(values.shape, work)
    widen = [convert(data.reshape(-1), total), convert(values, wide)]
    return in_sequence([*locate, *widen, partial(ufunc.at, total, numbers, wide), convert(total, flat)])
