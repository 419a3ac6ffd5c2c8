"""Values that shapes depend on and that follow from shapes: what `Shape` gives, and what is computed from it.

Inference computes them by the operators themselves, on the host, so that it knows the types behind a computed Reshape
or Expand. Models compute the same shapes over and over, in each layer, and inference sees them in every pass: results
are kept by operator type, arguments and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Values
from dagexec.core.evaluation import evaluated
from dagexec.core.node import Node
from dagexec.core.purity import is_pure
from dagexec.core.schema import OperatorCall, OpSchema, TensorType

Array = npt.NDArray[Any]

MAX_ELEMENTS = 1 << 12
"""Of each input and output; what describes tensors is smaller."""

MAX_SECONDS = 1e-3
"""Nominal time (`Cost.seconds`) of one operator."""

_KEPT = 1 << 11  # results

_Value = tuple[str, tuple[int, ...], bytes]  # dtype, shape and elements


def asked_operators(
    definitions: Sequence[Node], schemas: Sequence[OpSchema], *, decide: bool = False
) -> frozenset[int]:
    """The operators on whose results the output shapes of others depend, or if they `decide` what nets inside do."""
    found: set[int] = set()
    names: set[str] = set()
    for index in reversed(range(len(definitions))):
        definition, schema = definitions[index], schemas[index]
        if schema.value_inputs:
            names.update(definition.input[i] for i in schema.values_read(definition))
        if decide:
            names.update(definition.input[i] for i in schema.decided_by)
        if names and not names.isdisjoint(definition.output):
            found.add(index)
            if schema.from_types is None:
                names.update(definition.input)
    return frozenset(found)


def results_of(call: OperatorCall, schema: OpSchema, types: Sequence[TensorType]) -> Sequence[Array] | None:
    """The outputs, which have these `types`, of an operator for the values and types in `call`.

    None where values are not known or not small, and for operators that do more than compute or take long.
    """
    if any(kind.elements > MAX_ELEMENTS for kind in types):
        return None
    if schema.from_types is not None:
        return schema.from_types(call)
    values = [_frozen(value) for value in call.values]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or schema.sub_nets or not is_pure(call.definition):
        return None
    if schema.cost(call, types).seconds > MAX_SECONDS:
        return None
    return _computed(call.definition.type, call.definition.values, len(call.definition.output), tuple(known))


def _frozen(array: Array | None) -> _Value | None:
    """A value by which results are kept; None where it is not known, not small, or not of numbers."""
    if array is None or array.size > MAX_ELEMENTS or array.dtype.kind not in "biuf":
        return None
    return array.dtype.str, array.shape, array.tobytes()


@lru_cache(_KEPT)
def _computed(op_type: str, arguments: Values, outputs: int, values: tuple[_Value, ...]) -> Sequence[Array] | None:
    """What an operator gives; None when it raises an error, which a run tells of."""
    inputs = {
        str(index): np.frombuffer(elements, dtype).reshape(shape)
        for index, (dtype, shape, elements) in enumerate(values)
    }
    try:
        found = evaluated(Node(op_type, inputs, [f"o{index}" for index in range(outputs)], arguments), inputs)
    except Exception:  # whatever a step raises
        return None
    return list(map(_constant, found))


def _constant(array: Array) -> Array:
    array.flags.writeable = False
    return array
