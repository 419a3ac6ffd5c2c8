"""Gradients of layers in two operators: that of the input, which the layer before waits for, and those of its weights.

A chain of layers has a chain of gradient operators, which several workers would compute one after the other. Apart,
one worker continues through the gradients of the inputs, and others take those of the weights and the updates behind
them. What is computed stays the same, to the byte.
"""

from __future__ import annotations

from dagexec.core.arguments import make_argument
from dagexec.core.node import arguments_of, operator_label
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.ops.families.conv.convolution import SPATIAL_AXES
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, INPUT
from dagexec.ops.families.product.gradient import WEIGHTS

_WANTED = "wanted"

_WEIGHTS_OF = {f"{kind}{suffix}Gradient": FILTER for kind in ("Conv", "ConvTranspose") for suffix in SPATIAL_AXES} | {
    "FCGradient": WEIGHTS,
    "FCTransposedGradient": WEIGHTS,
}
"""What `wanted` calls the gradient of the weights, by the type of the operator."""


def split_gradients(net: NetDef) -> NetDef:
    """`net` with two operators for each that gives gradients of a layer's input and of its weights, the input's first.

    The layers are convolutions, transposed convolutions and fully connected ones. `net` itself stays as it is.
    """
    found = NetDef()
    found.CopyFrom(net)
    del found.op[:]
    for index, definition in enumerate(net.op):
        found.op.extend(_split(definition, index))
    return found


def _split(definition: OperatorDef, index: int) -> list[OperatorDef]:
    names = _gradients_of(definition, index)
    overwrites = set(definition.input) & set(definition.output)
    if INPUT not in names or len(names) < 2 or len(names) != len(definition.output) or overwrites:
        return [definition]
    outputs = dict(zip(names, definition.output, strict=True))
    others = {name: blob for name, blob in outputs.items() if name != INPUT}
    return [_part(definition, {INPUT: outputs[INPUT]}), _part(definition, others)]


def _gradients_of(definition: OperatorDef, index: int) -> list[str]:
    """What the outputs are the gradients of; nothing for operators that are none of a layer."""
    if definition.type not in _WEIGHTS_OF:
        return []
    arguments = arguments_of(definition, operator_label(definition, index))
    if _WANTED in arguments:
        return list(arguments.strings(_WANTED))
    names = [_WEIGHTS_OF[definition.type], BIAS, INPUT]
    if arguments.bool("no_bias"):
        names.remove(BIAS)
    return names[: len(definition.output)]


def _part(definition: OperatorDef, outputs: dict[str, str]) -> OperatorDef:
    made = OperatorDef()
    made.CopyFrom(definition)
    del made.output[:], made.arg[:]
    made.output.extend(outputs.values())
    made.arg.extend(argument for argument in definition.arg if argument.name != _WANTED)
    made.arg.append(make_argument(_WANTED, list(outputs)))
    return made
