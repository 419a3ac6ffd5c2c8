"""Graphs of torch.fx with streams as foreign graphs. PyTorch is not needed, not even to export an existing graph.

`export_fx` turns a graph into JSON: of each node its name, its target, its arguments, which of them it changes and
which it is a view of, by the operator's schema. It understands these operations of streams:

- the operators `streams::*` that Dynamo records: fork, join, record_event, wait_event, wait_stream and synchronize_*
  (torch/_dynamo/variables/streams.py), and `node.meta["custom"]["stream"]`;
- `torch.cuda.set_stream`, `current_stream`, `synchronize`, and the methods of streams and events, as older Dynamo
  records them and as graphs are written by hand.

One thread launches everything. A value is one memory; a part of a tuple is a memory of its own as well. Inputs and
parameters exist before. The output is read on the stream that is current at the end. A graph does not tell which memory
the allocator reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dagexec.analysis.foreign_graphs.own import MAX_OPERATORS
from dagexec.errors import ModelFormatError
from dagexec.scheduler.hazards.foreign import ForeignGraph, ForeignOperator

_DEFAULT = "default"
_VIEWS = frozenset((
    "chunk", "detach", "expand", "expand_as", "flatten", "movedim", "narrow", "permute", "reshape", "select", "split",
    "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
))  # fmt: skip


def export_fx(graph: Any) -> dict[str, Any]:
    """What `dagexec check --graph` reads of a `torch.fx.Graph`, for `json.dump`."""
    return {"fx": 1, "nodes": [_exported(node) for node in graph.nodes]}


def _exported(node: Any) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    changed, viewed = _aliases(node, schema) if schema is not None else _aliases_by_name(node)
    row: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target(node.target), "args": _flat(node.args)}
    row["kwargs"] = dict(zip(node.kwargs, map(_value, node.kwargs.values()), strict=True))
    stream = node.meta.get("custom", {}).get("stream") if hasattr(node, "meta") else None
    return row | {"changes": changed, "views": viewed} | ({} if stream is None else {"stream": stream})


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if hasattr(target, "_schema"):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _value(value: Any) -> Any:
    if hasattr(value, "op") and hasattr(value, "target"):
        return {"node": value.name}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _flat(values: Any) -> list[Any]:
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            leaves += _flat(value.values())
        else:
            leaves += _flat(value) if isinstance(value, list | tuple) else [_value(value)]
    return leaves


def _aliases(node: Any, schema: Any) -> tuple[list[str], list[str]]:
    """The nodes that an operator changes, and those that its result is a view of."""
    changed, viewed = [], []
    returned = {
        name for result in schema.returns if result.alias_info is not None for name in result.alias_info.before_set
    }
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        names = [result["node"] for result in _flat([value]) if isinstance(result, dict)]
        changed += names if argument.alias_info.is_write else []
        viewed += names if returned & set(argument.alias_info.before_set) else []
    return changed, viewed


def _aliases_by_name(node: Any) -> tuple[list[str], list[str]]:
    name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
    first = [one["node"] for one in _flat(node.args)[:1] if isinstance(one, dict)]
    in_place = name.endswith("_") and not name.endswith("__")
    out = [one["node"] for one in _flat([node.kwargs.get("out")]) if isinstance(one, dict)]
    return (first if in_place else []) + out, first if in_place or name in _VIEWS else out


def parse(name: str, found: Mapping[str, Any]) -> ForeignGraph:
    """The graph that `export_fx` has exported. Raises ModelFormatError, which names node and field."""
    rows = found.get("nodes")
    if found["fx"] != 1 or not isinstance(rows, list) or len(rows) > MAX_OPERATORS:
        raise ModelFormatError(f"expected fx to be 1 and nodes to be a list of at most {MAX_OPERATORS:,}")
    return _Reader(name).read(rows)


class _Reader:
    """Goes through the nodes with the state that calls leave: the current stream, and the meaning of events."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operators: list[ForeignOperator] = []
        self._current = _DEFAULT
        self._streams = {_DEFAULT: None}  # that were used, in this order
        self._memory: dict[str, tuple[str, ...]] = {}  # by node: what it is made of; the last one is its own
        self._objects: dict[str, str] = {}  # by node: the stream or event that it is
        self._recorded: set[str] = set()

    def read(self, rows: list[Any]) -> ForeignGraph:
        for row in rows:  # the first that leaves the ambient stream says which that is
            if isinstance(row, dict) and row.get("args") and str(row.get("target")).endswith("streams.fork.default"):
                self._current = self._stream(row["args"][0])
                break
        for place, row in enumerate(rows):
            if (
                not isinstance(row, dict)
                or not isinstance(row.get("name"), str)
                or not isinstance(row.get("args"), list)
            ):
                raise ModelFormatError(f"nodes[{place}]: expected an object with name, op, target and args")
            try:
                self._node(row)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ModelFormatError(f"nodes[{place}] {row['name']!r:.100}: {error!r:.100}") from None
        return ForeignGraph(self._name, tuple(self._operators))

    def _node(self, row: Mapping[str, Any]) -> None:
        name, kind = row["name"], str(row["target"]).rpartition(".")[2]
        if row["op"] in ("placeholder", "get_attr"):
            self._memory[name] = (name,)
            return
        call = self._call(row, str(row["target"]), kind)
        if call is not None:
            call()
            return
        inputs = [one["node"] for one in self._arguments(row) if isinstance(one, dict)]
        used = [one for one in inputs if one not in self._objects]
        for one in used:
            if one not in self._memory:
                raise KeyError(f"no node {one!r} is listed before it")
        if kind == "getitem" and row["op"] == "call_function" and used:
            self._memory[name] = (*self._memory[used[0]], name)
            return
        views = [one for one in row.get("views", []) if one in self._memory]
        changes = [self._memory[one][-1] for one in row.get("changes", [])]
        self._memory[name] = tuple(dict.fromkeys(part for one in views for part in self._memory[one])) or (name,)
        if views and not changes:
            return
        reads = tuple(dict.fromkeys(part for one in used for part in self._memory[one]))
        writes = changes if changes or row["op"] == "output" else [name]
        stream = self._current if row.get("stream") is None else self._stream(row["stream"])
        self._operators.append(ForeignOperator(name, reads, tuple(writes), stream))

    def _arguments(self, row: Mapping[str, Any]) -> Iterator[Any]:
        yield from row["args"]
        yield from row.get("kwargs", {}).values()

    def _stream(self, found: Any) -> str:
        """The stream that an argument stands for: the index that Dynamo gave it, or a node."""
        stream = self._objects[found["node"]] if isinstance(found, dict) else f"stream {found}"
        self._streams[stream] = None
        return stream

    def _event(self, found: Any) -> str:
        return self._objects[found["node"]] if isinstance(found, dict) else f"event {found}"

    def _call(self, row: Mapping[str, Any], target: str, kind: str) -> Callable[[], None] | None:
        """What a call does with streams and events; None for any other one."""
        name, arguments = row["name"], list(self._arguments(row))
        if target.startswith(("streams.", "streams::", "torch.ops.streams.")):
            operator = target.removeprefix("torch.ops.").replace("::", ".").split(".")[1]
            return self._operator(operator, name, arguments)
        if row["op"] == "call_function" and target.startswith(("torch.cuda", "torch.Stream", "torch.Event")):
            return self._function(kind, name, arguments)
        first = arguments[0] if arguments else None
        if row["op"] == "call_method" and isinstance(first, dict) and first.get("node") in self._objects:
            return self._method(kind, name, arguments)
        return None

    def _operator(self, operator: str, name: str, arguments: list[Any]) -> Callable[[], None]:
        calls: dict[str, Callable[[], None]] = {
            "fork": lambda: self._switch(self._stream(arguments[1])),
            "join": lambda: self._switch(self._stream(arguments[1])),
            "record_event": lambda: self._record(name, self._event(arguments[0]), self._stream(arguments[1])),
            "wait_event": lambda: self._wait(name, self._event(arguments[0]), self._stream(arguments[1])),
            "sync_dealloc": lambda: self._wait(name, self._event(arguments[0]), self._stream(arguments[1])),
            "wait_stream": lambda: self._wait_stream(name, self._stream(arguments[0]), self._stream(arguments[1])),
            "synchronize_event": lambda: self._wait(name, self._event(arguments[0]), None),
            "synchronize_stream": lambda: self._wait_stream(name, None, self._stream(arguments[0])),
            "synchronize_device": lambda: self._wait_all(name),
            "record_stream": lambda: None,  # of the allocator
        }
        return calls[operator]

    def _function(self, function: str, name: str, arguments: list[Any]) -> Callable[[], None] | None:
        calls: dict[str, Callable[[], None]] = {
            "set_stream": lambda: self._switch(self._stream(arguments[0])),
            "current_stream": lambda: self._objects.__setitem__(name, self._current),
            "default_stream": lambda: self._objects.__setitem__(name, _DEFAULT),
            "Stream": lambda: self._objects.__setitem__(name, name),
            "Event": lambda: self._objects.__setitem__(name, name),
            "synchronize": lambda: self._wait_all(name),
        }
        return calls.get(function)

    def _method(self, method: str, name: str, arguments: list[Any]) -> Callable[[], None] | None:
        own = self._objects[arguments[0]["node"]]
        other = self._objects[arguments[1]["node"]] if len(arguments) > 1 and isinstance(arguments[1], dict) else None
        calls: dict[str, Callable[[], None]] = {
            "record_event": lambda: self._record(name, other or name, self._used(own), named=name),
            "wait_event": lambda: self._wait(name, str(other), self._used(own)),
            "wait_stream": lambda: self._wait_stream(name, self._used(own), self._used(str(other))),
            "record": lambda: self._record(name, own, self._used(other or self._current)),
            "wait": lambda: self._wait(name, own, self._used(other or self._current)),
            "synchronize": lambda: self._synchronize(name, own),
            "query": lambda: None,
        }
        return calls.get(method)

    def _used(self, stream: str) -> str:
        self._streams[stream] = None
        return stream

    def _switch(self, stream: str) -> None:
        self._current = stream

    def _record(self, name: str, event: str, stream: str, named: str | None = None) -> None:
        if named is not None:
            self._objects[named] = event
        self._recorded.add(event)
        self._operators.append(ForeignOperator(name, stream=stream, records=(event,)))

    def _wait(self, name: str, event: str, stream: str | None) -> None:
        """A wait for an event that was never recorded waits for nothing, as in CUDA."""
        if event in self._recorded:
            self._operators.append(ForeignOperator(name, stream=stream, waits=(event,)))

    def _wait_stream(self, name: str, waiting: str | None, stream: str) -> None:
        self._record(f"{name} (end of {stream})", name, stream)
        self._wait(name, name, waiting)

    def _wait_all(self, name: str) -> None:
        for stream in self._streams:
            self._wait_stream(f"{name} of {stream}", None, stream)

    def _synchronize(self, name: str, own: str) -> None:
        if own in self._recorded:
            self._wait(name, own, None)
        else:
            self._wait_stream(name, None, self._used(own))
