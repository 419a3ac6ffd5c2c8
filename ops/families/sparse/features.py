"""Features before a model: BatchBoxCox, buckets, hashes, StumpFunc, Unique, dense rows from lists of indices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.schema import OperatorCall, TensorType, one_to_one
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import checked_lengths

_MIN_ARGUMENT = 1e-6


def infer_box_cox(call: OperatorCall) -> list[TensorType]:
    """The type of the data, a matrix, with two numbers for each column."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type()
    columns = call.require_rank(0, 2)[1]
    for index in (1, 2):
        call.require_shape(index, (columns,), "a number for each column")
    return [call.inputs[0]]


@array_function(
    "BatchBoxCox",
    infer=infer_box_cox,
    doc=(
        "With x = max(X + lambda2, 1e-6), a column each: (x^lambda1 - 1) / lambda1, or ln(x) where lambda1 is 0 "
        "(Box and Cox 1964)."
    ),
    input_names=("X", "lambda1", "lambda2"),
    output_names=("Y",),
    args={"naive": "for Caffe2's implementation; not read", "min_block_size": "likewise"},
)
def box_cox(_call: OperatorCall, data: Array, lambda1: Array, lambda2: Array) -> Sequence[Array]:
    """In float64: for a small lambda1, numerator and denominator are both small."""
    x = np.log(np.maximum(data.astype(np.float64) + lambda2, _MIN_ARGUMENT))
    power = np.where(lambda1 == 0, 1.0, lambda1.astype(np.float64))
    return [np.where(lambda1 == 0, x, np.expm1(x * power) / power)]


def infer_bucketize(call: OperatorCall) -> list[TensorType]:
    """A bucket for each row and each of the columns picked."""
    call.require_types(0, FLOAT32)
    call.require_types(2, FLOAT32)
    call.require_types(1, INT32)
    checked_lengths(call, 3, call.require_rank(2, 1)[0])
    picked = call.require_rank(1, 1)
    call.require_shape(3, picked, "a number of boundaries for each column")
    return [TensorType((call.require_rank(0, 2)[0], *picked), INT32)]


@array_function(
    "BatchBucketize",
    infer=infer_bucketize,
    doc="For columns `indices` of X, how many of their boundaries, sorted, are below each element.",
    input_names=("X", "indices", "boundaries", "lengths"),
    output_names=("Y",),
    value_inputs=(3,),
)
def bucketize(call: OperatorCall, x: Array, indices: Array, boundaries: Array, lengths: Array) -> Sequence[Array]:
    """A search in the boundaries of each column."""
    check_indices(indices, 0, x.shape[1], call.label)
    ends = np.cumsum(lengths)
    found = np.empty((len(x), len(indices)), np.int32)
    for place, (column, end, length) in enumerate(zip(indices, ends, lengths, strict=True)):
        found[:, place] = np.searchsorted(boundaries[end - length : end], x[:, column], side="left")
    return [found]


def infer_stump(call: OperatorCall) -> list[TensorType]:
    """float32, in the shape of X."""
    call.require_types(0, *FLOAT_TYPES)
    for name in ("threshold", "low_value", "high_value"):
        call.arguments.float(name, 0.0)
    return [TensorType(call.inputs[0].shape, FLOAT32)]


@array_function(
    "StumpFunc",
    infer=infer_stump,
    doc="low_value where X is at most the threshold, else high_value.",
    input_names=("X",),
    output_names=("Y",),
    args={"threshold": "(default 0)", "low_value": "(default 0)", "high_value": "(default 0)"},
)
def stump(call: OperatorCall, x: Array) -> Sequence[Array]:
    """One comparison."""
    threshold, low, high = (call.arguments.float(name, 0.0) for name in ("threshold", "low_value", "high_value"))
    return [np.where(x <= x.dtype.type(threshold), low, high)]


def infer_stump_places(call: OperatorCall) -> list[TensorType]:
    """As many places as there are elements on each side."""
    call.require_types(0, *FLOAT_TYPES)
    (count,), low = call.require_rank(0, 1), int(np.count_nonzero(_is_low(call, call.known_value(0))))
    return [TensorType((low,), INT64), TensorType((count - low,), INT64)]


def _is_low(call: OperatorCall, x: Array) -> Array:
    found: Array = x <= x.dtype.type(call.arguments.float("threshold", 0.0))
    return found


@array_function(
    "StumpFuncIndex",
    infer=infer_stump_places,
    doc="The places of the elements that are at most the threshold, and of the others.",
    input_names=("X",),
    output_names=("low", "high"),
    args={"threshold": "(default 0)"},
    value_inputs=(0,),
)
def stump_places(call: OperatorCall, x: Array) -> Sequence[Array]:
    """One comparison."""
    low = _is_low(call, x)
    return [np.flatnonzero(low), np.flatnonzero(~low)]


def infer_unique(call: OperatorCall) -> list[TensorType]:
    """As many as there are different ones, and a place in them for each element."""
    meta = call.require_types(0, INT32, INT64)
    count = len(np.unique(call.known_value(0)))
    both = [TensorType((count,), meta), TensorType(call.require_rank(0, 1), INT32)]
    return both[: len(call.definition.output)]


@array_function(
    "Unique",
    outputs=(1, 2),
    infer=infer_unique,
    doc="The different elements of a vector, sorted, and for each element where in them it is.",
    input_names=("X",),
    output_names=("unique", "remapping"),
    value_inputs=(0,),
)
def unique(call: OperatorCall, x: Array) -> Sequence[Array]:
    """A sort."""
    found, places = np.unique(x, return_inverse=True)
    return [found, places][: len(call.definition.output)]


_DENSE_ARGS = {
    "dense_last_dim": "columns of the dense matrix, where no input tells",
    "default_value": "what is elsewhere (default 0)",
}


def _check_lists(call: OperatorCall) -> int:
    """How many indices there are. Raises ShapeError unless the lengths add up to it."""
    for index in (0, 1):
        call.require_types(index, INT32, INT64)
    count = call.require_rank(1, 1)[0]
    checked_lengths(call, 0, count)
    call.arguments.float("default_value", 0.0)
    return count


def infer_sparse_to_dense(call: OperatorCall) -> list[TensorType]:
    """A row for each length, with the columns of the fourth input or of `dense_last_dim`."""
    meta = call.require_types(2, *NUMBER_TYPES)
    call.require_shape(2, (_check_lists(call),), "a value for each index")
    rows = call.inputs[0].shape[0]
    columns = call.require_rank(3, 2)[1] if len(call.inputs) == 4 else call.arguments.int("dense_last_dim", -1)
    if columns < 1:
        raise call.fail(f"expected at least 1 column from 'dense_last_dim' or input 3, found {columns}")
    return [TensorType((rows, columns), meta)]


@array_function(
    "BatchSparseToDense",
    inputs=(3, 4),
    infer=infer_sparse_to_dense,
    doc="Rows with the values at their indices, of which `lengths` says how many are in each row.",
    input_names=("lengths", "indices", "values", "shape_like"),
    output_names=("dense",),
    args=_DENSE_ARGS,
    value_inputs=(0,),
)
def sparse_to_dense(call: OperatorCall, lengths: Array, indices: Array, values: Array, *like: Array) -> Sequence[Array]:
    """Each value to its row and column."""
    columns = like[0].shape[1] if like else call.arguments.int("dense_last_dim", -1)
    check_indices(indices, 0, columns, call.label)
    dense = np.full((len(lengths), columns), call.arguments.float("default_value", 0.0), values.dtype)
    dense[np.repeat(np.arange(len(lengths)), lengths), indices] = values
    return [dense]


def infer_dense_to_sparse(call: OperatorCall) -> list[TensorType]:
    """A value for each index."""
    count = _check_lists(call)
    rows = call.require_rank(2, 2)[0]
    call.require_shape(0, (rows,), "a length for each row")
    return [TensorType((count,), call.inputs[2].meta)]


@array_function(
    "BatchDenseToSparse",
    infer=infer_dense_to_sparse,
    doc="The values of rows at their indices, of which `lengths` says how many are in each row.",
    input_names=("lengths", "indices", "dense"),
    output_names=("values",),
    args=_DENSE_ARGS,
    value_inputs=(0,),
)
def dense_to_sparse(call: OperatorCall, lengths: Array, indices: Array, dense: Array) -> Sequence[Array]:
    """Each value from its row and column."""
    check_indices(indices, 0, dense.shape[1], call.label)
    return [dense[np.repeat(np.arange(len(lengths)), lengths), indices]]


gradient_by("BatchSparseToDense", "BatchDenseToSparse", ("X0", "X1", "dY"), of_inputs=(2,))
gradient_by("BatchDenseToSparse", "BatchSparseToDense", ("X0", "X1", "dY", "X2"), of_inputs=(2,))


def infer_bucket_of_each(call: OperatorCall) -> list[TensorType]:
    """A bucket for each element. Raises ArgumentError for boundaries that are not sorted."""
    call.require_types(0, FLOAT32, FLOAT64)
    boundaries = call.arguments.floats("boundaries")
    if not boundaries or any(low > high for low, high in pairwise(boundaries)):
        raise ArgumentError(f"{call.label}: argument 'boundaries' must have at least one number, in rising order")
    return [TensorType(call.inputs[0].shape, INT32)]


@array_function(
    "Bucketize",
    infer=infer_bucket_of_each,
    doc="How many of the boundaries are below each element.",
    input_names=("X",),
    output_names=("Y",),
    args={"boundaries": "in rising order"},
    required_args=("boundaries",),
)
def bucket_of_each(call: OperatorCall, x: Array) -> Sequence[Array]:
    """A search."""
    return [np.searchsorted(np.array(call.arguments.floats("boundaries"), np.float32), x, side="left")]


def infer_hash(call: OperatorCall) -> list[TensorType]:
    """That of the indices."""
    call.require_types(0, INT32, INT64)
    call.require_rank(0, 1)
    call.arguments.int("seed", 0)
    if call.arguments.int("modulo", 0) < 1:
        raise ArgumentError(f"{call.label}: argument 'modulo' must be above 0")
    return [call.inputs[0]]


@array_function(
    "IndexHash",
    infer=infer_hash,
    doc="A number in [0, modulo) for each index: h = 0xDEADBEEF * seed, then h = 65537 * h + b for each byte b of the "
    "index, signed and the least significant first, in as many bits as the index has; h modulo `modulo`.",
    input_names=("indices",),
    output_names=("hashed",),
    args={"seed": "(default 0)", "modulo": "numbers are below it"},
    required_args=("modulo",),
    inplace=one_to_one,
)
def hashed(call: OperatorCall, indices: Array) -> Sequence[Array]:
    """Byte by byte for all indices."""
    signed = indices.astype(indices.dtype.newbyteorder("<"))
    wrapping = np.dtype(f"<u{indices.dtype.itemsize}")
    start = 0xDEADBEEF * call.arguments.int("seed", 0) % (1 << 8 * wrapping.itemsize)
    found = np.full(indices.shape, start, wrapping)
    for byte in signed.view(np.int8).reshape(-1, wrapping.itemsize).T:
        found = found * wrapping.type(65537) + byte.astype(signed.dtype).view(wrapping)
    return [found.view(signed.dtype).astype(np.int64) % call.arguments.int("modulo", 0)]


no_gradient("BatchBoxCox", "BatchBucketize", "Bucketize", "IndexHash", "StumpFunc", "StumpFuncIndex", "Unique")
