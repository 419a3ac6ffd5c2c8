"""Sizes of a model's tensors that follow from its inputs, by the onnx package's inference, without its weights.

Sizes that a file states for tensors between nodes are not used: exporters keep those of the example they exported with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx.shape_inference

from dagexec.core.model import InputInfo
from dagexec.frontend.onnx.node import Dims

_MAX_BYTES = 1 << 12
"""Limit of constants whose values inference sees: those that describe shapes are smaller."""


class InferredShapes:
    """Sizes by name; results of the onnx package are read when they are asked for."""

    def __init__(self, known: dict[str, Dims], found: Iterable[onnx.ValueInfoProto] = ()) -> None:
        self._known: dict[str, Dims | None] = dict(known)
        self._found = {value.name: value for value in found}

    def get(self, name: str) -> Dims | None:
        """The sizes of a tensor as far as they are known, None where not even their number is."""
        if name not in self._known:
            value = self._found.get(name)
            self._known[name] = None if value is None else _dims(value)
        return self._known[name]


def inferred_shapes(
    graph: onnx.GraphProto, imports: Iterable[onnx.OperatorSetIdProto], inputs: Mapping[str, InputInfo]
) -> InferredShapes:
    """The sizes of tensors of the model's own graph as far as they follow from those of `inputs`, by name.

    Functions of the model and what onnx refuses to infer are left out.
    """
    bare = onnx.GraphProto(name="shapes")
    shapes: dict[str, Dims] = {}
    for name, info in inputs.items():
        if info.shape is not None and info.dtype is not None:
            shapes[name] = info.shape
            _add_input(bare, name, info.dtype.onnx, info.shape)
    for tensor in graph.initializer:
        _add_constant(bare, tensor.name, tensor)
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t"):
            _add_constant(bare, node.output[0], node.attribute[0].t)
        else:
            bare.node.append(node)
    for value in graph.output:
        bare.output.add(name=value.name)
    model = onnx.ModelProto(ir_version=onnx.IR_VERSION, graph=bare, opset_import=imports)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError):
        return InferredShapes(shapes)
    return InferredShapes(shapes, (*inferred.value_info, *inferred.output))


def _add_constant(graph: onnx.GraphProto, name: str, tensor: onnx.TensorProto) -> None:
    """A constant: its value where it is small, else its type."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.ByteSize() > _MAX_BYTES:
        _add_input(graph, name, tensor.data_type, tuple(tensor.dims))
    else:
        graph.initializer.append(tensor)
        graph.initializer[-1].name = name


def _add_input(graph: onnx.GraphProto, name: str, number: int, dims: Dims) -> None:
    kind = graph.input.add(name=name).type.tensor_type
    kind.elem_type = number
    kind.shape.SetInParent()
    for size in dims:
        dim = kind.shape.dim.add()
        if size is not None:
            dim.dim_value = size


def _dims(value: onnx.ValueInfoProto) -> Dims | None:
    if value.type.WhichOneof("value") != "tensor_type" or not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims]
    return tuple([size if size >= 0 else None for size in sizes])
