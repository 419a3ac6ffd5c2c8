"""Regions of a net that another runtime can compute, and the net with islands in their place.

A region is connected and convex: no path from one of its operators to another leaves it, so that it can run as one. To
find the largest ones, every operator has a level, which grows on paths that leave what can be in an island and come
back: operators of one level that are connected are a region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dagexec.compiler.passes.types import BlobType, infer_types
from dagexec.core.device import CPU
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import infer_listed
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.proto import NetDef
from dagexec.core.purity import is_known, is_pure
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.errors import UnsupportedOperatorError
from dagexec.export import operators_without_counterpart, to_onnx
from dagexec.foreign import IslandRuntime, seal_of
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    nx = LazyModule("networkx")
else:
    import networkx as nx

Array = npt.NDArray[Any]

_MOST_IN_MESSAGE = 4096  # bytes of a constant; larger ones are handed over where they lie
_KINDS = "fiub"  # of element types that NumPy and both runtimes have in memory alike
_LEAST_OPERATORS = 2


@dataclass(frozen=True)
class Region:
    """Operators of a net, by their places in its list, that are connected and convex."""

    operators: tuple[int, ...]


@dataclass(frozen=True)
class IslandSource:
    """A net that islands are made from, with arrays as parameters and no init net.

    Attributes:
        model: the net.
        graph: what its operators read of each other.
        types: of its blobs.
        able: whether ONNX can say an operator that only computes, by its place.
        specialized: whether a session for the first shapes alone may give a row other last bits than one for any.
    """

    model: Model
    graph: Graph
    types: Mapping[str, BlobType]
    able: Sequence[bool]
    specialized: bool = False

    def regions(self, start: int = 0, stop: int | None = None) -> list[Region]:
        """The largest regions of the operators from `start` to `stop` in the list.

        Lone operators without weights are left out.
        """
        places = range(len(self.graph))[start:stop]
        able = [index in places and can for index, can in enumerate(self.able)]
        rows = _components(self.graph, _levels(self.graph, able), able)
        return [Region(row) for row in rows if _is_worth_it(self.graph, row)]


def island_source(model: Model, shapes: Mapping[str, Sequence[int]]) -> IslandSource:
    """What there is to know of `model`, for inputs of any shape or, where that tells too little, of those `shapes`.

    Of a net that writes a blob twice nothing can be in an island.
    """
    graph = build_graph(model.program, {*model.parameters, *model.inputs}.__contains__)
    types = _types(model, shapes)
    refused = range(len(graph)) if _writes_twice(model) else operators_without_counterpart(model)
    able = [
        index not in refused and _fits(definition, model, types) for index, definition in enumerate(model.program.op)
    ]
    return IslandSource(model, graph, types, able)


def _types(model: Model, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, BlobType]:
    """Types of the blobs; where sizes of inputs have to agree, or follow from their content, those of `shapes`.

    Such types have only those sizes fixed that are the same for all inputs.
    """
    types = infer_types(model)
    written = [name for definition in model.program.op for name in definition.output if name]
    if all(name in types for name in written):
        return types
    inputs = {
        name: replace(info, shape=tuple(shapes[name])) if name in shapes else info
        for name, info in model.inputs.items()
    }
    found = infer_types(model.changed(inputs=inputs))
    if not found.keys() > types.keys():
        return types
    return {name: _of_any_size(kind, types.get(name)) for name, kind in found.items()}


def _of_any_size(kind: BlobType, known: BlobType | None) -> BlobType:
    fixed = (None,) * kind.rank if known is None or known.rank != kind.rank else known.shape
    first = kind.shapes[0]
    return BlobType(kind.meta, (first, tuple(size + (other is None) for size, other in zip(first, fixed, strict=True))))


def _writes_twice(model: Model) -> bool:
    written = [name for definition in model.program.op for name in definition.output]
    return len(set(written)) < len(written) or not {*model.parameters, *model.inputs}.isdisjoint(written)


def _is_worth_it(graph: Graph, row: Sequence[int]) -> bool:
    return len(row) >= _LEAST_OPERATORS or any(graph.schemas[index].has_weights for index in row)


def _fits(definition: Node, model: Model, types: Mapping[str, BlobType]) -> bool:
    """True for an operator on the host that only computes, from and to blobs of known types."""
    if definition.control_input or not (is_known(definition) and is_pure(definition)):
        return False
    if model.program.device_of(definition) != CPU or schema_of(definition.type).foreign:
        return False
    found = [types.get(name) for name in (*definition.input, *definition.output)]
    return all(kind is not None and kind.meta.numpy.kind in _KINDS for kind in found)


def _levels(graph: Graph, able: Sequence[bool]) -> list[int]:
    levels: list[int] = []
    for index in range(len(graph)):
        least = [levels[parent] + (able[parent] != able[index] and able[index]) for parent in graph.parents[index]]
        levels.append(max(least, default=0))
    return levels


def _components(graph: Graph, levels: Sequence[int], able: Sequence[bool]) -> list[tuple[int, ...]]:
    """Operators of one level that are able and connected to each other."""
    alike: nx.Graph[int] = nx.Graph()
    for index in (index for index in range(len(graph)) if able[index]):
        alike.add_node(index)
        parents = (parent for parent in graph.parents[index] if able[parent] and levels[parent] == levels[index])
        alike.add_edges_from((parent, index) for parent in parents)
    return [tuple(sorted(component)) for component in nx.connected_components(alike)]


def with_islands(
    source: IslandSource, placed: Sequence[tuple[Region, IslandRuntime]], versions: Mapping[IslandRuntime, str]
) -> Model:
    """The model with an island in place of each region; those that cannot be written as ONNX stay.

    Its operators may be listed in another order.
    """
    model = source.model
    islands: dict[int, Node] = {}
    place: dict[int, int] = {}
    for region, runtime in placed:
        made = _island(source, region, runtime, versions[runtime])
        if made is not None:
            islands[region.operators[0]] = made
            place |= dict.fromkeys(region.operators, region.operators[0])
    program = model.program
    operators = [islands.get(index) or program.op[index] for index in _contracted_order(source.graph, place)]
    read = {name for definition in operators for name in definition.input} | set(model.outputs)
    parameters = {name: array for name, array in model.parameters.items() if name in read or name in model.inputs}
    return model.changed(net=program.with_operators(operators), parameters=parameters) if islands else model


def falling_back(model: Model) -> Model:
    """The model whose islands compute what their runtimes refuse by the operators that they stand for.

    While candidates are measured they do not, as one that its runtime refuses is none.
    """
    program = model.program
    operators = [one.changed(arguments={"falls_back": 1}) if one.type == "Island" else one for one in program.op]
    islands = any(one.type == "Island" for one in operators)
    return model.changed(net=program.with_operators(operators)) if islands else model


def _contracted_order(graph: Graph, place: Mapping[int, int]) -> list[int]:
    """An order of the operators in which each region is where its first operator stands for it."""
    parents: dict[int, set[int]] = {}
    for index in range(len(graph)):
        own = place.get(index, index)
        around = {place.get(parent, parent) for parent in graph.parents[index]}
        parents.setdefault(own, set()).update(around - {own})
    order: list[int] = []
    done: set[int] = set()
    stack = sorted(parents, reverse=True)
    while stack:
        index = stack[-1]
        missing = sorted(parents[index] - done, reverse=True)
        if missing and index not in done:
            stack += missing
            continue
        stack.pop()
        if index not in done:
            done.add(index)
            order.append(index)
    return order


def _island(source: IslandSource, region: Region, runtime: IslandRuntime, version: str) -> Node | None:
    """The operator in place of a region; None where it cannot be inferred, or the onnx package refuses it."""
    model, types = source.model, source.types
    operators = [model.program.op[index] for index in region.operators]
    written = {name for definition in operators for name in definition.output}
    read = list(dict.fromkeys(name for definition in operators for name in definition.input if name not in written))
    large = [name for name in read if name in model.parameters and model.parameters[name].nbytes > _MOST_IN_MESSAGE]
    small = {name: model.parameters[name] for name in read if name in model.parameters and name not in large}
    fed = [name for name in read if name not in model.parameters]
    inside = set(region.operators)
    outside = {name for index, one in enumerate(model.program.op) if index not in inside for name in one.input}
    outputs = [
        name for definition in operators for name in definition.output if name in outside or name in model.outputs
    ]
    net = NetDef(name=model.program.name, op=[one.message() for one in operators])
    inputs = {name: InputInfo(types[name].meta, types[name].shape) for name in (*fed, *large)}
    if not _can_be_inferred(operators, types, [*fed, *large], small, outputs):
        return None
    try:
        message = to_onnx(Model(model.name, net, None, small, inputs, tuple(outputs)))
    except UnsupportedOperatorError:
        return None
    if not _keeps_names(message, [*fed, *large], outputs):
        return None
    content, arguments = message.SerializeToString(), net.SerializeToString(deterministic=True)
    return new_node(
        "Island", [*fed, *large], outputs, name=_name(operators), runtime=runtime, version=version, model=content,
        constants=len(large), specialized=source.specialized, seal=seal_of(content, arguments),
        reasons=[f"{one.type} {one.name or one.output[0]!r}: {runtime} computes it in an island" for one in operators],
        net=net,
    )  # fmt: skip


def _can_be_inferred(
    operators: Sequence[Node],
    types: Mapping[str, BlobType],
    inputs: Sequence[str],
    values: Mapping[str, Array],
    outputs: Sequence[str],
) -> bool:
    """False where a shape depends on the content of an input: an island is told no more of them than their types."""
    known = {name: TensorType(types[name].shapes[0], types[name].meta) for name in (*inputs, *values)}
    found = infer_listed("island", operators, known, values).blobs
    return all(found.get(name) is not None for name in outputs)


def _keeps_names(message: object, inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """True when the message has these inputs and outputs, in this order."""
    graph = message.graph  # type: ignore[attr-defined]
    found = [value.name for value in graph.input], [value.name for value in graph.output]
    return found == (list(inputs), list(outputs))


def _name(operators: Sequence[Node]) -> str:
    names = [one.name or one.output[0] for one in (operators[0], operators[-1])]
    return names[0] if len(operators) == 1 else f"{names[0]} to {names[1]}"
