"""Which values of a list there are, as columns: BatchOneHot, SegmentOneHot and SparseToDenseMask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT32, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import checked_lengths


def infer_batch_one_hot(call: OperatorCall) -> list[TensorType]:
    """A column for each value of each column."""
    meta = call.require_types(0, *NUMBER_TYPES, BOOL)
    call.require_same_type(0, 2)
    rows, columns = call.require_rank(0, 2)
    call.require_shape(1, (columns,), "how many values each column has")
    count = call.require_rank(2, 1)[0]
    checked_lengths(call, 1, count)
    return [TensorType((rows, count), meta)]


@array_function(
    "BatchOneHot",
    infer=infer_batch_one_hot,
    doc="For each column as many as it has values, in which 1 stands where the element is that value, 0 elsewhere.",
    input_names=("X", "lengths", "values"),
    output_names=("Y",),
    value_inputs=(1,),
)
def batch_one_hot(_call: OperatorCall, x: Array, lengths: Array, values: Array) -> Sequence[Array]:
    """One comparison with all values."""
    return [np.repeat(x, lengths, axis=1) == values]


def infer_segment_one_hot(call: OperatorCall) -> list[TensorType]:
    """A row for each length, of the size in input 2."""
    call.require_types(1, INT64)
    call.require_types(2, INT64)
    checked_lengths(call, 0, call.require_rank(1, 1)[0])
    if call.inputs[2].elements != 1:
        raise call.fail("the size must be one number")
    size = int(call.known_value(2).reshape(-1)[0])
    if size < 1:
        raise call.fail(f"the size must be at least 1, found {size}")
    return [TensorType((call.inputs[0].shape[0], size), FLOAT32)]


@array_function(
    "SegmentOneHot",
    infer=infer_segment_one_hot,
    doc="A row of `size` columns for each segment of indices: 1 where one of them says, 0 elsewhere.",
    input_names=("lengths", "indices", "size"),
    output_names=("Y",),
    value_inputs=(0, 2),
)
def segment_one_hot(call: OperatorCall, lengths: Array, indices: Array, size: Array) -> Sequence[Array]:
    """Each index to its row and column."""
    columns = int(size.reshape(-1)[0])
    check_indices(indices, 0, columns, call.label)
    found = np.zeros((len(lengths), columns), np.float32)
    found[np.repeat(np.arange(len(lengths)), lengths), indices] = 1
    return [found]


_MASK_ARGS = {
    "mask": "the identifier that each column is of",
    "return_presence_mask": "1: output 1 says which columns have a value (default 0)",
    "max_skipped_indices": "more identifiers below 0, which no column is of, are an error (default 50)",
}


def _columns(call: OperatorCall, indices: Array) -> npt.NDArray[np.int64]:
    """The column of each identifier, -1 where it has none. Raises ArgumentError."""
    mask = np.array(call.arguments.ints("mask"), np.int64)
    bad, most = int(np.count_nonzero(indices < 0)), call.arguments.int("max_skipped_indices", 50)
    if bad > most:
        raise ArgumentError(f"{call.label}: {bad} identifiers are below 0; max_skipped_indices allows {most}")
    order = np.argsort(mask, kind="stable")
    place = np.searchsorted(mask, indices, "right", sorter=order) - 1
    column = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (mask[column] == indices), column, -1)


def _shape(call: OperatorCall, lengths: int) -> tuple[int, ...]:
    """A column for each of the mask's, behind a row for each length. Raises ShapeError, ArgumentError."""
    columns = len(call.arguments.ints("mask"))
    call.arguments.int("max_skipped_indices", 50)
    if not columns:
        raise ArgumentError(f"{call.label}: argument 'mask' must have at least one identifier")
    call.require_types(0, INT32, INT64)
    count = call.require_rank(0, 1)[0]
    if lengths == len(call.inputs):
        return (columns,)
    call.require_types(lengths, INT32)
    if call.inputs[lengths].shape == (0,) and count == 0:
        return (0, columns)
    checked_lengths(call, lengths, count)
    return (call.inputs[lengths].shape[0], columns)


def infer_mask(call: OperatorCall) -> list[TensorType]:
    """Values in columns, and with `return_presence_mask` which of them are there."""
    shape, meta = _shape(call, 3), call.require_same_type(1, 2)
    row = call.inputs[2].shape
    call.require_shape(1, (*call.inputs[0].shape, *row), "a value, as the default one, for each identifier")
    found = [TensorType((*shape, *row), meta)]
    if call.arguments.bool("return_presence_mask"):
        found.append(TensorType(shape, BOOL))
    if len(found) < len(call.definition.output):
        raise call.fail("output 1 is there only with return_presence_mask=1")
    return found[: len(call.definition.output)]


def _taken(call: OperatorCall, indices: Array, lengths: Sequence[Array]) -> npt.NDArray[np.int64]:
    """For each row and column the place of the value that stands there, the last of several; -1 for the default one."""
    columns = _columns(call, indices)
    rows = np.repeat(np.arange(len(lengths[0])), lengths[0]) if lengths else np.zeros(len(indices), np.int64)
    places = np.full((len(lengths[0]) if lengths else 1, len(call.arguments.ints("mask"))), -1)
    chosen = columns >= 0
    np.maximum.at(places, (rows[chosen], columns[chosen]), np.flatnonzero(chosen))
    return places


@array_function(
    "SparseToDenseMask",
    inputs=(3, 4),
    outputs=(1, 2),
    infer=infer_mask,
    doc="A column for each identifier of the mask, with the value whose identifier it is, or the default value; with "
    "lengths a row for each segment of identifiers. Of several values the last is taken.",
    input_names=("indices", "values", "default_value", "lengths"),
    output_names=("dense", "presence_mask"),
    args=_MASK_ARGS,
    required_args=("mask",),
    value_inputs=(3,),
)
def mask(call: OperatorCall, indices: Array, values: Array, default: Array, *lengths: Array) -> Sequence[Array]:
    """The default value everywhere, then those that are there."""
    places = _taken(call, indices, lengths)
    present = places >= 0
    dense = np.empty((*places.shape, *default.shape), values.dtype)
    dense[...] = default
    dense[present] = values[places[present]]
    return [dense, present][: len(call.definition.output)]


def infer_mask_gradient(call: OperatorCall) -> list[TensorType]:
    """A row for each identifier."""
    call.arguments.bool("return_presence_mask")
    shape, dy = _shape(call, 2), call.inputs[1]
    if dy.shape[: len(shape)] != shape:
        raise call.fail(f"dY must begin with the axes {shape} of rows and columns")
    return [TensorType((*call.inputs[0].shape, *dy.shape[len(shape) :]), dy.meta)]


@array_function(
    "SparseToDenseMaskGradient",
    inputs=(2, 3),
    infer=infer_mask_gradient,
    doc="Gradient of SparseToDenseMask: to each value that was taken the dY of its column, 0 to the others.",
    input_names=("indices", "dY", "lengths"),
    output_names=("dvalues",),
    args=_MASK_ARGS,
    required_args=("mask",),
    value_inputs=(2,),
)
def mask_gradient(call: OperatorCall, indices: Array, dy: Array, *lengths: Array) -> Sequence[Array]:
    """What its place has, to the value that was taken there."""
    places = _taken(call, indices, lengths)
    present = places >= 0
    by_row = dy if lengths else dy[np.newaxis]
    found = np.zeros((len(indices), *by_row.shape[2:]), dy.dtype)
    found[places[present]] = by_row[present]
    return [found]


@gradient_of("SparseToDenseMask")
def mask_maker(request: GradientRequest) -> GradientOperators:
    """Of the values."""
    lengths = [request.x(3)] if request.has_x(3) else []
    return request.single("SparseToDenseMaskGradient", [request.x(0), request.dy(0), *lengths], [1])


no_gradient("BatchOneHot", "SegmentOneHot")
