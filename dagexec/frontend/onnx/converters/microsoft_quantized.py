"""Converters of onnxruntime's own operators (com.microsoft) on integers.

`onnxruntime.quantization` writes them: QLinear* and QGemm for static quantization in QOperator format, the others for
dynamic quantization. Products are sums of integers that are scaled, as in `quantized`; a QLinear operator of another
kind is the operator on floats, between DequantizeLinear and QuantizeLinear.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.converters.convolution import window_arguments
from dagexec.frontend.onnx.converters.quantized import (
    Array,
    given_zero_points,
    is_bytes,
    requantization,
    requantized,
    scaled_product,
    symmetric_weights,
)
from dagexec.frontend.onnx.converters.recurrent import is_plain_lstm, quantized_lstm
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts_microsoft


@converts_microsoft("QuantizeLinear", "DequantizeLinear", inputs="x scale zero_point?")
def linear(node: OnnxNode) -> list[Node]:
    """As the operators of the default domain."""
    return node.standard(node.op_type, node.inputs, node.outputs)


@converts_microsoft("MatMulIntegerToFloat", inputs="A B a_scale b_scale a_zero_point? b_zero_point? bias?")
def matmul_integer_to_float(node: OnnxNode) -> list[Node]:
    """The product of integers times the scales, plus a bias."""
    compose = Composition(node)
    return _biased(compose, scaled_product(compose, (0, 1), (2, 3), (4, 5)), 6)


@converts_microsoft("DynamicQuantizeMatMul", inputs="A B b_scale b_zero_point? bias?")
def dynamic_quantize_matmul(node: OnnxNode) -> list[Node]:
    """As DynamicQuantizeLinear and MatMulIntegerToFloat."""
    compose = Composition(node)
    integers, scale, zero = (node.new_name(what) for what in ("integers", "scale", "zero_point"))
    compose.operators.append(node.operator("DynamicQuantizeLinear", node.inputs[:1], [integers, scale, zero]))
    sums = compose("MatMulInteger", integers, node.inputs[1], *given_zero_points(compose, [zero, _optional(node, 3)]))
    multiplier = compose.multiplier(scale, node.inputs[2])
    return _biased(compose, compose("Mul", compose("Cast", sums, to=FLOAT32.number), multiplier), 4)


def _optional(node: OnnxNode, index: int) -> str:
    return node.inputs[index] if node.has_input(index) else ""


def _biased(compose: Composition, values: str, bias: int) -> list[Node]:
    """All operators, and the sum of `values` and input `bias`, if there is one."""
    if not compose.node.has_input(bias):
        return compose.finish()
    return compose.result("Add", values, compose.node.inputs[bias])


@converts_microsoft("QGemm", inputs="A a_scale a_zero_point B b_scale b_zero_point C? y_scale? y_zero_point?")
def qgemm(node: OnnxNode) -> list[Node]:
    """alpha A B + C of integers, C in units of alpha * a_scale * b_scale; integers where there is a y_scale."""
    alpha, turned = node.number("alpha", 1.0), [node.integer(f"trans{letter}", 0) for letter in "AB"]
    weights = symmetric_weights(node, 3, 5, 0 if turned[1] else 1)
    scaling = requantization(node, (1, 2), 4, (7, 8) if node.has_input(7) else None, alpha)
    bias = node.value(6)
    if weights is None or weights.ndim != 2 or scaling is None or turned[0]:
        return _gemm_by_integers(node, alpha, turned)
    rows = weights if turned[1] else weights.T
    if node.has_input(6) and (bias is None or bias.shape not in ((len(rows),), (1, len(rows)))):
        return _gemm_by_integers(node, alpha, turned)
    compose = Composition(node)
    inputs = [node.inputs[0], compose.constant(np.ascontiguousarray(rows)), node.inputs[4]]
    if bias is None:
        return compose.result("QuantFC", *inputs, **scaling)
    return compose.result("QuantFC", *inputs, compose.constant(bias.reshape(-1)), bias=1, **scaling)


def _gemm_by_integers(node: OnnxNode, alpha: float, turned: list[int]) -> list[Node]:
    """Sums of MatMulInteger and C, and the operators that make Y of them."""
    compose = Composition(node)
    a, b = (
        compose("Transpose", node.inputs[index], axes=[1, 0]) if turn else node.inputs[index]
        for index, turn in ((0, turned[0]), (3, turned[1]))
    )
    sums = compose("MatMulInteger", a, b, node.inputs[2], node.inputs[5])
    if node.has_input(6):
        sums = compose("Add", sums, node.inputs[6])
    multiplier = compose.multiplier(node.inputs[1], node.inputs[4], _optional(node, 7))
    if alpha != 1:
        multiplier = compose("Scale", multiplier, scale=alpha)
    if node.has_input(7):
        return requantized(compose, sums, multiplier, _optional(node, 8))
    return compose.result("Mul", compose("Cast", sums, to=FLOAT32.number), multiplier)


def _real(compose: Composition, first: int) -> str:
    """The floats that integers stand for: input `first`, with scale and zero point in the inputs after it."""
    node = compose.node
    return compose("DequantizeLinear", *[name for name in node.inputs[first : first + 3] if name])


def _quantized(compose: Composition, values: str, scale: int) -> list[Node]:
    """All operators, and the integers of Y with its scale in input `scale` and its zero point after that."""
    return compose.result("QuantizeLinear", values, *[name for name in compose.node.inputs[scale : scale + 2] if name])


@converts_microsoft("QLinearAdd", inputs="A A_scale A_zero_point? B B_scale B_zero_point? C_scale C_zero_point?")
def qlinear_add(node: OnnxNode) -> list[Node]:
    """The sum; on integers where their shapes are known to be equal, and scales and zero points are constants."""
    compose = Composition(node)
    shape, addend = node.shape(0), requantization(node, (4, 5), 4, None)
    scaling = requantization(node, (1, 2), 1, (6, 7))
    if shape is None or None in shape or shape != node.shape(3) or scaling is None or addend is None:
        return _quantized(compose, compose("Add", _real(compose, 0), _real(compose, 3)), 6)
    added = {"add_scale": addend["x_scale"], "add_zero_point": addend["x_zero_point"]}
    return compose.result("QuantAdd", node.inputs[0], node.inputs[3], post_ops=["add:1"], **scaling, **added)


@converts_microsoft("QLinearMul", inputs="A A_scale A_zero_point? B B_scale B_zero_point? C_scale C_zero_point?")
def qlinear_mul(node: OnnxNode) -> list[Node]:
    """The product."""
    compose = Composition(node)
    return _quantized(compose, compose("Mul", _real(compose, 0), _real(compose, 3)), 6)


_UNARY = "X X_scale X_zero_point? Y_scale Y_zero_point?"


@converts_microsoft("QLinearSigmoid", inputs=_UNARY)
def qlinear_sigmoid(node: OnnxNode) -> list[Node]:
    """1 / (1 + exp(-X))."""
    compose = Composition(node)
    return _quantized(compose, compose("Sigmoid", _real(compose, 0)), 3)


@converts_microsoft("QLinearLeakyRelu", inputs=_UNARY)
def qlinear_leaky_relu(node: OnnxNode) -> list[Node]:
    """X, times alpha where it is negative."""
    compose = Composition(node)
    return _quantized(compose, compose("LeakyRelu", _real(compose, 0), alpha=node.number("alpha", 0.01)), 3)


@converts_microsoft("QLinearSoftmax", inputs=_UNARY)
def qlinear_softmax(node: OnnxNode) -> list[Node]:
    """Softmax as the operator set `opset` has it: over one axis from 13 on, before over all from `axis` on."""
    compose = Composition(node)
    single = 1 if node.integer("opset", 13) >= 13 else None
    values = compose("Softmax", _real(compose, 0), axis=node.integer("axis", -1), single_axis=single)
    return _quantized(compose, values, 3)


@converts_microsoft("QLinearGlobalAveragePool", inputs=_UNARY)
def qlinear_global_average_pool(node: OnnxNode) -> list[Node]:
    """The mean of each channel."""
    compose = Composition(node)
    return _quantized(compose, compose("AveragePool", _real(compose, 0), global_pooling=1, order=_order(node)), 3)


@converts_microsoft("QLinearAveragePool", inputs=_UNARY)
def qlinear_average_pool(node: OnnxNode) -> list[Node]:
    """AveragePool."""
    compose = Composition(node)
    arguments: dict[str, ArgumentValue | None] = {
        **window_arguments(node, node.integers("kernel_shape") or []),
        "ceil_mode": node.integer("ceil_mode", 0),
        "count_include_pad": node.integer("count_include_pad", 0),
        "order": _order(node),
    }
    return _quantized(compose, compose("AveragePool", _real(compose, 0), **arguments), 3)


def _order(node: OnnxNode) -> str | None:
    return "NHWC" if node.integer("channels_last", 0) else None


@converts_microsoft("NhwcMaxPool", inputs="x")
def nhwc_max_pool(node: OnnxNode) -> list[Node]:
    """MaxPool with the channels last."""
    window = window_arguments(node, node.integers("kernel_shape") or [])
    return node.unary("MaxPool", ceil_mode=node.integer("ceil_mode", 0), order="NHWC", **window)


@converts_microsoft("QLinearConcat", inputs="Y_scale Y_zero_point inputs*")
def qlinear_concat(node: OnnxNode) -> list[Node]:
    """Concat of the inputs, each quantized as Y, along `axis`."""
    if len(node.inputs) % 3 != 2:
        raise ModelFormatError(f"{node.label}: expected a tensor, a scale and a zero point each, found {node.inputs}")
    compose = Composition(node)
    parts = [_as_output(compose, first) for first in range(2, len(node.inputs), 3)]
    return compose.result("Concat", *parts, axis=node.integer("axis", 0))


def _as_output(compose: Composition, first: int) -> str:
    """Input `first` in integers of Y's scale and zero point, which are inputs 0 and 1."""
    node = compose.node
    if _equal_constants(node, first + 1, 0) and _equal_constants(node, first + 2, 1):
        return node.inputs[first]
    return compose("QuantizeLinear", _real(compose, first), *node.inputs[:2])


def _equal_constants(node: OnnxNode, index: int, other: int) -> bool:
    first, second = node.value(index), node.value(other)
    return first is not None and second is not None and first.dtype == second.dtype and np.array_equal(first, second)


@converts_microsoft(
    "QLinearWhere", inputs="condition X x_scale x_zero_point Y y_scale y_zero_point z_scale z_zero_point"
)
def qlinear_where(node: OnnxNode) -> list[Node]:
    """X where the condition holds, else Y."""
    compose = Composition(node)
    return _quantized(compose, compose("Where", node.inputs[0], _real(compose, 1), _real(compose, 4)), 7)


@converts_microsoft("QLinearConv", inputs="x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B?")
def qlinear_conv(node: OnnxNode) -> list[Node]:
    """As QLinearConv of the default domain."""
    if node.integer("channels_last", 0):
        raise CannotConvertError("channels_last=1 is not supported")
    return node.standard("QLinearConv", node.inputs, node.outputs)


@converts_microsoft(
    "DynamicQuantizeLSTM",
    inputs="X W R B? sequence_lens? initial_h? initial_c? P? W_scale W_zero_point R_scale R_zero_point",
    outputs=3,
)
def dynamic_quantize_lstm(node: OnnxNode) -> list[Node]:
    """LSTM on integers: X, and the state of each step, are quantized by their own ranges.

    With peepholes, other functions, or weights less their zero point that int8 does not hold, all is computed in
    floats, with the weights that W and R stand for: onnxruntime's result differs by the error of quantization.
    """
    compose = Composition(node)
    integers = [_turned_integers(node, index, first + 1) for index, first in ((1, 8), (2, 10))]
    scales = [node.constant(first, "scales") for first in (8, 10)]
    if is_plain_lstm(node) and all(_in_int8(array) for array in integers):
        weights = [compose.constant(np.ascontiguousarray(array, np.int8)) for array in integers]
        middle = [node.inputs[index] if node.has_input(index) else "" for index in range(3, 7)]
        return quantized_lstm(node, [node.inputs[0], *weights, *middle, "", *(node.inputs[first] for first in (8, 10))])
    real = [_real_weights(node, array, factors) for array, factors in zip(integers, scales, strict=True)]
    return node.standard("LSTM", [node.inputs[0], *map(compose.constant, real), *node.inputs[3:8]], node.outputs)


def _in_int8(differences: Array) -> bool:
    limits = np.iinfo(np.int8)
    return differences.dtype == np.int8 or bool(
        differences.min(initial=0) >= limits.min and differences.max(initial=0) <= limits.max
    )


def _turned_integers(node: OnnxNode, index: int, zero_point: int) -> Array:
    """Weights less their zero points, int16 or int8, as LSTM has them: directions x 4 hidden x inputs, strided.

    They are given as directions x inputs x 4 hidden, zero points as directions or directions x 4 hidden.
    """
    integers, zeros = (node.constant(at, "weights, scales and zero points") for at in (index, zero_point))
    if integers.ndim != 3 or not is_bytes(integers, zeros):
        raise ModelFormatError(
            f"{node.label}: weights must have 3 axes and 8 bits, found {integers.dtype}{list(integers.shape)}"
        )
    try:
        offsets = zeros.reshape(len(integers), 1, -1)
        is_less = integers.dtype != np.int8 or offsets.shape[-1] > integers.shape[-1] or zeros.any()
        differences = np.subtract(integers, offsets, dtype=np.int16) if is_less else integers
    except ValueError:
        raise CannotConvertError(f"zero points of shape {zeros.shape} do not fit weights of {integers.shape}") from None
    return differences.transpose(0, 2, 1)


def _real_weights(node: OnnxNode, integers: Array, scales: Array) -> Array:
    try:
        return np.multiply(integers, scales.reshape(len(integers), -1, 1), dtype=np.float32, order="C")
    except ValueError:
        raise CannotConvertError(f"scales of shape {scales.shape} do not fit weights of {integers.shape}") from None
