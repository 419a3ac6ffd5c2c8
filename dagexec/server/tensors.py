"""Tensors of the Open Inference Protocol: as JSON, and as bytes behind it (the binary tensor data extension).

Whatever comes from a client is checked here: `ProtocolError` says what is wrong with it, and nothing is allocated for
sizes that are only claimed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from dagexec.core.feeds import Array
from dagexec.core.tensor import as_bytes_objects
from dagexec.server.datatypes import BYTES, NUMPY, datatype_of_array
from dagexec.server.inference import RequestError, TensorMetadata
from dagexec.server.limits import Limits

_LITTLE = sys.byteorder == "little"  # the protocol's order
_LENGTH = 4  # bytes of the length before each text


class ProtocolError(RequestError):
    """A request that does not follow the protocol."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def checked_shape(name: str, shape: object, limits: Limits) -> tuple[int, ...]:
    """The sizes that a client gives."""
    problem = limits.problem_with_shape(shape)
    if problem is not None:
        raise ProtocolError(f"input {name!r:.80}: {problem}")
    assert isinstance(shape, Iterable)
    return tuple(shape)


def checked_datatype(name: str, datatype: object) -> np.dtype[Any]:
    """The dtype of a datatype that a client gives."""
    dtype = NUMPY.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise ProtocolError(f"input {name!r:.80}: unknown datatype {datatype!r:.80}; expected one of {sorted(NUMPY)}")
    return dtype


def from_binary(name: str, datatype: object, shape: tuple[int, ...], data: memoryview) -> Array:
    """The tensor in `data`, little-endian and in C order: in its memory where numbers are concerned."""
    dtype = checked_datatype(name, datatype)
    if datatype == BYTES:
        return _texts(name, shape, data)
    expected = math.prod(shape) * dtype.itemsize
    if data.nbytes != expected:
        raise ProtocolError(
            f"input {name!r:.80}: {data.nbytes} bytes; {datatype} of shape {list(shape)} has {expected}"
        )
    array = _reshaped(name, np.frombuffer(data, dtype) if expected else np.empty(0, dtype), shape)
    if datatype == "BOOL":
        return np.not_equal(array.view(np.uint8), 0)
    return array if _LITTLE else array.byteswap()


def _texts(name: str, shape: tuple[int, ...], data: memoryview) -> Array:
    count = math.prod(shape)
    if count * _LENGTH > data.nbytes:
        raise ProtocolError(f"input {name!r:.80}: {data.nbytes} bytes are too few for {count} elements of BYTES")
    found = np.empty(count, object)
    place = 0
    for index in range(count):
        start = place + _LENGTH
        if start > data.nbytes:
            raise ProtocolError(f"input {name!r:.80}: {data.nbytes} bytes end within element {index}")
        place = start + int.from_bytes(data[place:start], "little")
        if place > data.nbytes:
            raise ProtocolError(f"input {name!r:.80}: {data.nbytes} bytes end within element {index}")
        found[index] = bytes(data[start:place])
    if place != data.nbytes:
        raise ProtocolError(f"input {name!r:.80}: {data.nbytes - place} bytes behind its last element")
    return _reshaped(name, found, shape)


def from_json(name: str, datatype: object, shape: tuple[int, ...], data: object) -> Array:
    """The tensor in a list of values, nested or flat."""
    dtype = checked_datatype(name, datatype)
    if datatype == "BF16":
        raise ProtocolError(f"input {name!r:.80}: JSON has no BF16; send binary data")
    values = _flat(name, data, len(shape))
    if len(values) != math.prod(shape):
        raise ProtocolError(f"input {name!r:.80}: {len(values)} values; shape {list(shape)} has {math.prod(shape)}")
    types, words = _JSON_TYPES[dtype.kind]
    if not types.issuperset(map(type, values)):
        raise ProtocolError(f"input {name!r:.80}: {datatype} takes {words} only")
    try:
        if datatype == BYTES:
            values = [text.encode() for text in values]
        with np.errstate(over="ignore"):
            array = np.array(values, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"input {name!r:.80}: {datatype} of shape {list(shape)}: {error}") from None

    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ProtocolError(
            f"input {name!r:.80}: {datatype} cannot hold a value as large; send infinity as binary data"
        )
    return array


_NUMBERS = (frozenset((int, float)), "numbers")
_WHOLE = (frozenset((int,)), "whole numbers")
_JSON_TYPES: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset((bool,)), "true and false"),
    "i": _WHOLE,
    "u": _WHOLE,
    "f": _NUMBERS,
    "O": (frozenset((str,)), "texts"),
}
"""The types of values, and what they are called, by kind of dtype."""


def from_nested(tensor: TensorMetadata, data: object, limits: Limits) -> Array:
    """The tensor in a value, or in lists in lists that show its sizes; first axes that they lack are of one element."""
    sizes: list[int] = []
    inner = data
    while isinstance(inner, list) and len(sizes) <= limits.axes:
        sizes.append(len(inner))
        inner = inner[0] if inner else None
    shape = checked_shape(tensor.name, sizes, limits)
    array = from_json(tensor.name, tensor.datatype, shape, data if isinstance(data, list) else [data])
    axes = len(shape) if tensor.shape is None else len(tensor.shape)
    return array.reshape((1,) * (axes - len(shape)) + shape)


def _flat(name: str, data: object, axes: int) -> list[Any]:
    """The values of a list that has no lists in it, or of lists of equal lengths, one in the other for each axis."""
    if type(data) is not list:
        raise ProtocolError(f"input {name!r:.80}: data must be a list")
    values: list[Any] = data
    for _ in range(axes - 1):
        if {list} != set(map(type, values)):
            break
        if len(set(map(len, values))) > 1:
            raise ProtocolError(f"input {name!r:.80}: lists of different lengths in data")
        values = list(chain.from_iterable(values))
    return values


def _reshaped(name: str, values: Array, shape: tuple[int, ...]) -> Array:
    try:
        return values.reshape(shape)
    except ValueError as error:  # an empty tensor of enormous sizes
        raise ProtocolError(f"input {name!r:.80}: shape {list(shape)}: {error}") from None


def datatype_of_output(name: str, array: object) -> str:
    """The datatype of a result. Raises RequestError for one that the protocol has none for."""
    datatype = datatype_of_array(array.dtype) if isinstance(array, np.ndarray) else None
    if datatype is None:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise RequestError(500, f"output {name!r} is {kind}; the Open Inference Protocol has no such tensors")
    return datatype


def to_binary(array: Array) -> memoryview:
    """The bytes of a result, without a copy where it lies in the protocol's order."""
    if array.dtype.hasobject:
        texts = as_bytes_objects(array).flat
        parts = [part for text in texts for part in (len(text).to_bytes(_LENGTH, "little"), text)]
        return memoryview(b"".join(parts))
    packed = np.ascontiguousarray(array)
    if not _LITTLE:
        packed = packed.byteswap()
    return packed.reshape(-1).view(np.uint8).data


def to_json(name: str, datatype: str, array: Array) -> list[Any]:
    """The values of a result in a flat list. Raises RequestError for those that JSON has no words for."""
    if datatype == "BF16":
        raise ProtocolError(f"output {name!r}: JSON has no BF16; ask for binary data")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ProtocolError(f"output {name!r} has NaN or infinity, which JSON has no numbers for; ask for binary data")
    values: list[Any] = array.reshape(-1).tolist()
    if datatype == BYTES:
        try:
            return [text.decode() for text in as_bytes_objects(array).flat]
        except UnicodeDecodeError:
            raise ProtocolError(f"output {name!r} is no text in UTF-8; ask for binary data") from None
    return values


def whole_parameter(parameters: Mapping[str, Any], name: str) -> int | None:
    """A parameter that counts something, None where it is absent."""
    value = parameters.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise ProtocolError(f"parameter {name!r} must be a whole number, not {value!r:.80}")
    return value
