"""Integers that an operator is given as the values of an input: shapes, axes, bounds."""

from __future__ import annotations

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.schema import OperatorCall


def integers_of(call: OperatorCall, index: int) -> tuple[int, ...]:
    """The content of input `index`, a vector (or scalar) of int32 or int64.

    Raises UnknownValueError when it is computed only at run time, ShapeError for another rank or element type.
    """
    call.require_rank(index, 0, 1)
    call.require_types(index, INT32, INT64)
    return tuple(int(value) for value in call.known_value(index).reshape(-1))


def given_axes(call: OperatorCall, name: str) -> tuple[int, ...] | None:
    """The axes of input 1, or of argument `name`, as they are given; None where neither is there."""
    if len(call.inputs) > 1:
        if name in call.arguments:
            raise call.fail(f"the axes are given by both an input and the argument {name!r}; expected one of them")
        return integers_of(call, 1)
    return tuple(call.arguments.ints(name)) if name in call.arguments else None
