"""Exporters of operators that move, cut, join or fill."""

from __future__ import annotations

import numpy as np
import onnx.helper

from dagexec.core import dtypes
from dagexec.core.arguments import Arguments
from dagexec.export.onnx_node import CannotExportError, Operation, exports

_END = np.iinfo(np.int64).max


@exports("Copy", "StopGradient", "Alias")
def copy(operation: Operation) -> None:
    """Identity."""
    operation.node("Identity", operation.inputs[:1], [operation.only_output()])


@exports("Dropout")
def dropout(operation: Operation) -> None:
    """Identity, as inference computes it."""
    if not operation.flag("is_test"):
        raise CannotExportError("only inference (is_test=1) has a counterpart")
    operation.ignore("ratio", "drawn_as")
    operation.ignore_input(1)  # of training
    operation.node("Identity", operation.inputs[:1], [operation.only_output()])


@exports("Reshape")
def reshape(operation: Operation) -> None:
    """Reshape; the shape is an input."""
    allow_zero = operation.integer("allow_zero", 0)
    given = operation.integers("shape")
    shape = _int64(operation, 1) if len(operation.inputs) > 1 else operation.constant(given or [])
    operation.node("Reshape", [operation.inputs[0], shape], [operation.only_output()], allowzero=allow_zero or None)


def _int64(operation: Operation, index: int) -> str:
    """The name of an input of integers as int64, which ONNX wants of shapes."""
    return operation.through("Cast", [operation.inputs[index]], to=onnx.TensorProto.INT64)


@exports("Squeeze", "ExpandDims")
def axes_of_one(operation: Operation) -> None:
    """Squeeze and Unsqueeze; the axes are an input."""
    kind = "Squeeze" if operation.definition.type == "Squeeze" else "Unsqueeze"
    dims = operation.integers("dims")
    axes = [_int64(operation, 1)] if len(operation.inputs) > 1 else [] if dims is None else [operation.constant(dims)]
    operation.node(kind, [operation.inputs[0], *axes], [operation.only_output()])


@exports("Flatten")
def flatten(operation: Operation) -> None:
    """Flatten."""
    operation.node("Flatten", operation.inputs, [operation.only_output()], axis=operation.integer("axis", 1))


@exports("Transpose")
def transpose(operation: Operation) -> None:
    """Transpose; without axes they are reversed, as in ONNX."""
    operation.node("Transpose", operation.inputs, [operation.only_output()], perm=operation.integers("axes") or None)


@exports("Concat")
def concat(operation: Operation) -> None:
    """Concat; with add_axis, of inputs that have that axis."""
    axis = _axis(operation)
    inputs = list(operation.inputs)
    if operation.flag("add_axis"):
        where = operation.constant([axis])
        inputs = [operation.through("Unsqueeze", [name, where]) for name in inputs]
    operation.node("Concat", inputs, [operation.only_output()], axis=axis)


@exports("Split")
def split(operation: Operation) -> None:
    """Split; the sizes are an input."""
    if operation.flag("add_axis"):
        raise CannotExportError("add_axis has no counterpart")
    operation.ignore("uneven")
    axis, sizes = _axis(operation), operation.integers("split")
    inputs = [operation.inputs[0]]
    if len(operation.inputs) > 1:
        inputs.append(_int64(operation, 1))
    elif sizes:
        inputs.append(operation.constant(sizes))
    outputs = list(operation.outputs)
    operation.node("Split", inputs, outputs, axis=axis, num_outputs=len(outputs) if len(inputs) == 1 else None)


def _axis(operation: Operation) -> int:
    last = operation.text("order", "NCHW").upper() == "NHWC"
    return operation.integer("axis", -1 if last else 1)


@exports("Slice")
def slice_tensor(operation: Operation) -> None:
    """Slice; Caffe2's negative bounds count from one behind the end, ONNX's from the end."""
    if len(operation.inputs) > 1:
        _slice_by_inputs(operation)
        return
    starts, ends = operation.integers("starts") or [], operation.integers("ends") or []
    if not operation.flag("onnx_style"):
        starts, ends = ([_END if bound == -1 else bound + (bound < 0) for bound in row] for row in (starts, ends))
    axes = operation.integers("axes")
    steps = operation.integers("steps")
    inputs = [operation.inputs[0], operation.constant(starts), operation.constant(ends)]
    inputs.append(operation.constant(list(range(len(starts))) if axes is None else axes))
    if steps is not None:
        inputs.append(operation.constant(steps))
    operation.node("Slice", inputs, [operation.only_output()])


def _slice_by_inputs(operation: Operation) -> None:
    """Bounds as inputs, axes and steps as inputs or arguments."""
    if not operation.flag("onnx_style"):
        raise CannotExportError("computed bounds of Caffe2's have no counterpart")
    inputs = [operation.inputs[0], *(_int64(operation, index) for index in range(1, len(operation.inputs)))]
    axes, steps = operation.integers("axes"), operation.integers("steps")
    if len(inputs) == 3 and (axes is not None or steps is not None):
        inputs.append(operation.constant(list(range(len(steps or []))) if axes is None else axes))
    if steps is not None:
        inputs.append(operation.constant(steps))
    operation.node("Slice", inputs, [operation.only_output()])


@exports("Expand")
def expand(operation: Operation) -> None:
    """Expand."""
    shape = operation.integers("shape")
    wanted = _int64(operation, 1) if len(operation.inputs) > 1 else operation.constant(shape or [])
    operation.node("Expand", [operation.inputs[0], wanted], [operation.only_output()])


@exports("Tile")
def tile(operation: Operation) -> None:
    """Tile along one axis."""
    if len(operation.inputs) > 1:
        raise CannotExportError("computed repeats have no counterpart")
    repeats = [1] * operation.rank(0, "its repeats are one for each axis")
    repeats[operation.integer("axis", 0)] = operation.integer("tiles", 1)
    operation.node("Tile", [operation.inputs[0], operation.constant(repeats)], [operation.only_output()])


@exports("TileAxes")
def tile_axes(operation: Operation) -> None:
    """Tile; the counts are an input."""
    repeats = operation.integers("repeats")
    counts = _int64(operation, 1) if len(operation.inputs) > 1 else operation.constant(repeats or [])
    operation.node("Tile", [operation.inputs[0], counts], [operation.only_output()])


@exports("Pad")
def pad(operation: Operation) -> None:
    """Pad; pads, value and axes are inputs."""
    meta = operation.type_of(0, "the value is of its input's type").meta
    count, axes = len(operation.inputs), operation.integers("axes")
    pads = _int64(operation, 1) if count > 1 else operation.constant(operation.integers("pads") or [])
    if count > 2:
        value = operation.through("Cast", [operation.inputs[2]], to=element_type(meta))
    else:
        value = operation.constant(operation.number("value", 0.0), meta.numpy)
    inputs = [operation.inputs[0], pads, value]
    if count > 3 or axes is not None:
        inputs.append(_int64(operation, 3) if count > 3 else operation.constant(axes or []))
    operation.node("Pad", inputs, [operation.only_output()], mode=operation.text("mode", "constant"))


@exports("Shape")
def shape_of(operation: Operation) -> None:
    """Shape; some of the sizes are gathered from all."""
    axes = operation.integers("axes")
    output = operation.only_output()
    if not axes:
        operation.node("Shape", operation.inputs, [output])
        return
    sizes = operation.through("Shape", operation.inputs)
    operation.node("Gather", [sizes, operation.constant(axes)], [output])


@exports("Gather")
def gather(operation: Operation) -> None:
    """Gather; negative indices are none of Caffe2's, and so do not occur without wrap_indices."""
    operation.ignore("wrap_indices")
    operation.node("Gather", operation.inputs, [operation.only_output()], axis=operation.integer("axis", 0))


@exports("Cast")
def cast(operation: Operation) -> None:
    """Cast."""
    operation.ignore("to", "from_type")
    if "to" not in operation.arguments:
        raise CannotExportError("it does not say to which type")
    meta = stated_type(operation.arguments, "to")
    operation.node("Cast", operation.inputs, [operation.only_output()], to=element_type(meta))


@exports("ConstantFill")
def constant_fill(operation: Operation) -> None:
    """ConstantOfShape; without an input, of a constant shape."""
    if operation.integers("extra_shape"):
        raise CannotExportError("extra_shape has no counterpart")
    meta, number = _filling(operation)
    element = onnx.helper.make_tensor("value", element_type(meta), [1], [number])
    if not operation.inputs:
        shape = operation.constant(operation.integers("shape") or [])
    elif operation.flag("input_as_shape"):
        shape = _int64(operation, 0)
    else:
        shape = operation.through("Shape", operation.inputs)
    operation.node("ConstantOfShape", [shape], [operation.only_output()], value=element)


def _filling(operation: Operation) -> tuple[dtypes.TypeMeta, float | int]:
    """The type and the value of each element."""
    operation.ignore("value", "dtype")
    arguments = operation.arguments
    if arguments.field("value", "s") is not None:
        raise CannotExportError("strings have no counterpart")
    real, integer = arguments.field("value", "f"), arguments.field("value", "i") or 0
    number = integer if real is None else real
    if operation.flag("input_type"):
        return operation.type_of(0, "the elements are of its input's type").meta, number
    if "dtype" in arguments:
        return stated_type(arguments, "dtype"), number
    return dtypes.FLOAT32 if "value" not in arguments or real is not None else dtypes.INT64, number


def stated_type(arguments: Arguments, name: str) -> dtypes.TypeMeta:
    """The type that an argument names, or has the number of."""
    text = arguments.field(name, "s")
    return dtypes.from_number(arguments.field(name, "i") or 0) if text is None else dtypes.from_name(text.decode())


def element_type(meta: dtypes.TypeMeta) -> int:
    """The number of an element type in ONNX."""
    if meta is dtypes.STRING:
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(meta.numpy))
