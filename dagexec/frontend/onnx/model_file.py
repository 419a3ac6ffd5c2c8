"""ONNX files: the message without its large weights, which are read once, to where they stay.

The library would have a file in memory as it is, the weights a second time in the message, and a third as they are
handed out. Here the initializers of a file are found by the wire form alone, and large data among them becomes
external data in the file itself. A node that is a large constant becomes an initializer, too. A file with anything
unusual in it goes to the library as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.external_data import OwnFile
from dagexec.platform.disk import disk
from dagexec.storage.net_file import load_message, parse_message
from dagexec.storage.wire import FIXED32, FIXED64, LENGTH, VARINT, WireError, length_field, read_varint

_MIN_FILE = 1 << 18  # bytes: of smaller files a copy costs less than a look
_MIN_DATA = 1 << 12  # bytes of raw data that are left out
_WINDOW = 1 << 16  # bytes read at a time
_MAX_HEAD = 20  # bytes of a field's number and length

_GRAPH, _NODE, _INITIALIZER = 7, 1, 5  # of ModelProto and GraphProto
_OUTPUT, _NODE_NAME, _OP_TYPE, _ATTRIBUTE = 2, 3, 4, 5  # of NodeProto
_ATTRIBUTE_NAME, _TENSOR, _TYPE = 1, 5, 20  # of AttributeProto
_DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 8, 9, 13, 14  # of TensorProto
_ANY_BUT_TEXT = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.STRING}
_TYPED_DATA = {4: {onnx.TensorProto.FLOAT, onnx.TensorProto.COMPLEX64}, 10: {onnx.TensorProto.DOUBLE}}
"""Fields that hold numbers as raw data does, packed, of these element types."""

_Field = tuple[int, int, int, int, int]
"""Number and wire type, where the field starts in the file, and where its value does, behind the length, and ends."""


def read_model(path: Path) -> tuple[onnx.ModelProto, OwnFile | None]:
    """The message in a file, and the file where it has large weights. Raises ModelFormatError, naming the file."""
    try:
        if path.is_file() and path.stat().st_size >= _MIN_FILE:
            with disk().open(path, "rb") as file:
                own = OwnFile(path, file.fileno())
                content = _without_weights(_Source(file.fileno(), own.size))
            if content is not None:
                return parse_message(content, onnx.ModelProto, str(path)), own
    except (OSError, ValueError, WireError, ModelFormatError):
        pass  # the library says what is wrong with it
    return load_message(path, onnx.ModelProto), None


class _Source:
    """The bytes of a file, of which a window is in memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self._start = 0
        self._window = b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`. Raises WireError where the file has fewer."""
        found = os.pread(self._descriptor, end - start, start)
        if len(found) != end - start:
            raise WireError(f"the file ends before byte {end}")
        return found

    def fields(self, start: int, end: int) -> list[_Field]:
        """Those of the message from `start` to `end`. Raises WireError."""
        found: list[_Field] = []
        while start < end:
            place = start - self._start
            if not 0 <= place <= len(self._window) - _MAX_HEAD:
                self._window = os.pread(self._descriptor, _WINDOW, start)
                self._start, place = start, 0
            window = self._window
            try:
                tag = window[place]
                tag, place = (tag, place + 1) if tag < 0x80 else read_varint(window, place)
                kind = tag & 7
                begin = self._start + place
                if kind == LENGTH:
                    size = window[place]
                    size, place = (size, place + 1) if size < 0x80 else read_varint(window, place)
                    begin = self._start + place
                    stop = begin + size
                elif kind == VARINT:
                    stop = begin + 1 if window[place] < 0x80 else self._start + read_varint(window, place)[1]
                elif kind in (FIXED32, FIXED64):
                    stop = begin + (4 if kind == FIXED32 else 8)
                else:
                    raise WireError(f"wire type {kind} at byte {start}")
            except IndexError:
                raise WireError(f"the file ends in the field at byte {start}") from None
            if stop > end:
                raise WireError(f"the field at byte {start} ends after its message")
            found.append((tag >> 3, kind, start, begin, stop))
            start = stop
        return found


def _without_weights(source: _Source) -> bytes | None:
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


def _graph_without_weights(source: _Source, begin: int, end: int) -> bytes | None:
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


def _constant_without_data(source: _Source, begin: int, end: int) -> bytes | None:
    """What a node that is a large constant gives, as an initializer; None for any other node."""
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


def _single(source: _Source, begin: int, end: int, known: set[int]) -> dict[int, tuple[int, int]]:
    """Where the values of the fields of a message are, by number; nothing unless each is one of these, and once."""
    fields = source.fields(begin, end)
    found = {number: (first, stop) for number, _, _, first, stop in fields}
    return found if len(found) == len(fields) and found.keys() <= known else {}


def _tensor_without_data(source: _Source, begin: int, end: int) -> bytes | None:
    """The tensor with its data as external data; None where it has little, or external data already."""
    fields = source.fields(begin, end)
    numbers = [number for number, *_ in fields]
    if _EXTERNAL_DATA in numbers or _DATA_LOCATION in numbers or numbers.count(_DATA_TYPE) != 1:
        return None
    [element_type] = [read_varint(source.read(first, stop), 0)[0] for n, _, _, first, stop in fields if n == _DATA_TYPE]
    held = [number for number in (_RAW_DATA, *_TYPED_DATA) if number in numbers]
    if len(held) != 1 or numbers.count(held[0]) != 1 or element_type not in _TYPED_DATA.get(held[0], _ANY_BUT_TEXT):
        return None
    [(_, kind, start, first, stop)] = [field for field in fields if field[0] == held[0]]
    if kind != LENGTH or stop - first < _MIN_DATA:
        return None
    place = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in OwnFile.entries(first, stop - first).items():
        place.external_data.add(key=key, value=value)
    return source.read(begin, start) + source.read(stop, end) + place.SerializeToString()
