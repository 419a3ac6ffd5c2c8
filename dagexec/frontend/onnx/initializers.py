"""ONNX TensorProtos as read-only arrays: raw bytes are viewed, not copied, and external files are read once.

`external_data` reads those.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from dagexec.core import dtypes
from dagexec.core.dtypes import TypeMeta
from dagexec.core.proto import TensorProto
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.external_data import ExternalData
from dagexec.platform.host_memory import check_fits
from dagexec.storage.tensor_proto import encode_tensor

Array = npt.NDArray[Any]

NOWHERE = ExternalData(None)
"""For tensors that may have no external data."""

_TYPES: dict[int, TypeMeta] = {meta.onnx: meta for meta in dtypes.HELD_TYPES}

_TYPED_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.STRING: "string_data",
}  # every other element type travels in int32_data


def element_type(number: int, owner: str) -> TypeMeta:
    """The TypeMeta of an ONNX `TensorProto.DataType` number; `owner` names what has it. Raises ModelFormatError."""
    try:
        return _TYPES[number]
    except KeyError:
        names = ", ".join(str(meta) for meta in _TYPES.values())
        raise ModelFormatError(f"{owner}: {type_name(number)} is not supported; expected one of {names}") from None


def type_name(number: int) -> str:
    """dagexec's name of an ONNX `TensorProto.DataType` number, or ONNX's where dagexec has no such type."""
    names = {value: name for name, value in onnx.TensorProto.DataType.items()}
    return str(_TYPES[number]) if number in _TYPES else names.get(number, f"element type {number}")


def tensor_array(tensor: onnx.TensorProto, external: ExternalData, owner: str) -> Array:
    """The content of a TensorProto as a read-only array of its shape.

    `external` reads external data; `owner` names the tensor in errors.
    Raises ModelFormatError for an unsupported type, for dims that do not fit the data, and what `external` raises.
    """
    meta = element_type(tensor.data_type, owner)
    shape = tuple(tensor.dims)
    if min(shape, default=0) < 0:
        raise ModelFormatError(f"{owner}: a size is negative: {list(shape)}")
    if tensor.HasField("segment"):
        raise ModelFormatError(f"{owner}: it is a segment of a tensor, which is not supported")
    count = math.prod(shape)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if meta is dtypes.STRING:
            raise ModelFormatError(f"{owner}: strings may not be external data")
        entries = {entry.key: entry.value for entry in tensor.external_data}
        flat = _native(external.read(entries, stored_bytes(meta, count), owner), meta, count)
    elif tensor.HasField("raw_data"):
        flat = _raw(tensor.raw_data, meta, count, owner)
    else:
        flat = _typed(tensor, meta, count, owner)
    try:
        array = flat.reshape(shape)
    except ValueError:
        raise ModelFormatError(f"{owner}: sizes {list(shape)} are too large") from None
    array.flags.writeable = False
    return array


def tensor_argument(tensor: onnx.TensorProto, owner: str) -> TensorProto:
    """A tensor that an attribute holds, as an argument of an operator. Raises ModelFormatError."""
    return TensorProto.FromString(encode_tensor("", np.ascontiguousarray(tensor_array(tensor, NOWHERE, owner))))


def dense_array(sparse: onnx.SparseTensorProto, external: ExternalData, owner: str) -> Array:
    """A sparse tensor as a dense one, read-only. Its indices are places in the tensor, or a row of them for each value.

    Raises ModelFormatError for indices that do not fit, ResourceError when memory does not suffice.
    """
    values = tensor_array(sparse.values, external, f"{owner}, values")
    indices = tensor_array(sparse.indices, external, f"{owner}, indices")
    shape = tuple(sparse.dims)
    if any(size < 0 for size in shape):
        raise ModelFormatError(f"{owner}: a size is negative: {list(shape)}")
    count = math.prod(shape)
    check_fits(count * values.itemsize, owner)
    fits = indices.shape in ((values.size,), (values.size, len(shape))) and indices.dtype == np.int64
    if values.ndim != 1 or values.dtype.kind == "O" or not fits:
        found = f"{values.size} values of shape {values.shape} and {indices.dtype} indices of shape {indices.shape}"
        raise ModelFormatError(f"{owner}: values and int64 indices must have as many rows, found {found}")
    if np.any(indices < 0) or np.any(indices >= (count if indices.ndim == 1 else np.array(shape, np.int64))):
        raise ModelFormatError(f"{owner}: an index is outside of sizes {list(shape)}")
    try:
        dense: Array = np.zeros(shape, values.dtype)
    except ValueError:
        raise ModelFormatError(f"{owner}: sizes {list(shape)} are too large") from None
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    dense.flags.writeable = False
    return dense


def _check_length(found: int, expected: int, unit: str, owner: str) -> None:
    if found != expected:
        raise ModelFormatError(f"{owner}: its sizes ask for {expected} {unit}, found {found}")


def _raw(data: bytes, meta: TypeMeta, count: int, owner: str) -> Array:
    if meta is dtypes.STRING:
        raise ModelFormatError(f"{owner}: strings may not be given as raw data")
    _check_length(len(data), stored_bytes(meta, count), "bytes", owner)
    return _native(np.frombuffer(data, np.uint8), meta, count)


def stored_bytes(meta: TypeMeta, count: int) -> int:
    """The bytes that `count` elements take in a file, where those of less than a byte are packed."""
    return -(-count * meta.bits // 8)


def _native(data: npt.NDArray[np.uint8], meta: TypeMeta, count: int) -> Array:
    """Little-endian bytes as `count` elements.

    A view, except for packed elements, for bool (any byte but 0 is true) and on big-endian machines.
    """
    if meta.bits < 8:
        return _unpacked(data, meta, count)
    if meta is dtypes.BOOL:
        return np.not_equal(data, 0)
    array = data.view(meta.numpy)
    if not array.flags.aligned:
        array = array.copy()
    return array.byteswap() if sys.byteorder == "big" else array


def _unpacked(data: npt.NDArray[np.uint8], meta: TypeMeta, count: int) -> Array:
    """Elements of less than a byte, of which the first in a byte has its lowest bits."""
    shifts = np.arange(0, 8, meta.bits, dtype=np.uint8)
    bits = (data[:, np.newaxis] >> shifts & np.uint8((1 << meta.bits) - 1)).reshape(-1)[:count]
    return bits.view(meta.numpy)


def _typed(tensor: onnx.TensorProto, meta: TypeMeta, count: int, owner: str) -> Array:
    values = getattr(tensor, _TYPED_FIELDS.get(tensor.data_type, "int32_data"))
    if meta.bits < 8:  # as many in an integer as in a byte
        _check_length(len(values), stored_bytes(meta, count), "bytes", owner)
        return _unpacked(_narrow(values, np.dtype(np.uint8), owner), meta, count)
    if meta in (dtypes.COMPLEX64, dtypes.COMPLEX128):  # real and imaginary parts in turn
        _check_length(len(values), 2 * count, "parts", owner)
        return np.array(values, np.empty(0, meta.numpy).real.dtype).view(meta.numpy)
    _check_length(len(values), count, "elements", owner)
    if meta is dtypes.STRING:
        strings = np.empty(count, np.object_)
        strings[:] = list(values)
        return strings
    if meta in (dtypes.FLOAT16, dtypes.BFLOAT16):  # their bits, as integers
        return _narrow(values, np.dtype(np.uint16), owner).view(meta.numpy)
    if meta in dtypes.NARROW_TYPES:  # floats of a byte, likewise
        return _narrow(values, np.dtype(np.uint8), owner).view(meta.numpy)
    if meta is dtypes.BOOL:
        return np.not_equal(np.array(values, np.int32), 0)
    if meta.is_integer:
        return _narrow(values, meta.numpy, owner)
    return np.array(values, meta.numpy)


def _narrow(values: Any, dtype: np.dtype[Any], owner: str) -> Array:
    wide = np.array(values, np.uint64 if dtype == np.uint64 else np.int64)
    limits = np.iinfo(dtype)
    if wide.size and not limits.min <= wide.min() <= wide.max() <= limits.max:
        raise ModelFormatError(f"{owner}: a value does not fit {dtype}: {wide.min()} to {wide.max()}")
    return wide.astype(dtype)
