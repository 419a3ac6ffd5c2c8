"""Initializers that are inputs too: constants, unless a run is fed others, for which the graph is converted anew.

Since IR version 4 an initializer is listed among the inputs where callers may override it; before, all had to be
listed, so the list says nothing. Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md, "Graphs".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx

from dagexec.core.dtypes import from_numpy
from dagexec.core.model import InputInfo
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError, ModelFormatError
from dagexec.frontend.onnx.initializers import Array

_FIRST_IR_VERSION = 4
_MAX_BYTES_KEPT = 1 << 12  # of an initializer, as shape inference reads such values


def overridable_inputs(
    proto: onnx.ModelProto,
    values: Mapping[str, Array],
    chosen: Collection[str] | None,
    info_of: Callable[[onnx.ValueInfoProto], InputInfo],
) -> dict[str, InputInfo]:
    """The initializers, among `values`, that runs may override: those `chosen`, or by the standard if None.

    Raises FeedError for a chosen name that is no initializer, ModelFormatError where an initializer differs from the
    type that the model states of the input.
    """
    stated = {
        value.name: info_of(value)
        for value in proto.graph.input
        if value.name in values and value.type.WhichOneof("value") is not None
    }
    for name, info in stated.items():
        _check(name, info, values[name])
    if chosen is None:
        listed = [value.name for value in proto.graph.input if value.name in values]
        chosen = listed if proto.ir_version >= _FIRST_IR_VERSION else ()
    if unknown := sorted(set(chosen) - values.keys()):
        hint = did_you_mean(unknown[0], values)
        raise FeedError(f"overridable: {unknown[0]!r} is not an initializer; the model has {sorted(values)[:20]}{hint}")
    return {name: stated.get(name) or _info(values[name]) for name in dict.fromkeys(chosen)}


def _info(array: Array) -> InputInfo:
    return InputInfo(from_numpy(array.dtype), tuple(array.shape))


def _check(name: str, info: InputInfo, array: Array) -> None:
    sizes = info.shape
    fits = sizes is None or (
        len(sizes) == array.ndim and all(a in (None, b) for a, b in zip(sizes, array.shape, strict=True))
    )
    if not fits or info.dtype is not from_numpy(array.dtype):
        raise ModelFormatError(f"input {name!r} is stated to be {info}, and its initializer is {_info(array)}")


def without_data(proto: onnx.ModelProto, overridden: Collection[str] = ()) -> onnx.ModelProto:
    """A copy in which large initializers are types without data, and those `overridden` are inputs alone."""
    copy = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    graph = proto.graph
    copy.graph.name = graph.name
    for field in ("node", "input", "output", "value_info"):
        getattr(copy.graph, field).extend(getattr(graph, field))
    for tensor in graph.initializer:
        if tensor.name not in overridden:
            copy.graph.initializer.append(tensor if tensor.ByteSize() <= _MAX_BYTES_KEPT else _bare(tensor))
    for sparse in graph.sparse_initializer:
        if sparse.values.name not in overridden:
            copy.graph.sparse_initializer.add(values=onnx.TensorProto(name=sparse.values.name))
    listed = {value.name for value in graph.input}
    copy.graph.input.extend(onnx.ValueInfoProto(name=name) for name in overridden if name not in listed)
    return copy


def _bare(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=onnx.TensorProto.EXTERNAL
    )
