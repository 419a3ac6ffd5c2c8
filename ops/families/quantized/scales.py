"""Scales and zero points: as arguments of an operator, or as tensors; checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT32, INT8, UINT8, TypeMeta
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError

Array = npt.NDArray[Any]

BYTES = (UINT8, INT8)
"""The integer types of quantized activations."""


def integer_range(meta: TypeMeta) -> tuple[int, int]:
    """The least and the largest integer of a type."""
    limits = np.iinfo(meta.numpy) if meta.is_integer else ml_dtypes.iinfo(meta.numpy)  # type: ignore[no-untyped-call]
    return int(limits.min), int(limits.max)


def scale_argument(call: OperatorCall, name: str) -> np.float32:
    """Argument `name` (default 1) as a scale. Raises ArgumentError unless it is finite and above 0 in float32."""
    value = np.float32(call.arguments.float(name, 1.0))
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{call.label}: argument {name!r} must be a finite scale above 0, found {value:g}")
    return value


def zero_point_argument(call: OperatorCall, name: str, meta: TypeMeta) -> int:
    """Argument `name` (default 0) as a zero point of `meta`. Raises ArgumentError when the type does not hold it.

    Floats have no zero point: only 0 is allowed for them.
    """
    value = call.arguments.int(name, 0)
    least, most = integer_range(meta) if meta.is_integer else (0, 0)
    if not least <= value <= most:
        raise ArgumentError(
            f"{call.label}: argument {name!r} must be a zero point of {meta}, {least} to {most}, found {value}"
        )
    return value


def type_named(call: OperatorCall, name: str, default: TypeMeta, allowed: tuple[TypeMeta, ...]) -> TypeMeta:
    """Argument `name` as one of `allowed` types, by number or name. Raises ArgumentError."""
    if name not in call.arguments:
        return default
    if call.arguments.field(name, "s") is not None:
        meta = dtypes.from_name(call.arguments.string(name, ""))
    else:
        meta = dtypes.from_number(call.arguments.int(name, 0))
    if meta not in allowed:
        expected = ", ".join(map(str, allowed))
        raise ArgumentError(f"{call.label}: argument {name!r} must be one of {expected}, found {meta}")
    return meta


def check_scales(values: Array, label: str, blob: str) -> None:
    """Raise ArgumentError, naming operator and blob, unless all `values` are finite and above 0."""
    wide = values.astype(np.float64)
    wrong = ~(np.isfinite(wide) & (wide > 0))
    if wrong.any():
        raise ArgumentError(f"{label}: scales {blob!r} must be finite and above 0, found {wide[wrong].flat[0]:g}")


def checked_scales(owner: Operator, index: int) -> list[Step]:
    """Check the scales in input `index`: now when they are constant, else in the steps of every run.

    Raises ArgumentError for a constant that is no scale.
    """
    values, blob = owner.x(index), owner.definition.input[index]

    def check() -> None:
        check_scales(values, owner.label, blob)

    if owner.input(index).constant is not None:
        check()
        return []
    return [check]


def along(axis: int, rank: int) -> Callable[[Array], Array]:
    """A view that turns a vector, one entry for each index of `axis`, into a tensor of `rank` axes; scalars stay."""

    def view(vector: Array) -> Array:
        if vector.size == 1:
            return vector.reshape(())
        shape = [1] * rank
        shape[axis] = vector.size
        return vector.reshape(shape)

    return view


def require_scales(call: OperatorCall, index: int, entries: int, what: str) -> None:
    """Raise ShapeError unless input `index` is float32, with one entry or `entries`, one for each of `what`."""
    call.require_types(index, FLOAT32)
    shape = call.inputs[index].shape
    if shape not in ((), (1,), (entries,)):
        raise call.fail(
            f"scales {call.definition.input[index]!r} must have one entry, or {entries}: one for each {what}; "
            f"found shape {shape}"
        )
