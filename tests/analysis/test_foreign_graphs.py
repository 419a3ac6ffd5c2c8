"""Files of foreign graphs: dagexec's format, torch.fx without torch, Chakra traces; and `dagexec check --graph`."""

from __future__ import annotations

import gzip
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagexec.analysis.foreign_graphs import export_fx, read_graph
from dagexec.analysis.foreign_graphs.chakra import _NODE
from dagexec.errors import ModelFormatError
from dagexec.scheduler.hazards.foreign import check_graph
from tests.command_line import Cli

STEP: dict[str, Any] = {
    "name": "step",
    "memories": {"x": {"space": "arena", "low": 0, "high": 64}, "z": {"space": "arena", "low": 32, "high": 96}},
    "operators": [
        {"name": "copy", "writes": ["x"], "stream": "copies", "records": ["copied"]},
        {
            "name": "conv",
            "reads": ["x", "w"],
            "writes": ["y"],
            "stream": "main",
            "waits": ["copied"],
            "records": ["done"],
        },
        {"name": "fetch", "reads": ["y"], "waits": ["done"]},
        {"name": "next", "writes": ["z"], "stream": "copies", "after": ["fetch"]},
    ],
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    graph: dict[str, Any] = json.loads(json.dumps(STEP))
    change(graph)
    return graph


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], Path]:
    def write(graph: object) -> Path:
        path = tmp_path / "step.json"
        path.write_text(graph if isinstance(graph, str) else json.dumps(graph))
        return path

    return write


def test_a_graph_is_proved_and_a_missing_wait_is_found(cli: Cli, file: Callable[[object], Path]) -> None:
    status, out, _ = cli("check", "--graph", file(STEP))
    assert status == 0
    assert "Proved" in out
    status, out, _ = cli("check", "--graph", file(changed(lambda graph: graph["operators"][1].pop("waits"))), "--json")
    assert status == 1
    [found] = json.loads(out)["unordered"]
    assert (found["kind"], found["resource"]) == ("RAW", "bytes 0 to 32 of 'arena'")
    assert found["missing"] == "'conv' must wait for event 'copied'"


def test_the_example_of_the_page_is_proved(file: Callable[[object], Path]) -> None:
    page = (Path(__file__).parents[2] / "docs/hazards.md").read_text().partition("## Graphs of other systems")[2]
    assert check_graph(read_graph(file(page.partition("```json\n")[2].partition("```")[0]))).holds


def test_a_model_and_a_graph_are_one_too_many_and_none_too_few(cli: Cli, file: Callable[[object], Path]) -> None:
    for arguments in ((), ("zoo:squeezenet", "--graph", file(STEP))):
        status, _, told = cli("check", *arguments)
        assert status == 2
        assert "either MODEL or --graph FILE" in told


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        ('{"operators": [\n{]}', "line 2, column 2"),
        ("[]", "neither JSON nor a Chakra trace"),
        ("{}", "expected a field operators"),
        ('{"operators": ' + "[" * 100_000, "JSON"),
        (changed(lambda graph: graph.update(nodes=1)), "unknown field 'nodes'"),
        (changed(lambda graph: graph.update(operators={})), "operators: expected a list"),
        (changed(lambda graph: graph["operators"].append(7)), "operators[4]: expected an object, found 7"),
        (changed(lambda graph: graph["operators"][2].update(name=7)), "operators[2]: name: expected a string"),
        (changed(lambda graph: graph["operators"][2].update(name="copy")), "[2] 'copy': name: operator 0 has it"),
        (changed(lambda graph: graph["operators"][0].update(read=[])), "operators[0] 'copy': read: unknown field"),
        (changed(lambda graph: graph["operators"][0].update(reads="x")), "reads: expected a list of strings"),
        (changed(lambda graph: graph["operators"][0].update(stream=3)), "stream: expected a string, found 3"),
        (changed(lambda graph: graph["operators"][0].update(waits=["done"])), "waits: no operator listed before"),
        (changed(lambda graph: graph["operators"][0].update(after=["next"])), "'next' is listed behind it"),
        (changed(lambda graph: graph["operators"][0].update(after=["nobody"])), "'nobody' is unknown"),
        (changed(lambda graph: graph["operators"][3].update(records=["done"], thread="t")), "thread 'main' records"),
        (changed(lambda graph: graph["memories"]["x"].update(low=64)), "memories: 'x': expected 0 <= low < high"),
        (changed(lambda graph: graph["memories"]["x"].update(high=10**30)), "memories: 'x': expected 0 <= low < high"),
        (changed(lambda graph: graph["memories"].update(x=[])), "memories: 'x': expected space, low and high"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_file_is_told_with_operator_and_field(graph: object, told: str, file: Callable[[object], Path]) -> None:
    path = file(graph)
    with pytest.raises(ModelFormatError) as raised:
        read_graph(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert told in str(raised.value)


def test_an_event_that_is_recorded_anew_stands_for_the_last_record_before(file: Callable[[object], Path]) -> None:
    operators = [
        {"name": "first", "writes": ["x"], "stream": "a", "records": ["e"]},
        {"name": "second", "writes": ["y"], "stream": "b", "records": ["e"]},
        {"name": "reader", "reads": ["y"], "stream": "c", "waits": ["e"]},
    ]
    assert check_graph(read_graph(file({"operators": operators}))).holds
    operators[2]["reads"] = ["x"]
    assert not check_graph(read_graph(file({"operators": operators}))).holds


# What torch.fx has, as far as it is looked at.


class Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []

    def add(self, op: str, target: object, *args: object, name: str = "", **kwargs: object) -> Any:
        name = name or f"n{len(self.nodes)}"
        self.nodes.append(SimpleNamespace(name=name, op=op, target=target, args=args, kwargs=kwargs, meta={}))
        return self.nodes[-1]

    def call(self, target: object, *args: object, **kwargs: object) -> Any:
        return self.add("call_function", target, *args, **kwargs)


class Aten:
    """An operator with a schema: it writes the arguments at `changed`, its result is a view of those at `viewed`."""

    def __init__(self, name: str, arguments: int = 1, changed: Sequence[int] = (), viewed: Sequence[int] = ()) -> None:
        def alias(place: int) -> object:
            touched = place in (*changed, *viewed)
            return SimpleNamespace(is_write=place in changed, before_set={str(place)}) if touched else None

        self._name = name
        self._schema = SimpleNamespace(
            arguments=[SimpleNamespace(name=f"a{place}", alias_info=alias(place)) for place in range(arguments)],
            returns=[SimpleNamespace(alias_info=alias(place)) for place in viewed]
            or [SimpleNamespace(alias_info=None)],
        )

    def __str__(self) -> str:
        return self._name


def proved(graph: Graph, file: Callable[[object], Path]) -> list[str]:
    """What is not ordered, as (earlier, later)."""
    proof = check_graph(read_graph(file(json.loads(json.dumps(export_fx(graph))))))
    return [f"{one.earlier.split()[1]} {one.later.split()[1]}" for one in proof.unordered]


RELU, ADD_ = Aten("aten.relu.default"), Aten("aten.add_.Tensor", 2, changed=[0], viewed=[0])
VIEW, SPLIT = Aten("aten.view.default", 2, viewed=[0]), Aten("aten.split_with_sizes_copy.default")
FORK, JOIN = Aten("streams.fork.default"), Aten("streams.join.default")
RECORD, WAIT = Aten("streams.record_event.default"), Aten("streams.wait_event.default")
WAIT_STREAM, SYNCHRONIZE = Aten("streams.wait_stream.default"), Aten("streams.synchronize_stream.default")


@pytest.mark.parametrize("waits", ["event", "stream", "host", "nothing"])
def test_what_dynamo_records_of_streams_is_understood(waits: str, file: Callable[[object], Path]) -> None:
    graph = Graph()
    x = graph.call(RELU, graph.add("placeholder", "x"), name="x")
    graph.call(WAIT_STREAM, 1, 0)
    graph.call(FORK, 0, 1)
    side = graph.call(RELU, x, name="side")
    graph.call(RECORD, 7, 1)
    graph.call(JOIN, 1, 0)
    if waits == "event":
        graph.call(WAIT, 7, 0)
    elif waits == "stream":
        graph.call(WAIT_STREAM, 0, 1)
    elif waits == "host":
        graph.call(SYNCHRONIZE, 1)
    here = graph.call(RELU, side, name="here")
    graph.add("output", "output", (here,), name="output")
    assert proved(graph, file) == (["'side' 'here'"] if waits == "nothing" else [])


def test_methods_of_streams_and_events_are_understood(file: Callable[[object], Path]) -> None:
    class Cuda:
        def __init__(self, name: str) -> None:
            self.__module__, self.__qualname__ = "torch.cuda", name

    def graph(waits: bool) -> Graph:
        made = Graph()
        x = made.add("placeholder", "x", name="x")
        ambient, stream = made.call(Cuda("current_stream")), made.call(Cuda("Stream"))
        made.add("call_method", "wait_stream", stream, ambient)
        made.call(Cuda("set_stream"), stream)
        side = made.add("call_method", "relu", x, name="side")
        event = made.add("call_method", "record_event", stream)
        made.call(Cuda("set_stream"), ambient)
        if waits:
            made.add("call_method", "wait_event", ambient, event)
        made.add("output", "output", side, name="output")
        return made

    assert proved(graph(waits=True), file) == []
    assert proved(graph(waits=False), file) == ["'side' 'output'"]


def test_changes_in_place_views_and_parts_of_tuples_are_memory_of_what_they_are_made_of(
    file: Callable[[object], Path],
) -> None:
    graph = Graph()
    x = graph.add("placeholder", "x", name="x")
    whole = graph.call(RELU, x, name="whole")
    view = graph.call(VIEW, whole, [1], name="view")
    graph.call(FORK, 0, 1)
    graph.call(ADD_, view, x, name="add_")  # whole was not waited for
    parts = graph.call(SPLIT, x, name="parts")
    graph.call(JOIN, 1, 0)
    graph.call(RELU, graph.call(operator.getitem, parts, 0, name="part"), name="reader")
    assert proved(graph, file) == ["'whole' 'add_'", "'parts' 'reader'"]


def test_a_node_that_is_not_there_is_told(file: Callable[[object], Path]) -> None:
    path = file({"fx": 1, "nodes": [{"name": "n", "op": "call_function", "target": "relu", "args": [{"node": "m"}]}]})
    with pytest.raises(ModelFormatError, match=r"nodes\[0\] 'n': .*no node 'm'"):
        read_graph(path)


# Chakra


def node(number: int, name: str, reads: int, writes: int, after: Sequence[int] = (), stream: int | None = 7) -> Any:
    made: Any = _NODE(id=number, name=name, data_deps=after)
    made.inputs.values = f"[[1, {reads}, 0, 16, 4, 'cuda:0'], 'none']"
    made.outputs.values = f"[[2, {writes}, 0, 16, 4, 'cuda:0']]"
    if stream is not None:
        made.attr.add(name="stream", int64_val=stream)
    return made


def framed(messages: Sequence[bytes]) -> bytes:
    found = b""
    for message in messages:
        size = len(message)
        while size > 127:
            found += bytes((size & 127 | 128,))
            size >>= 7
        found += bytes((size,)) + message
    return found


def traced(tmp_path: Path, *nodes: Any, zipped: bool = False) -> list[str]:
    content = framed([b"\x0a\x050.0.4", *(one.SerializeToString() for one in nodes)])
    path = tmp_path / "trace.et"
    path.write_bytes(gzip.compress(content) if zipped else content)
    return [f"{one.kind.name} {one.resource}" for one in check_graph(read_graph(path)).unordered]


def test_a_trace_is_ordered_by_its_dependencies_and_streams(tmp_path: Path) -> None:
    assert traced(tmp_path, node(1, "aten::mm", 1, 2), node(2, "aten::relu", 2, 3)) == []
    assert traced(tmp_path, node(1, "aten::mm", 1, 2), node(2, "aten::relu", 2, 3, [1], stream=9), zipped=True) == []
    found = traced(tmp_path, node(1, "aten::mm", 1, 2), node(2, "aten::relu", 2, 3, stream=9))
    assert found == ["RAW bytes 0 to 64 of 'storage 2 of cuda:0'"]


def test_nodes_are_put_in_order_and_an_output_in_the_storage_of_an_input_is_a_view(tmp_path: Path) -> None:
    assert traced(tmp_path, node(2, "aten::relu", 2, 3, [1], stream=9), node(1, "aten::mm", 1, 2)) == []
    assert traced(tmp_path, node(1, "aten::view", 1, 1), node(2, "aten::relu", 1, 3, stream=9)) == []
    assert traced(tmp_path, node(1, "aten::add_", 1, 1), node(2, "aten::relu", 1, 3, stream=9)) != []


def test_what_the_jsonizer_writes_is_read(tmp_path: Path) -> None:
    from google.protobuf.json_format import MessageToJson

    path = tmp_path / "trace.json"
    nodes = (node(1, "aten::mm", 1, 2), node(2, "aten::relu", 2, 3, stream=9))
    path.write_text('{"version": "0.0.4"}' + "".join(map(MessageToJson, nodes)))
    assert len(check_graph(read_graph(path)).unordered) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (framed([b"", node(1, "a", 1, 2, [1]).SerializeToString()]), "cycle: 'a' (1)"),
        (framed([b"", node(1, "a", 1, 2, [5]).SerializeToString()]), "depends on node 5, which is missing"),
        (framed([b"", *[node(1, "a", 1, 2).SerializeToString()] * 2]), "'a': id: another node has 1, too"),
        (framed([b"", b"\xff\xff"]), "node 0 at byte 2"),
        (b"\x00\x7f", "a message of 127 bytes at byte 2"),
        (b"\xff" * 9, "no length of a message at byte 0"),
        (b'{"version": 1}{"id": -1}', "nodes[0]: id: expected a number, found -1"),
        (b'{"version": 1}{"id": 1}{', "no JSON at character"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_damaged_trace_is_told(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.et"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError) as raised:
        read_graph(path)
    assert told in str(raised.value)
