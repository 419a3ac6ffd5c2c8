"""ONNX TensorProtos as read-only arrays: raw bytes and external files are viewed, not copied.

External data may lie only inside the model's own folder, so that a model file cannot make anyone read other files.
Specification: https://github.com/onnx/onnx/blob/main/docs/ExternalData.md.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from dagexec.core import dtypes
from dagexec.core.dtypes import TypeMeta
from dagexec.core.errors import ModelFormatError

Array = npt.NDArray[Any]

_TYPES: dict[int, TypeMeta] = {
    onnx.TensorProto.FLOAT: dtypes.FLOAT32,
    onnx.TensorProto.DOUBLE: dtypes.FLOAT64,
    onnx.TensorProto.FLOAT16: dtypes.FLOAT16,
    onnx.TensorProto.BFLOAT16: dtypes.BFLOAT16,
    onnx.TensorProto.INT8: dtypes.INT8,
    onnx.TensorProto.UINT8: dtypes.UINT8,
    onnx.TensorProto.INT16: dtypes.INT16,
    onnx.TensorProto.UINT16: dtypes.UINT16,
    onnx.TensorProto.INT32: dtypes.INT32,
    onnx.TensorProto.INT64: dtypes.INT64,
    onnx.TensorProto.BOOL: dtypes.BOOL,
    onnx.TensorProto.STRING: dtypes.STRING,
}

_TYPED_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.STRING: "string_data",
}  # every other element type travels in int32_data


def element_type(number: int, owner: str) -> TypeMeta:
    """The TypeMeta of an ONNX `TensorProto.DataType` number; `owner` names what has it. Raises ModelFormatError."""
    try:
        return _TYPES[number]
    except KeyError:
        known = ", ".join(str(meta) for meta in _TYPES.values())
        raise ModelFormatError(f"{owner}: {type_name(number)} is not supported; expected one of {known}") from None


def type_name(number: int) -> str:
    """What dagexec calls an ONNX `TensorProto.DataType` number, or ONNX does where dagexec has no such type."""
    names = {value: name for name, value in onnx.TensorProto.DataType.items()}
    return str(_TYPES[number]) if number in _TYPES else names.get(number, f"element type {number}")


def tensor_array(tensor: onnx.TensorProto, folder: Path | None, owner: str) -> Array:
    """The content of a TensorProto as a read-only array of its shape.

    `folder` is where external data may be, None when it may not be used; `owner` names the tensor in errors.
    Raises ModelFormatError for an unsupported type, for dims that do not fit the data, and for external data that is
    missing, too short, or outside the folder.
    """
    meta = element_type(tensor.data_type, owner)
    shape = tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise ModelFormatError(f"{owner}: a size is negative: {list(shape)}")
    if tensor.HasField("segment"):
        raise ModelFormatError(f"{owner}: it is a segment of a tensor, which is not supported")
    count = math.prod(shape)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        flat = _external(tensor, meta, count, folder, owner)
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


def _check_length(found: int, expected: int, unit: str, owner: str) -> None:
    if found != expected:
        raise ModelFormatError(f"{owner}: its sizes ask for {expected} {unit}, found {found}")


def _raw(data: bytes, meta: TypeMeta, count: int, owner: str) -> Array:
    if meta is dtypes.STRING:
        raise ModelFormatError(f"{owner}: strings may not be given as raw data")
    _check_length(len(data), count * meta.itemsize, "bytes", owner)
    return _native(np.frombuffer(data, np.uint8), meta)


def _native(data: npt.NDArray[np.uint8], meta: TypeMeta) -> Array:
    """Little-endian bytes as elements: a view, except for bool (any byte but 0 is true) and on big-endian machines."""
    if meta is dtypes.BOOL:
        return np.not_equal(data, 0)
    if data.ctypes.data % meta.itemsize:
        data = data.copy()
    array = data.view(meta.numpy)
    return array.byteswap() if sys.byteorder == "big" else array


def _typed(tensor: onnx.TensorProto, meta: TypeMeta, count: int, owner: str) -> Array:
    values = getattr(tensor, _TYPED_FIELDS.get(tensor.data_type, "int32_data"))
    _check_length(len(values), count, "elements", owner)
    if meta is dtypes.STRING:
        strings = np.empty(count, np.object_)
        strings[:] = list(values)
        return strings
    if meta in (dtypes.FLOAT16, dtypes.BFLOAT16):  # their bits, as integers
        return _narrow(values, np.dtype(np.uint16), owner).view(meta.numpy)
    if meta is dtypes.BOOL:
        return np.not_equal(np.array(values, np.int32), 0)
    if meta.is_integer:
        return _narrow(values, meta.numpy, owner)
    return np.array(values, meta.numpy)


def _narrow(values: Any, dtype: np.dtype[Any], owner: str) -> Array:
    wide = np.array(values, np.int64)
    limits = np.iinfo(dtype)
    if wide.size and not limits.min <= wide.min() <= wide.max() <= limits.max:
        raise ModelFormatError(f"{owner}: a value does not fit {dtype}: {wide.min()} to {wide.max()}")
    return wide.astype(dtype)


def _external(tensor: onnx.TensorProto, meta: TypeMeta, count: int, folder: Path | None, owner: str) -> Array:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(folder, entries.get("location", ""), owner)
    if meta is dtypes.STRING:
        raise ModelFormatError(f"{owner}: strings may not be external data")
    size = path.stat().st_size
    needed = count * meta.itemsize
    offset = _entry(entries, "offset", 0, owner)
    length = _entry(entries, "length", needed, owner)
    _check_length(length, needed, "bytes", owner)
    if offset + length > size:
        raise ModelFormatError(
            f"{owner}: external data {path.name!r} has {size} bytes; expected {length} bytes at offset {offset}"
        )
    if not needed:
        return np.empty(0, meta.numpy)
    try:
        mapped = np.memmap(path, np.uint8, "r", offset, (needed,))
    except OSError as error:
        raise ModelFormatError(f"{owner}: external data {path.name!r} cannot be read: {error.strerror}") from None
    return _native(mapped.view(np.ndarray), meta)


def _entry(entries: dict[str, str], key: str, default: int, owner: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ModelFormatError(f"{owner}: external data {key} must be a number of bytes, found {text[:40]!r}")
    if len(text) > 19:
        raise ModelFormatError(f"{owner}: external data {key} is too large: {text[:40]}")
    return int(text)


def _inside(folder: Path | None, location: str, owner: str) -> Path:
    """The file `location` of `folder`, after symbolic links; it must be a regular file inside the folder."""
    if folder is None:
        raise ModelFormatError(f"{owner}: has external data {location!r}, but the model was not loaded from a file")
    if not location:
        raise ModelFormatError(f"{owner}: external data has no location")
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        allowed = path.is_relative_to(root) and not Path(location).is_absolute()
        regular = allowed and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a loop of links
        raise ModelFormatError(f"{owner}: external data location {location[:80]!r} is no file name: {error}") from None
    if not allowed:
        raise ModelFormatError(f"{owner}: external data {location!r} is outside the model's folder {root}")
    if not regular:
        raise ModelFormatError(f"{owner}: external data {location!r} is not a file in {root}")
    return path
