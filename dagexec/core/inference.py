"""Shape and cost inference over a whole net, without running it.

Unlike a preparation (`dagexec.scheduler.nets.net`), this needs no workspace and allocates nothing: `inspect` and the
frontends use it. Values that follow from shapes are computed, as shapes may depend on them (`core.shape_values`). An
output whose shape only a run can tell is unknown (None), and so is what follows from it alone; everything else is still
inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.graph import Graph
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, UnknownValueError
from dagexec.core.shape_values import asked_operators, results_of
from dagexec.errors import DagexecError

Array = npt.NDArray[Any]
Call = tuple[OperatorDef, OpSchema, Arguments]


@dataclass(frozen=True)
class NetTypes:
    """What inference found: the type of every blob after its last write, and the cost of every operator.

    `outputs[i]` are the types of operator i's outputs. None stands for unknown.
    """

    blobs: Mapping[str, TensorType | None]
    outputs: tuple[tuple[TensorType | None, ...], ...]
    costs: tuple[Cost | None, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of one run, over the operators whose cost is known."""
        return sum(cost.flops for cost in self.costs if cost)


def infer_net(
    graph: Graph,
    inputs: Mapping[str, TensorType],
    values: Mapping[str, Array] | None = None,
) -> NetTypes:
    """Types of every blob of `graph` from those of the blobs that exist before it runs.

    `values` holds the contents of blobs that are constant, for operators whose output shapes depend on a value; values
    that follow from shapes are computed. Raises ShapeError, naming the operator, when inputs do not fit together.
    """
    contents = dict(values or {})
    asked = asked_operators(graph.operators, graph.schemas)
    blobs: dict[str, TensorType | None] = dict(inputs)
    outputs: list[tuple[TensorType | None, ...]] = []
    costs: list[Cost | None] = []
    for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
        call = _call(graph, index, blobs, contents)
        found = _Found((None,) * len(definition.output))
        if call is not None:
            with suppress(UnknownValueError):
                found = _infer(call, schema, index in asked)
        blobs.update(zip(definition.output, found.types, strict=True))
        for name in definition.output:
            contents.pop(name, None)
        contents.update(zip(definition.output, found.contents, strict=False))
        outputs.append(found.types)
        costs.append(found.cost)
    return NetTypes(blobs, tuple(outputs), tuple(costs))


class _Found(NamedTuple):
    """What is known of an operator: types of outputs, cost, and the contents of outputs where shapes depend on them."""

    types: tuple[TensorType | None, ...]
    cost: Cost | None = None
    contents: Sequence[Array] = ()


def _call(
    graph: Graph, index: int, blobs: Mapping[str, TensorType | None], contents: Mapping[str, Array]
) -> OperatorCall | None:
    """What inference may look at; None when nothing can be inferred."""
    definition = graph.operators[index]
    known = tuple(kind for name in definition.input if (kind := blobs.get(name)) is not None)
    if len(known) < len(definition.input) or not graph.schemas[index].can_infer(definition):
        return None
    label = graph.label(index)
    values = tuple(contents.get(name) for name in definition.input)
    return OperatorCall(definition, Arguments(definition, label), known, values, label)


def _infer(call: OperatorCall, schema: OpSchema, is_asked: bool) -> _Found:
    assert schema.infer is not None
    types = tuple(schema.infer(call))
    results = results_of(call, schema, types) if is_asked else None
    return _Found(types, schema.cost(call, types), results or ())


def infer_operators(
    calls: Sequence[Call],
    known: Mapping[str, TensorType],
    values: Mapping[str, Array],
    otherwise: Mapping[str, TensorType | None] = MappingProxyType({}),
) -> Mapping[str, TensorType | None]:
    """Types of all blobs where those `known` are tried: sizes that are made up, say, which an operator may refuse.

    Where one refuses, its outputs have the types of `otherwise`, or None. `values` are the contents of constants.
    """
    blobs: dict[str, TensorType | None] = dict(known)
    constants = dict(values)
    for definition, schema, arguments in calls:
        inputs = [kind for name in definition.input if (kind := blobs.get(name)) is not None]
        outputs: Sequence[TensorType | None] = [otherwise.get(name) for name in definition.output]
        if schema.infer is not None and schema.can_infer(definition) and len(inputs) == len(definition.input):
            seen = tuple(constants.get(name) for name in definition.input)
            with suppress(DagexecError):
                outputs = schema.infer(OperatorCall(definition, arguments, tuple(inputs), seen, definition.type))
        for name, kind in zip(definition.output, outputs, strict=False):
            blobs[name] = kind
            constants.pop(name, None)
    return blobs
