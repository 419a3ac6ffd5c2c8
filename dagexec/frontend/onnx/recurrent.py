"""Converters of recurrent layers."""

from __future__ import annotations

from dagexec.core.proto import OperatorDef
from dagexec.frontend.onnx.node import CannotConvertError, Node, converts

_BIAS, _SEQUENCE_LENGTHS, _INITIAL_H, _INITIAL_C, _PEEPHOLES = 3, 4, 5, 6, 7


@converts(LSTM=22)
def lstm(node: Node) -> list[OperatorDef]:
    """LSTM with the activations of its definition, and a state before the first step or none."""
    if node.has_input(_PEEPHOLES):
        raise CannotConvertError("peepholes are not supported")
    if node.integer("input_forget", 0):
        raise CannotConvertError("input_forget is not supported")
    if node.has_input(_INITIAL_H) != node.has_input(_INITIAL_C):
        raise CannotConvertError("initial_h and initial_c must be given together")
    return [_layer(node, (b"Sigmoid", b"Tanh", b"Tanh"), ("sequence", "hidden", "cell"))]


@converts(GRU=22)
def gru(node: Node) -> list[OperatorDef]:
    """GRU with the activations of its definition."""
    linear = node.integer("linear_before_reset", 0) or None
    return [_layer(node, (b"Sigmoid", b"Tanh"), ("sequence", "hidden"), linear_before_reset=linear)]


def _layer(
    node: Node, activations: tuple[bytes, ...], outputs: tuple[str, ...], **arguments: int | None
) -> OperatorDef:
    """The operator of the node's type. Raises CannotConvertError for what it does not have."""
    if node.integer("layout", 0):
        raise CannotConvertError("layout=1 (batch first) is not supported")
    if "clip" in node:
        raise CannotConvertError("clip is not supported")
    node.ignore("output_sequence")  # before opset 7: whether the first output may be left out
    given = node.texts("activations") or []
    if any(name != activations[position % len(activations)] for position, name in enumerate(given)):
        names = ", ".join(name.decode() for name in activations)
        raise CannotConvertError(f"activations other than {names} are not supported, found {given}")
    count = max((index + 1 for index in range(len(outputs)) if node.is_read(index)), default=1)
    return node.operator(
        node.op_type,
        [name for name in node.inputs if name],
        [
            node.outputs[index] if index < len(node.outputs) and node.outputs[index] else node.new_name(outputs[index])
            for index in range(count)
        ],
        direction=node.text("direction", "forward"),
        hidden_size=node.integer("hidden_size", 0) or None,
        bias=1 if node.has_input(_BIAS) else None,
        sequence_lengths=1 if node.has_input(_SEQUENCE_LENGTHS) else None,
        initial_state=1 if node.has_input(_INITIAL_H) else None,
        **arguments,
    )
