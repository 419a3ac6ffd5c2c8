"""Constants that a model computes by nodes: pads, bounds, axes and shapes are known when it is loaded.

Small results are computed at once, by the operators that nodes become, so that converters see values. Weights that a
model computes are left to its init net, and operators that fail to the run, which reports the failure.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.evaluation import evaluated
from dagexec.core.inferred_types import output_types
from dagexec.core.node import Node
from dagexec.core.purity import is_pure
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.shape_values import MAX_ELEMENTS, results_of
from dagexec.frontend.onnx.node import Array, Scope

MAX_FLOATS = 1 << 6
"""Limit of an output: scales and bounds have fewer, and biases and weights are left to the init net."""


def fold(operators: Sequence[Node], scope: Scope) -> bool:
    """Compute operators of known values, or of shapes alone, and note the results in `scope`; False if that fails."""
    computed: dict[str, Array] = {}
    for operator in operators:
        results = _computed(operator, scope, computed)
        if results is None:
            return False
        computed.update(zip(operator.output, results, strict=True))
    scope.values.update(computed)
    return bool(computed)


def _computed(operator: Node, scope: Scope, computed: dict[str, Array]) -> list[Array] | None:
    """The outputs of an operator; None when they are not known, too large, or a run would raise an error."""
    values = [computed[name] if name in computed else scope.values.get(name) for name in operator.input]
    schema = schema_of(operator.type)
    if schema.infer is None or not is_pure(operator):
        return None
    try:
        call = _call(operator, schema, values, scope)
        if call is None or not schema.can_infer(operator):
            return None
        kinds = output_types(call, schema)
        if not all(map(_is_small, kinds)):
            return None
        if schema.from_types is None and any(value.dtype.kind not in "biuf" for value in values if value is not None):
            return [_constant(array) for array in evaluated(operator, ChainMap(computed, scope.values))]
        results = results_of(call, schema, kinds)
        return None if results is None else [_constant(array.copy()) for array in results]  # others have these
    except Exception:  # whatever a step raises: the run names its operator
        return None


def _is_small(kind: TensorType) -> bool:
    return kind.elements <= min(MAX_ELEMENTS, MAX_FLOATS if kind.meta.is_float else MAX_ELEMENTS)


def _call(operator: Node, schema: OpSchema, values: Sequence[Array | None], scope: Scope) -> OperatorCall | None:
    """The call for inference; None when an input is unknown or large, unless the operator reads only shapes."""
    kinds = []
    for name, value in zip(operator.input, values, strict=True):
        if value is not None and (value.size <= MAX_ELEMENTS or schema.from_types is not None):
            kinds.append(TensorType(tuple(value.shape), from_numpy(value.dtype)))
            continue
        shape = scope.certain_shape(name) if schema.from_types is not None else None
        if shape is None:
            return None
        kinds.append(TensorType(shape, FLOAT32))
    return OperatorCall(operator, operator.arguments(), tuple(kinds), tuple(values), operator.type)


def _constant(array: Array) -> Array:
    array.flags.writeable = False
    return array
