"""Regions of a net that another runtime can compute, and the net with islands in their place.

A region is connected and convex: no path from one of its operators to another leaves it, so that it can run as one. To
find the largest ones, every operator has a level, which grows on paths that leave what can be in an island and come
back: operators of one level that are connected are a region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from dagexec.compiler.passes.types import BlobType, infer_types
from dagexec.core.arguments import make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import infer_listed
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.purity import is_known, is_pure
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.errors import UnsupportedOperatorError
from dagexec.export import operators_without_counterpart, to_onnx
from dagexec.sessions import IslandRuntime, seal_of

Array = npt.NDArray[Any]

_MOST_IN_MESSAGE = 4096  # bytes of a constant; larger ones are handed over where they lie
_KINDS = "fiub"  # of element types that NumPy and both runtimes have in memory alike
_LEAST_OPERATORS = 2


@dataclass(frozen=True)
class Region:
    """Operators of a net, by their places in its list, that are connected and convex."""

    operators: tuple[int, ...]


def find_regions(model: Model, within: Collection[int] | None = None) -> list[Region]:
    """The largest regions of operators that ONNX can say, of those in `within`; none for a net that writes twice.

    The model has parameters that are arrays, and no init net. Lone operators without weights are left out.
    """
    graph = build_graph(model.net, {*model.parameters, *model.inputs}.__contains__)
    if _writes_twice(model):
        return []
    types = infer_types(model)
    refused = operators_without_counterpart(model)
    able = [
        index not in refused and (within is None or index in within) and _fits(definition, model, types)
        for index, definition in enumerate(model.net.op)
    ]
    rows = _components(graph, _levels(graph, able), able)
    return [Region(row) for row in rows if _is_worth_it(graph, row)]


def _writes_twice(model: Model) -> bool:
    written = [name for definition in model.net.op for name in definition.output]
    return len(set(written)) < len(written) or not {*model.parameters, *model.inputs}.isdisjoint(written)


def _is_worth_it(graph: Graph, row: Sequence[int]) -> bool:
    return len(row) >= _LEAST_OPERATORS or any(graph.schemas[index].has_weights for index in row)


def _fits(definition: OperatorDef, model: Model, types: Mapping[str, BlobType]) -> bool:
    """True for an operator on the host that only computes, from and to blobs of known types."""
    if definition.control_input or not (is_known(definition) and is_pure(definition)):
        return False
    option = definition.device_option if definition.HasField("device_option") else model.net.device_option
    if Device.from_option(option) != CPU or schema_of(definition.type).foreign:
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
    """Operators of one level that are able and connected to each other, by an edge or by a blob that both read."""
    leader = list(range(len(graph)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    for index in range(len(graph)):
        for parent in graph.parents[index] if able[index] else ():
            if able[parent] and levels[parent] == levels[index]:
                leader[find(index)] = find(parent)
    rows: dict[int, list[int]] = {}
    for index in range(len(graph)):
        if able[index]:
            rows.setdefault(find(index), []).append(index)
    return [tuple(row) for row in rows.values()]


def with_islands(model: Model, regions: Sequence[Region], runtime: IslandRuntime, version: str, reason: str) -> Model:
    """`model` with an island of `runtime` in place of each region; those that cannot be written as ONNX stay.

    Its operators may be listed in another order.
    """
    types = infer_types(model)
    islands: dict[int, OperatorDef] = {}
    place: dict[int, int] = {}
    for region in regions:
        made = _island(model, region, types, runtime, version, reason)
        if made is not None:
            islands[region.operators[0]] = made
            place |= dict.fromkeys(region.operators, region.operators[0])
    net = NetDef()
    net.CopyFrom(model.net)
    del net.op[:]
    for index in _contracted_order(model, place):
        net.op.append(islands[index] if index in islands else model.net.op[index])
    read = {name for definition in net.op for name in definition.input} | set(model.outputs)
    parameters = {name: array for name, array in model.parameters.items() if name in read or name in model.inputs}
    return replace(model, net=net, parameters=parameters) if islands else model


def _contracted_order(model: Model, place: Mapping[int, int]) -> list[int]:
    """An order of the operators in which each region is where its first operator stands for it."""
    graph = build_graph(model.net, {*model.parameters, *model.inputs}.__contains__)
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


def _island(
    model: Model,
    region: Region,
    types: Mapping[str, BlobType],
    runtime: IslandRuntime,
    version: str,
    reason: str,
) -> OperatorDef | None:
    """The operator in place of a region; None where it cannot be inferred, or the onnx package refuses it."""
    operators = [model.net.op[index] for index in region.operators]
    written = {name for definition in operators for name in definition.output}
    read = list(dict.fromkeys(name for definition in operators for name in definition.input if name not in written))
    large = [name for name in read if name in model.parameters and model.parameters[name].nbytes > _MOST_IN_MESSAGE]
    small = {name: model.parameters[name] for name in read if name in model.parameters and name not in large}
    fed = [name for name in read if name not in model.parameters]
    inside = set(region.operators)
    outside = {name for index, one in enumerate(model.net.op) if index not in inside for name in one.input}
    outputs = [
        name for definition in operators for name in definition.output if name in outside or name in model.outputs
    ]
    net = NetDef(name=model.net.name, op=operators)
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
    made = op(
        "Island", [*fed, *large], outputs, name=_name(operators), runtime=runtime, version=version, model=content,
        constants=len(large), seal=seal_of(content, arguments),
        reasons=[f"{one.type} {one.name or one.output[0]!r}: {reason}" for one in operators],
    )  # fmt: skip
    made.arg.append(make_argument("net", net))
    return made


def _can_be_inferred(
    operators: Sequence[OperatorDef],
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


def _name(operators: Sequence[OperatorDef]) -> str:
    names = [one.name or one.output[0] for one in (operators[0], operators[-1])]
    return names[0] if len(operators) == 1 else f"{names[0]} to {names[1]}"
