"""Converters of recurrent layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.node import OnnxNode, converts

_BIAS, _SEQUENCE_LENGTHS, _INITIAL_H, _INITIAL_C, _PEEPHOLES = 3, 4, 5, 6, 7
_LSTM_FUNCTIONS = ("Sigmoid", "Tanh", "Tanh")
_BATCH_FIRST = {"X": [1, 0, 2], "state": [1, 0, 2], "Y": [2, 0, 1, 3]}
"""Axes of transposes: X and initial states to steps first, and states and Y back."""


@converts(RNN=22)
def rnn(node: OnnxNode) -> list[Node]:
    """A simple recurrent layer."""
    return _layer(node, "RNN", "RNN", ("Tanh",), 1)


@converts(LSTM=22)
def lstm(node: OnnxNode) -> list[Node]:
    """LSTM, with peepholes or not."""
    peepholes, coupled = node.has_input(_PEEPHOLES), node.integer("input_forget", 0)
    special: dict[str, ArgumentValue | None] = {}
    if peepholes or coupled:
        special = {"peepholes": int(peepholes), "input_forget": coupled}
    return _layer(node, "LSTM", "GeneralLSTM", _LSTM_FUNCTIONS, 2, special)


def quantized_lstm(node: OnnxNode, inputs: Sequence[str]) -> list[Node]:
    """An LSTM with weights of int8: its `inputs`, and behind them the scales of W and R. See `is_plain_lstm`."""
    layer = copy.copy(node)
    layer.inputs = tuple(inputs)
    return _layer(layer, "DynamicQuantLSTM", "", _LSTM_FUNCTIONS, 2)


def is_plain_lstm(node: OnnxNode) -> bool:
    """True for an LSTM without peepholes and coupled gates, with its own functions."""
    return not (node.has_input(_PEEPHOLES) or node.integer("input_forget", 0) or _functions(node, _LSTM_FUNCTIONS))


@converts(GRU=22)
def gru(node: OnnxNode) -> list[Node]:
    """GRU."""
    linear = node.integer("linear_before_reset", 0) or None
    return _layer(node, "GRU", "GeneralGRU", ("Sigmoid", "Tanh"), 1, linear_before_reset=linear)


def _layer(
    node: OnnxNode,
    plain: str,
    general: str,
    functions: Sequence[str],
    states: int,
    special: Mapping[str, ArgumentValue | None] | None = None,
    **arguments: ArgumentValue | None,
) -> list[Node]:
    """The operator `plain`, or `general` where something is `special`, between transposes where the batch is first."""
    node.ignore("output_sequence")  # before opset 7: whether the first output may be left out
    batch_first = bool(node.integer("layout", 0))
    added = dict(special or {}) | _functions(node, functions)
    operators, inputs = _inputs(node, states, batch_first=batch_first)
    outputs, after = _outputs(node, 1 + states, batch_first=batch_first)
    layer = node.operator(
        general if added else plain,
        inputs,
        outputs,
        direction=node.text("direction", "forward"),
        hidden_size=node.integer("hidden_size", 0) or None,
        bias=1 if node.has_input(_BIAS) else None,
        sequence_lengths=1 if node.has_input(_SEQUENCE_LENGTHS) else None,
        initial_state=1 if node.has_input(_INITIAL_H) or node.has_input(_INITIAL_C) else None,
        **arguments,
        **added,
    )
    return [*operators, layer, *after]


def _functions(node: OnnxNode, defaults: Sequence[str]) -> dict[str, ArgumentValue | None]:
    """Activations, their parameters and the clip of sums, where they differ from the layer's defaults."""
    names = [name.decode(errors="replace") for name in node.texts("activations") or []]
    alpha, beta = node.numbers("activation_alpha"), node.numbers("activation_beta")
    clip = node.number("clip", 0.0)
    if all(name.lower() == defaults[place % len(defaults)].lower() for place, name in enumerate(names)) and not clip:
        return {}
    return {"activations": names or None, "activation_alpha": alpha, "activation_beta": beta, "clip": clip or None}


def _inputs(node: OnnxNode, states: int, *, batch_first: bool) -> tuple[list[Node], list[str]]:
    """The inputs, and operators that prepare them: steps first, and both states of an LSTM or none."""
    operators: list[Node] = []
    names = list(node.inputs)
    if states > 1 and node.has_input(_INITIAL_H) != node.has_input(_INITIAL_C):
        names += [""] * (_INITIAL_C + 1 - len(names))
        present, absent = (_INITIAL_H, _INITIAL_C) if node.has_input(_INITIAL_H) else (_INITIAL_C, _INITIAL_H)
        names[absent] = node.new_name("zero_state")
        operators.append(node.operator("Sub", [names[present], names[present]], [names[absent]]))
    if batch_first:
        for index, axes in ((0, "X"), (_INITIAL_H, "state"), (_INITIAL_C, "state")):
            if index < len(names) and names[index]:
                turned = node.new_name(f"steps_first_{index}")
                operators.append(node.operator("Transpose", [names[index]], [turned], axes=_BATCH_FIRST[axes]))
                names[index] = turned
    return operators, [name for name in names if name]


def _outputs(node: OnnxNode, most: int, *, batch_first: bool) -> tuple[list[str], list[Node]]:
    """Names for the outputs of the layer, and operators that transpose those that are read."""
    count = max((index + 1 for index in range(most) if node.is_read(index)), default=1)
    outputs = [
        node.outputs[index] if index < len(node.outputs) and node.outputs[index] else node.new_name(f"output_{index}")
        for index in range(count)
    ]
    if not batch_first:
        return outputs, []
    layer_outputs = [node.new_name(f"steps_first_output_{index}") for index in range(count)]
    return layer_outputs, [
        node.operator("Transpose", [source], [target], axes=_BATCH_FIRST["state" if index else "Y"])
        for index, (source, target) in enumerate(zip(layer_outputs, outputs, strict=True))
    ]
