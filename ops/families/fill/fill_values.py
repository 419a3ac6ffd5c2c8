"""What a filler writes: the arguments `value`, `values` and `dtype` read as NumPy values.

A filler's values are checked against its element type, so that an integer that does not fit is an error rather than
another number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT32, INT64, STRING, TypeMeta
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.families.elementwise.cast import type_argument


def fill_type(call: OperatorCall) -> TypeMeta:
    """The type of ConstantFill: that of its input if asked for, else `dtype`, the kind of `value`, or float32."""
    if call.inputs and call.arguments.bool("input_type"):
        return call.inputs[0].meta
    if "dtype" in call.arguments:
        return type_argument(call, "dtype")
    if "value" not in call.arguments or call.arguments.field("value", "f") is not None:
        return FLOAT32
    return INT64 if call.arguments.field("value", "s") is None else STRING


def fill_value(call: OperatorCall) -> Any:
    """The argument `value` as a scalar of `fill_type`. Raises ArgumentError when it is of another kind or too large."""
    meta = fill_type(call)
    if "value" not in call.arguments:
        return b"" if meta is STRING else meta.numpy.type(0)
    if meta is STRING:
        text = call.arguments.field("value", "s")
        if text is None:
            raise ArgumentError(f"{call.label}: argument 'value' must be a string")
        return text
    if meta.is_float:
        given = call.arguments.field("value", "f")  # which may be NaN
        with np.errstate(over="ignore"):
            return meta.numpy.type(call.arguments.float("value", 0.0) if given is None else given)
    value = call.arguments.int("value", 0)
    if meta is not BOOL:
        _check_range(call, "value", meta, value, value)
    return meta.numpy.type(value)


def _check_range(call: OperatorCall, name: str, meta: TypeMeta, low: int, high: int) -> None:
    limits = np.iinfo(meta.numpy)
    if low < limits.min or high > limits.max:
        found = low if low < limits.min else high
        raise ArgumentError(f"{call.label}: argument {name!r} must fit {meta}, found {found}")


def given_type(call: OperatorCall, default: TypeMeta) -> TypeMeta:
    """The element type of a GivenTensor filler: `dtype`, where it is given and not UNDEFINED (0), else `default`."""
    if "dtype" not in call.arguments or call.arguments.field("dtype", "i") == 0:
        return default
    return type_argument(call, "dtype")


def _listed(call: OperatorCall, meta: TypeMeta) -> Any:
    """The list in `values` that suits `meta`; integers do for floats too. Raises ArgumentError for another kind."""
    if "values" not in call.arguments:
        raise ArgumentError(f"{call.label}: argument 'values' is required")
    wanted = "strings" if meta is STRING else "floats" if meta.is_float else "ints"
    given = {name: call.arguments.field("values", name) for name in ("floats", "ints", "strings")}
    present = [name for name, found in given.items() if found]
    if meta.is_float and present == ["ints"]:
        return given["ints"]
    if present not in ([], [wanted]):
        raise ArgumentError(f"{call.label}: argument 'values' must be a list of {wanted} for {meta}, found {present}")
    return given[wanted] or ()


def given_count(call: OperatorCall, meta: TypeMeta) -> int:
    """How many values are listed. Raises ArgumentError when they are not of a kind that suits `meta`."""
    return len(_listed(call, meta))


def given_values(call: OperatorCall, meta: TypeMeta) -> npt.NDArray[Any]:
    """The listed values as a vector of `meta`. Raises ArgumentError when an integer does not fit."""
    listed = _listed(call, meta)
    if meta is STRING:
        strings = np.empty(len(listed), np.object_)
        strings[:] = list(listed)
        return strings
    if meta.is_float:
        return np.fromiter(listed, np.float64 if meta.numpy.itemsize == 8 else np.float32, len(listed)).astype(
            meta.numpy, copy=False
        )
    values = np.fromiter(listed, np.int64, len(listed))
    if meta is not BOOL and values.size:
        _check_range(call, "values", meta, int(values.min()), int(values.max()))
    return values.astype(meta.numpy, copy=False)
