"""Execution traces of MLCommons Chakra as foreign graphs: their dependencies, and the storages of their tensors.

A trace is a stream of messages, each after its length: one GlobalMetadata, then Nodes. The schema is
https://github.com/mlcommons/chakra/blob/main/schema/protobuf/et_def.proto, of which the fields needed are declared
here. Chakra's jsonizer writes the same as JSON messages, one after another.

A node begins when the nodes in its `data_deps` are done, as in Chakra's feeder (`ctrl_deps` of converted traces are
their callers); nodes of one `stream` follow one another. It reads the tensors of its inputs and writes those of its
outputs; an output in the storage of an input is a view, which touches nothing, unless the name says that the operator
works in place (`add_`). A node with `is_cpu_op` only launches what touches memory of devices.

Tensors are (tensor id, storage id, offset, elements, bytes of an element, device), with the offset in elements:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/profiler/standalone/execution_trace_observer.cpp
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from dagexec.analysis.foreign_graphs.own import MAX_OPERATORS
from dagexec.errors import ModelFormatError
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.hazards.foreign import ByteRange, ForeignGraph, ForeignOperator

if not TYPE_CHECKING:
    nx = LazyModule("networkx")
else:
    import networkx as nx

_MAX_BYTES = 1 << 30
_TENSOR = re.compile(r"""[\[(](\d{1,20}), ?(\d{1,20}), ?(\d{1,18}), ?(\d{1,18}), ?(\d{1,18}), ?["']([^"']*)["'][\])]""")
_VALUES = {"int32": 7, "int64": 9, "uint32": 11, "uint64": 13, "bool": 27}
"""The kinds of attributes that are read, with their numbers in the schema."""
_CYCLE = 5


class _Node(NamedTuple):
    number: int
    name: str
    after: tuple[int, ...]
    inputs: str
    outputs: str
    stream: int | None
    on_host: bool


def _message_class() -> type[Message]:
    """`Node`, of which other fields are skipped."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="dagexec/chakra.proto", package="ChakraProtoMsg", syntax="proto3")

    def add(message: str, *fields: tuple[str, int, Any, bool, str]) -> None:
        declared = file.message_type.add(name=message)
        for name, number, kind, repeated, of in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            declared.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    add("IOInfo", ("values", 1, kinds.TYPE_STRING, False, ""))
    values = [
        (f"{kind}_val", number, getattr(kinds, f"TYPE_{kind.upper()}"), False, "") for kind, number in _VALUES.items()
    ]
    add("AttributeProto", ("name", 1, kinds.TYPE_STRING, False, ""), *values)
    for field in file.message_type[-1].field[1:]:
        field.proto3_optional = True
        field.oneof_index = len(file.message_type[-1].oneof_decl)
        file.message_type[-1].oneof_decl.add(name=f"_{field.name}")
    add(
        "Node",
        ("id", 1, kinds.TYPE_UINT64, False, ""),
        ("name", 2, kinds.TYPE_STRING, False, ""),
        ("data_deps", 5, kinds.TYPE_UINT64, True, ""),
        ("inputs", 8, kinds.TYPE_MESSAGE, False, ".ChakraProtoMsg.IOInfo"),
        ("outputs", 9, kinds.TYPE_MESSAGE, False, ".ChakraProtoMsg.IOInfo"),
        ("attr", 10, kinds.TYPE_MESSAGE, True, ".ChakraProtoMsg.AttributeProto"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ChakraProtoMsg.Node"))


_NODE = _message_class()


def parse_protobuf(name: str, content: bytes) -> ForeignGraph:
    """The graph of a trace in protobuf, or compressed by gzip. Raises ModelFormatError."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = zlib.decompressobj(wbits=31).decompress(content, _MAX_BYTES + 1)
        except zlib.error as error:
            raise ModelFormatError(f"damaged gzip: {error}") from None
        if len(content) > _MAX_BYTES:
            raise ModelFormatError(f"has more than {_MAX_BYTES:,} bytes when it is decompressed")
    return _graph(name, _decoded(content))


def parse_json_messages(name: str, text: str) -> ForeignGraph:
    """The graph in the JSON of Chakra's jsonizer. Raises ModelFormatError."""
    return _graph(name, (_node(place, row) for place, row in enumerate(_messages(text))))


def _decoded(content: bytes) -> Iterator[_Node]:
    end, place = 0, -1
    view = memoryview(content)
    while end < len(content):
        start = end
        size = shift = 0
        while True:
            if start == len(content) or shift > 28:
                raise ModelFormatError(f"neither JSON nor a Chakra trace: no length of a message at byte {end:,}")
            byte = content[start]
            size |= (byte & 0x7F) << shift
            start, shift = start + 1, shift + 7
            if not byte & 0x80:
                break
        if size > len(content) - start:
            raise ModelFormatError(f"neither JSON nor a Chakra trace: a message of {size:,} bytes at byte {start:,}")
        end = start + size
        if place >= 0:  # the first one is the metadata
            message: Any = _NODE()
            try:
                message.ParseFromString(view[start:end])
            except (DecodeError, UnicodeDecodeError) as error:
                raise ModelFormatError(f"node {place} at byte {start:,}: {error}") from None
            yield _Node(
                message.id, message.name, tuple(message.data_deps),
                message.inputs.values, message.outputs.values,
                _attribute(message.attr, "stream"), bool(_attribute(message.attr, "is_cpu_op")),
            )  # fmt: skip
        place += 1


def _attribute(attributes: Iterable[Any], name: str) -> int | None:
    for attribute in attributes:
        if attribute.name == name:
            for kind in _VALUES:
                if attribute.HasField(f"{kind}_val"):
                    return int(getattr(attribute, f"{kind}_val"))
    return None


def _messages(text: str) -> Iterator[object]:
    """The JSON values of `text` but the first, which is the metadata."""
    decoder, place, first = json.JSONDecoder(), 0, True
    while text[place:].strip():
        place += len(text[place : place + 1000]) - len(text[place : place + 1000].lstrip())
        try:
            found, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ModelFormatError(f"no JSON at character {place:,}: {error}") from None
        if not first:
            yield found
        first = False


def _node(place: int, row: object) -> _Node:
    """A node in JSON, whose fields have the names of the schema or those that protobuf makes of them."""
    if not isinstance(row, dict):
        raise ModelFormatError(f"nodes[{place}]: expected an object, found {row!r:.50}")
    number = _number(place, "id", row.get("id"))
    found = row.get("data_deps", row.get("dataDeps", []))
    after = tuple(_number(place, "data_deps", one) for one in (found if isinstance(found, list) else [found]))
    attributes = {}
    for one in row["attr"] if isinstance(row.get("attr"), list) else ():
        if isinstance(one, dict) and one.get("name") in ("stream", "is_cpu_op"):
            attributes[one["name"]] = next((value for key, value in one.items() if key.endswith(("Val", "_val"))), None)
    stream = _number(place, "stream", attributes["stream"]) if "stream" in attributes else None
    inputs, outputs = (
        str(found.get("values", "")) if isinstance(found := row.get(field), dict) else ""
        for field in ("inputs", "outputs")
    )
    return _Node(number, str(row.get("name", "")), after, inputs, outputs, stream, attributes.get("is_cpu_op") is True)


def _number(place: int, field: str, found: object) -> int:
    if type(found) is int and 0 <= found < 1 << 64:
        return found
    if isinstance(found, str) and found.isdecimal() and len(found) <= 20:
        return int(found)
    raise ModelFormatError(f"nodes[{place}]: {field}: expected a number, found {found!r:.50}")


def _graph(name: str, nodes: Iterable[_Node]) -> ForeignGraph:
    rows = []
    for row in nodes:
        rows.append(row)
        if len(rows) > MAX_OPERATORS:
            raise ModelFormatError(f"has more than {MAX_OPERATORS:,} nodes")
    streams = {row.number: row.stream for row in rows}
    if len(streams) < len(rows):
        places = {row.number: place for place, row in enumerate(rows)}
        twice = next(row for place, row in enumerate(rows) if places[row.number] != place)
        raise ModelFormatError(f"node {twice.name!r:.100}: id: another node has {twice.number}, too")
    order = _topological(rows)
    places = {}
    operators = []
    memories: dict[str, ByteRange] = {}
    for place, row in enumerate(rows[index] for index in order):
        places[row.number] = place
        reads = _tensors(row.inputs, row.on_host, memories)
        writes = _tensors(row.outputs, row.on_host, memories)
        if not row.name.partition("(")[0].endswith("_"):
            spaces = {memories[one].space for one in reads}
            writes = tuple(one for one in writes if memories[one].space not in spaces)
        on_stream = row.stream is not None
        operator = ForeignOperator(
            f"{row.name:.100} ({row.number})",
            reads,
            writes,
            stream=str(row.stream) if on_stream else None,
            thread=f"stream {row.stream}" if on_stream else f"node {row.number}",
            after=tuple(places[one] for one in row.after),
            waits=tuple(str(one) for one in row.after if streams[one] is not None),
            records=(str(row.number),) if on_stream else (),
        )
        operators.append(operator)
    return ForeignGraph(name, tuple(operators), memories)


def _topological(rows: list[_Node]) -> list[int]:
    """The places of the nodes, each after its dependencies; otherwise in the order of the trace."""
    places = {row.number: place for place, row in enumerate(rows)}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(rows)))
    for place, row in enumerate(rows):
        for one in row.after:
            if one not in places:
                raise ModelFormatError(
                    f"node {row.name!r:.100} ({row.number}): depends on node {one}, which is missing"
                )
            graph.add_edge(places[one], place)
    try:
        return list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        cycle = [f"{rows[place].name!r:.50} ({rows[place].number})" for place, _ in nx.find_cycle(graph)]
        raise ModelFormatError(f"nodes depend on each other in a cycle: {', '.join(cycle[:_CYCLE])}") from None


def _tensors(text: str, on_host: bool, memories: dict[str, ByteRange]) -> tuple[str, ...]:
    """Names of the tensors in a text of values; their bytes are put into `memories`."""
    names = []
    for _, storage, offset, elements, size, device in _TENSOR.findall(text):
        low = int(offset) * int(size)
        high = low + int(elements) * int(size)
        if high > low and (not on_host or device.startswith("cpu")):
            name = f"storage {storage} of {device}, bytes {low} to {high}"
            memories[name] = ByteRange(f"storage {storage} of {device}", low, high)
            names.append(name)
    return tuple(dict.fromkeys(names))
