"""Exporters of products, reductions, normalization over axes, and operators that compute element by element."""

from __future__ import annotations

import numpy as np
import onnx

from dagexec.core import dtypes
from dagexec.export.onnx_node import CannotExportError, Operation, exports
from dagexec.export.onnx_shapes import element_type, stated_type

_FOLDS = "its operands are folded to matrices"


@exports("FC")
def fully_connected(operation: Operation) -> None:
    """Gemm of the folded input, or a product with transposed weights that keeps leading axes."""
    rank = operation.rank(0, _FOLDS)
    weights_shape = operation.shape(1, _FOLDS)
    operation.ignore("axis_w")
    axis = operation.integer("axis", 1) % max(1, rank)
    weights, output = operation.inputs[1], operation.only_output()
    if len(weights_shape) != 2 or operation.integer("axis_w", 1) != 1:
        weights = operation.through("Flatten", [weights], axis=operation.integer("axis_w", 1))
    if axis == 1:
        folded = operation.inputs[0] if rank == 2 else operation.through("Flatten", [operation.inputs[0]], axis=1)
        operation.node("Gemm", [folded, weights, operation.inputs[2]], [output], transB=1)
        return
    source = operation.inputs[0]
    if axis != rank - 1:
        source = operation.through("Reshape", [source, operation.constant([*[0] * axis, -1])])
    turned = operation.through("Transpose", [weights], perm=[1, 0])
    product = operation.through("MatMul", [source, turned])
    operation.node("Add", [product, operation.inputs[2]], [output])


@exports("MatMul")
def matrix_product(operation: Operation) -> None:
    """Gemm of two matrices."""
    if len(operation.inputs) > 2 or operation.rank(0, _FOLDS) != 2 or operation.rank(1, _FOLDS) != 2:
        raise CannotExportError("only the product of two matrices has a counterpart")
    if operation.integer("axis_a", 1) != 1 or operation.integer("axis_b", 1) != 1:
        raise CannotExportError("matrices folded elsewhere than between their axes have no counterpart")
    turned = {"transA": operation.integer("trans_a", 0), "transB": operation.integer("trans_b", 0)}
    operation.node("Gemm", operation.inputs, [operation.only_output()], **turned)


@exports("BatchMatMul")
def batch_product(operation: Operation) -> None:
    """MatMul; operands to be transposed are, before it."""
    operation.ignore("broadcast")  # where the batch axes are equal, both rules give the same
    operands = []
    for index, argument in enumerate(("trans_a", "trans_b")):
        name = operation.inputs[index]
        if operation.flag(argument):
            rank = operation.rank(index, "its last two axes are exchanged")
            name = operation.through("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])
        operands.append(name)
    operation.node("MatMul", operands, [operation.only_output()])


@exports("Softmax", "LogSoftmax", "Hardmax")
def softmax(operation: Operation) -> None:
    """Softmax or Hardmax over one axis; over several, of the folded input."""
    kind, output = operation.definition.type, operation.only_output()
    axis = operation.integer("axis", 1)
    if operation.flag("single_axis") or axis == -1:
        operation.node(kind, operation.inputs, [output], axis=axis)
        return
    axis %= max(1, operation.rank(0, "it is over all axes from one on"))
    folded = operation.through("Flatten", operation.inputs, axis=axis)
    rows = operation.through(kind, [folded], axis=1)
    operation.node("Reshape", [rows, operation.through("Shape", operation.inputs)], [output])


@exports("LayerNorm")
def layer_normalization(operation: Operation) -> None:
    """LayerNormalization; without scale and bias, with ones and no bias."""
    axis, epsilon = operation.integer("axis", 1), operation.number("epsilon", 1e-5)
    operation.ignore("elementwise_affine")
    inputs = list(operation.inputs)
    if len(inputs) == 1:
        kind = operation.type_of(0, "its scale has the shape of the axes")
        shape = operation.shape(0, "its scale has the shape of the axes")[axis:]
        if None in shape:
            raise CannotExportError("the axes that it normalizes over have open sizes")
        inputs.append(operation.constant(np.ones(tuple(size or 0 for size in shape)), kind.meta.numpy))
    operation.node("LayerNormalization", inputs, [operation.only_output()], axis=axis, epsilon=epsilon)


@exports("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp")
def reduction(operation: Operation) -> None:
    """Reductions; the axes are an input."""
    operation.ignore("infinite")
    axes = operation.integers("axes")
    inputs = [operation.inputs[0], *([operation.constant(axes)] if axes else [])]
    inputs += [operation.through("Cast", [name], to=onnx.TensorProto.INT64) for name in operation.inputs[1:]]
    keep, idle = operation.integer("keepdims", 1), operation.integer("noop_with_empty_axes", 0)
    output = operation.only_output()
    operation.node(operation.definition.type, inputs, [output], keepdims=keep, noop_with_empty_axes=idle or None)


@exports("ArgMax", "ArgMin")
def position(operation: Operation) -> None:
    """ArgMax and ArgMin."""
    axis, keep = operation.integer("axis", -1), operation.integer("keepdims", 1)
    last = operation.integer("last", 0)
    kind, output = operation.definition.type, operation.only_output()
    operation.node(kind, operation.inputs, [output], axis=axis, keepdims=keep, select_last_index=last)


@exports("TopK")
def top_k(operation: Operation) -> None:
    """TopK; the number of elements is an input."""
    axis, largest = operation.integer("axis", -1), operation.integer("largest", 1)
    if any(operation.is_read(name) for name in operation.outputs[2:]):
        raise CannotExportError("indices into the whole tensor have no counterpart")
    count = operation.inputs[1] if len(operation.inputs) > 1 else operation.constant([operation.integer("k", 0)])
    operation.node("TopK", [operation.inputs[0], count], operation.outputs[:2], axis=axis, largest=largest)


@exports("CumSum", "CumProd")
def cumulative(operation: Operation) -> None:
    """CumSum and CumProd; the axis is an input."""
    flags = {name: operation.integer(name, 0) for name in ("exclusive", "reverse")}
    axis = operation.inputs[1] if len(operation.inputs) > 1 else operation.constant(operation.integer("axis", 0))
    operation.node(operation.definition.type, [operation.inputs[0], axis], [operation.only_output()], **flags)


@exports("LeftShift", "RightShift")
def shift(operation: Operation) -> None:
    """BitShift; operands that broadcast by Caffe2's older rule have no counterpart."""
    direction = operation.definition.type.removesuffix("Shift").upper()
    operation.node("BitShift", operation.inputs, [operation.only_output()], direction=direction)


@exports("Clip")
def clip(operation: Operation) -> None:
    """Clip; the bounds are inputs."""
    meta = operation.type_of(0, "its bounds are of its input's type").meta
    bounds = [
        operation.constant(operation.number(name, 0.0), meta.numpy) if name in operation.arguments else ""
        for name in ("min", "max")
    ]
    operation.node("Clip", [operation.inputs[0], *bounds], [operation.only_output()])


@exports("Add", "Sub", "Mul", "Div", "LT", "LE", "GT", "GE", "EQ", "And", "Or", "Xor")
def binary(operation: Operation) -> None:
    """Broadcast as NumPy does; by Caffe2's older rule, the second operand gets axes of size 1 behind it."""
    [name, *_] = operation.schema.onnx
    inputs = list(operation.inputs)
    if operation.flag("broadcast"):
        inputs[1] = _matched(operation)
    operation.node(name.type, inputs, [operation.only_output()])


def _matched(operation: Operation) -> str:
    """The second operand with axes of size 1, so that its first axis lies at `axis` of the first operand."""
    why = "the place of its second operand must be known"
    rank, own = operation.rank(0, why), operation.rank(1, why)
    letter = operation.text("axis_str", "")
    order = operation.text("order", "NCHW")
    axis = order.index(letter) if letter else operation.integer("axis", -1)
    behind = 0 if axis == -1 else rank - axis - own
    if not behind:
        return operation.inputs[1]
    axes = operation.constant(list(range(own, own + behind)))
    return operation.through("Unsqueeze", [operation.inputs[1], axes])


@exports("NE")
def not_equal(operation: Operation) -> None:
    """Not of Equal."""
    inputs = [operation.inputs[0], _matched(operation) if operation.flag("broadcast") else operation.inputs[1]]
    operation.node("Not", [operation.through("Equal", inputs)], [operation.only_output()])


@exports("Sqr", "Cube")
def power(operation: Operation) -> None:
    """X * X, and that * X."""
    [source], output = operation.inputs, operation.only_output()
    if operation.definition.type == "Sqr":
        operation.node("Mul", [source, source], [output])
        return
    operation.node("Mul", [operation.through("Mul", [source, source]), source], [output])


@exports("Mod")
def remainder(operation: Operation) -> None:
    """Mod; of floats, and where the sign is that of the dividend, fmod=1."""
    fmod = 0 if operation.flag("sign_follow_divisor") else 1
    kind = operation.known_type(0)
    if not fmod and kind is not None and kind.meta.is_float:
        raise CannotExportError("of floats, only the remainder with the dividend's sign has a counterpart")
    operation.node("Mod", operation.inputs, [operation.only_output()], fmod=fmod)


@exports("QuantizeLinear", "DequantizeLinear")
def quantization(operation: Operation) -> None:
    """QuantizeLinear and DequantizeLinear; an axis belongs to a vector of scales."""
    kind = operation.definition.type
    scale = operation.shape(1, "whether its scale is a vector must be known")
    axis = operation.integer("axis", 1)
    inputs = list(operation.inputs)
    to = None
    if kind == "QuantizeLinear":
        operation.ignore("to")
        meta = stated_type(operation.arguments, "to") if "to" in operation.arguments else dtypes.UINT8
        to = None if len(inputs) > 2 else element_type(meta)
    if scale == (1,):
        inputs[1:] = [operation.through("Reshape", [name, operation.constant([])]) for name in inputs[1:]]
    is_vector = scale not in ((), (1,))
    operation.node(kind, inputs, [operation.only_output()], axis=axis if is_vector else None, output_dtype=to)


@exports("LSTM", "GRU")
def recurrent(operation: Operation) -> None:
    """LSTM and GRU: the optional inputs have their places."""
    kind = operation.definition.type
    inputs, rest = list(operation.inputs[:3]), list(operation.inputs[3:])
    inputs.append(rest.pop(0) if operation.flag("bias") else "")
    inputs.append(rest.pop(0) if operation.flag("sequence_lengths") else "")
    states = rest if operation.flag("initial_state") else []
    linear = operation.integer("linear_before_reset", 0) or None
    hidden = operation.integer("hidden_size", 0) or operation.shape(2, "its hidden_size must be known")[2]
    outputs = [output if operation.is_read(output) else "" for output in operation.outputs]
    operation.node(
        kind, [*inputs, *states], outputs, direction=operation.text("direction", "forward"), hidden_size=hidden,
        linear_before_reset=linear,
    )  # fmt: skip
