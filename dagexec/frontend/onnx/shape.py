"""Converters of operators that move, cut, join or name elements without computing with them."""

from __future__ import annotations

import numpy as np

from dagexec.core import dtypes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.proto import OperatorDef
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.initializers import NOWHERE, tensor_array
from dagexec.frontend.onnx.node import CannotConvertError, Node, converts

_END = (1 << 63) - 1


@converts(Reshape=25)
def reshape(node: Node) -> list[OperatorDef]:
    """Reshape; a constant shape becomes an argument, a computed one stays an input. 0 keeps a size, -1 is inferred."""
    shape = node.integers("shape") if node.opset < 5 else None
    if node.opset >= 5 and node.value(1) is not None:
        shape = node.constant_ints(1, "shape")
    if node.integer("allowzero", 0) and (shape is None or 0 in shape):
        raise CannotConvertError("allowzero=1 is supported only for a constant shape without zeros")
    if shape is None:
        return [node.operator("Reshape", node.inputs, node.only_output())]
    return node.unary("Reshape", shape=shape)


@converts(Squeeze=25)
def squeeze(node: Node) -> list[OperatorDef]:
    """Drop axes of size 1: the given ones, or all, which needs a known shape. Axes are an input from opset 13 on."""
    axes = node.integers_given("axes", 1, since=13)
    if axes is None:
        shape = node.full_shape(0, "it names no axes")
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    return node.unary("Squeeze", dims=axes) if axes else node.unary("Copy")


@converts(Unsqueeze=25)
def unsqueeze(node: Node) -> list[OperatorDef]:
    """Insert axes of size 1, named by their place in the output. Axes are an input from opset 13 on."""
    axes = node.integers_given("axes", 1, since=13)
    if axes is None:
        raise ModelFormatError(f"{node.label}: axes are missing")
    return node.unary("ExpandDims", dims=axes) if axes else node.unary("Copy")


def _rank(node: Node, index: int, why: str) -> int:
    shape = node.shape(index)
    if shape is None:
        raise CannotConvertError(f"{why}, and the model does not state the shape of {node.inputs[index]!r}")
    return len(shape)


def _from_front(axes: list[int], rank: int) -> list[int]:
    return [axis + rank if axis < 0 else axis for axis in axes]


@converts(Split=18)
def split(node: Node) -> list[OperatorDef]:
    """Cut along `axis` into the given sizes, else evenly; sizes are an input from opset 13 on."""
    axis = node.integer("axis", 0)
    sizes = node.integers_given("split", 1, since=13)
    if "num_outputs" in node and sizes is None:
        sizes = _chunks(node, axis, node.integer("num_outputs", 0))
    outputs = [name or node.new_name(f"unused_{index}") for index, name in enumerate(node.outputs)]
    return [node.operator("Split", [node.inputs[0]], outputs, axis=axis, split=sizes)]


def _chunks(node: Node, axis: int, count: int) -> list[int] | None:
    """Sizes of `count` equal chunks, the last one smaller; None where the size is open and so must be a multiple."""
    shape = node.shape(0)
    if shape is None or not -len(shape) <= axis < len(shape) or count != len(node.outputs):
        return None
    size = shape[axis]
    if size is None:
        return None
    chunk = -(-size // count)
    return [chunk] * (count - 1) + [size - chunk * (count - 1)]


@converts(Slice=13)
def slice_tensor(node: Node) -> list[OperatorDef]:
    """Slice by constants: attributes before opset 10, inputs from then on."""
    starts = node.integers_given("starts", 1, since=10)
    ends = node.integers_given("ends", 2, since=10)
    axes = node.integers_given("axes", 3, since=10)
    steps = node.constant_ints(4, "steps") if node.opset >= 10 and node.has_input(4) else None
    if starts is None or ends is None:
        raise ModelFormatError(f"{node.label}: starts and ends are required")
    return node.unary("Slice", starts=starts, ends=ends, axes=axes, steps=steps, onnx_style=1)


@converts(Expand=13)
def expand(node: Node) -> list[OperatorDef]:
    """Broadcast to a shape, constant or computed."""
    if node.value(1) is not None:
        return node.unary("Expand", shape=node.constant_ints(1, "shape"))
    return [node.operator("Expand", node.inputs, node.only_output())]


@converts(Tile=13)
def tile(node: Node) -> list[OperatorDef]:
    """Repeat by constant counts: one operator for each axis that repeats. Before opset 6: `tiles` along one axis."""
    if node.opset < 6:
        tiles, axis = node.constant_scalar(1, "tiles"), node.constant_scalar(2, "axis")
        return node.unary("Tile", tiles=int(tiles), axis=int(axis))
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
def pad(node: Node) -> list[OperatorDef]:
    """Pad by constants (heads of all axes, then tails): attributes before opset 11, inputs from then on."""
    pads = node.integers_given("pads" if node.opset >= 2 else "paddings", 1, since=11)
    if pads is None:
        raise ModelFormatError(f"{node.label}: pads are missing")
    value = node.number("value", 0.0)
    if node.opset >= 11 and node.has_input(2):
        value = float(node.constant_scalar(2, "value"))
    if node.opset >= 18 and node.has_input(3):
        pads = _pads_of_all_axes(node, pads, node.constant_ints(3, "axes"))
    return node.unary("Pad", pads=pads, mode=node.text("mode", "constant"), value=value)


def _pads_of_all_axes(node: Node, pads: list[int], axes: list[int]) -> list[int]:
    rank = _rank(node, 0, "its pads are given for some axes")
    if len(pads) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise ModelFormatError(f"{node.label}: pads {pads} do not fit axes {axes} of a tensor of {rank} axes")
    full = [0] * (2 * rank)
    for position, axis in enumerate(_from_front(axes, rank)):
        full[axis], full[rank + axis] = pads[position], pads[len(axes) + position]
    return full


@converts(DepthToSpace=28)
def depth_to_space(node: Node) -> list[OperatorDef]:
    """Blocks of channels become blocks of pixels (mode DCR or CRD), for a stated number of channels and size."""
    block, crd = node.integer("blocksize", 0), _is_crd(node)
    channels, height, width = _image(node)
    if block < 1 or channels % (block * block):
        raise CannotConvertError(f"{channels} channels do not divide into blocks of {block}x{block}")
    depth = channels // (block * block)
    split = [0, depth, block, block, height, width] if crd else [0, block, block, depth, height, width]
    order = [0, 1, 4, 2, 5, 3] if crd else [0, 3, 4, 1, 5, 2]
    return _rearranged(node, split, order, [0, depth, height * block, width * block])


@converts(SpaceToDepth=28)
def space_to_depth(node: Node) -> list[OperatorDef]:
    """Blocks of pixels become blocks of channels (mode DCR or CRD), for a stated number of channels and size."""
    block, crd = node.integer("blocksize", 0), _is_crd(node)
    channels, height, width = _image(node)
    if block < 1 or height % block or width % block:
        raise CannotConvertError(f"{height}x{width} does not divide into blocks of {block}x{block}")
    split = [0, channels, height // block, block, width // block, block]
    order = [0, 1, 3, 5, 2, 4] if crd else [0, 3, 5, 1, 2, 4]
    return _rearranged(node, split, order, [0, channels * block * block, height // block, width // block])


def _is_crd(node: Node) -> bool:
    mode = node.text("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise CannotConvertError(f"mode {mode!r} is unknown; expected 'DCR' or 'CRD'")
    return mode == "CRD"


def _image(node: Node) -> tuple[int, int, int]:
    """Channels, height and width of the input; the batch may be open."""
    shape = node.shape(0)
    if shape is None or len(shape) != 4 or None in shape[1:]:
        raise CannotConvertError("the model does not state channels, height and width of its input")
    channels, height, width = (size or 0 for size in shape[1:])
    return channels, height, width


def _rearranged(node: Node, split: list[int], order: list[int], joined: list[int]) -> list[OperatorDef]:
    """Reshape to `split`, permute by `order`, reshape to `joined`."""
    blocks, moved = node.new_name("blocks"), node.new_name("moved")
    return [
        node.operator("Reshape", [node.inputs[0]], [blocks], shape=split),
        node.operator("Transpose", [blocks], [moved], axes=order),
        node.operator("Reshape", [moved], node.only_output(), shape=joined),
    ]


@converts(Shape=25)
def shape_of(node: Node) -> list[OperatorDef]:
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
def constant_of_shape(node: Node) -> list[OperatorDef]:
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
