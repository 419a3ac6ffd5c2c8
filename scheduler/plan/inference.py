"""Inference: the types of all outputs of a net from those of its inputs; what follows from shapes alone is computed.

Layers of a net repeat: operators of one form, with inputs of the same types, are asked once for their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dagexec.core.blob import Blob
from dagexec.core.body import OperatorWithBodies
from dagexec.core.form import Form
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.tensor import Tensor
from dagexec.errors import ResourceError, ShapeError
from dagexec.platform.host_memory import check_fits, fits
from dagexec.scheduler.memory import Inferred
from dagexec.scheduler.plan.culprit import naming_failures
from dagexec.scheduler.plan.dynamic import Dependence, dependence
from dagexec.scheduler.plan.settling import Settling

_Types = tuple[TensorType, ...]


def inferred_and_settled(
    operators: Sequence[Operator],
    graph: Graph,
    constants: frozenset[str],
    *,
    in_one_plan: bool,
    known: Mapping[int, TensorType] | None = None,
) -> tuple[frozenset[int], list[Inferred | None]]:
    """The dynamic operators, and what inference finds for the others, of which the settled ones are computed.

    `known` are types that blobs, by their ids, will have when the net runs, where they have others now.
    Raises ResourceError for outputs that do not fit in memory, together unless they are `in_one_plan` to share it.
    """
    unsettled: frozenset[int] = frozenset()
    while True:
        depends = dependence(graph, constants, unsettled)
        inferred = _Inference(operators, graph, depends, constants, known or {}, in_one_plan=in_one_plan).run()
        if len(inferred) == len(graph):
            return depends.dynamic, inferred
        unsettled |= {len(inferred)}


class _Answer(NamedTuple):
    """What an operator of some form said: the types of its outputs, the bytes of them, and its time."""

    types: _Types
    nbytes: int
    seconds: float


class _Inference:
    """The state of it."""

    def __init__(
        self,
        operators: Sequence[Operator],
        graph: Graph,
        depends: Dependence,
        constants: frozenset[str],
        known: Mapping[int, TensorType],
        *,
        in_one_plan: bool,
    ) -> None:
        self._operators = operators
        self._graph = graph
        self._depends = depends
        self._in_one_plan = in_one_plan
        self._settling = Settling(graph, operators, depends)
        self._values = set(constants)  # blobs whose values are known
        self._known = dict(known)  # by the id of a blob
        self._answers: dict[tuple[Form, _Types], _Answer] = {}
        self._nbytes = 0

    def run(self) -> list[Inferred | None]:
        """What inference finds for each operator that is not dynamic.

        It ends before an operator that cannot be settled though the shapes of others depend on its results.
        """
        found: list[Inferred | None] = []
        with naming_failures(self._graph.name) as under_way:
            for index, operator in enumerate(self._operators):
                if index in self._depends.dynamic:
                    found.append(None)
                    continue
                under_way.operator = operator
                one = self._one(index, operator)
                if one is None:
                    break
                found.append(one)
        return found

    def _one(self, index: int, operator: Operator) -> Inferred | None:
        """Operator `index`; None where it cannot be settled though it would have to be."""
        known = self._known
        if operator.schema.decided_by and not all(
            id(blob) in known or _has_type(blob) for blob in operator.input_blobs
        ):
            return None
        given = [known.get(id(blob)) or operator.input_type(i) for i, blob in enumerate(operator.input_blobs)]
        call = operator.call(given)
        if operator.schema.infer is None:
            return self._by_bodies(operator, call)
        key = (operator.common_form, call.inputs) if _is_told_by_form(operator) else None
        answer = None if key is None else self._answers.get(key)
        types = _types_of(operator, call) if answer is None else answer.types
        known.update(zip(map(id, operator.output_blobs), types, strict=True))
        if index in self._depends.settled:
            if self._settling.settle(index, call, types):
                self._values.update(operator.definition.output)
                return Inferred(call, types, 0.0, is_settled=True)
            if index in self._depends.asked:
                return None
        if answer is None:
            nbytes = sum(kind.nbytes for kind in types)
            answer = _Answer(types, nbytes, operator.schema.cost(call, types).seconds)
            if key is not None:
                self._answers[key] = answer
        if not (index in self._graph.views and _is_packed(operator.input_blobs[0])):
            self._check_memory(operator, answer)
        return Inferred(call, types, answer.seconds)

    def _by_bodies(self, operator: Operator, call: OperatorCall) -> Inferred | None:
        """An operator whose nets tell its output types; None where these follow from more than shapes."""
        assert isinstance(operator, OperatorWithBodies)
        decided_by = operator.schema.decided_by
        if self._values.issuperset(operator.definition.input[index] for index in decided_by):
            values = [operator.host_value(index) if index in decided_by else None for index in range(len(call.inputs))]
            call = replace(call, values=tuple(values))
        found = operator.infer_by_bodies(call)
        if found is None:
            return None
        types, seconds = found
        self._known.update(zip(map(id, operator.output_blobs), types, strict=True))
        self._check_memory(operator, _Answer(types, sum(kind.nbytes for kind in types), seconds))
        return Inferred(call, types, seconds)

    def _check_memory(self, operator: Operator, answer: _Answer) -> None:
        """Raise ResourceError when the outputs do not fit, unless they are placed with others."""
        if self._in_one_plan and fits(answer.nbytes):
            return
        needed = _bytes_of(answer.types, operator)
        self._nbytes = needed if self._in_one_plan else self._nbytes + needed
        if not fits(self._nbytes):
            beside = "" if self._in_one_plan else "with the outputs of the operators before it, "
            check_fits(self._nbytes, f"{operator.label}: {beside}{_named(operator, answer.types)}")


def _is_told_by_form(operator: Operator) -> bool:
    """True where types of inputs and the form say all: no values, nets or handles."""
    return not (operator.values_read or operator.bodies or operator.schema.handles)


def _types_of(operator: Operator, call: OperatorCall) -> _Types:
    assert operator.schema.infer is not None
    types = tuple(operator.schema.infer(call))
    if len(types) != len(operator.output_blobs):
        raise ShapeError(f"{operator.label}: inference gave {len(types)} types for its outputs: {types}")
    return types


def _has_type(blob: Blob) -> bool:
    return isinstance(blob.value, Tensor) and not blob.value.is_empty


def _is_packed(blob: Blob) -> bool:
    return not isinstance(blob.value, Tensor) or blob.value.is_packed


def _named(operator: Operator, types: Sequence[TensorType]) -> str:
    """The outputs with their types, for messages."""
    named = (f"{blob.name!r} {kind}" for blob, kind in zip(operator.output_blobs, types, strict=True))
    return f"output {', '.join(named)}"


def _bytes_of(types: Sequence[TensorType], operator: Operator) -> int:
    """Bytes that outputs of these types take beside those they have. Raises ResourceError when that is no number."""
    nbytes = 0
    for kind, blob in zip(types, operator.output_blobs, strict=True):
        try:
            nbytes += blob.value.growth(kind.nbytes) if isinstance(blob.value, Tensor) else kind.nbytes
        except ResourceError as error:
            raise ResourceError(f"{operator.label}: output {blob.name!r}: {error}") from None
    return nbytes
