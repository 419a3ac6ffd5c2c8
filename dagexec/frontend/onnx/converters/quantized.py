"""Converters of quantized operators: QuantizeLinear and DequantizeLinear, QLinearConv, QLinearMatMul, and integers.

Where scales and zero points are constants of the model, and weights less their zero point are int8, one operator of
dagexec has them as arguments. Everything else becomes exact sums of integers (ConvInteger, MatMulInteger), which other
operators scale and quantize.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import Node
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.converters.convolution import window_arguments
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import OnnxNode, converts

Array = npt.NDArray[np.generic]


def _same_shape(node: OnnxNode) -> None:
    """Note that the output has the input's sizes."""
    shape = node.shape(0)
    if shape is not None:
        node.scope.shapes.setdefault(node.outputs[0], shape)


def _given_type(node: OnnxNode, attribute: str) -> int | None:
    number = node.integer(attribute, 0)
    return element_type(number, node.label).number if number else None


def _placement(node: OnnxNode) -> dict[str, ArgumentValue | None]:
    """The argument that says which scale belongs to which element."""
    return {"axis": node.integer("axis", 1), "block_size": node.integer("block_size", 0) or None}


@converts(QuantizeLinear=28)
def quantize_linear(node: OnnxNode) -> list[Node]:
    """QuantizeLinear."""
    _same_shape(node)
    inputs = [name for name in node.inputs if name]
    kind, saturate = _given_type(node, "output_dtype"), node.integer("saturate", 1)
    arguments = {"to": None if node.has_input(2) else kind, "saturate": None if saturate else 0}
    return [node.operator("QuantizeLinear", inputs, node.only_output(), **arguments, **_placement(node))]


@converts(DequantizeLinear=28)
def dequantize_linear(node: OnnxNode) -> list[Node]:
    """DequantizeLinear."""
    _same_shape(node)
    inputs = [name for name in node.inputs if name]
    to, placement = _given_type(node, "output_dtype"), _placement(node)
    if to is None:
        return [node.operator("DequantizeLinear", inputs, node.only_output(), **placement)]
    compose = Composition(node)
    return compose.result("Cast", compose("DequantizeLinear", *inputs, **placement), to=to)


@converts(QLinearConv=10)
def qlinear_conv(node: OnnxNode) -> list[Node]:
    """QLinearConv: X, x_scale, x_zero, W, w_scale, w_zero, y_scale, y_zero, bias; as QuantConv where that serves."""
    window = _filter_window(node, 3)
    weights, scaling = symmetric_weights(node, 3, 5, 0), requantization(node, (1, 2), 4, (6, 7))
    if weights is None or scaling is None:
        return _conv_by_integers(node, window)
    compose = Composition(node)
    bias = [node.inputs[8]] if node.has_input(8) else []
    inputs = (node.inputs[0], _weights(compose, 3, weights), node.inputs[4], *bias)
    return compose.result("QuantConv", *inputs, bias=1 if bias else None, **window, **scaling)


def _conv_by_integers(node: OnnxNode, window: dict[str, ArgumentValue | None]) -> list[Node]:
    """Sums of ConvInteger, the bias, and the operators that make Y of them."""
    compose = Composition(node)
    spatial = node.rank(3, "its scales belong to filters") - 2
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = node.inputs[:8]
    sums = compose("ConvInteger", x, w, x_zero, w_zero, **window)
    if node.has_input(8):
        sums = compose("Add", sums, compose.along(node.inputs[8], spatial))
    multiplier = compose.multiplier(x_scale, compose.along(w_scale, spatial), y_scale)
    return requantized(compose, sums, multiplier, y_zero)


@converts(QLinearMatMul=21)
def qlinear_matmul(node: OnnxNode) -> list[Node]:
    """QLinearMatMul: A, a_scale, a_zero, B, b_scale, b_zero, y_scale, y_zero; of a constant matrix B, QuantFC."""
    weights, scaling = symmetric_weights(node, 3, 5, -1), requantization(node, (1, 2), 4, (6, 7))
    if weights is None or weights.ndim != 2 or scaling is None:
        return _matmul_by_integers(node)
    compose = Composition(node)
    turned = compose.constant(np.ascontiguousarray(weights.T))
    return compose.result("QuantFC", node.inputs[0], turned, node.inputs[4], axis=-1, **scaling)


def _matmul_by_integers(node: OnnxNode) -> list[Node]:
    """Sums of MatMulInteger, and the operators that make Y of them. A's and Y's parameters may be one for each row."""
    compose = Composition(node)
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.inputs
    sums = compose("MatMulInteger", a, b, a_zero, b_zero)
    multiplier = compose.multiplier(compose.along(a_scale, 1), b_scale, compose.along(y_scale, 1))
    return requantized(compose, sums, multiplier, y_zero, axis=-2)


def requantized(
    compose: Composition, sums: str, multiplier: str, zero_point: str, axis: int | None = None
) -> list[Node]:
    """The integers of Y: sums times `multiplier`, rounded, and the zero point."""
    values = compose("Mul", compose("Cast", sums, to=FLOAT32.number), multiplier)
    shape = compose.node.shape_of(zero_point) or ()
    unit = compose.constant(np.ones([size or 1 for size in shape], np.float32))
    return compose.result("QuantizeLinear", values, unit, *([zero_point] if zero_point else []), axis=axis)


def scaled_product(
    compose: Composition, operands: tuple[int, int], scales: tuple[int, int], zero_points: tuple[int, int]
) -> str:
    """The product of two tensors of integers, times their scales, as floats; from the inputs of these numbers."""
    node = compose.node
    a, b = (node.inputs[index] for index in operands)
    zeros = given_zero_points(compose, [node.inputs[index] if node.has_input(index) else "" for index in zero_points])
    sums = compose("MatMulInteger", a, b, *zeros)
    multiplier = compose.multiplier(*(node.inputs[index] for index in scales))
    return compose("Mul", compose("Cast", sums, to=FLOAT32.number), multiplier)


def given_zero_points(compose: Composition, names: list[str]) -> list[str]:
    """The zero points as inputs of a product: 0 for one that is missing before another, none at the end."""
    while names and not names[-1]:
        names.pop()
    return [name or compose.constant(np.zeros((), np.uint8)) for name in names]


@converts(ConvInteger=10)
def conv_integer(node: OnnxNode) -> list[Node]:
    """ConvInteger."""
    window = _filter_window(node, 1)
    compose = Composition(node)
    return compose.result("ConvInteger", *integer_operands(compose), **window)


@converts(MatMulInteger=10)
def matmul_integer(node: OnnxNode) -> list[Node]:
    """MatMulInteger."""
    compose = Composition(node)
    return compose.result("MatMulInteger", *integer_operands(compose))


def integer_operands(compose: Composition) -> list[str]:
    """Both operands and their zero points, the first of which is 0 where only the second is given."""
    node = compose.node
    return [*node.inputs[:2], *given_zero_points(compose, list(node.inputs[2:4]))]


def _filter_window(node: OnnxNode, index: int) -> dict[str, ArgumentValue | None]:
    """Window and group; a missing kernel_shape is taken from the filter, input `index`."""
    kernels = node.integers("kernel_shape")
    if kernels is None:
        kernels = list(node.full_shape(index, "it has no kernel_shape")[2:])
    return {**window_arguments(node, kernels), "group": node.integer("group", 1)}


def symmetric_weights(node: OnnxNode, weights: int, zero_point: int, axis: int) -> Array | None:
    """Constant weights less their zero points, which belong to `axis`; None unless int8 holds the differences."""
    values, zero = node.value(weights), node.value(zero_point)
    if values is None or (node.has_input(zero_point) and zero is None):
        return None
    zero = np.zeros((), np.int8) if zero is None else zero
    if values.dtype == zero.dtype == np.int8 and not np.any(zero):
        return values
    if not is_bytes(values, zero) or not -values.ndim <= axis < values.ndim or zero.size not in (1, values.shape[axis]):
        return None
    view = [1] * values.ndim
    view[axis] = zero.size
    differences = values.astype(np.int16) - zero.astype(np.int16).reshape(view)
    narrow = differences.astype(np.int8)
    return narrow if np.array_equal(narrow, differences) else None


def _weights(compose: Composition, index: int, weights: Array) -> str:
    """The tensor of `weights`: input `index`, unless its zero points changed the values."""
    return compose.node.inputs[index] if weights is compose.node.value(index) else compose.constant(weights)


def requantization(
    node: OnnxNode, x: tuple[int, int], w_scale: int, y: tuple[int, int] | None, factor: float = 1.0
) -> dict[str, ArgumentValue | None] | None:
    """Scales and zero points of X and Y as arguments, from the inputs of these numbers; None unless they can be.

    Without `y` the output are floats. X's scale is multiplied by `factor`.
    """
    scale, pairs = node.value(w_scale), [_pair(node, pair) for pair in (x, y) if pair is not None]
    if scale is None or scale.dtype != np.float32 or scale.ndim > 1 or factor <= 0:
        return None
    if any(pair is None for pair in pairs):
        return None
    (x_scale, x_zero), *rest = (pair for pair in pairs if pair is not None)
    arguments: dict[str, ArgumentValue | None] = {
        "x_scale": float(np.float32(x_scale * factor)),
        "x_zero_point": int(x_zero),
    }
    for y_scale, y_zero in rest:
        arguments |= {"y_scale": float(y_scale), "y_zero_point": int(y_zero), "to": y_zero.dtype.name}
    return arguments


def _pair(node: OnnxNode, pair: tuple[int, int]) -> tuple[Any, Any] | None:
    """One scale in float32 and one zero point of 8 bits, constants; None if they are anything else."""
    scale, zero = (node.value(index) for index in pair)
    if scale is None or zero is None or not scale.size == zero.size == 1:
        return None
    if scale.dtype != np.float32 or not is_bytes(zero):
        return None
    return scale.reshape(-1)[0], zero.reshape(-1)[0]


def is_bytes(*values: Array | None) -> bool:
    """True when all are arrays of uint8 or int8."""
    return all(value is not None and value.dtype in (np.uint8, np.int8) for value in values)
