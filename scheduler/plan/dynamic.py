"""What a run's shapes decide: operators whose results are known with them, and those whose shapes even a run decides.

An operator is *settled* when its results follow from the shapes a net is prepared for and from constants: `Shape`,
and what is computed from it. It is computed once, while the net is prepared, so that others may take their shapes from
what it gives, and a run has nothing to do for it. An operator is *dynamic* when its output shapes depend on a value
computed by the run, or when it comes after one. Its `CheckedStep` prepares itself again when what it was prepared for
has changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dagexec.core.device import CPU
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Step
from dagexec.core.purity import is_pure
from dagexec.core.shape_values import asked_operators
from dagexec.core.tensor import Tensor

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
    asked = asked_operators(graph.operators, graph.schemas)
    candidates = _may_be_settled(graph) - unsettled
    dynamic: set[int] = set()
    shared: set[str] = set()  # blobs with a dynamic writer
    changing = _may_change_shape(graph)
    while True:
        found: set[int] = set()
        settled: set[int] = set()
        unknown: set[str] = set()
        values: set[str] = set()  # the blobs that settled operators write
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
            inputs = definition.input
            read = (inputs[i] for i in schema.values_read(definition))
            if (
                not schema.can_infer(definition)
                or any(name not in constants and name not in values for name in read)
                or any(name in unknown for name in inputs)
                or any(name in shared for name in definition.output)
            ):
                found.add(index)
                unknown.update(definition.output)
                shared.update(definition.output)
                shared.update(changing.intersection(inputs))
                continue
            unknown.difference_update(definition.output)
            if index in candidates and (
                schema.from_types is not None
                or (
                    all(name in values or name in constants for name in inputs)
                    and (index in asked or any(name in values for name in inputs))
                )
            ):
                settled.add(index)
                values.update(definition.output)
        if found == dynamic:
            return Dependence(frozenset(dynamic), frozenset(settled), asked)
        dynamic = found


def _may_be_settled(graph: Graph) -> frozenset[int]:
    """Operators of the host that only compute, and write blobs that hold nothing else at any time of a run."""
    writes = Counter(name for definition in graph.operators for name in definition.output)
    touched: set[str] = set()  # otherwise than by being read after they were written
    for definition, schema in zip(graph.operators, graph.schemas, strict=True):
        touched.update(definition.input[i] for i in schema.mutates if i < len(definition.input))
    written: set[str] = set()
    for definition in graph.operators:
        touched.update(name for name in definition.input if name in writes and name not in written)
        written.update(definition.output)
    return frozenset(
        index
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True))
        if all(writes[name] == 1 and name not in touched for name in definition.output)
        and not schema.handles
        and not schema.does_io
        and graph.device(index) == CPU
        and is_pure(definition)
    )


def _may_change_shape(graph: Graph) -> frozenset[str]:
    """Blobs that get a value twice, the one before the run counted, other than by operators that work in place."""
    writes: Counter[str] = Counter()
    for definition in graph.operators:
        writes.update({name for name in definition.input if name not in writes})  # there before the run
        writes.update(set(definition.output) - set(definition.input))
    return frozenset(name for name, count in writes.items() if count > 1)


class CheckedStep:
    """The step of an operator whose shapes are known only when it runs: prepares itself again when they changed."""

    __slots__ = ("_arrays", "_as_view", "_blobs", "_held", "_operator", "_read", "_step", "_tensors", "_values")

    def __init__(self, operator: Operator, as_view: bool) -> None:
        self._operator = operator
        self._as_view = as_view
        self._read = operator.schema.values_read(operator.definition)
        self._step: Step | None = None
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
        arrays = self._arrays
        values = self._held
        if any(blob.value is not values[i] for i, blob in enumerate(self._blobs)):
            return True
        if any(tensor.current_array() is not arrays[i] for i, tensor in enumerate(self._tensors)):
            return True
        return self._read_values() != self._values

    def _read_values(self) -> list[bytes]:
        return [self._operator.host_value(i).tobytes() for i in self._read]

    def _prepare(self) -> Step:
        operator = self._operator
        operator.check_output_layouts()
        step = operator.bind(operator.infer(), as_view=self._as_view).step
        self._held = [blob.value for blob in self._blobs]
        self._tensors = [tensor for tensor in self._held if isinstance(tensor, Tensor)]
        self._arrays = [tensor.current_array() for tensor in self._tensors]
        self._values = self._read_values()
        self._step = step
        return step
