"""Converters of quantized operators: QuantizeLinear and DequantizeLinear, QLinearConv, QLinearMatMul, and integers.

Scales and zero points that an operator of dagexec has as arguments must be constants of the model, and the zero point
of weights must be 0, as it is for weights that are quantized symmetrically.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from dagexec.core.proto import OperatorDef
from dagexec.frontend.onnx.convolution import window_arguments
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import CannotConvertError, Node, converts


def _same_shape(node: Node) -> None:
    """Note that the output has the input's sizes; blocks are refused."""
    if node.integer("block_size", 0):
        raise CannotConvertError("blocks with scales of their own are not supported")
    shape = node.shape(0)
    if shape is not None:
        node.scope.shapes.setdefault(node.outputs[0], shape)


def _given_type(node: Node, attribute: str) -> int | None:
    number = node.integer(attribute, 0)
    return element_type(number, node.label).number if number else None


@converts(QuantizeLinear=28)
def quantize_linear(node: Node) -> list[OperatorDef]:
    """QuantizeLinear."""
    _same_shape(node)
    inputs = [name for name in node.inputs if name]
    node.ignore("saturate")  # of types of 8 bits that are floats, which are not supported
    given = _given_type(node, "output_dtype")
    to = None if node.has_input(2) else given
    return [node.operator("QuantizeLinear", inputs, node.only_output(), axis=node.integer("axis", 1), to=to)]


@converts(DequantizeLinear=28)
def dequantize_linear(node: Node) -> list[OperatorDef]:
    """DequantizeLinear."""
    _same_shape(node)
    inputs = [name for name in node.inputs if name]
    return [node.operator("DequantizeLinear", inputs, node.only_output(), axis=node.integer("axis", 1))]


@converts(QLinearConv=10)
def qlinear_conv(node: Node) -> list[OperatorDef]:
    """QLinearConv as QuantConv: X, x_scale, x_zero, W, w_scale, w_zero, y_scale, y_zero, bias."""
    _check_weights(node, 3, 5)
    biased = node.has_input(8)
    inputs = [node.inputs[0], node.inputs[3], node.inputs[4], *([node.inputs[8]] if biased else [])]
    arguments: dict[str, ArgumentValue | None] = {**_filter_window(node, 3), **_requantization(node, 1, 2, 6, 7)}
    if biased:
        arguments["bias"] = 1
    return [node.operator("QuantConv", inputs, node.only_output(), **arguments)]


@converts(QLinearMatMul=21)
def qlinear_matmul(node: Node) -> list[OperatorDef]:
    """QLinearMatMul: A, a_scale, a_zero, B, b_scale, b_zero, y_scale, y_zero; of a constant matrix B, QuantFC."""
    b = node.value(3)
    if b is None or b.ndim != 2 or b.dtype != np.int8 or np.any(node.constant(5, "b_zero_point")):
        return _by_floats(node)
    turned = node.new_name("transposed")
    weights = np.ascontiguousarray(b.T)
    weights.flags.writeable = False
    node.scope.values[turned] = weights
    arguments = _requantization(node, 1, 2, 6, 7)
    inputs = [node.inputs[0], turned, node.inputs[4]]
    return [node.operator("QuantFC", inputs, node.only_output(), axis=-1, **arguments)]


def _by_floats(node: Node) -> list[OperatorDef]:
    """Dequantized, multiplied, quantized: what the integers stand for."""
    names = [node.new_name(suffix) for suffix in ("a", "b", "product")]
    operators = [
        node.operator("DequantizeLinear", node.inputs[start : start + 3], [name], axis=axis)
        for start, name, axis in ((0, names[0], -2), (3, names[1], -1))
    ]
    operators.append(node.operator("BatchMatMul", names[:2], [names[2]], broadcast=1))
    return [*operators, node.operator("QuantizeLinear", [names[2], *node.inputs[6:8]], node.only_output())]


@converts(ConvInteger=10)
def conv_integer(node: Node) -> list[OperatorDef]:
    """ConvInteger."""
    if node.has_input(3) and np.any(node.constant(3, "w_zero_point")):
        raise CannotConvertError("a w_zero_point other than 0 is not supported")
    zero = int(node.constant_scalar(2, "x_zero_point")) if node.has_input(2) else None
    window = _filter_window(node, 1)
    return [node.operator("ConvInteger", node.inputs[:2], node.only_output(), x_zero_point=zero, **window)]


def _filter_window(node: Node, index: int) -> dict[str, ArgumentValue | None]:
    """Window and group; a missing kernel_shape is taken from the filter, input `index`."""
    kernels = node.integers("kernel_shape")
    if kernels is None:
        kernels = list(node.full_shape(index, "it has no kernel_shape")[2:])
    return {**window_arguments(node, kernels), "group": node.integer("group", 1)}


def _check_weights(node: Node, weights: int, zero_point: int) -> None:
    """Raise CannotConvertError unless the weights are int8 with zero point 0."""
    zero: npt.NDArray[np.generic] = node.constant(zero_point, "w_zero_point")
    if zero.dtype != np.int8 or np.any(zero):
        raise CannotConvertError(f"weights of {zero.dtype} with a zero point are not supported; expected int8 and 0")
    node.constant(weights + 1, "w_scale")


def _requantization(
    node: Node, x_scale: int, x_zero: int, y_scale: int, y_zero: int
) -> dict[str, ArgumentValue | None]:
    """Scales and zero points of X and Y as arguments, from the inputs of these numbers."""
    return {
        "x_scale": float(node.constant_scalar(x_scale, "x_scale")),
        "x_zero_point": int(node.constant_scalar(x_zero, "x_zero_point")),
        "y_scale": float(node.constant_scalar(y_scale, "y_scale")),
        "y_zero_point": int(node.constant_scalar(y_zero, "y_zero_point")),
        "to": node.constant(y_zero, "y_zero_point").dtype.name,
    }
