"""ONNX files: the message without its large weights, which are read once, to where they stay.

The library would have a file in memory as it is, the weights a second time in the message, and a third as they are
handed out. Here the initializers of a file are found by the wire form alone, and large raw data among them becomes
external data in the file itself. A file with anything unusual in it goes to the library as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.external_data import OwnFile
from dagexec.platform.disk import disk
from dagexec.storage.net_file import load_message, parse_message
from dagexec.storage.wire import FIXED32, FIXED64, LENGTH, VARINT, WireError, length_field

_MIN_FILE = 1 << 18  # bytes: of smaller files a copy costs less than a look
_MIN_DATA = 1 << 14  # bytes of raw data that are left out
_WINDOW = 1 << 16  # bytes read at a time
_MAX_VARINT = 10

_GRAPH, _INITIALIZER = 7, 5  # of ModelProto and GraphProto
_DATA_TYPE, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 9, 13, 14  # of TensorProto


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


class _Field(NamedTuple):
    """A field of a message: where it starts in the file, and where its value does; LENGTH's is behind the length."""

    number: int
    kind: int
    start: int
    begin: int
    end: int


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

    def varint(self, position: int) -> tuple[int, int]:
        """The number at `position`, and where it ends. Raises WireError."""
        place = position - self._start
        if not 0 <= place <= len(self._window) - _MAX_VARINT:
            self._window = os.pread(self._descriptor, _WINDOW, position)
            self._start, place = position, 0
        value = shift = 0
        for byte in self._window[place : place + _MAX_VARINT]:
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, self._start + place
            shift += 7
        raise WireError(f"unterminated number at byte {position}")

    def fields(self, start: int, end: int) -> Iterator[_Field]:
        """Those of the message from `start` to `end`. Raises WireError."""
        while start < end:
            tag, begin = self.varint(start)
            kind = tag & 7
            if kind == LENGTH:
                size, begin = self.varint(begin)
                stop = begin + size
            elif kind == VARINT:
                _, stop = self.varint(begin)
            elif kind in (FIXED32, FIXED64):
                stop = begin + (4 if kind == FIXED32 else 8)
            else:
                raise WireError(f"wire type {kind} at byte {start}")
            if stop > end:
                raise WireError(f"the field at byte {start} ends after its message")
            yield _Field(tag >> 3, kind, start, begin, stop)
            start = stop


def _without_weights(source: _Source) -> bytes | None:
    """The message with large raw data as external data in the file itself; None where there is none.

    Raises WireError for anything unusual.
    """
    graphs = [field for field in source.fields(0, source.size) if field.number == _GRAPH]
    if len(graphs) != 1 or graphs[0].kind != LENGTH:
        raise WireError(f"{len(graphs)} graphs; expected one")
    field = graphs[0]
    graph = _graph_without_weights(source, field)
    if graph is None:
        return None
    return source.read(0, field.start) + length_field(_GRAPH, graph) + source.read(field.end, source.size)


def _graph_without_weights(source: _Source, graph: _Field) -> bytes | None:
    parts: list[bytes] = []
    copied = graph.begin
    for field in source.fields(graph.begin, graph.end):
        if field.number != _INITIALIZER or field.end - field.begin < _MIN_DATA:
            continue
        if field.kind != LENGTH:
            raise WireError(f"an initializer of wire type {field.kind} at byte {field.start}")
        tensor = _tensor_without_data(source, field)
        if tensor is not None:
            parts += (source.read(copied, field.start), length_field(_INITIALIZER, tensor))
            copied = field.end
    return b"".join([*parts, source.read(copied, graph.end)]) if parts else None


def _tensor_without_data(source: _Source, tensor: _Field) -> bytes | None:
    """The tensor with its raw data as external data; None where it has little, or external data already."""
    data: _Field | None = None
    for field in source.fields(tensor.begin, tensor.end):
        is_text = field.number == _DATA_TYPE and source.varint(field.begin)[0] == onnx.TensorProto.STRING
        if is_text or field.number in (_EXTERNAL_DATA, _DATA_LOCATION) or (field.number == _RAW_DATA and data):
            return None
        if field.number == _RAW_DATA:
            data = field
    if data is None or data.kind != LENGTH or data.end - data.begin < _MIN_DATA:
        return None
    place = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in OwnFile.entries(data.begin, data.end - data.begin).items():
        place.external_data.add(key=key, value=value)
    before, after = source.read(tensor.begin, data.start), source.read(data.end, tensor.end)
    return before + after + place.SerializeToString()
