"""Converters of operators that treat each element on its own."""

from __future__ import annotations

import numpy as np
import onnx

from dagexec.core import dtypes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.initializers import NOWHERE, element_type, tensor_array
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, UnknownSizeError, converts


@converts(IsNaN=20)
def is_nan(node: OnnxNode) -> list[Node]:
    """A comparison with itself, which gives booleans; the operator IsNaN gives bytes."""
    return [node.operator("NE", [node.inputs[0], node.inputs[0]], node.only_output())]


@converts(BitShift=28)
def bit_shift(node: OnnxNode) -> list[Node]:
    """A shift to the left or to the right."""
    shifts = {"LEFT": "LeftShift", "RIGHT": "RightShift"}
    direction = node.text("direction", "")
    if direction not in shifts:
        raise CannotConvertError(f"direction {direction!r} is unknown; expected one of {', '.join(shifts)}")
    return [node.operator(shifts[direction], node.inputs, node.only_output())]


@converts(BitCast=26)
def bit_cast(node: OnnxNode) -> list[Node]:
    """The same bits as another type; ONNX numbers element types in its own way."""
    return node.unary("BitCast", to=element_type(node.integer("to", onnx.TensorProto.UNDEFINED), node.label).number)


@converts(StringNormalizer=10)
def string_normalizer(node: OnnxNode) -> list[Node]:
    """Stop words and cases by Unicode's rules, which are those of every locale but few."""
    locale = node.text("locale", "en_US")
    if locale[:2] in ("az", "lt", "tr"):
        raise CannotConvertError(f"cases by the rules of locale {locale!r} are not supported")
    return node.unary(
        "StringNormalizer",
        case_change_action=node.text("case_change_action", "NONE"),
        is_case_sensitive=node.integer("is_case_sensitive", 0),
        stopwords=[word.decode(errors="replace") for word in node.texts("stopwords") or []] or None,
    )


@converts(SwiGLU=28)
def swiglu(node: OnnxNode) -> list[Node]:
    """Swish of the gate, times the values."""
    gate = node.new_name("gate")
    return [
        node.operator("Swish", [node.inputs[0]], [gate], alpha=node.number("alpha", 1.0)),
        node.operator("Mul", [gate, node.inputs[1]], node.only_output()),
    ]


@converts(Hardmax=13)
def hardmax(node: OnnxNode) -> list[Node]:
    """Over one axis from opset 13 on; before that over all axes from `axis` on, as Softmax."""
    if node.opset >= 13:
        return node.unary("Hardmax", axis=node.integer("axis", -1), single_axis=1)
    return node.unary("Hardmax", axis=node.integer("axis", 1))


@converts(PRelu=16)
def prelu(node: OnnxNode) -> list[Node]:
    """PRelu. From opset 7 on the slope broadcasts to the input; before, a vector has one slope a channel."""
    shape = node.shape(1)
    if shape is None and node.opset >= 7:
        return _prelu_of_any_rank(node)
    if shape is None:
        raise UnknownSizeError(f"the model does not state the shape of its slope {node.inputs[1]!r}")
    if node.opset < 7 or len(shape) != 1 or shape == (1,):
        return [node.operator("PRelu", node.inputs, node.only_output())]
    row = node.new_name("slope")
    return [
        node.operator("ExpandDims", [node.inputs[1]], [row], dims=[0]),
        node.operator("PRelu", [node.inputs[0], row], node.only_output()),
    ]


def _prelu_of_any_rank(node: OnnxNode) -> list[Node]:
    """max(x, 0) - slope * max(-x, 0)."""
    x, slope = node.inputs
    above, opposite, below, scaled = (node.new_name(name) for name in ("above", "opposite", "below", "scaled"))
    return [
        node.operator("Relu", [x], [above]),
        node.operator("Negative", [x], [opposite]),
        node.operator("Relu", [opposite], [below]),
        node.operator("Mul", [below, slope], [scaled]),
        node.operator("Sub", [above, scaled], node.only_output()),
    ]


@converts(Clip=13)
def clip(node: OnnxNode) -> list[Node]:
    """Clip; bounds are attributes before opset 11 and optional inputs from then on, which may be computed."""
    if node.opset < 11:
        low = node.number("min", 0.0) if "min" in node else None
        return node.unary("Clip", min=low, max=node.number("max", 0.0) if "max" in node else None)
    computed = any(node.has_input(index) and node.value(index) is None for index in (1, 2))
    if computed:
        return _clip_by_tensors(node)
    low_bound = float(node.constant_scalar(1, "min")) if node.has_input(1) else None
    high_bound = float(node.constant_scalar(2, "max")) if node.has_input(2) else None
    return node.unary("Clip", min=low_bound, max=high_bound)


def _clip_by_tensors(node: OnnxNode) -> list[Node]:
    operators = []
    current = node.inputs[0]
    for index, op_type in ((1, "Max"), (2, "Min")):
        if node.has_input(index):
            last = index == 2 or not node.has_input(2)
            target = node.outputs[0] if last else node.new_name("raised")
            operators.append(node.operator(op_type, [current, node.inputs[index]], [target]))
            current = target
    return operators


@converts(Cast=28)
def cast(node: OnnxNode) -> list[Node]:
    """Cast; before opset 6 the type is a name."""
    if node.opset < 6:
        target = dtypes.from_name(node.text("to", "float"))
    else:
        target = element_type(node.integer("to", onnx.TensorProto.UNDEFINED), node.label)
    if target is dtypes.STRING:
        raise CannotConvertError("numbers are written out in another form")
    rounding: dict[str, ArgumentValue | None] = {}
    if target in dtypes.NARROW_TYPES:
        rounding = {"saturate": node.integer("saturate", 1), "round_mode": node.text("round_mode", "up")}
    node.ignore("saturate", "round_mode")  # of other types
    return node.unary("Cast", to=target.number, **rounding)


@converts(Identity=25)
def identity(node: OnnxNode) -> list[Node]:
    """A copy; of a known value only another name for it."""
    value = node.value(0)
    if value is not None:
        node.scope.values[node.outputs[0]] = value
        return []
    if node.is_variant(node.inputs[0]):
        node.scope.variants.add(node.outputs[0])
        return node.unary("CopyValue")
    return node.unary("Copy")


@converts(Constant=25)
def constant(node: OnnxNode) -> list[Node]:
    """A value that the model holds; it becomes a parameter."""
    tensor = node.tensor("value")
    if tensor is not None:
        array = tensor_array(tensor, NOWHERE, node.label)
    elif "value_float" in node or "value_floats" in node:
        floats = node.numbers("value_floats")
        array = np.array(node.number("value_float", 0.0) if floats is None else floats, np.float32)
    elif "value_int" in node or "value_ints" in node:
        ints = node.integers("value_ints")
        array = np.array(node.integer("value_int", 0) if ints is None else ints, np.int64)
    else:
        raise CannotConvertError("only a tensor, floats or integers are supported as its value")
    array.flags.writeable = False
    node.scope.values[node.outputs[0]] = array
    return []
