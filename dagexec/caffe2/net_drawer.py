"""Nets as drawings for Graphviz: `net_drawer.GetPydotGraph(net, rankdir="LR").write_png("net.png")`.

The graphs have those methods of pydot's that scripts call, and need only Graphviz's `dot`, for pictures alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from dagexec.core.node import operator_label
from dagexec.core.proto import ExecutionStep, NetDef, OperatorDef, PlanDef
from dagexec.errors import Caffe2Error
from dagexec.platform.files import write_atomically

__all__ = ["GetPlanGraph", "GetPydotGraph", "GetPydotGraphMinimal", "Graph"]

_OPERATOR = "shape=box, style=filled, fillcolor=lightblue"
_BLOB = "shape=ellipse"


class Graph:
    """A drawing: lines in Graphviz's language."""

    def __init__(self, name: str, rankdir: str) -> None:
        self._lines = [f"digraph {_quoted(name)} {{", f"  rankdir={rankdir};"]

    def add_node(self, key: str, label: str, style: str) -> None:
        """Draw a node."""
        self._lines.append(f"  {_quoted(key)} [label={_quoted(label)}, {style}];")

    def add_edge(self, begin: str, end: str) -> None:
        """Draw an arrow."""
        self._lines.append(f"  {_quoted(begin)} -> {_quoted(end)};")

    def to_string(self) -> str:
        """The drawing as text."""
        return "\n".join([*self._lines, "}", ""])

    def write_dot(self, path: str) -> None:
        """Write the text to a file."""
        write_atomically(Path(path), self.to_string().encode())

    def create(self, format: str = "png") -> bytes:
        """The picture, drawn by Graphviz. Raises Caffe2Error where its program `dot` is not installed, or fails."""
        try:
            done = subprocess.run(
                ["dot", f"-T{format}"], input=self.to_string().encode(), capture_output=True, check=True
            )
        except FileNotFoundError:
            raise Caffe2Error("net_drawer: Graphviz's program dot is not installed; write_dot needs none") from None
        except subprocess.CalledProcessError as error:
            raise Caffe2Error(f"net_drawer: dot: {error.stderr.decode(errors='replace')}") from None
        return done.stdout

    def create_png(self) -> bytes:
        """The picture as PNG."""
        return self.create("png")

    def create_svg(self) -> bytes:
        """The picture as SVG."""
        return self.create("svg")

    def write_png(self, path: str) -> None:
        """Write the picture as PNG."""
        write_atomically(Path(path), self.create_png())


def GetPydotGraph(operators_or_net: Any, name: str | None = None, rankdir: str = "LR") -> Graph:
    """Operators, and the blobs that they read and write; a blob is drawn once for each time it is written."""
    operators, graph = _begun(operators_or_net, name, rankdir)
    versions: dict[str, int] = {}
    drawn: set[str] = set()

    def blob(blob_name: str) -> str:
        key = f"blob {versions.get(blob_name, 0)} {blob_name}"
        if key not in drawn:
            drawn.add(key)
            graph.add_node(key, blob_name, _BLOB)
        return key

    for index, operator in enumerate(operators):
        key = _operator(graph, index, operator)
        for read in operator.input:
            graph.add_edge(blob(read), key)
        for written in operator.output:
            versions[written] = versions.get(written, 0) + 1
            graph.add_edge(key, blob(written))
    return graph


def GetPydotGraphMinimal(
    operators_or_net: Any, name: str | None = None, rankdir: str = "LR", minimal_dependency: bool = False
) -> Graph:
    """Operators alone, each with arrows from those whose results it reads.

    With `minimal_dependency` an arrow that follows from others is left out.
    """
    operators, graph = _begun(operators_or_net, name, rankdir)
    writers: dict[str, int] = {}
    above: list[set[int]] = []
    for index, operator in enumerate(operators):
        _operator(graph, index, operator)
        parents = {writers[blob] for blob in operator.input if blob in writers}
        above.append(parents.union(*(above[parent] for parent in parents)))
        implied = set().union(*(above[parent] for parent in parents)) if minimal_dependency else set()
        for parent in sorted(parents - implied):
            graph.add_edge(f"operator {parent}", f"operator {index}")
        writers.update(dict.fromkeys(operator.output, index))
    return graph


def GetPlanGraph(plan_def: Any, name: str | None = None, rankdir: str = "TB") -> Graph:
    """The steps of a plan, with arrows to what they run, and from each of that to the next unless all run at once."""
    plan: PlanDef = plan_def.Proto() if hasattr(plan_def, "Proto") else plan_def
    graph = Graph(name or plan.name or "plan", rankdir)
    sizes = {net.name: len(net.op) for net in plan.network}
    keys = count()

    def nets(names: Iterable[str]) -> list[str]:
        drawn = []
        for one in names:
            drawn.append(f"net {next(keys)}")
            graph.add_node(drawn[-1], f"{one}\n{sizes[one]} operators" if one in sizes else one, _BLOB)
        return drawn

    def step(one: ExecutionStep) -> str:
        key = f"step {next(keys)}"
        graph.add_node(key, "\n".join([one.name, *_settings(one)]), _OPERATOR)
        inside = [*nets(one.network), *map(step, one.substep)]
        if one.concurrent_substeps:
            for begin in inside:
                graph.add_edge(key, begin)
        else:
            for begin, end in pairwise([key, *inside]):
                graph.add_edge(begin, end)
        for begin in nets([one.report_net] if one.report_net else []):
            graph.add_edge(key, begin)
        return key

    for begin, end in pairwise([step(one) for one in plan.execution_step]):
        graph.add_edge(begin, end)
    return graph


def _settings(step: ExecutionStep) -> list[str]:
    """How often a step runs, and how."""
    told = {
        f"num_iter: {step.num_iter}": step.HasField("num_iter"),
        f"until {step.should_stop_blob}": step.should_stop_blob and not step.only_once,
        f"unless {step.should_stop_blob}": step.should_stop_blob and step.only_once,
        "at once": step.concurrent_substeps,
        f"{step.num_concurrent_instances} instances": step.num_concurrent_instances > 1,
        f"every {step.run_every_ms} ms": step.run_every_ms,
        f"reports every {step.report_interval} s": step.report_net,
        "in a workspace of its own": step.create_workspace,
    }
    return [text for text, is_set in told.items() if is_set]


def _begun(operators_or_net: Any, name: str | None, rankdir: str) -> tuple[Sequence[OperatorDef], Graph]:
    net = operators_or_net.Proto() if hasattr(operators_or_net, "Proto") else operators_or_net
    operators: Iterable[OperatorDef] = net.op if isinstance(net, NetDef) else net
    return list(operators), Graph(name or (net.name if isinstance(net, NetDef) else "unnamed"), rankdir)


def _operator(graph: Graph, index: int, operator: OperatorDef) -> str:
    key = f"operator {index}"
    graph.add_node(key, operator_label(operator, index), _OPERATOR)
    return key


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
