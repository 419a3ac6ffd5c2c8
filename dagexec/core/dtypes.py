"""TypeMeta: the element types a tensor can have, with their numbers in a NetDef and their NumPy dtypes.

`bfloat16` is NumPy's through `ml_dtypes`, and so are the types of ONNX that have at most 8 bits. Caffe2 has no number
for them nor for a few others, so dagexec uses numbers above Caffe2's range: 1000 for bfloat16, else 1000 and the number
that ONNX has. They appear only in arguments such as Cast's `to`. Strings are object arrays of `bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core.proto import TensorProto
from dagexec.errors import ArgumentError, ShapeError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class TypeMeta:
    """One element type: its name, `TensorProto.DataType` number, NumPy dtype and size in bytes.

    There is one object of each, also in copies and behind a pickle, so that types are compared by identity.
    `onnx` is its number in ONNX's `TensorProto.DataType`, and `bits` are those of an element in an ONNX file, which
    packs elements of less than a byte.
    """

    name: str
    number: int
    numpy: np.dtype[Any]
    onnx: int
    bits: int

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
        """True for the signed and unsigned integers of at least 8 bits (not bool)."""
        return self.numpy.kind in "iu"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], TypeMeta], tuple[str]]:
        return from_name, (self.name,)


def _type(name: str, number: int, dtype: npt.DTypeLike, onnx: int) -> TypeMeta:
    numpy_dtype = np.dtype(dtype)
    return TypeMeta(name, number, numpy_dtype, onnx, 8 * numpy_dtype.itemsize)


FLOAT32 = _type("float32", TensorProto.FLOAT, np.float32, 1)
FLOAT64 = _type("float64", TensorProto.DOUBLE, np.float64, 11)
FLOAT16 = _type("float16", TensorProto.FLOAT16, np.float16, 10)
BFLOAT16 = _type("bfloat16", 1000, ml_dtypes.bfloat16, 16)
INT8 = _type("int8", TensorProto.INT8, np.int8, 3)
UINT8 = _type("uint8", TensorProto.UINT8, np.uint8, 2)
INT16 = _type("int16", TensorProto.INT16, np.int16, 5)
UINT16 = _type("uint16", TensorProto.UINT16, np.uint16, 4)
INT32 = _type("int32", TensorProto.INT32, np.int32, 6)
INT64 = _type("int64", TensorProto.INT64, np.int64, 7)
UINT32 = _type("uint32", 1012, np.uint32, 12)
UINT64 = _type("uint64", 1013, np.uint64, 13)
COMPLEX64 = _type("complex64", 1014, np.complex64, 14)
COMPLEX128 = _type("complex128", 1015, np.complex128, 15)
BOOL = _type("bool", TensorProto.BOOL, np.bool_, 9)
STRING = _type("string", TensorProto.STRING, np.object_, 8)


def _narrow_types() -> Iterator[TypeMeta]:
    """The types of at most 8 bits that the installed `ml_dtypes` has."""
    for name, dtype, onnx, bits in (
        ("float8e4m3fn", "float8_e4m3fn", 17, 8),
        ("float8e4m3fnuz", "float8_e4m3fnuz", 18, 8),
        ("float8e5m2", "float8_e5m2", 19, 8),
        ("float8e5m2fnuz", "float8_e5m2fnuz", 20, 8),
        ("float8e8m0", "float8_e8m0fnu", 24, 8),
        ("float4e2m1", "float4_e2m1fn", 23, 4),
        ("uint4", "uint4", 21, 4),
        ("int4", "int4", 22, 4),
        ("uint2", "uint2", 25, 2),
        ("int2", "int2", 26, 2),
    ):
        if hasattr(ml_dtypes, dtype):
            yield TypeMeta(name, 1000 + onnx, np.dtype(getattr(ml_dtypes, dtype)), onnx, bits)


ALL_TYPES = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, UINT16, INT32, INT64, BOOL, STRING)
"""Caffe2's types, and bfloat16: nets in files have these."""
NARROW_TYPES = tuple(_narrow_types())
"""Floats and integers of at most 8 bits. In memory each element has a byte; files pack those of less."""
HELD_TYPES = (*ALL_TYPES, UINT32, UINT64, COMPLEX64, COMPLEX128, *NARROW_TYPES)
"""All that a tensor can hold. Most operators refuse those that are in neither ALL_TYPES nor NUMBER_TYPES."""
FLOAT_TYPES = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
NUMBER_TYPES = (*(meta for meta in ALL_TYPES if meta not in (BOOL, STRING)), UINT32, UINT64)

_BY_NUMPY = {meta.numpy: meta for meta in HELD_TYPES}
_BY_NUMBER = {meta.number: meta for meta in HELD_TYPES} | {int(TensorProto.BYTE): UINT8}
_ALIASES = {"float": FLOAT32, "double": FLOAT64, "byte": UINT8, "half": FLOAT16}
_BY_NAME = {meta.name: meta for meta in HELD_TYPES} | _ALIASES


def from_numpy(dtype: npt.DTypeLike) -> TypeMeta:
    """The TypeMeta of a NumPy dtype; string dtypes (`S`, `U`) become STRING. Raises ShapeError for any other."""
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind in "SU":
        return STRING
    try:
        return _BY_NUMPY[numpy_dtype]
    except KeyError:
        names = ", ".join(meta.name for meta in HELD_TYPES)
        raise ShapeError(f"dtype {numpy_dtype} is not one a tensor can hold; expected one of {names}") from None


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
