"""Messages that sessions are made of: checked before anything of them is used, and completed with types of inputs.

A message is hostile until it is parsed here. It may read no file: both runtimes would follow external data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from dagexec.core import dtypes
from dagexec.core.schema import TensorType
from dagexec.errors import ModelFormatError, ShapeError
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
    shape_inference = LazyModule("onnx.shape_inference")
else:
    import onnx
    from onnx import shape_inference

_BY_ONNX = {meta.onnx: meta for meta in dtypes.HELD_TYPES}


def parse(content: bytes, owner: str) -> onnx.ModelProto:
    """The message in `content`. Raises ModelFormatError, naming its `owner`, when it is none or refers to files."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ModelFormatError(f"{owner}: not an ONNX message: {error}") from None
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise ModelFormatError(f"{owner}: tensor {tensor.name!r} has external data, which is not allowed there")
    check_for_inference(model)
    model.ClearField("metadata_props")  # options of onnxruntime may be among them
    return model


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
        yield from _of_attributes(function.attribute_proto)


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of functions and of graphs in other nodes too."""
    waiting = [model.graph.node, *(function.node for function in model.functions)]
    while waiting:
        for node in waiting.pop():
            yield node
            for one in node.attribute:
                if one.HasField("g"):
                    waiting.append(one.g.node)
                waiting += [graph.node for graph in one.graphs]


def check_for_inference(model: onnx.ModelProto) -> None:
    """Raise ModelFormatError for a node that ONNX's inference, up to 1.23 at least, writes out of bounds for."""
    for node in nodes_of(model):
        if node.op_type == "Split":
            count = next((one.i for one in node.attribute if one.name == "num_outputs"), len(node.output))
            if count != len(node.output):
                label = f"Split {node.name or next(iter(node.output), '')!r}"
                raise ModelFormatError(f"{label}: num_outputs is {count}, and it has {len(node.output)} outputs")


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _of_sparse(graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Sequence[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        yield from (attribute.t, *attribute.tensors)
        yield from _of_sparse((attribute.sparse_tensor, *attribute.sparse_tensors))
        for graph in (attribute.g, *attribute.graphs):
            if graph.ByteSize():
                yield from _of_graph(graph)


def _of_sparse(tensors: Sequence[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def type_of_value(value: object) -> onnx.TypeProto:
    """The ONNX type of an array, a list or a mapping; an empty one for None and empty lists."""
    if isinstance(value, np.ndarray):
        return tensor_type(TensorType(value.shape, dtypes.from_numpy(value.dtype)))
    found = onnx.TypeProto()
    if isinstance(value, Mapping) and value:
        key, item = next(iter(value.items()))
        found.map_type.key_type = dtypes.STRING.onnx if isinstance(key, str | bytes) else dtypes.INT64.onnx
        found.map_type.value_type.CopyFrom(type_of_value(np.asarray(item)))
    elif isinstance(value, list | tuple) and value:
        found.sequence_type.elem_type.CopyFrom(type_of_value(value[0]))
        found.sequence_type.elem_type.tensor_type.ClearField("shape")  # each has its own
    return found


def complete(model: onnx.ModelProto, types: Sequence[onnx.TypeProto], *, sized: bool = True) -> onnx.ModelProto:
    """A copy in which the inputs have these types, in order; an empty one leaves what the message says.

    What is not `sized` serves tensors of any sizes. Graphs inside of nodes then still learn how many axes there are,
    as runtimes ask for that; elsewhere inference takes an axis without a size for one of size 0.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with_axes = any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute)
    for value, kind in zip(copy.graph.input, types, strict=True):
        if kind.WhichOneof("value") is not None:
            value.type.CopyFrom(kind)
        if not sized and with_axes:
            for dim in value.type.tensor_type.shape.dim:
                dim.Clear()
        elif not sized and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return copy


def tensor_type(kind: TensorType) -> onnx.TypeProto:
    """The ONNX type of a tensor, with its sizes."""
    found = onnx.TypeProto()
    found.tensor_type.elem_type = kind.meta.onnx
    found.tensor_type.shape.SetInParent()
    for size in kind.shape:
        found.tensor_type.shape.dim.add(dim_value=size)
    return found


def infer_types(model: onnx.ModelProto, inputs: Sequence[TensorType], owner: str) -> list[TensorType] | None:
    """Types of the outputs by ONNX's shape inference, None where it does not tell them in full.

    Raises ShapeError, naming the `owner`, when it finds that the inputs do not fit.
    """
    typed = complete(model, list(map(tensor_type, inputs)))
    try:
        found = shape_inference.infer_shapes(typed, strict_mode=True, data_prop=True).graph.output
    except Exception as error:  # of several types
        raise ShapeError(f"{owner}: {' '.join(str(error).split())[:400]}") from None
    types = [known_type(value.type) for value in found]
    return [kind for kind in types if kind is not None] if None not in types else None


def known_type(kind: onnx.TypeProto) -> TensorType | None:
    """The type of a tensor whose sizes are all stated; None for others."""
    meta = _BY_ONNX.get(kind.tensor_type.elem_type)
    if kind.WhichOneof("value") != "tensor_type" or meta is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if any(not dim.HasField("dim_value") or dim.dim_value < 0 for dim in dims):
        return None
    return TensorType(tuple(dim.dim_value for dim in dims), meta)
