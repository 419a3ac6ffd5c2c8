"""A cache of output types: equal operators on equal types of inputs have the same, and layers repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.node import Node
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_KEPT = 1 << 12  # results
_MAX_ELEMENTS = 1 << 6
"""The largest values that may decide types: sizes, axes and pads are smaller."""

MIN_WEIGHT_BYTES = 1 << 14
"""Of floats with so many bytes only the type counts: no shape depends on weights, and the cache must not hold them."""

_known: dict[Hashable, Answer] = {}


def typing_form(node: Node, schema: OpSchema, values: Sequence[Array | None]) -> Hashable | None:
    """Equal for operators whose output types are equal if their input types are; None where they depend on more.

    Inference reads `values` only where the schema says so.
    """
    if schema.foreign or schema.sub_nets or schema.handles:
        return None
    read: list[Hashable] = []
    for index in schema.value_inputs:
        value = values[index] if index < len(values) else None
        if value is None:
            read.append(None)
        elif value.size > _MAX_ELEMENTS or value.dtype.hasobject:
            return None
        else:
            read.append((value.dtype.str, value.shape, value.tobytes()))
    return node.form, tuple(read)


def content_form(value: Array | None) -> Hashable | None:
    """Equal for values that have the same consequences for inference: of weights, only the type counts.

    None for other large values, and for texts.
    """
    if value is None:
        return ()
    if value.nbytes < MIN_WEIGHT_BYTES and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    return (value.dtype.str, value.shape) if value.dtype.kind == "f" else None


@dataclass(slots=True, eq=False)
class Answer:
    """The types of an operator's outputs, and its cost, inferred on demand."""

    types: tuple[TensorType, ...]
    _cost: Cost | None = None

    @property
    def known_cost(self) -> Cost | None:
        """The cost, if somebody has asked for it."""
        return self._cost

    def cost(self, call: OperatorCall, schema: OpSchema) -> Cost:
        """The cost of `call`, which is the answered one or equals it."""
        if self._cost is None:
            self._cost = schema.cost(call, self.types)
        return self._cost


def known_answer(
    node: Node, schema: OpSchema, inputs: tuple[TensorType, ...], values: Sequence[Array | None]
) -> Answer | None:
    """The answer of an operator that reads such inputs, where an equal one was asked before, with its cost."""
    form = typing_form(node, schema, values)
    answer = None if form is None else _known.get((form, schema.infer, inputs))
    return None if answer is None or answer.known_cost is None else answer


def answer_of(call: OperatorCall, schema: OpSchema) -> Answer:
    """The answer of an operator, cached for equal calls in all stages from a file to a run. Raises what it raises."""
    form = typing_form(call.definition, schema, call.values)
    if form is None:
        return _asked(call, schema)
    key = form, schema.infer, call.inputs
    answer = _known.get(key)
    if answer is None:
        answer = _asked(call, schema)
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = answer
    return answer


def output_types(call: OperatorCall, schema: OpSchema) -> tuple[TensorType, ...]:
    """The types of the outputs of an operator whose types of inputs are known. Raises what its inference raises."""
    return answer_of(call, schema).types


def _asked(call: OperatorCall, schema: OpSchema) -> Answer:
    assert schema.infer is not None
    return Answer(tuple(schema.infer(call)))
