"""Ranges of a vector, each by its beginning and its length: gathered one after another, or into columns of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def _checked_ranges(call: OperatorCall) -> Array:
    """The ranges. Raises ShapeError for one that is not within the data."""
    call.require_types(1, INT32, INT64)
    (count,) = call.require_rank(0, 1)
    if call.require_rank(1, 3)[2] != 2:
        raise call.fail("ranges must have shape (N, M, 2): each a start and a length")
    ranges = call.known_value(1).astype(np.int64)
    ends = ranges[..., 0] + ranges[..., 1]
    if (ranges < 0).any() or (ends > count).any():
        raise call.fail(f"a range must lie within the {count} elements of the data")
    return ranges


def infer_gather_ranges(call: OperatorCall) -> list[TensorType]:
    """All elements of all ranges, and how many there are in each row of ranges."""
    ranges = _checked_ranges(call)
    total = int(ranges[..., 1].sum())
    return [TensorType((total,), call.inputs[0].meta), TensorType(ranges.shape[:1], INT32)]


@array_function(
    "GatherRanges",
    infer=infer_gather_ranges,
    doc="The elements of ranges one after another, and how many each row of ranges has.",
    input_names=("data", "ranges"),
    output_names=("Y", "lengths"),
    value_inputs=(1,),
)
def gather_ranges(_call: OperatorCall, data: Array, ranges: Array) -> Sequence[Array]:
    """One slice a range."""
    pieces = [data[start : start + length] for start, length in ranges.reshape(-1, 2)]
    return [np.concatenate([data[:0], *pieces]), ranges[..., 1].sum(axis=1)]


def infer_gather_ranges_to_dense(call: OperatorCall) -> list[TensorType]:
    """A matrix for each of the M columns of ranges. Raises ShapeError where too many ranges have another length."""
    ranges, lengths = _checked_ranges(call), call.arguments.ints("lengths")
    if len(call.inputs) == 3:
        call.require_types(2, INT64)
        call.require_shape(2, call.inputs[0].shape, "a key for each element")
    if not len(lengths) == ranges.shape[1] == len(call.definition.output) or min(lengths) < 1:
        raise call.fail(f"expected a length above 0 and an output for each of {ranges.shape[1]} columns of ranges")
    rows = max(len(ranges), call.arguments.int("min_observation", 10000))
    empty = ranges[..., 1] == 0
    other = (ranges[..., 1] != lengths) & ~empty
    for what, found, name, most in (
        ("empty", empty, "max_empty_ratio", 1.0),
        ("of another length", other, "max_mismatched_ratio", 0.01),
    ):
        ratio = call.arguments.float(name, most)
        if (found.sum(axis=0) > rows * ratio).any():
            raise call.fail(f"{name}={ratio:g}: of {len(ranges)} ranges {found.sum(axis=0).tolist()} are {what}")
    return [TensorType((len(ranges), length), call.inputs[0].meta) for length in lengths]


@array_function(
    "GatherRangesToDense",
    inputs=(2, 3),
    outputs=(1, UNBOUNDED),
    infer=infer_gather_ranges_to_dense,
    doc=(
        "For each of the M columns of ranges a matrix of their elements, a range a row, sorted by `key` where it "
        "is given; zeros where a range is empty or has another length."
    ),
    input_names=("data", "ranges", "key"),
    output_names=("Y_0", "Y_1", "..."),
    args={
        "lengths": "the length of the ranges of each column",
        "min_observation": "ratios are of so many rows at least (default 10000)",
        "max_mismatched_ratio": "of the ranges of a column so many may have another length (default 0.01)",
        "max_empty_ratio": "so many may be empty (default 1)",
    },
    required_args=("lengths",),
    value_inputs=(1,),
)
def gather_ranges_to_dense(call: OperatorCall, data: Array, ranges: Array, *keys: Array) -> Sequence[Array]:
    """Row by row."""
    found = []
    for column, length in enumerate(call.arguments.ints("lengths")):
        rows = np.zeros((len(ranges), length), data.dtype)
        for row, (start, count) in enumerate(ranges[:, column]):
            if count == length:
                order = np.argsort(keys[0][start : start + count], kind="stable") if keys else slice(None)
                rows[row] = data[start : start + count][order]
        found.append(rows)
    return found


no_gradient("GatherRanges", "GatherRangesToDense")
