"""Rows put in, repeated and replaced: PadEmptySamples, NumpyTile, CopyRowsToTensor, VariableLengthSequencePadding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import gradient_by, no_gradient, not_differentiable
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType, first_to_first, same_as_input
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import checked_lengths


def infer_pad_empty(call: OperatorCall) -> list[TensorType]:
    """Lengths of at least 1, and features with a row more for each length of 0."""
    call.require_rank(0, 1)
    call.require_types(0, INT32)
    if len(call.definition.output) != len(call.inputs):
        raise call.fail(
            f"expected {len(call.inputs)} outputs, as there are inputs, found {len(call.definition.output)}"
        )
    lengths = call.known_value(0)
    added = int(np.count_nonzero(lengths == 0))
    found = [call.inputs[0]]
    for index, kind in enumerate(call.inputs[1:], 1):
        if not kind.shape:
            raise call.fail(f"features must have rows; {call.definition.input[index]!r} has no axes")
        checked_lengths(call, 0, kind.shape[0])
        found.append(TensorType((kind.shape[0] + added, *kind.shape[1:]), kind.meta))
    return found


@array_function(
    "PadEmptySamples",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_pad_empty,
    doc="Segments of no rows get one of zeros: the lengths, and the rows of each of the features.",
    input_names=("lengths", "features..."),
    output_names=("lengths", "features..."),
    value_inputs=(0,),
)
def pad_empty(_call: OperatorCall, lengths: Array, *features: Array) -> Sequence[Array]:
    """Insertions where empty segments are."""
    places = (np.cumsum(lengths) - lengths)[lengths == 0]
    return [np.maximum(lengths, 1), *(np.insert(rows, places, np.zeros((), rows.dtype), axis=0) for rows in features)]


def infer_sequence_padding(call: OperatorCall) -> list[TensorType]:
    """As X. Raises ShapeError where there is no length for each sequence."""
    call.require_types(0, FLOAT32)
    call.require_types(1, INT32)
    call.require_shape(1, (call.require_rank(0, 3)[1],), "a length for each sequence")
    return [call.inputs[0]]


@array_function(
    "VariableLengthSequencePadding",
    infer=infer_sequence_padding,
    doc="Sequences of shape steps x batch x size that are zero from their lengths on, in place.",
    input_names=("X", "lengths"),
    output_names=("X",),
    inplace=first_to_first,
    enforced_inplace=((0, 0),),
)
def sequence_padding(_call: OperatorCall, x: Array, lengths: Array) -> Sequence[Array]:
    """A choice by the step."""
    return [np.where((np.arange(len(x))[:, None] < lengths)[..., None], x, 0)]


def infer_numpy_tile(call: OperatorCall) -> list[TensorType]:
    """Each size times its number."""
    call.require_types(1, INT32)
    shape = call.inputs[0].shape
    call.require_shape(1, (len(shape),), "a number of repetitions for each axis")
    repeats = call.known_value(1)
    if (repeats < 0).any():
        raise call.fail(f"repetitions must be at least 0, found {int(repeats.min())}")
    sizes = tuple(size * int(count) for size, count in zip(shape, repeats, strict=True))
    return [TensorType(sizes, call.inputs[0].meta)]


@array_function(
    "NumpyTile",
    infer=infer_numpy_tile,
    doc="The data repeated along each axis so often as `repeats`, one int32 an axis, says.",
    input_names=("data", "repeats"),
    output_names=("Y",),
    value_inputs=(1,),
)
def numpy_tile(_call: OperatorCall, data: Array, repeats: Array) -> Sequence[Array]:
    """NumPy's tile."""
    return [np.tile(data, repeats)]


def infer_copy_rows(call: OperatorCall) -> list[TensorType]:
    """As the tensor. Raises ShapeError for a row of another size."""
    call.require_types(0, FLOAT32, FLOAT64, INT32, INT64)
    call.require_types(1, INT32, INT64)
    call.require_same_type(0, 2)
    call.require_rank(1, 1)
    call.require_shape(2, call.require_rank(0, 2)[1:], "one row")
    return [call.inputs[0]]


@array_function(
    "CopyRowsToTensor",
    infer=infer_copy_rows,
    doc="One row in place of each row that indices name.",
    input_names=("X", "indices", "row"),
    output_names=("Y",),
    inplace=first_to_first,
)
def copy_rows(call: OperatorCall, x: Array, indices: Array, row: Array) -> Sequence[Array]:
    """An assignment."""
    check_indices(indices, 0, len(x), call.label)
    found = x.copy()
    found[indices] = row
    return [found]


@array_function(
    "CopyRowsToTensorGradient",
    infer=same_as_input,
    doc="Gradient of CopyRowsToTensor, as Caffe2 has it: dX is dY.",
    input_names=("dY",),
    output_names=("dX",),
    inplace=first_to_first,
)
def copy_rows_gradient(_call: OperatorCall, dy: Array) -> Sequence[Array]:
    """A copy."""
    return [dy]


gradient_by("CopyRowsToTensor", "CopyRowsToTensorGradient", ("dY",))
no_gradient("NumpyTile", "PadEmptySamples")
not_differentiable("it changes sequences in place", "VariableLengthSequencePadding")
