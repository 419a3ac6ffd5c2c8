"""GivenTensorByteStringToUInt8Fill: bytes of an argument as a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import UINT8
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.fill.fillers import SHAPE_ARGS, fill_shape


def _content(call: OperatorCall) -> bytes:
    """The bytes. Raises ArgumentError unless there is one string of them."""
    several, one = call.arguments.field("values", "strings"), call.arguments.field("values", "s")
    strings = [*(several or ()), *(() if one is None else (one,))]
    if len(strings) != 1:
        raise ArgumentError(f"{call.label}: argument 'values' must be one string of bytes, found {len(strings)}")
    return bytes(strings[0])


def infer_byte_fill(call: OperatorCall) -> list[TensorType]:
    """uint8, of the shape asked for. Raises ArgumentError unless there is a byte for each element."""
    found = TensorType(fill_shape(call), UINT8)
    if len(_content(call)) != found.elements:
        raise ArgumentError(f"{call.label}: {found} needs {found.elements} bytes, found {len(_content(call))}")
    return [found]


@array_function(
    "GivenTensorByteStringToUInt8Fill",
    inputs=(0, 1),
    infer=infer_byte_fill,
    doc="A tensor of uint8 from a string of bytes.",
    input_names=("input",),
    output_names=("Y",),
    args={**SHAPE_ARGS, "values": "the bytes, a list of one string", "dtype": "not read"},
    value_inputs=(0,),
    values_read_if="input_as_shape",
)
def byte_fill(call: OperatorCall, *_inputs: Array) -> Sequence[Array]:
    """The bytes."""
    return [np.frombuffer(_content(call), np.uint8)]


no_gradient("GivenTensorByteStringToUInt8Fill")
