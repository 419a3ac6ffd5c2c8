"""Arguments of operators on tables as arrays: lists of numbers or texts, or tensors, checked and named in errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import from_numpy
from dagexec.core.onnx_name import OnnxName
from dagexec.errors import ModelFormatError
from dagexec.storage.tensor_proto import decode_tensor

Array = npt.NDArray[Any]

DOMAIN = "ai.onnx.ml"
"""The domain of ONNX that these operators are of."""

_MAX_BYTES = 1 << 31


def onnx_name(op_type: str, version: int, *attributes: str) -> tuple[OnnxName, ...]:
    """The operator of ai.onnx.ml whose attributes are arguments of the same names."""
    return (OnnxName(op_type, version, {name: name for name in attributes}, domain=DOMAIN),)


def numbers(arguments: Arguments, label: str, *names: str) -> Array:
    """The first of arguments `names` that is given, lists of numbers or tensors, in one dimension; else an empty array.

    Lists of integers are int64, of floats float32. Raises ModelFormatError, with `label`, for texts.
    """
    for name in names:
        found = _given(arguments, label, name)
        if found is not None:
            if found.dtype == np.object_:
                raise ModelFormatError(f"{label}: attribute {name!r} must be numbers, found texts")
            return found.reshape(-1)
    return np.empty(0, np.float32)


def integers(arguments: Arguments, label: str, name: str, length: int | None = None) -> Array:
    """Argument `name`, integers, of that `length`. Raises ModelFormatError."""
    found = np.array(arguments.ints(name), np.int64)
    check_length(found, label, name, length)
    return found


def texts(arguments: Arguments, label: str, *names: str) -> Array:
    """The first of arguments `names` that is given, as an array of bytes objects. Raises ModelFormatError."""
    for name in names:
        found = _given(arguments, label, name)
        if found is not None and found.size:
            if found.dtype != np.object_:
                raise ModelFormatError(f"{label}: attribute {name!r} must be texts, found numbers")
            return found.reshape(-1)
    return np.empty(0, np.object_)


def check_length(found: Array, label: str, name: str, length: int | None) -> None:
    """Raise ModelFormatError unless an attribute has so many values."""
    if length is not None and found.size != length:
        raise ModelFormatError(f"{label}: attribute {name!r} must have {length} values, found {found.size}")


def check_finite(found: Array, label: str, name: str) -> None:
    """Raise ModelFormatError unless all values of an attribute are finite."""
    if not np.isfinite(found).all():
        raise ModelFormatError(f"{label}: attribute {name!r} has values that are not finite")


def _given(arguments: Arguments, label: str, name: str) -> Array | None:
    """The values of an argument, None where it is absent."""
    if name not in arguments:
        return None
    tensor, strings = arguments.field(name, "t"), arguments.field(name, "strings")
    if tensor is not None:
        segment = decode_tensor(memoryview(tensor.SerializeToString()), _MAX_BYTES)
        from_numpy(segment.values.dtype)
        return segment.values.reshape(-1)
    if strings:
        found = np.empty(len(strings), np.object_)
        found[:] = strings
        return found
    integers = arguments.field(name, "ints")
    if integers:
        return np.array(integers, np.int64)
    return np.array(arguments.field(name, "floats") or (), np.float32)
