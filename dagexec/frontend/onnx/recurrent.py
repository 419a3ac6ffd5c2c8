"""Converters of recurrent layers."""

from __future__ import annotations

from dagexec.core.proto import OperatorDef
from dagexec.frontend.onnx.node import CannotConvertError, Node, converts

_SEQUENCE_LENGTHS, _INITIAL_H, _INITIAL_C, _PEEPHOLES = 4, 5, 6, 7
_DEFAULT_ACTIVATIONS = (b"Sigmoid", b"Tanh", b"Tanh")


@converts("LSTM")
def lstm(node: Node) -> list[OperatorDef]:
    """LSTM with the activations of its definition, whole sequences, and a state before the first step or none."""
    _require_plain(node)
    biased, has_state = node.has_input(3), node.has_input(_INITIAL_H)
    if has_state != node.has_input(_INITIAL_C):
        raise CannotConvertError("initial_h and initial_c must be given together")
    inputs = list(node.inputs[: 4 if biased else 3])
    if has_state:
        inputs += node.inputs[_INITIAL_H : _INITIAL_C + 1]
    count = max((index + 1 for index in range(3) if node.is_read(index)), default=1)
    names = ("sequence", "hidden", "cell")
    outputs = [
        node.outputs[index] if index < len(node.outputs) and node.outputs[index] else node.new_name(names[index])
        for index in range(count)
    ]
    arguments = {"bias": 1 if biased else None, "initial_state": 1 if has_state else None}
    hidden = node.integer("hidden_size", 0) or None
    direction = node.text("direction", "forward")
    return [node.operator("LSTM", inputs, outputs, direction=direction, hidden_size=hidden, **arguments)]


def _require_plain(node: Node) -> None:
    """Raise CannotConvertError for what the operator does not have."""
    for index, what in ((_SEQUENCE_LENGTHS, "sequence_lens"), (_PEEPHOLES, "peepholes")):
        if node.has_input(index):
            raise CannotConvertError(f"{what} are not supported")
    if node.integer("layout", 0):
        raise CannotConvertError("layout=1 (batch first) is not supported")
    if node.integer("input_forget", 0) or "clip" in node:
        raise CannotConvertError("input_forget and clip are not supported")
    activations = node.texts("activations") or []
    if any(name != _DEFAULT_ACTIVATIONS[position % 3] for position, name in enumerate(activations)):
        raise CannotConvertError(f"activations other than Sigmoid, Tanh, Tanh are not supported, found {activations}")
