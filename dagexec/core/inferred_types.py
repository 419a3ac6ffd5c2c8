"""Types of outputs, remembered: equal operators on equal types of inputs give the same, and layers repeat."""

from __future__ import annotations

from collections.abc import Hashable

from dagexec.core.schema import OperatorCall, OpSchema, TensorType

_KEPT = 1 << 12  # results

_known: dict[Hashable, tuple[TensorType, ...]] = {}


def output_types(call: OperatorCall, schema: OpSchema) -> tuple[TensorType, ...]:
    """The types of the outputs of an operator whose types of inputs are known. Raises what its inference raises.

    Inference reads the names of blobs only where one is written in place, and values only where the schema says so.
    """
    assert schema.infer is not None
    node = call.definition
    if schema.value_inputs or schema.foreign or schema.sub_nets or not set(node.output).isdisjoint(node.input):
        return tuple(schema.infer(call))
    key = schema.infer, node.type, len(node.output), node.values, call.inputs
    found = _known.get(key)
    if found is None:
        found = tuple(schema.infer(call))
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = found
    return found
