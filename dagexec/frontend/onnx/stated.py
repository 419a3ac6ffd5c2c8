"""What a graph states of its tensors, read at once: every look into a message makes objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import onnx

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.node import Dims


class Stated(NamedTuple):
    """Statements of a graph, by name of the tensor.

    Attributes:
        shapes: sizes, None for open ones. Exporters write no axes where they do not know a result's shape: only an
            input without axes is a scalar for sure.
        numbers: element types of what is no input, as numbers of `TensorProto.DataType`.
        variants: what is a sequence or an optional.
    """

    shapes: dict[str, Dims]
    numbers: dict[str, int]
    variants: set[str]


def stated_of(graph: onnx.GraphProto) -> Stated:
    """What `graph` states. Raises ModelFormatError for a size that is negative."""
    stated = Stated({}, {}, set())
    _read(graph.value_info, stated)
    inputs = Stated(stated.shapes, {}, stated.variants)
    _read(graph.input, inputs)
    _read(graph.output, stated)
    for name in [name for name, dims in stated.shapes.items() if not dims and name not in inputs.numbers]:
        del stated.shapes[name]
    return stated


def _read(values: Iterable[onnx.ValueInfoProto], found: Stated) -> None:
    for value in values:
        kind = value.type
        which = kind.WhichOneof("value")
        if which == "tensor_type":
            tensor, name = kind.tensor_type, value.name
            found.numbers[name] = tensor.elem_type
            dims = dims_of(tensor, name)
            if dims is None:
                found.shapes.pop(name, None)
            else:
                found.shapes[name] = dims
        elif which in ("sequence_type", "optional_type"):
            found.variants.add(value.name)


def dims_of(kind: onnx.TypeProto.Tensor, name: str) -> Dims | None:
    """The sizes of a tensor called `name`, None for open ones; None where not even their number is stated.

    Raises ModelFormatError for a size that is negative.
    """
    if not kind.HasField("shape"):
        return None
    dims: list[int | None] = []
    for dim in kind.shape.dim:
        size = dim.dim_value
        if size > 0:
            dims.append(size)
        elif size < -1:
            raise ModelFormatError(f"tensor {name!r}: a size is negative: {size}")
        else:
            dims.append(0 if size == 0 and dim.HasField("dim_value") else None)
    return tuple(dims)
