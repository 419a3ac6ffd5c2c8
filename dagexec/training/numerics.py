"""Finding the operator that makes the first NaN of a net."""

from __future__ import annotations

from dagexec.core.arguments import make_argument
from dagexec.core.node import operator_label
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import schema_of


def with_nan_checks(net: NetDef) -> NetDef:
    """`net` with a NanCheck behind every operator, for each of its outputs that is a tensor.

    A run then ends with an OperatorError, whose cause is a NonFiniteError that names the operator and the blob, before
    anything reads the blob. What is fed is checked before the first operator.
    Raises UnsupportedOperatorError for an operator that is not registered.
    """
    checked = NetDef()
    checked.CopyFrom(net)
    del checked.op[:]
    written: set[str] = set()
    for index, definition in enumerate(net.op):
        schema = schema_of(definition.type)
        handles = {definition.input[place] for place in schema.handles if place < len(definition.input)}
        for name in dict.fromkeys(definition.input):
            if name not in written and name not in handles:
                checked.op.append(_check(name, "", definition))
                written.add(name)
        checked.op.append(definition)
        written.update(definition.output)
        if schema.infer is not None and definition.type != "NanCheck":
            label = operator_label(definition, index)
            checked.op.extend(_check(name, label, definition) for name in definition.output)
    return checked


def _check(blob: str, producer: str, placed_as: OperatorDef) -> OperatorDef:
    made = OperatorDef(type="NanCheck", input=[blob], output=[blob])
    if producer:
        made.arg.append(make_argument("producer", producer))
    if placed_as.HasField("device_option"):
        made.device_option.CopyFrom(placed_as.device_option)
    return made
