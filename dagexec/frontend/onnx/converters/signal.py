"""Converters of Fourier transforms and windows."""

from __future__ import annotations

import onnx

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import OnnxNode, converts


@converts(DFT=20)
def dft(node: OnnxNode) -> list[Node]:
    """The axis is an attribute before opset 20, an input from then on."""
    arguments: dict[str, ArgumentValue | None] = {
        "inverse": node.integer("inverse", 0),
        "onesided": node.integer("onesided", 0),
    }
    inputs = [node.inputs[0]]
    for index, name in ((1, "length"), (2, "axis")):
        if not node.has_input(index):
            continue
        if node.value(index) is None:
            inputs.append(node.inputs[index])
            arguments[f"{name}_input"] = 1
        else:
            arguments[name] = int(node.constant_scalar(index, name))
    if node.opset < 20:
        arguments["axis"] = node.integer("axis", 1)
    return [node.operator("DFT", inputs, node.only_output(), **arguments)]


@converts(STFT=17)
def stft(node: OnnxNode) -> list[Node]:
    """Frames times a window, or not."""
    inputs = [name for name in node.inputs if name]
    flags = {"window": int(node.has_input(2)), "length_input": int(node.has_input(3))}
    return [node.operator("STFT", inputs, node.only_output(), onesided=node.integer("onesided", 1), **flags)]


@converts(HannWindow=17, HammingWindow=17, BlackmanWindow=17)
def window(node: OnnxNode) -> list[Node]:
    """Cosines of a size that is an input."""
    return node.unary(node.op_type, periodic=node.integer("periodic", 1), dtype=_dtype(node))


@converts(MelWeightMatrix=17)
def mel_weights(node: OnnxNode) -> list[Node]:
    """The matrix that five numbers describe."""
    return [node.operator("MelWeightMatrix", node.inputs, node.only_output(), dtype=_dtype(node))]


def _dtype(node: OnnxNode) -> int:
    return element_type(node.integer("output_datatype", onnx.TensorProto.FLOAT), node.label).number
