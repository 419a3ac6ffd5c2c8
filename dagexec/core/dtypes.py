"""TypeMeta: the element types a tensor can have, with their numbers in a NetDef and their NumPy dtypes.

`bfloat16` is NumPy's through `ml_dtypes`. Caffe2 has no number for it, so dagexec uses one above Caffe2's range; it
appears only in arguments such as Cast's `to`. Strings are object arrays of `bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core.proto import TensorProto
from dagexec.errors import ArgumentError, ShapeError


@dataclass(frozen=True, slots=True)
class TypeMeta:
    """One element type: its name, `TensorProto.DataType` number, NumPy dtype and size in bytes."""

    name: str
    number: int
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes an element takes in a tensor's storage (a pointer's size for strings)."""
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """True for float16, bfloat16, float32 and float64."""
        return self.name in ("float16", "bfloat16", "float32", "float64")

    @property
    def is_integer(self) -> bool:
        """True for the signed and unsigned integers (not bool)."""
        return self.numpy.kind in "iu"

    def __str__(self) -> str:
        return self.name


FLOAT32 = TypeMeta("float32", TensorProto.FLOAT, np.dtype(np.float32))
FLOAT64 = TypeMeta("float64", TensorProto.DOUBLE, np.dtype(np.float64))
FLOAT16 = TypeMeta("float16", TensorProto.FLOAT16, np.dtype(np.float16))
BFLOAT16 = TypeMeta("bfloat16", 1000, np.dtype(ml_dtypes.bfloat16))
INT8 = TypeMeta("int8", TensorProto.INT8, np.dtype(np.int8))
UINT8 = TypeMeta("uint8", TensorProto.UINT8, np.dtype(np.uint8))
INT16 = TypeMeta("int16", TensorProto.INT16, np.dtype(np.int16))
UINT16 = TypeMeta("uint16", TensorProto.UINT16, np.dtype(np.uint16))
INT32 = TypeMeta("int32", TensorProto.INT32, np.dtype(np.int32))
INT64 = TypeMeta("int64", TensorProto.INT64, np.dtype(np.int64))
BOOL = TypeMeta("bool", TensorProto.BOOL, np.dtype(np.bool_))
STRING = TypeMeta("string", TensorProto.STRING, np.dtype(np.object_))

ALL_TYPES = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, UINT16, INT32, INT64, BOOL, STRING)
FLOAT_TYPES = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
NUMBER_TYPES = tuple(meta for meta in ALL_TYPES if meta not in (BOOL, STRING))

_BY_NUMPY = {meta.numpy: meta for meta in ALL_TYPES}
_BY_NUMBER = {meta.number: meta for meta in ALL_TYPES} | {int(TensorProto.BYTE): UINT8}
_ALIASES = {"float": FLOAT32, "double": FLOAT64, "byte": UINT8, "half": FLOAT16}
_BY_NAME = {meta.name: meta for meta in ALL_TYPES} | _ALIASES


def from_numpy(dtype: npt.DTypeLike) -> TypeMeta:
    """The TypeMeta of a NumPy dtype; string dtypes (`S`, `U`) become STRING. Raises ShapeError for any other."""
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind in "SU":
        return STRING
    try:
        return _BY_NUMPY[numpy_dtype]
    except KeyError:
        known = ", ".join(meta.name for meta in ALL_TYPES)
        raise ShapeError(f"dtype {numpy_dtype} is not one a tensor can hold; expected one of {known}") from None


def from_number(number: int) -> TypeMeta:
    """The TypeMeta of a `TensorProto.DataType` number. Raises ArgumentError for an unknown number."""
    try:
        return _BY_NUMBER[number]
    except KeyError:
        raise ArgumentError(f"data type number {number} is unknown; known: {sorted(_BY_NUMBER)}") from None


def from_name(name: str) -> TypeMeta:
    """The TypeMeta of a name, case-insensitive (`float`, `FLOAT`, `float32`, ...). Raises ArgumentError if unknown."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        raise ArgumentError(f"data type {name!r} is unknown; known: {', '.join(_BY_NAME)}") from None
