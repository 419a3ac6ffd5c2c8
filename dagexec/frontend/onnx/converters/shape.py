"""Converters of operators that move, cut, join or name elements without computing with them."""

from __future__ import annotations

import numpy as np

from dagexec.core import dtypes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.initializers import NOWHERE, tensor_array
from dagexec.frontend.onnx.node import OnnxNode, converts

_END = (1 << 63) - 1


@converts(Reshape=25)
def reshape(node: OnnxNode) -> list[Node]:
    """Reshape; a constant shape becomes an argument, a computed one stays an input. 0 keeps a size, -1 is inferred."""
    shape, computed = node.integers_or_input("shape", 1, since=5)
    literal = node.integer("allowzero", 0) or None
    return [node.operator("Reshape", [node.inputs[0], *computed], node.only_output(), shape=shape, allow_zero=literal)]


@converts(Squeeze=25)
def squeeze(node: OnnxNode) -> list[Node]:
    """Drop axes of size 1: the given ones, or all. Axes are an input from opset 13 on."""
    axes, computed = node.integers_or_input("axes", 1, since=13)
    if axes == []:
        return node.unary("Copy")
    return [node.operator("Squeeze", [node.inputs[0], *computed], node.only_output(), dims=axes)]


@converts(Unsqueeze=25)
def unsqueeze(node: OnnxNode) -> list[Node]:
    """Insert axes of size 1, named by their place in the output. Axes are an input from opset 13 on."""
    axes, computed = node.integers_or_input("axes", 1, since=13)
    if axes is None and not computed:
        raise ModelFormatError(f"{node.label}: axes are missing")
    if axes == []:
        return node.unary("Copy")
    return [node.operator("ExpandDims", [node.inputs[0], *computed], node.only_output(), dims=axes)]


@converts(Split=18)
def split(node: OnnxNode) -> list[Node]:
    """Cut along `axis` into the given sizes, else evenly; sizes are an input from opset 13 on."""
    axis = node.integer("axis", 0)
    sizes, computed = node.integers_or_input("split", 1, since=13)
    uneven = int(node.integer("num_outputs", 0) > 0) or None
    outputs = [name or node.new_name(f"unused_{index}") for index, name in enumerate(node.outputs)]
    return [node.operator("Split", [node.inputs[0], *computed], outputs, axis=axis, split=sizes, uneven=uneven)]


@converts(Slice=13)
def slice_tensor(node: OnnxNode) -> list[Node]:
    """Slice: bounds are attributes before opset 10, inputs from then on, arguments where they are constants."""
    if node.opset >= 10 and any(node.has_input(index) and node.value(index) is None for index in range(1, 5)):
        return _slice_by_inputs(node)
    starts, ends = (node.integers_given(name, index, since=10) for index, name in ((1, "starts"), (2, "ends")))
    axes = node.integers_given("axes", 3, since=10)
    steps = node.constant_ints(4, "steps") if node.opset >= 10 and node.has_input(4) else None
    if starts is None or ends is None:
        raise ModelFormatError(f"{node.label}: starts and ends are required")
    return node.unary("Slice", starts=starts, ends=ends, axes=axes, steps=steps, onnx_style=1)


def _slice_by_inputs(node: OnnxNode) -> list[Node]:
    """Bounds as inputs; axes and steps are inputs where they are computed; steps only after axes."""
    operators: list[Node] = []
    inputs = list(node.inputs[:3])
    arguments: dict[str, ArgumentValue | None] = {"onnx_style": 1}
    places = {name: index for index, name in ((3, "axes"), (4, "steps")) if node.has_input(index)}
    if any(node.value(index) is None for index in places.values()):
        if "axes" not in places:
            operators, axes = _leading_axes(node)
            inputs.append(axes)
        inputs += [node.inputs[index] for index in places.values()]
    else:
        arguments |= {name: node.constant_ints(index, name) for name, index in places.items()}
    return [*operators, node.operator("Slice", inputs, node.only_output(), **arguments)]


def _leading_axes(node: OnnxNode) -> tuple[list[Node], str]:
    """Operators that give as many axes as there are starts, and the name of the vector."""
    count, axes = node.new_name("count"), node.new_name("axes")
    return [node.operator("Size", [node.inputs[1]], [count]), node.operator("Range", [count], [axes])], axes


@converts(Expand=13)
def expand(node: OnnxNode) -> list[Node]:
    """Broadcast to a shape, constant or computed."""
    if node.value(1) is not None:
        return node.unary("Expand", shape=node.constant_ints(1, "shape"))
    return [node.operator("Expand", node.inputs, node.only_output())]


@converts(Tile=13)
def tile(node: OnnxNode) -> list[Node]:
    """Repeat; by constant counts, one operator for each axis that repeats. Before opset 6: `tiles` along one axis."""
    if node.opset < 6:
        tiles, axis = node.constant_scalar(1, "tiles"), node.constant_scalar(2, "axis")
        return node.unary("Tile", tiles=int(tiles), axis=int(axis))
    if node.value(1) is None:
        return [node.operator("TileAxes", node.inputs[:2], node.only_output())]
    repeats = node.constant_ints(1, "repeats")
    axes = [axis for axis, count in enumerate(repeats) if count != 1]
    if not axes:
        return node.unary("Copy")
    names = [node.inputs[0], *(node.new_name(f"axis_{axis}") for axis in axes[:-1]), *node.only_output()]
    return [
        node.operator("Tile", [source], [target], tiles=repeats[axis], axis=axis)
        for axis, source, target in zip(axes, names, names[1:], strict=False)
    ]


@converts(Pad=25)
def pad(node: OnnxNode) -> list[Node]:
    """Pad (heads, then tails): attributes before opset 11, inputs from then on, arguments where they are constants."""
    if node.opset >= 11 and not _is_plain_padding(node):
        return _pad_by_inputs(node)
    pads = node.integers_given("pads" if node.opset >= 2 else "paddings", 1, since=11)
    if pads is None:
        raise ModelFormatError(f"{node.label}: pads are missing")
    value = node.number("value", 0.0)
    if node.opset >= 11 and node.has_input(2):
        value = float(node.constant_scalar(2, "value"))
    axes = node.constant_ints(3, "axes") if node.opset >= 18 and node.has_input(3) else None
    if axes is not None and (shape := node.shape(0)) is not None:
        pads, axes = _pads_of_all_axes(node, pads, axes, len(shape)), None
    return node.unary("Pad", pads=pads, axes=axes, mode=node.text("mode", "constant"), value=value)


def _is_plain_padding(node: OnnxNode) -> bool:
    """True when pads, value and axes are constants, and the value a number that an argument holds exactly."""
    if any(node.has_input(index) and node.value(index) is None for index in (1, 2, 3)):
        return False
    value = node.value(2)
    if value is None or value.dtype == np.float32:
        return True
    with np.errstate(all="ignore"):
        return value.size != 1 or value.dtype.kind not in "fiub" or bool(np.float32(value) == value)


def _pad_by_inputs(node: OnnxNode) -> list[Node]:
    """Pads and value as inputs; axes where they are computed, behind a value."""
    inputs, axes = list(node.inputs[:2]), None
    if node.has_input(2):
        inputs.append(node.inputs[2])
    if node.has_input(3) and node.value(3) is not None:
        axes = node.constant_ints(3, "axes")
    elif node.has_input(3):
        if not node.has_input(2):
            inputs.append(node.new_name("zero"))
            node.scope.values[inputs[2]] = np.zeros(1, np.int64)
        inputs.append(node.inputs[3])
    mode = node.text("mode", "constant")
    return [node.operator("Pad", inputs, node.only_output(), axes=axes, mode=mode)]


def _pads_of_all_axes(node: OnnxNode, pads: list[int], axes: list[int], rank: int) -> list[int]:
    if len(pads) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise ModelFormatError(f"{node.label}: pads {pads} do not fit axes {axes} of a tensor of {rank} axes")
    full = [0] * (2 * rank)
    for position, axis in enumerate(axis % rank for axis in axes):
        full[axis], full[rank + axis] = pads[position], pads[len(axes) + position]
    return full


@converts(Shape=25)
def shape_of(node: OnnxNode) -> list[Node]:
    """The sizes, or from opset 15 on those of axes `start` to `end`."""
    start, end = node.integer("start", 0), node.integer("end", _END)
    if (start, end) == (0, _END):
        return node.unary("Shape")
    sizes = node.new_name("sizes")
    [output] = node.only_output()
    return [
        node.operator("Shape", [node.inputs[0]], [sizes]),
        node.operator("Slice", [sizes], [output], starts=[start], ends=[end], axes=[0], onnx_style=1),
    ]


@converts(ConstantOfShape=25)
def constant_of_shape(node: OnnxNode) -> list[Node]:
    """One value in every element; with a constant shape it is computed once, as a parameter."""
    tensor = node.tensor("value")
    value = np.zeros(1, np.float32) if tensor is None else tensor_array(tensor, NOWHERE, node.label)
    if value.size != 1:
        raise ModelFormatError(f"{node.label}: its value must have one element, found shape {value.shape}")
    meta = dtypes.from_numpy(value.dtype)
    item = float(value.reshape(-1)[0]) if meta.is_float else int(value.reshape(-1)[0])
    filling: dict[str, ArgumentValue | None] = {"value": item, "dtype": meta.number}
    if node.value(0) is None:
        return [node.operator("ConstantFill", node.inputs, node.only_output(), input_as_shape=1, **filling)]
    shape = node.constant_ints(0, "shape")
    if any(size < 0 for size in shape):
        raise ModelFormatError(f"{node.label}: a size is negative: {shape}")
    node.scope.shapes[node.outputs[0]] = tuple(shape)
    return [node.operator("ConstantFill", [], node.only_output(), shape=shape, **filling)]
