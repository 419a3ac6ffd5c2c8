"""Arrays as TensorProtos: bytes that Caffe2 reads and writes, a segment of the elements at a time.

float32 and float64 go to `float_data` and `double_data`, int64 to `int64_data`, strings to `string_data`, everything
else to `int32_data`, 16-bit floats by their bits. Caffe2 has no bfloat16: its bits are written as UINT16, with a note
in `device_detail.extra_info`, so that Caffe2 reads them as numbers and dagexec as bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from dagexec.core import dtypes
from dagexec.core.dtypes import ALL_TYPES, BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT64, STRING, UINT16, TypeMeta
from dagexec.core.proto import DeviceOption, TensorProto
from dagexec.errors import DagexecError, StorageError
from dagexec.platform.records import dataclass
from dagexec.storage.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    WireError,
    decode_varints,
    encode_varints,
    fields,
    length_field,
    varint,
)

Array = npt.NDArray[Any]

_FLOAT_DATA, _INT32_DATA, _BYTE_DATA, _STRING_DATA, _DOUBLE_DATA, _INT64_DATA, _RAW_DATA = 3, 4, 5, 6, 9, 10, 13
_DATA = frozenset({_FLOAT_DATA, _INT32_DATA, _BYTE_DATA, _STRING_DATA, _DOUBLE_DATA, _INT64_DATA, _RAW_DATA})
_BFLOAT16_MARK = "dtype:bfloat16"
_ELEMENT_KINDS = {_FLOAT_DATA: FIXED32, _DOUBLE_DATA: FIXED64, _INT32_DATA: VARINT, _INT64_DATA: VARINT}


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements `begin` to `end` of a tensor, in the order of their indices.

    Attributes:
        shape: of the whole tensor.
        meta: the element type.
        values: the elements of this segment, in one dimension.
        device: where the tensor was, if the message says so.
    """

    name: str
    shape: tuple[int, ...]
    meta: TypeMeta
    begin: int
    end: int
    values: Array
    device: DeviceOption | None = None


def encode_tensor(name: str, array: Array, begin: int = 0, end: int | None = None) -> bytes:
    """The TensorProto of elements `begin` to `end` of an array (by default all, without a segment).

    The array is packed. Raises ShapeError for a dtype that tensors do not hold, StorageError for one of ONNX's.
    """
    meta = dtypes.from_numpy(array.dtype)
    if meta not in ALL_TYPES:
        raise StorageError(f"tensor {name!r}: elements of type {meta} have no place in a file of Caffe2's format")
    head = TensorProto(dims=array.shape, name=name)
    head.data_type = TensorProto.UINT16 if meta is BFLOAT16 else meta.number  # type: ignore[assignment]
    if meta is BFLOAT16:
        head.device_detail.extra_info.append(_BFLOAT16_MARK)
    flat = array.reshape(-1)
    if end is not None:
        head.segment.begin, head.segment.end = begin, end
        flat = flat[begin:end]
    return head.SerializeToString() + _encode_values(flat, meta)


def _encode_values(flat: Array, meta: TypeMeta) -> bytes:
    if meta is STRING:
        strings = (item.encode() if isinstance(item, str) else item for item in flat.tolist())
        return b"".join(length_field(_STRING_DATA, item) for item in strings)
    if not flat.size:
        return b""
    if meta in (FLOAT32, FLOAT64):
        number = _FLOAT_DATA if meta is FLOAT32 else _DOUBLE_DATA
        little = flat.astype(meta.numpy.newbyteorder("<"), copy=False)
        head = varint(number << 3 | LENGTH) + varint(little.nbytes)
        return b"".join((head, little.data.cast("B")))
    bits = flat.view(np.uint16) if meta in (FLOAT16, BFLOAT16) else flat
    return length_field(_INT64_DATA if meta is INT64 else _INT32_DATA, encode_varints(bits.astype(np.int64)))


def decode_tensor(message: memoryview, most_bytes: int) -> Segment:
    """The values of a TensorProto, which may be a part of its tensor.

    `most_bytes` is the size of the file or database of the tensor: a tensor that could not be in it is refused before
    anything is allocated. Raises StorageError.
    """
    data: dict[int, list[memoryview]] = {}
    rest: list[memoryview] = []
    head = TensorProto()
    try:
        for number, kind, value, whole in fields(message):
            if number not in _DATA:
                rest.append(whole)
            elif kind == LENGTH or kind == _ELEMENT_KINDS.get(number):
                data.setdefault(number, []).append(value)
            else:
                raise WireError(f"field {number} with wire type {kind}")
        head.ParseFromString(b"".join(rest))
        return _segment(head, data, most_bytes)
    except (WireError, DecodeError) as error:
        raise StorageError(f"not a TensorProto: {error}") from None


def _segment(head: TensorProto, data: dict[int, list[memoryview]], most_bytes: int) -> Segment:
    name = head.name if isinstance(head.name, str) else repr(head.name)
    if head.storage_type not in (TensorProto.TYPED, TensorProto.RAW):
        raise StorageError(f"tensor {name!r}: its values are not in the message (storage type {head.storage_type})")
    try:
        meta = dtypes.from_number(head.data_type)
    except DagexecError as error:
        raise StorageError(f"tensor {name!r}: {error}") from None
    if meta is UINT16 and _BFLOAT16_MARK in head.device_detail.extra_info:
        meta = BFLOAT16
    shape = tuple(head.dims)
    if any(extent < 0 for extent in shape):
        raise StorageError(f"tensor {name!r}: negative size in shape {shape}")
    count = math.prod(shape)
    if count * _fewest_bytes(meta, head.storage_type) > most_bytes:
        raise StorageError(
            f"tensor {name!r}: {count:,} elements of type {meta} (shape {shape}) do not fit in {most_bytes:,} bytes"
        )
    begin, end = (head.segment.begin, head.segment.end) if head.HasField("segment") else (0, count)
    if not 0 <= begin <= end <= count:
        raise StorageError(f"tensor {name!r}: elements {begin} to {end} of {count}")
    values = _values(name, meta, data, head.storage_type == TensorProto.RAW)
    if values.size != end - begin:
        raise StorageError(
            f"tensor {name!r}: expected {end - begin:,} values {meta} (shape {shape}), found {values.size:,}"
        )
    device = head.device_detail if head.HasField("device_detail") else None
    return Segment(name, shape, meta, begin, end, values, device)


def _fewest_bytes(meta: TypeMeta, storage_type: int) -> int:
    """Bytes that an element takes at least."""
    if meta in (FLOAT32, FLOAT64) or storage_type == TensorProto.RAW:
        return meta.itemsize
    return 2 if meta is STRING else 1


def _values(name: str, meta: TypeMeta, data: dict[int, list[memoryview]], raw: bool) -> Array:
    if raw:
        if meta is STRING:
            raise StorageError(f"tensor {name!r}: strings as raw bytes")
        return _fixed(name, meta, data.get(_RAW_DATA, ()))
    if meta is STRING:
        strings = np.empty(len(data.get(_STRING_DATA, ())), np.object_)
        strings[:] = [bytes(item) for item in data.get(_STRING_DATA, ())]
        return strings
    if meta is FLOAT32:
        return _fixed(name, meta, data.get(_FLOAT_DATA, ()))
    if meta is FLOAT64:
        return _fixed(name, meta, data.get(_DOUBLE_DATA, ()))
    if _BYTE_DATA in data and meta.itemsize <= 2:  # BYTE, and FLOAT16 as bytes
        return _fixed(name, meta, data[_BYTE_DATA])
    if meta is INT64:
        return decode_varints(_joined(data.get(_INT64_DATA, ())))
    return _narrowed(name, meta, decode_varints(_joined(data.get(_INT32_DATA, ()))))


def _joined(parts: Iterable[memoryview]) -> memoryview:
    chunks = list(parts)
    return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))


def _fixed(name: str, meta: TypeMeta, parts: Iterable[memoryview]) -> Array:
    """Little-endian elements."""
    content = _joined(parts)
    if len(content) % meta.itemsize:
        raise StorageError(f"tensor {name!r}: {len(content)} bytes are not a multiple of the size of {meta} elements")
    if meta is BOOL:
        return np.not_equal(np.frombuffer(content, np.uint8), 0)
    if meta is BFLOAT16:
        return np.frombuffer(content, "<u2").astype(np.uint16).view(meta.numpy)
    return np.frombuffer(content, meta.numpy.newbyteorder("<")).astype(meta.numpy, copy=False)


def _narrowed(name: str, meta: TypeMeta, values: npt.NDArray[np.int64]) -> Array:
    """The int32 values of a message as elements of a narrower type. Raises StorageError where they do not fit."""
    if meta is BOOL:
        return np.not_equal(values, 0)
    target = np.dtype(np.uint16) if meta in (FLOAT16, BFLOAT16) else meta.numpy
    narrow = values.astype(target)
    if not np.array_equal(narrow, values):
        wrong = values[narrow != values][0]
        raise StorageError(f"tensor {name!r}: the value {wrong} is not a valid {meta}")
    return narrow.view(meta.numpy) if meta in (FLOAT16, BFLOAT16) else narrow
