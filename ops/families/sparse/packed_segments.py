"""Segments as rows of a tensor of their longest length: PackSegments, what undoes it, and packed ones reversed.

PackSegments puts the segments first, PackRNNSequence (`packed_sequence`) the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths, places_in_segments

_ARGS = {
    "max_length": "rows of each segment in the packed tensor; what is longer is cut off (default: the longest length)",
    "pad_minf": "1: -infinity behind the ends of segments, where floats are packed (default 0: zeros)",
    "return_presence_mask": "1: output 1 says which rows are of a segment (default 0)",
}


def _times(call: OperatorCall, lengths: npt.NDArray[Any]) -> int:
    """How many rows each segment has when it is packed. Raises ShapeError for fewer than 0."""
    times = call.arguments.int("max_length", -1)
    if times < -1:
        raise call.fail(f"argument 'max_length' must be at least 0, found {times}")
    return int(lengths.max(initial=0)) if times == -1 else times


def infer_pack(call: OperatorCall) -> list[TensorType]:
    """A row for each segment, and with `return_presence_mask` a truth value for each of its places."""
    call.arguments.bool("pad_minf")
    data = call.inputs[1]
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    checked_lengths(call, 0, data.shape[0])
    lengths = call.known_value(0)
    packed = (len(lengths), _times(call, lengths))
    found = [TensorType((*packed, *data.shape[1:]), data.meta)]
    if call.arguments.bool("return_presence_mask"):
        found.append(TensorType(packed, BOOL))
    if len(found) < len(call.definition.output):
        raise call.fail("output 1 is there only with return_presence_mask=1")
    return found[: len(call.definition.output)]


@array_function(
    "PackSegments",
    outputs=(1, 2),
    infer=infer_pack,
    doc="A row of `max_length` rows for each segment, with zeros or -infinity behind its end.",
    input_names=("lengths", "data"),
    output_names=("packed", "presence_mask"),
    args=_ARGS,
    value_inputs=(0,),
)
def pack(call: OperatorCall, lengths: Array, data: Array) -> Sequence[Array]:
    """Row by row to its segment and place."""
    present = np.arange(_times(call, lengths)) < lengths[:, np.newaxis]
    fill: Any = b"" if data.dtype == object else 0
    if call.arguments.bool("pad_minf") and call.inputs[1].meta in FLOAT_TYPES:
        fill = -np.inf
    packed = np.full((*present.shape, *data.shape[1:]), fill, data.dtype)
    packed[present] = data[places_in_segments(lengths) < present.shape[1]]
    return [packed, present][: len(call.definition.output)]


def infer_unpack(call: OperatorCall) -> list[TensorType]:
    """The rows of all segments."""
    packed = call.inputs[1]
    call.require_types(0, INT32, INT64)
    if len(packed.shape) < 2:
        raise call.fail("the packed segments must have at least 2 axes")
    call.require_shape(0, packed.shape[:1], "a length for each packed segment")
    times = call.arguments.int("max_length", -1)
    if times not in (-1, packed.shape[1]):
        raise call.fail(f"argument 'max_length' must be that of the packed segments, found {times}")
    lengths = call.known_value(0)
    if (lengths < 0).any():
        raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
    return [TensorType((int(lengths.sum(dtype=np.int64)), *packed.shape[2:]), packed.meta)]


@array_function(
    "UnpackSegments",
    infer=infer_unpack,
    doc="The segments one after another; undoes PackSegments. Rows that it cut off are zeros.",
    input_names=("lengths", "packed"),
    output_names=("data",),
    args=_ARGS,
    value_inputs=(0,),
)
def unpack(_call: OperatorCall, lengths: Array, packed: Array) -> Sequence[Array]:
    """Row by row from its segment and place."""
    times = packed.shape[1]
    data = np.full((int(lengths.sum()), *packed.shape[2:]), b"" if packed.dtype == object else 0, packed.dtype)
    data[places_in_segments(lengths) < times] = packed[np.arange(times) < lengths[:, np.newaxis]]
    return [data]


@gradient_of("PackSegments", "UnpackSegments")
def packed_gradient(request: GradientRequest) -> GradientOperators:
    """By the operator that undoes this one."""
    undone = "UnpackSegments" if request.definition.type == "PackSegments" else "PackSegments"
    return request.single(undone, [request.x(0), request.dy(0)], [1])


def infer_reverse(call: OperatorCall) -> list[TensorType]:
    """That of the data: times, segments, features."""
    call.require_rank(0, 3)
    call.require_types(1, INT32, INT64)
    call.require_shape(1, call.inputs[0].shape[1:2], "a length for each segment")
    return [call.inputs[0]]


@array_function(
    "ReversePackedSegs",
    infer=infer_reverse,
    doc="Each segment of a tensor of times, segments and features from its end to its beginning; what is behind its "
    "end stays.",
    input_names=("data", "lengths"),
    output_names=("reversed",),
)
def reverse(call: OperatorCall, data: Array, lengths: Array) -> Sequence[Array]:
    """Rows from other times. Raises ShapeError for a length that is longer than all times."""
    times = np.arange(len(data))[:, np.newaxis]
    if ((lengths < 0) | (lengths > len(data))).any():
        raise call.fail(f"lengths must be in [0, {len(data)}], found {lengths.tolist()}")
    places = np.where(times < lengths, lengths - 1 - times, times)
    return [data[places, np.arange(data.shape[1])]]


gradient_by("ReversePackedSegs", "ReversePackedSegs", ("dY", "X1"))
