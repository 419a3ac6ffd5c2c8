"""ONNX files: the message without its large weights, which are read once, straight into arrays.

The library would hold a file in memory, its weights a second time in the message, and a third time when they are read
from that. Here the wire form alone gives the initializers of a file, and large data in them becomes external data in
the file itself. A node that is a large constant becomes an initializer, too. A file with anything unusual goes to the
library as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.external_data import OwnFile
from dagexec.platform.disk import StrPath, disk
from dagexec.storage.net_file import load_message, parse_message
from dagexec.storage.wire import LENGTH, WireError, length_field, read_varint
from dagexec.storage.wire_file import WireFile

_MIN_FILE = 1 << 18  # bytes: of smaller files a copy costs less than a look
_MIN_DATA = 1 << 12  # bytes of raw data that are left out

_GRAPH, _NODE, _INITIALIZER = 7, 1, 5  # of ModelProto and GraphProto
_OUTPUT, _NODE_NAME, _OP_TYPE, _ATTRIBUTE = 2, 3, 4, 5  # of NodeProto
_ATTRIBUTE_NAME, _TENSOR, _TYPE = 1, 5, 20  # of AttributeProto
_DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 8, 9, 13, 14  # of TensorProto
_ANY_BUT_TEXT = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.STRING}
_TYPED_DATA = {4: {onnx.TensorProto.FLOAT, onnx.TensorProto.COMPLEX64}, 10: {onnx.TensorProto.DOUBLE}}
"""Fields that hold numbers as raw data does, packed, of these element types."""


def read_model(path: StrPath) -> tuple[onnx.ModelProto, OwnFile | None]:
    """The message in a file, and the file where it has large weights. Raises ModelFormatError, naming the file."""
    try:
        if os.stat(path).st_size >= _MIN_FILE:
            with disk().open(path, "rb") as file:
                own = OwnFile(Path(path), file.fileno())
                content = _without_weights(WireFile(file.fileno(), own.size))
            if content is not None:
                return parse_message(content, onnx.ModelProto, str(path)), own
    except (OSError, ValueError, WireError, ModelFormatError):
        pass  # the library says what is wrong with it
    return load_message(path, onnx.ModelProto), None


def _without_weights(source: WireFile) -> bytes | None:
    """The message with large data as external data in the file itself; None where there is none.

    Raises WireError for anything unusual.
    """
    graphs = [field for field in source.fields(0, source.size) if field[0] == _GRAPH]
    if len(graphs) != 1:
        raise WireError(f"{len(graphs)} graphs; expected one")
    _, kind, start, begin, end = graphs[0]
    graph = _graph_without_weights(source, begin, end) if kind == LENGTH else None
    if graph is None:
        return None
    return source.read(0, start) + length_field(_GRAPH, graph) + source.read(end, source.size)


def _graph_without_weights(source: WireFile, begin: int, end: int) -> bytes | None:
    parts: list[bytes] = []
    copied = begin
    for number, kind, start, first, stop in source.fields(begin, end):
        if stop - first < _MIN_DATA or kind != LENGTH:
            continue
        if number == _INITIALIZER:
            tensor = _tensor_without_data(source, first, stop)
        elif number == _NODE:
            tensor = _constant_without_data(source, first, stop)
        else:
            continue
        if tensor is not None:
            parts += (source.read(copied, start), length_field(_INITIALIZER, tensor))
            copied = stop
    return b"".join([*parts, source.read(copied, end)]) if parts else None


def _constant_without_data(source: WireFile, begin: int, end: int) -> bytes | None:
    """The value of a node that is a large constant, as an initializer; None for any other node."""
    node = _single(source, begin, end, {_OUTPUT, _NODE_NAME, _OP_TYPE, _ATTRIBUTE})
    if not {_OUTPUT, _OP_TYPE, _ATTRIBUTE} <= node.keys() or source.read(*node[_OP_TYPE]) != b"Constant":
        return None
    attribute = _single(source, *node[_ATTRIBUTE], {_ATTRIBUTE_NAME, _TENSOR, _TYPE})
    if len(attribute) < 3 or source.read(*attribute[_ATTRIBUTE_NAME]) != b"value":
        return None
    name, kind = source.read(*node[_OUTPUT]), source.read(*attribute[_TYPE])
    bare = _tensor_without_data(source, *attribute[_TENSOR])
    if bare is None or not name or kind != bytes([onnx.AttributeProto.TENSOR]):
        return None
    return bare + length_field(_NAME, name)


def _single(source: WireFile, begin: int, end: int, known: set[int]) -> dict[int, tuple[int, int]]:
    """The places of a message's fields' values, by number; nothing unless each is known, and there once."""
    fields = source.fields(begin, end)
    places = {number: (first, stop) for number, _, _, first, stop in fields}
    return places if len(places) == len(fields) and places.keys() <= known else {}


def _tensor_without_data(source: WireFile, begin: int, end: int) -> bytes | None:
    """The tensor with its data as external data; None where it has little, or external data already."""
    fields = source.fields(begin, end)
    numbers = [number for number, *_ in fields]
    if _EXTERNAL_DATA in numbers or _DATA_LOCATION in numbers or numbers.count(_DATA_TYPE) != 1:
        return None
    [element_type] = [read_varint(source.read(first, stop), 0)[0] for n, _, _, first, stop in fields if n == _DATA_TYPE]
    data_numbers = [number for number in (_RAW_DATA, *_TYPED_DATA) if number in numbers]
    if (
        len(data_numbers) != 1
        or numbers.count(data_numbers[0]) != 1
        or element_type not in _TYPED_DATA.get(data_numbers[0], _ANY_BUT_TEXT)
    ):
        return None
    [(_, kind, start, first, stop)] = [field for field in fields if field[0] == data_numbers[0]]
    if kind != LENGTH or stop - first < _MIN_DATA:
        return None
    place = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in OwnFile.entries(first, stop - first).items():
        place.external_data.add(key=key, value=value)
    return source.read(begin, start) + source.read(stop, end) + place.SerializeToString()
