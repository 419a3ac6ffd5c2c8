"""What a run's shapes decide: operators whose results are known with them, and those whose shapes even a run decides.

An operator is *settled* when its results follow from the shapes a net is prepared for and from constants: `Shape`,
and what is computed from it. It is computed once, while the net is prepared, so that others may take their shapes from
what it gives, and a run has nothing to do for it. An operator is *dynamic* when its output shapes depend on a value
computed by the run, or when it comes after one. Its `CheckedStep` prepares itself again when what it was prepared for
has changed.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

import numpy.typing as npt

from dagexec.core.device import CPU
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Step
from dagexec.core.purity import is_pure
from dagexec.core.schema import OpSchema
from dagexec.core.shape_values import asked_operators
from dagexec.core.tensor import Tensor, binding_epoch
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dependence:
    """What the operators of a graph depend on.

    Attributes:
        dynamic: those whose output shapes cannot be told from the input shapes alone, and all that follow from them.
        settled: those whose results can, if these are not too large to be kept.
        asked: those on whose results shapes depend.
    """

    dynamic: frozenset[int]
    settled: frozenset[int]
    asked: frozenset[int]


def dependence(graph: Graph, constants: frozenset[str], unsettled: frozenset[int] = frozenset()) -> Dependence:
    """What the operators depend on where `constants` do not change and those in `unsettled` are left to the run.

    A blob with one dynamic writer counts as dynamic for all its writers, so that none of them keeps an array that
    another has replaced. So does a blob that one of them reads and that may change its shape within a run, so that it
    is read in the shape it has then: when a run begins, it has the shape of its last writer.
    """
    return graph.derived((constants, unsettled), lambda: _find_dependence(graph, constants, unsettled))


def dynamic_operators(graph: Graph, constants: frozenset[str]) -> frozenset[int]:
    """Operators whose output shapes cannot be told from the input shapes alone, and all that follow from them."""
    return dependence(graph, constants).dynamic


def _find_dependence(graph: Graph, constants: frozenset[str], unsettled: frozenset[int]) -> Dependence:
    if all(map(_is_told_by_types, {schema.type: schema for schema in graph.schemas}.values())):
        return _NONE
    asked = asked_operators(graph.operators, graph.schemas, decide=True)
    blobs = _Blobs(graph)
    dynamic: set[int] = set()
    shared: set[str] = set()  # blobs with a dynamic writer
    while True:
        found: set[int] = set()
        settled: set[int] = set()
        unknown: set[str] = set()
        values: set[str] = set()  # the blobs that settled operators write
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
            inputs, outputs = tuple(definition.input), tuple(definition.output)
            read = (inputs[i] for i in schema.values_read(definition)) if schema.value_inputs else ()
            if (
                not (schema.can_infer(definition) or (schema.decided_by and index not in unsettled))
                or any(name not in constants and name not in values for name in read)
                or not unknown.isdisjoint(inputs)
                or not shared.isdisjoint(outputs)
            ):
                found.add(index)
                unknown.update(outputs)
                shared.update(outputs)
                shared.update(blobs.changing.intersection(inputs))
                continue
            unknown.difference_update(outputs)
            follows = schema.from_types is not None or (
                (index in asked or not values.isdisjoint(inputs))
                and all(name in values or name in constants for name in inputs)
            )
            if follows and not schema.sub_nets and index not in unsettled and blobs.may_be_settled(index):
                settled.add(index)
                values.update(outputs)
        if found == dynamic:
            return Dependence(frozenset(dynamic), frozenset(settled), asked)
        dynamic = found


_NONE = Dependence(frozenset(), frozenset(), frozenset())


def _is_told_by_types(schema: OpSchema) -> bool:
    """True where output types follow from input types, and no values from either."""
    by_values = schema.value_inputs or schema.decided_by or schema.inferred_if or schema.from_types
    return schema.infer is not None and not by_values


class _Blobs:
    """How the blobs of a graph are used, found out when something depends on it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def may_be_settled(self, index: int) -> bool:
        """True for operators of the host that only compute, and write blobs that hold nothing else in a run."""
        definition, schema = self._graph.operators[index], self._graph.schemas[index]
        return (
            all(self._writes[name] == 1 and name not in self._touched for name in definition.output)
            and not schema.handles
            and not schema.does_io
            and self._graph.device(index) == CPU
            and is_pure(definition)
        )

    @cached_property
    def _writes(self) -> Counter[str]:
        """How many operators write each blob."""
        return Counter(name for definition in self._graph.operators for name in definition.output)

    @cached_property
    def _touched(self) -> frozenset[str]:
        """Blobs that an operator uses otherwise than by reading them after they were written."""
        touched: set[str] = set()
        written: set[str] = set()
        for definition, schema in zip(self._graph.operators, self._graph.schemas, strict=True):
            inputs = definition.input
            touched.update(inputs[i] for i in schema.mutates if i < len(inputs))
            touched.update(name for name in inputs if name in self._writes and name not in written)
            written.update(definition.output)
        return frozenset(touched)

    @cached_property
    def changing(self) -> frozenset[str]:
        """Blobs that get a value twice, the one before the run counted, other than by operators that work in place."""
        writes: Counter[str] = Counter()
        for definition in self._graph.operators:
            writes.update({name for name in definition.input if name not in writes})  # there before the run
            writes.update(set(definition.output) - set(definition.input))
        return frozenset(name for name, count in writes.items() if count > 1)


class CheckedStep:
    """The step of an operator whose shapes are known only when it runs: prepares itself again when they changed."""

    __slots__ = (
        "_arrays",
        "_as_view",
        "_blobs",
        "_epoch",
        "_held",
        "_lasts",
        "_operator",
        "_read",
        "_step",
        "_tensors",
        "_values",
    )

    def __init__(self, operator: Operator, as_view: bool) -> None:
        self._operator = operator
        self._as_view = as_view
        self._read = operator.schema.values_read(operator.definition)
        self._step: Step | None = None
        self._lasts = False  # the step is for any sizes
        self._epoch = 0
        self._arrays: list[Array | None] = []
        self._blobs = (*operator.input_blobs, *operator.output_blobs)
        self._held: list[object] = []
        self._tensors: list[Tensor] = []
        self._values: list[bytes] = []

    def __call__(self) -> None:
        """Run the operator once."""
        step = self._step
        if step is None or self._changed():
            step = self._prepare()
        step()

    def current(self) -> Step:
        """The operator's step for what its blobs hold now."""
        step = self._step
        return self._prepare() if step is None or self._changed() else step

    def _changed(self) -> bool:
        if self._lasts:
            return False
        epoch = binding_epoch()
        if epoch != self._epoch:  # an array was replaced somewhere, perhaps one of these
            if any(blob.value is not held for blob, held in zip(self._blobs, self._held, strict=True)):
                return True
            if any(one.current_array() is not array for one, array in zip(self._tensors, self._arrays, strict=True)):
                return True
            self._epoch = epoch
        return bool(self._read) and self._read_values() != self._values

    def _read_values(self) -> list[bytes]:
        return [self._operator.host_value(i).tobytes() for i in self._read]

    def _prepare(self) -> Step:
        operator = self._operator
        operator.check_output_layouts()
        step = operator.for_any_sizes()
        if step is not None:
            self._lasts, self._step = True, step
            return step
        call = operator.call() if operator.schema.can_infer(operator.definition) else None  # None: perhaps no tensors
        step = operator.bind(operator.infer(call), as_view=self._as_view, call=call).step
        self._epoch = binding_epoch()
        self._held = [blob.value for blob in self._blobs]
        self._tensors = [tensor for tensor in self._held if isinstance(tensor, Tensor)]
        self._arrays = [tensor.current_array() for tensor in self._tensors]
        self._values = self._read_values()
        self._step = step
        return step
