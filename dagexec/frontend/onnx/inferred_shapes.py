"""Sizes of a model's tensors that follow from its inputs, by the onnx package's inference, without its weights.

What a file states of tensors between nodes is not used: exporters keep sizes of the example they exported with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx.shape_inference

from dagexec.core.model import InputInfo
from dagexec.frontend.onnx.node import Dims

_MAX_BYTES = 1 << 12
"""Of constants whose values inference sees: what describes shapes is smaller."""


def inferred_shapes(
    graph: onnx.GraphProto, imports: Iterable[onnx.OperatorSetIdProto], inputs: Mapping[str, InputInfo]
) -> dict[str, Dims]:
    """The sizes of tensors of the model's own graph as far as they follow from those of `inputs`, by name.

    Functions of the model and what onnx refuses to infer are left out.
    """
    bare = onnx.GraphProto(name="shapes")
    known: dict[str, Dims] = {}
    for name, info in inputs.items():
        if info.shape is not None and info.dtype is not None:
            known[name] = info.shape
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
        found = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError):
        return known
    return {value.name: dims for value in (*found.value_info, *found.output) if (dims := _dims(value))} | known


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
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None for dim in dims)
