"""Inference: the types of all outputs of a net from those of its inputs; results that follow from shapes are computed.

Layers of a net repeat: operators of one form, with inputs of the same types, are inferred once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from dagexec.core.blob import Blob
from dagexec.core.form import Form
from dagexec.core.graph import Graph
from dagexec.core.inferred_types import answer_of
from dagexec.core.operator import Operator
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.tensor import Tensor
from dagexec.errors import ResourceError, ShapeError
from dagexec.platform.host_memory import check_fits, fits
from dagexec.platform.records import dataclass
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
    unsteady: frozenset[str] = frozenset(),
) -> tuple[frozenset[int], list[Inferred | None]]:
    """The dynamic operators, and what inference says of the others, of which the settled ones are computed.

    `known` are types that blobs, by their ids, will have when the net runs, where they have others now; the inputs in
    `unsteady` have other types in each run.
    Raises ResourceError for outputs that do not fit in memory, together unless they are `in_one_plan` to share it.
    """
    unsettled: frozenset[int] = frozenset()
    while True:
        depends = dependence(graph, constants, unsettled, unsteady)
        inferred = _Inference(operators, graph, depends, constants, known or {}, in_one_plan=in_one_plan).run()
        if len(inferred) == len(graph):
            return depends.dynamic, inferred
        unsettled |= {len(inferred)}


@dataclass(slots=True)
class _OfForm:
    """Operators of a form: whether it and the types of inputs determine the outputs, and these by the types' ids."""

    is_told_by: bool
    inferred: dict[tuple[int, ...], Inferred] = field(default_factory=dict)


class _Inference:
    """The state of an inference."""

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
        self._forms: dict[Form, _OfForm] = {}
        self._types: dict[TensorType, TensorType] = {}  # one object for all equal types
        self._nbytes = 0

    def run(self) -> list[Inferred | None]:
        """The result for each operator that is not dynamic; one object for those that are alike.

        It ends before an operator that cannot be settled although the shapes of others depend on its results.
        """
        result: list[Inferred | None] = []
        types, settled, views = self._known, self._depends.settled, self._graph.views
        with naming_failures(self._graph.name) as under_way:
            for index, operator in enumerate(self._operators):
                if index in self._depends.dynamic:
                    result.append(None)
                    continue
                under_way.operator = operator
                form = self._forms.get(operator.common_form)
                if form is None:
                    form = self._forms[operator.common_form] = _OfForm(is_told_by=_is_told_by_form(operator))
                if index in settled or not form.is_told_by:
                    record = self._one(index, operator)
                    if record is None:
                        break
                    result.append(record)
                    continue
                kinds = [
                    types.get(id(blob)) or self._input_type(operator, i) for i, blob in enumerate(operator.input_blobs)
                ]
                key = tuple(map(id, kinds))
                record = form.inferred.get(key)
                if record is None:
                    record = form.inferred[key] = self._new(operator, kinds)
                if not record.fits and not (index in views and _is_packed(operator.input_blobs[0])):
                    self._check_memory(operator, record.types, record.nbytes)
                for blob, kind in zip(operator.output_blobs, record.types, strict=True):
                    types[id(blob)] = kind
                result.append(record)
        return result

    def _input_type(self, operator: Operator, index: int) -> TensorType:
        """Of a tensor that no operator has written yet."""
        kind = self._known[id(operator.input_blobs[index])] = self._one_object(operator.input_type(index))
        return kind

    def _one_object(self, kind: TensorType) -> TensorType:
        return self._types.setdefault(kind, kind)

    def _new(self, operator: Operator, kinds: Sequence[TensorType]) -> Inferred:
        """The first operator of a form with inputs of these types."""
        call = operator.call(kinds)
        answer = answer_of(call, operator.schema)
        types = tuple(map(self._one_object, _counted(operator, answer.types)))
        nbytes = sum(kind.nbytes for kind in types)
        return Inferred(
            call, types, answer.cost(call, operator.schema).seconds, nbytes, fits=self._in_one_plan and fits(nbytes),
            zero_copy=_is_zero_copy(call),
        )  # fmt: skip

    def _one(self, index: int, operator: Operator) -> Inferred | None:
        """Operator `index`, which its form does not determine; None where it has to be settled and cannot be."""
        known_types = self._known
        if operator.schema.decided_by and not all(
            id(blob) in known_types or _has_type(blob) for blob in operator.input_blobs
        ):
            return None
        blobs = enumerate(operator.input_blobs)
        call = operator.call(
            [known_types.get(id(blob)) or self._one_object(operator.input_type(i)) for i, blob in blobs]
        )
        if operator.schema.infer is None:
            return self._by_bodies(operator, call)
        types = tuple(map(self._one_object, _types_of(operator, call)))
        known_types.update(zip(map(id, operator.output_blobs), types, strict=True))
        nbytes = sum(kind.nbytes for kind in types)
        if index in self._depends.settled:
            if self._settling.settle(index, call, types):
                self._values.update(operator.definition.output)
                return Inferred(call, types, 0.0, nbytes, is_settled=True)
            if index in self._depends.asked:
                return None
        if not (index in self._graph.views and _is_packed(operator.input_blobs[0])):
            self._check_memory(operator, types, nbytes)
        seconds = operator.schema.cost(call, types).seconds
        return Inferred(call, types, seconds, nbytes, zero_copy=_is_zero_copy(call))

    def _by_bodies(self, operator: Operator, call: OperatorCall) -> Inferred | None:
        """An operator whose nets determine its output types; None where these follow from more than shapes."""
        assert isinstance(operator, OperatorWithBodies)
        decided_by = operator.schema.decided_by
        if self._values.issuperset(operator.definition.input[index] for index in decided_by):
            values = [operator.host_value(index) if index in decided_by else None for index in range(len(call.inputs))]
            call = replace(call, values=tuple(values))
        results = operator.infer_by_bodies(call)
        if results is None:
            return None
        types, seconds = results
        self._known.update(zip(map(id, operator.output_blobs), types, strict=True))
        nbytes = sum(kind.nbytes for kind in types)
        self._check_memory(operator, types, nbytes)
        return Inferred(call, types, seconds, nbytes, zero_copy=_is_zero_copy(call))

    def _check_memory(self, operator: Operator, types: _Types, nbytes: int) -> None:
        """Raise ResourceError when the outputs, `nbytes` of them, do not fit, unless they are placed with others."""
        if self._in_one_plan and fits(nbytes):
            return
        needed = _bytes_of(types, operator)
        self._nbytes = needed if self._in_one_plan else self._nbytes + needed
        if not fits(self._nbytes):
            beside = "" if self._in_one_plan else "with the outputs of the operators before it, "
            check_fits(self._nbytes, f"{operator.label}: {beside}{_named(operator, types)}")


def _is_zero_copy(call: OperatorCall) -> bool:
    return call.arguments.bool("zero_copy")


def _is_told_by_form(operator: Operator) -> bool:
    """True where the form and the types of inputs determine the outputs: no values, nets or handles."""
    schema = operator.schema
    return (
        not (operator.values_read or operator.bodies or schema.handles or schema.decided_by)
        and schema.infer is not None
    )


def _types_of(operator: Operator, call: OperatorCall) -> _Types:
    assert operator.schema.infer is not None
    return _counted(operator, tuple(operator.schema.infer(call)))


def _counted(operator: Operator, types: _Types) -> _Types:
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
    """Bytes that outputs of these types need in addition. Raises ResourceError when that is no number."""
    nbytes = 0
    for kind, blob in zip(types, operator.output_blobs, strict=True):
        try:
            nbytes += blob.value.growth(kind.nbytes) if isinstance(blob.value, Tensor) else kind.nbytes
        except ResourceError as error:
            raise ResourceError(f"{operator.label}: output {blob.name!r}: {error}") from None
    return nbytes
