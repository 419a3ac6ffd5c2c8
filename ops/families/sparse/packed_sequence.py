"""Sequences one after another and side by side: PackRNNSequence and what undoes it; the top k of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths, places_in_segments


def infer_pack(call: OperatorCall) -> list[TensorType]:
    """The longest length, the number of sequences, and a row."""
    values, lengths = call.inputs
    if not values.shape:
        raise call.fail("the values must have at least 1 axis")
    checked_lengths(call, 1, values.shape[0])
    longest = int(call.known_value(1).max(initial=0))
    return [TensorType((longest, lengths.shape[0], *values.shape[1:]), values.meta)]


def _places(lengths: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Time and sequence of each row."""
    return places_in_segments(lengths), np.repeat(np.arange(len(lengths)), lengths)


@array_function(
    "PackRNNSequence",
    infer=infer_pack,
    doc="Sequences that stand one after another, side by side: time, sequence, row; zeros behind their ends.",
    input_names=("values", "lengths"),
    output_names=("Y",),
    value_inputs=(1,),
)
def pack(_call: OperatorCall, values: Array, lengths: Array) -> Sequence[Array]:
    """Row by row to its time and sequence."""
    found = np.zeros((int(lengths.max(initial=0)), len(lengths), *values.shape[1:]), values.dtype)
    found[_places(lengths)] = values
    return [found]


def infer_unpack(call: OperatorCall) -> list[TensorType]:
    """All rows of all sequences. Raises ShapeError for a length above that of the longest."""
    values = call.inputs[0]
    if len(values.shape) < 2:
        raise call.fail("the values must have axes of time and of sequences")
    call.require_types(1, INT32)
    call.require_shape(1, values.shape[1:2], "a length for each sequence")
    lengths = call.known_value(1)
    if ((lengths < 0) | (lengths > values.shape[0])).any():
        raise call.fail(f"lengths must be in [0, {values.shape[0]}]")
    return [TensorType((int(lengths.sum()), *values.shape[2:]), values.meta)]


@array_function(
    "UnpackRNNSequence",
    infer=infer_unpack,
    doc="Sequences that stand side by side, one after another; undoes PackRNNSequence.",
    input_names=("values", "lengths"),
    output_names=("Y",),
    value_inputs=(1,),
)
def unpack(_call: OperatorCall, values: Array, lengths: Array) -> Sequence[Array]:
    """Row by row from its time and sequence."""
    return [values[_places(lengths)]]


@gradient_of("PackRNNSequence", "UnpackRNNSequence")
def packed_gradient(request: GradientRequest) -> GradientOperators:
    """By the operator that undoes this one."""
    packs = request.definition.type == "PackRNNSequence"
    undone = "UnpackRNNSequence" if packs else "PackRNNSequence"
    return request.single(undone, [request.dy(0), request.x(1)], [0])


def _most(call: OperatorCall) -> int:
    most = call.arguments.int("k", -1)
    if most < 1:
        raise ArgumentError(f"{call.label}: argument 'k' must be at least 1, found {most}")
    return most


def infer_lengths_top_k(call: OperatorCall) -> list[TensorType]:
    """k values and k places of each segment."""
    meta = call.require_types(0, *FLOAT_TYPES)
    checked_lengths(call, 1, call.require_rank(0, 1)[0])
    shape = (*call.inputs[1].shape, _most(call))
    return [TensorType(shape, meta), TensorType(shape, INT32)]


@array_function(
    "LengthsTopK",
    infer=infer_lengths_top_k,
    doc="The k largest of each segment, the largest first, and where in it they are; 0 and -1 where it is shorter.",
    input_names=("X", "lengths"),
    output_names=("values", "indices"),
    args={"k": "how many"},
    required_args=("k",),
    value_inputs=(1,),
)
def lengths_top_k(call: OperatorCall, x: Array, lengths: Array) -> Sequence[Array]:
    """A stable sort of each segment: of equal values the first comes first."""
    shape = (len(lengths), _most(call))
    values, places = np.zeros(shape, x.dtype), np.full(shape, -1)
    for number, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        segment = x[end - length : end]
        order = np.argsort(-segment, kind="stable")[: shape[1]]
        values[number, : order.size], places[number, : order.size] = segment[order], order
    return [values, places]


def infer_lengths_top_k_gradient(call: OperatorCall) -> list[TensorType]:
    """An element for each of the segments."""
    meta = call.require_types(2, *FLOAT_TYPES)
    shape = (*call.require_rank(0, 1), _most(call))
    for index in (0, 1):
        call.require_types(index, INT32, INT64)
    for index in (1, 2):
        call.require_shape(index, shape, "k of each segment")
    lengths = call.known_value(0)
    if (lengths < 0).any():
        raise call.fail("lengths must be at least 0")
    return [TensorType((int(lengths.sum()),), meta)]


@array_function(
    "LengthsTopKGradient",
    infer=infer_lengths_top_k_gradient,
    doc="Gradient of LengthsTopK: dValues where the values were, 0 elsewhere.",
    input_names=("lengths", "indices", "dValues"),
    output_names=("dX",),
    args={"k": "how many"},
    required_args=("k",),
    value_inputs=(0,),
)
def lengths_top_k_slope(call: OperatorCall, lengths: Array, indices: Array, dy: Array) -> Sequence[Array]:
    """Each value to its place. Raises IndexError for a place outside of its segment."""
    rows, columns = np.nonzero(indices >= 0)
    places = indices[rows, columns]
    if (places >= lengths[rows]).any():
        raise IndexError(f"{call.label}: an index is outside its segment")
    found = np.zeros(int(lengths.sum()), dy.dtype)
    found[(np.cumsum(lengths) - lengths)[rows] + places] = dy[rows, columns]
    return [found]


gradient_by("LengthsTopK", "LengthsTopKGradient", ("X1", "Y1", "dY"))
