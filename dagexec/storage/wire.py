"""The wire form of protocol buffers for long arrays, which the library would take through a Python object an element.

A field is a varint (number * 8 + wire type) and a value: a varint (wire type 0), 8 bytes (1), a varint length and that
many bytes (2), or 4 bytes (5). A varint has 7 bits a byte, the lowest first; all bytes but the last have bit 7 set.
Reference: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10


class WireError(Exception):
    """Bytes that are no message."""


def varint(value: int) -> bytes:
    """One number from 0 on as a varint."""
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def length_field(number: int, content: bytes) -> bytes:
    """A field of bytes: a string, a message or packed numbers."""
    return varint(number << 3 | LENGTH) + varint(len(content)) + content


def fields(message: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """(number, wire type, value, whole field) of each field; a LENGTH field's value comes without its length.

    Raises WireError.
    """
    position = 0
    while position < len(message):
        start = position
        tag, position = read_varint(message, position)
        kind = tag & 7
        if kind == VARINT:
            begin = position
            _, end = read_varint(message, position)
        elif kind == LENGTH:
            size, begin = read_varint(message, position)
            end = begin + size
        elif kind in (FIXED32, FIXED64):
            begin, end = position, position + (4 if kind == FIXED32 else 8)
        else:
            raise WireError(f"wire type {kind} at byte {start}")
        if end > len(message):
            raise WireError(f"the field at byte {start} ends {end - len(message):,} bytes after the message")
        position = end
        yield tag >> 3, kind, message[begin:end], message[start:end]


def read_varint(message: bytes | memoryview, position: int) -> tuple[int, int]:
    """The number at `position` of a message, and where it ends. Raises WireError."""
    value = shift = 0
    for index in range(position, min(position + _MAX_VARINT, len(message))):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise WireError(f"unterminated number at byte {position}")


def encode_varints(values: npt.NDArray[np.int64]) -> bytes:
    """Packed varints of int64 values; negative ones take ten bytes, as protobuf writes them."""
    bits = values.astype(np.int64, copy=False).view(np.uint64)
    if not bits.size:
        return b""
    longest = len(varint(int(bits.max())))
    if longest == 1:
        return bits.astype(np.uint8).tobytes()
    groups = np.empty((bits.size, longest), np.uint8)
    used = np.ones((bits.size, longest), np.bool_)
    rest = bits
    for place in range(longest):
        groups[:, place] = rest & np.uint64(0x7F)
        if place:
            np.not_equal(rest, 0, out=used[:, place])
        rest = rest >> np.uint64(7)
    groups[:, :-1][used[:, 1:]] |= 0x80
    return groups[used].tobytes()


def decode_varints(content: memoryview) -> npt.NDArray[np.int64]:
    """The int64 values of packed varints. Raises WireError."""
    data = np.frombuffer(content, np.uint8)
    if not data.size:
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(data < 0x80)
    if not ends.size or ends[-1] != data.size - 1:
        raise WireError("unterminated packed numbers")
    if ends.size == data.size:
        return data.astype(np.int64)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _MAX_VARINT:
        raise WireError(f"a packed number of {longest} bytes")
    values = np.zeros(ends.size, np.uint64)
    for place in range(longest):
        longer = slice(None) if place == 0 else np.flatnonzero(lengths > place)
        values[longer] |= (data[starts[longer] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)
