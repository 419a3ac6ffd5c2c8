"""Types of outputs, remembered: equal operators on equal types of inputs give the same, and layers repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.node import Node
from dagexec.core.schema import OperatorCall, OpSchema, TensorType

Array = npt.NDArray[Any]

_KEPT = 1 << 12  # results
_MAX_ELEMENTS = 1 << 6
"""Of values that decide types: sizes, axes and pads are fewer."""

_known: dict[Hashable, tuple[TensorType, ...]] = {}


def typing_form(node: Node, schema: OpSchema, values: Sequence[Array | None]) -> Hashable | None:
    """Equal for operators whose types of outputs are equal if those of their inputs are; None where more has a part.

    Inference reads the names of blobs only where one is written in place, and `values` only where the schema says so.
    """
    if schema.foreign or schema.sub_nets or not set(node.output).isdisjoint(node.input):
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
    return node.type, len(node.output), node.values, tuple(read)


def output_types(call: OperatorCall, schema: OpSchema) -> tuple[TensorType, ...]:
    """The types of the outputs of an operator whose types of inputs are known. Raises what its inference raises."""
    assert schema.infer is not None
    form = typing_form(call.definition, schema, call.values)
    if form is None:
        return tuple(schema.infer(call))
    key = form, schema.infer, call.inputs
    found = _known.get(key)
    if found is None:
        found = tuple(schema.infer(call))
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = found
    return found
