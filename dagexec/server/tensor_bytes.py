"""Arrays as the bytes that the Open Inference Protocol's binary forms have for them, over HTTP and gRPC alike.

Elements follow each other in row-major order, little-endian; BOOL has a byte for each. An element of BYTES is its
length as 4 bytes, then itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from dagexec.core.feeds import Array
from dagexec.server.datatypes import BYTES, NUMPY
from dagexec.server.inference import RequestError

Bytes = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")


def array_from_bytes(name: str, datatype: str, shape: Sequence[int], data: Bytes) -> Array:
    """The input `name` as an array on the memory of `data`, except for BYTES and BOOL.

    Raises `RequestError` (400) for an unknown datatype, an impossible shape, and any other number of bytes.
    """
    if datatype not in NUMPY:
        raise RequestError(
            400, f"input {name!r:.80} has the datatype {datatype!r:.80}, which is none of {', '.join(NUMPY)}"
        )
    if datatype == BYTES:
        texts = list(_texts(name, memoryview(data)))
        return shaped(name, np.array([*texts, None], np.object_)[:-1], shape)
    dtype = NUMPY[datatype]
    expected = prod(shape) * dtype.itemsize
    if expected != len(data):
        raise RequestError(
            400, f"input {name!r:.80}: {datatype} of shape {list(shape)!r:.200} has {expected} bytes, not {len(data)}"
        )
    if datatype == "BOOL":
        return shaped(name, np.frombuffer(data, np.uint8) != 0, shape)
    return shaped(name, np.frombuffer(data, dtype), shape)


def bytes_from_array(array: Array) -> bytes | memoryview:
    """The bytes of an array; those of a contiguous one are its own memory."""
    if array.dtype == np.object_:
        return b"".join(part for text in array.flat for part in (_LENGTH.pack(len(text)), text))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def shaped(name: str, elements: Array, shape: Sequence[int]) -> Array:
    """The elements of the input `name` in this shape; raises `RequestError` (400) where that is impossible."""
    if any(size < 0 for size in shape) or prod(shape) != elements.size:
        raise RequestError(
            400, f"input {name!r:.80}: {elements.size} elements do not have the shape {list(shape)!r:.200}"
        )
    try:
        return elements.reshape(shape)
    except ValueError as error:  # more axes than NumPy has, or sizes beyond its integers beside one of 0
        raise RequestError(400, f"input {name!r:.80}: {error}") from error


def _texts(name: str, data: memoryview) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        start = position + _LENGTH.size
        end = start + _LENGTH.unpack(data[position:start])[0] if start <= len(data) else start
        if end > len(data):
            raise RequestError(400, f"input {name!r:.80}: element at byte {position} ends behind the {len(data)} given")
        yield bytes(data[start:end])
        position = end
