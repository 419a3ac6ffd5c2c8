"""Lengths of segments in other words, and rows repeated, picked and padded by them.

`lengths` of [2, 0, 3] are a segment of the first two rows, one of none and one of the last three; the numbers of their
segments are [0, 0, 2, 2, 2], which Caffe2 calls segment ids. What is computed over segments is in `segments` and
`segment_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, INT32, INT64, TypeMeta
from dagexec.core.gradient import gradient_by, no_gradient, not_differentiable
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import Compute, array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import checked_lengths, places_in_segments, rows_of_segments

_POWER = {"power": "the exponent (default 0.5)"}


def _vector_of_lengths(call: OperatorCall) -> npt.NDArray[Any]:
    """The lengths, input 0. Raises ShapeError for one below 0."""
    call.require_rank(0, 1)
    call.require_types(0, INT32, INT64)
    lengths = call.known_value(0)
    if (lengths < 0).any():
        raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
    return lengths


def _weights(lengths: Array, power: float) -> Array:
    found: Array = np.repeat(np.maximum(lengths, 1).astype(np.float64) ** -power, lengths)
    return found


def _ranges(lengths: Array) -> Array:
    return np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)


def _from_lengths(
    name: str,
    meta: TypeMeta,
    doc: str,
    shape: Callable[[int, int], tuple[int, ...]],
    args: dict[str, str] | None = None,
) -> Callable[[Compute], Compute]:
    """Decorator: the function computes this operator of lengths; `shape` of Y from their number and their sum."""
    no_gradient(name)

    def infer(call: OperatorCall) -> list[TensorType]:
        lengths = _vector_of_lengths(call)
        call.arguments.float("power", 0.5)
        return [TensorType(shape(len(lengths), int(lengths.sum(dtype=np.int64))), meta)]

    return array_function(
        name, infer=infer, doc=doc, input_names=("lengths",), output_names=("Y",), args=args or {}, value_inputs=(0,)
    )


@_from_lengths("LengthsToSegmentIds", INT32, "The number of its segment for each row.", lambda _, total: (total,))
def numbers(_call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 0, 1] gives [0, 0, 2]."""
    return [np.repeat(np.arange(len(lengths)), lengths)]


@_from_lengths("LengthsToRanges", INT32, "The first row and the length of each segment.", lambda count, _: (count, 2))
def ranges(_call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 0, 1] gives [[0, 2], [2, 0], [2, 1]]."""
    return [_ranges(lengths)]


@_from_lengths(
    "LengthsToWeights", FLOAT32, "For each row 1 / (length of its segment)^power.", lambda _, total: (total,), _POWER
)
def weights(call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 1] with power 1 gives [1/2, 1/2, 1]."""
    return [_weights(lengths, call.arguments.float("power", 0.5))]


def infer_offsets(call: OperatorCall) -> list[TensorType]:
    """A first row for each length, and one behind the last with `include_last_offset`."""
    count = call.require_rank(0, 1)[0]
    return [TensorType((count + call.arguments.bool("include_last_offset"),), call.require_types(0, INT32, INT64))]


@array_function(
    "LengthsToOffsets",
    infer=infer_offsets,
    doc="The first row of each segment.",
    input_names=("lengths",),
    output_names=("offsets",),
    args={"include_last_offset": "1: the number of all rows comes last (default 0)"},
)
def offsets(call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[1, 3, 0, 2] gives [0, 1, 4, 4], with the last offset [0, 1, 4, 4, 6]."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return [ends[: len(lengths) + call.arguments.bool("include_last_offset")]]


def infer_lengths_to_shape(call: OperatorCall) -> list[TensorType]:
    """Two sizes."""
    call.require_rank(0, 1)
    call.require_types(0, INT32)
    return [TensorType((2,), INT32)]


@array_function(
    "LengthsToShape",
    infer=infer_lengths_to_shape,
    doc="The shape of the matrix whose rows are segments of equal lengths.",
    input_names=("lengths",),
    output_names=("shape",),
)
def lengths_to_shape(call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[3, 3] gives [2, 3]. Raises ArgumentError for lengths that differ, or none."""
    if not lengths.size or (lengths != lengths[0]).any():
        raise ArgumentError(f"{call.label}: expected at least one length, all of them equal, found {lengths.tolist()}")
    return [np.array([lengths.size, lengths[0]])]


def infer_split(call: OperatorCall) -> list[TensorType]:
    """So many parts of each length. Raises ShapeError, and ArgumentError for a number of parts below 1."""
    call.require_types(0, INT32)
    lengths, parts = _vector_of_lengths(call), call.arguments.int("n_split", 0)
    if len(call.inputs) == 2:
        call.require_types(1, INT32)
        if call.inputs[1].elements != 1:
            raise call.fail("n_split must be one number")
        parts = int(call.known_value(1).reshape(-1)[0])
    if parts < 1:
        raise ArgumentError(f"{call.label}: n_split, input 1 or else an argument, must be at least 1, found {parts}")
    return [TensorType((len(lengths) * parts,), INT32)]


@array_function(
    "LengthsSplit",
    inputs=(1, 2),
    infer=infer_split,
    doc="Each length as a sum of n_split lengths, as equal as can be, the larger ones first.",
    input_names=("lengths", "n_split"),
    output_names=("Y",),
    args={"n_split": "how many, where input 1 does not say it"},
    value_inputs=(0, 1),
)
def split(call: OperatorCall, lengths: Array, *counts: Array) -> Sequence[Array]:
    """[9, 4] in 3 parts gives [3, 3, 3, 2, 1, 1]."""
    parts = int(counts[0].reshape(-1)[0]) if counts else call.arguments.int("n_split", 0)
    column = lengths[:, np.newaxis]
    return [column // parts + (np.arange(parts) < column % parts)]


def infer_tile(call: OperatorCall) -> list[TensorType]:
    """Each row as often as its length says."""
    data = call.inputs[0]
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    call.require_types(1, INT32, INT64)
    call.require_shape(1, data.shape[:1], "a length for each row")
    lengths = call.known_value(1)
    if (lengths < 0).any():
        raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
    return [TensorType((int(lengths.sum(dtype=np.int64)), *data.shape[1:]), data.meta)]


@array_function(
    "LengthsTile",
    infer=infer_tile,
    doc="Each row of the data as often as its length says.",
    input_names=("data", "lengths"),
    output_names=("Y",),
    value_inputs=(1,),
)
def tile(_call: OperatorCall, data: Array, lengths: Array) -> Sequence[Array]:
    """Rows a, b with lengths [2, 1] give a, a, b."""
    return [np.repeat(data, lengths, axis=0)]


gradient_by("LengthsTile", "LengthsSum", ("dY", "X1"))


def infer_gather(call: OperatorCall) -> list[TensorType]:
    """The rows of the segments picked. Raises ShapeError, IndexError."""
    items = call.inputs[0]
    if not items.shape:
        raise call.fail("the items must have at least 1 axis")
    checked_lengths(call, 1, items.shape[0])
    call.require_rank(2, 1)
    call.require_types(2, INT32, INT64)
    lengths, indices = call.known_value(1), call.known_value(2)
    check_indices(indices, 0, len(lengths), call.label)
    return [TensorType((int(lengths[indices].sum(dtype=np.int64)), *items.shape[1:]), items.meta)]


@array_function(
    "LengthsGather",
    infer=infer_gather,
    doc="The rows of the segments `indices`, one segment after another. Gather picks their lengths.",
    input_names=("items", "lengths", "indices"),
    output_names=("Y",),
    value_inputs=(1, 2),
)
def gather(_call: OperatorCall, items: Array, lengths: Array, indices: Array) -> Sequence[Array]:
    """Items 1, 2, 3 with lengths [2, 1] and index 1 give 3."""
    return [items[rows_of_segments(lengths, indices)]]


def _lengths_of(ids: Array, others: Sequence[Array]) -> npt.NDArray[np.int64]:
    """How many rows each segment has; of so many segments as the first of the others has rows, where there is one."""
    count = len(others[0]) if others else 0
    found: npt.NDArray[np.int64] = np.bincount(ids, minlength=count)
    return found


def _from_ids(
    name: str, meta: TypeMeta, doc: str, shape: Callable[[int, int], tuple[int, ...]], args: dict[str, str]
) -> Callable[[Compute], Compute]:
    """Decorator: the function computes this operator of numbers of segments; `shape` as for lengths."""
    no_gradient(name)

    def infer(call: OperatorCall) -> list[TensorType]:
        (rows,) = call.require_rank(0, 1)
        call.require_types(0, INT32, INT64)
        call.arguments.float("power", 0.5)
        ids = call.known_value(0)
        if rows and (int(ids[0]) < 0 or (np.diff(ids) < 0).any()):
            raise call.fail("segment numbers must be at least 0 and not decrease")
        count = int(ids[-1]) + 1 if rows else 0
        if len(call.inputs) == 2:
            segments = call.inputs[1].shape[0] if call.inputs[1].shape else 0
            if segments < count:
                raise call.fail(f"expected a row of input 1 for each of {count} segments, found {segments}")
            count = segments
        return [TensorType(shape(count, rows), meta)]

    return array_function(
        name,
        inputs=(1, 2),
        infer=infer,
        doc=f"{doc}, from the number of its segment for each row. There are as many segments as input 1 has rows.",
        input_names=("segment_ids", "data"),
        output_names=("Y",),
        args=args,
        value_inputs=(0,),
    )


@_from_ids("SegmentIdsToLengths", INT32, "The length of each segment", lambda count, _: (count,), {})
def segment_lengths(_call: OperatorCall, ids: Array, *others: Array) -> Sequence[Array]:
    """[0, 0, 2] gives [2, 0, 1]."""
    return [_lengths_of(ids, others)]


@_from_ids("SegmentIdsToRanges", INT32, "The first row and the length of each segment", lambda count, _: (count, 2), {})
def segment_ranges(_call: OperatorCall, ids: Array, *others: Array) -> Sequence[Array]:
    """[0, 0, 2] gives [[0, 2], [2, 0], [2, 1]]."""
    return [_ranges(_lengths_of(ids, others))]


@_from_ids(
    "SegmentIdsToLengthWeights",
    FLOAT32,
    "For each row 1 / (length of its segment)^power",
    lambda _, total: (total,),
    _POWER,
)
def segment_weights(call: OperatorCall, ids: Array, *others: Array) -> Sequence[Array]:
    """[0, 0, 2] with power 1 gives [1/2, 1/2, 1]."""
    return [_weights(_lengths_of(ids, others), call.arguments.float("power", 0.5))]


def infer_lengths_pad(call: OperatorCall) -> list[TensorType]:
    """`target_length` rows a segment. Raises ShapeError where one is longer."""
    data, target = call.inputs[0], call.arguments.int("target_length", -1)
    call.arguments.float("padding_value", -1.0)
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    checked_lengths(call, 1, data.shape[0])
    longest = int(call.known_value(1).max(initial=0))
    if target < longest:
        raise call.fail(f"'target_length' must be at least the longest segment's, {longest}, found {target}")
    return [TensorType((call.inputs[1].shape[0] * target, *data.shape[1:]), data.meta)]


@array_function(
    "LengthsPad",
    infer=infer_lengths_pad,
    doc="The segments with rows of `padding_value` behind each, so that all have `target_length` rows.",
    input_names=("data", "lengths"),
    output_names=("Y",),
    args={"target_length": "rows of each segment", "padding_value": "what the others hold (default -1)"},
    required_args=("target_length",),
    value_inputs=(1,),
)
def lengths_pad(call: OperatorCall, data: Array, lengths: Array) -> Sequence[Array]:
    """Rows of one segment after another, with the padding between."""
    target = call.arguments.int("target_length", -1)
    padded = np.full((len(lengths), target, *data.shape[1:]), call.arguments.float("padding_value", -1.0), data.dtype)
    padded[np.repeat(np.arange(len(lengths)), lengths), places_in_segments(lengths)] = data
    return [padded]


no_gradient("LengthsToOffsets", "LengthsToShape", "LengthsSplit")
not_differentiable("Caffe2 has none", "LengthsPad", "LengthsGather")
