"""Converters of normalizations and Dropout, whose training mode has statistics and masks as further outputs."""

from __future__ import annotations

import onnx

from dagexec.core import dtypes
from dagexec.core.node import Node
from dagexec.core.proto import DeviceOption
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, UnknownSizeError, converts

_MAX_AXES = 64  # of NumPy
_USUAL_MOMENTUM = 0.9


@converts(BatchNormalization=15)
def batch_normalization(node: OnnxNode) -> list[Node]:
    """BatchNormalization; before opset 14, further outputs belong to training that an attribute does not announce."""
    if node.integer("spatial", 1) == 0:
        raise CannotConvertError("spatial=0 is not supported")
    node.ignore("is_test")
    epsilon, momentum = node.number("epsilon", 1e-5), node.number("momentum", _USUAL_MOMENTUM)
    if not node.integer("training_mode", 0):
        kept = {} if momentum == _USUAL_MOMENTUM else {"momentum": momentum}  # for a training that goes on
        return [node.operator("SpatialBN", node.inputs, node.only_output(), is_test=1, epsilon=epsilon, **kept)]
    names = [*node.outputs, *[""] * (3 - len(node.outputs))]
    running = [name or node.new_name(f"running_{index}") for index, name in enumerate(names[1:])]
    saved = [node.new_name("saved_mean"), node.new_name("saved_deviation")]
    inputs, outputs = [*node.inputs[:3], *running], [names[0] or node.new_name("normalized"), *running, *saved]
    return [
        *(node.operator("Copy", [node.inputs[3 + index]], [name]) for index, name in enumerate(running)),
        node.operator("SpatialBN", inputs, outputs, is_test=0, epsilon=epsilon, momentum=momentum),
    ]


@converts(LayerNormalization=17)
def layer_normalization(node: OnnxNode) -> list[Node]:
    """Over the axes from `axis` on; a scale or bias of another shape becomes an operator of its own."""
    axis, epsilon = node.integer("axis", -1), node.number("epsilon", 1e-5)
    affine = node.has_input(2) and all(_spans_axes(node, index, axis) for index in (1, 2))
    whole = node.outputs[0] if affine else node.new_name("normalized")
    deviation = node.new_name("deviation")
    outputs = [whole, node.new_name("mean"), deviation]
    inputs = node.inputs if affine else node.inputs[:1]
    operators = [
        node.operator("LayerNorm", inputs, outputs, axis=axis, epsilon=epsilon, elementwise_affine=int(affine))
    ]
    if not affine:
        scaled = node.new_name("scaled") if node.has_input(2) else node.outputs[0]
        operators.append(node.operator("Mul", [whole, node.inputs[1]], [scaled]))
        if node.has_input(2):
            operators.append(node.operator("Add", [scaled, node.inputs[2]], [node.outputs[0]]))
    if node.is_read(1):
        operators += _statistic(node, outputs[1], 1, axis)
    if node.is_read(2):
        inverse = node.new_name("inverse")
        operators += [node.operator("Reciprocal", [deviation], [inverse]), *_statistic(node, inverse, 2, axis)]
    return operators


def _statistic(node: OnnxNode, source: str, index: int, axis: int) -> list[Node]:
    """Output `index` from `source`: float32 (stash_type 1), with an axis of size 1 for each that is normalized over."""
    shape = node.shape(0)
    if axis >= 0 and shape is None:
        raise UnknownSizeError(f"the model does not state how many axes {node.inputs[0]!r} has")
    missing = (-axis if shape is None or axis < 0 else len(shape) - axis) - 1
    if missing >= _MAX_AXES:
        raise CannotConvertError(f"no array has {missing} axes, as axis {axis} asks for")
    expanded = node.new_name("expanded") if missing else source
    operators = [node.operator("ExpandDims", [source], [expanded], dims=list(range(-missing, 0)))] if missing else []
    return [*operators, node.operator("Cast", [expanded], [node.outputs[index]], to=dtypes.FLOAT32.number)]


def _spans_axes(node: OnnxNode, index: int, axis: int) -> bool:
    """True unless input `index` is known to broadcast to the axes that are normalized over."""
    parameter, shape = node.shape(index), node.shape(0)
    if parameter is None:
        return True
    normalized = shape[axis:] if shape is not None and axis >= -len(shape) else None
    rank = len(normalized) if normalized is not None else -axis if axis < 0 else len(parameter)
    if len(parameter) != rank:
        return False
    return 1 not in parameter or (
        normalized is not None and all(a in (b, None) for a, b in zip(normalized, parameter, strict=True))
    )


@converts(LpNormalization=22)
def lp_normalization(node: OnnxNode) -> list[Node]:
    """Vectors along an axis divided by the sum of their magnitudes, or by their Euclidean length."""
    power = node.integer("p", 2)
    if power not in (1, 2):
        raise CannotConvertError(f"p = {power} is not supported; expected 1 or 2")
    return node.unary("NormalizeL1" if power == 1 else "Normalize", axis=node.integer("axis", -1))


@converts(Dropout=22)
def dropout(node: OnnxNode) -> list[Node]:
    """The input unchanged and a mask of ones, unless training_mode says otherwise; it may be computed."""
    computed = node.opset >= 12 and node.has_input(2) and node.value(2) is None
    training = (
        node.opset >= 12 and node.has_input(2) and not computed and bool(node.constant_scalar(2, "training_mode"))
    )
    if computed or training:
        return _training_dropout(node)
    node.ignore("seed", "is_test")
    operators = [node.operator("Dropout", [node.inputs[0]], [node.outputs[0]], is_test=1, **_ratio(node))]
    if node.is_read(1):
        kind = dtypes.BOOL if node.opset >= 10 else dtypes.FLOAT32
        one = 1 if kind is dtypes.BOOL else 1.0
        fill = {"value": one, "dtype": kind.number}
        operators.append(node.operator("ConstantFill", [node.inputs[0]], [node.outputs[1]], **fill))
    return operators


def _ratio(node: OnnxNode) -> dict[str, float]:
    """The share that a training drops, where it can be one and is not the usual one."""
    ratio: float = 0.5
    if node.opset < 12:
        ratio = node.number("ratio", 0.5)
    elif node.has_input(1) and node.value(1) is not None:
        ratio = float(node.constant_scalar(1, "ratio"))
    return {"ratio": ratio} if 0 <= ratio < 1 and ratio != 0.5 else {}


def _training_dropout(node: OnnxNode) -> list[Node]:
    """RandomDropout, with ratio and mode as inputs, so that a run decides."""
    inputs = [node.inputs[0], node.inputs[2]]
    if node.has_input(1):
        inputs.append(node.inputs[1])
    mask = node.outputs[1] if node.is_read(1) else node.new_name("mask")
    return [seeded(node, node.operator("RandomDropout", inputs, [node.outputs[0], mask]))]


def seeded(node: OnnxNode, operator: Node) -> Node:
    """The operator with the node's seed, so that it draws the same in every process."""
    if "seed" in node:
        kind = node.definition.kinds.get("seed")
        seed = node.number("seed", 0.0) if kind == onnx.AttributeProto.FLOAT else node.integer("seed", 0)
        return operator.changed(device_option=DeviceOption(random_seed=int(seed) & 0x7FFFFFFF))
    return operator
