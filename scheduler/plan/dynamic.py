"""Operators whose shapes are known only when they run: which they are, and the step that prepares them then.

The output shapes of such an operator depend on a value computed by the run, or it comes after one. Its `CheckedStep`
prepares itself again when what it was prepared for has changed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy.typing as npt

from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Step
from dagexec.core.tensor import Tensor

Array = npt.NDArray[Any]


def dynamic_operators(graph: Graph, constants: frozenset[str]) -> frozenset[int]:
    """Operators whose output shapes cannot be told from the input shapes alone, and all that follow from them.

    A blob with one such writer counts as dynamic for all its writers, so that none of them keeps an array that
    another has replaced. So does a blob that one of them reads and that may change its shape within a run, so that it
    is read in the shape it has then: when a run begins, it has the shape of its last writer.
    """
    dynamic: set[int] = set()
    shared: set[str] = set()  # blobs with a dynamic writer
    changing = _may_change_shape(graph)
    while True:
        found: set[int] = set()
        unknown: set[str] = set()
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
            by_value = any(definition.input[i] not in constants for i in schema.values_read(definition))
            if (
                not schema.can_infer(definition)
                or by_value
                or any(name in unknown for name in definition.input)
                or any(name in shared for name in definition.output)
            ):
                found.add(index)
                unknown.update(definition.output)
                shared.update(definition.output)
                shared.update(changing.intersection(definition.input))
            else:
                unknown.difference_update(definition.output)
        if found == dynamic:
            return frozenset(dynamic)
        dynamic = found


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
