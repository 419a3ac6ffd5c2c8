"""Segments of rows, given by their lengths: sums, means and maxima over each.

`lengths` of [2, 0, 3] are a segment of the first two rows, one of none and one of the last three. A sparse operator
takes rows `indices` of the data, in that order; of float16 it gives float32, as Caffe2's. Over no rows a sum, a mean
and a maximum are 0. Gradients are in `segments_gradient`, segments by their numbers in `segment_ids`, lengths in other
words in `lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT16, FLOAT32, FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.families.index.indexing import check_indices

Reduce = Callable[[Array, Array], Array]
"""From rows, and the number of rows of each segment, a row for each segment."""

_INTEGERS = (INT32, INT64)


def checked_lengths(call: OperatorCall, index: int, rows: int) -> None:
    """Raise ShapeError, where the lengths are known, unless they are at least 0 and add up to `rows`."""
    call.require_rank(index, 1)
    call.require_types(index, *_INTEGERS)
    lengths = call.known_value(index)
    total = int(lengths.sum(dtype=np.int64))
    if (lengths < 0).any() or total != rows:
        raise call.fail(f"lengths must be at least 0 and add up to {rows} rows, found {total}")


def _by_segments(ufunc: np.ufunc) -> Reduce:
    def reduce(rows: Array, lengths: Array) -> Array:
        wide = compute_dtype(rows.dtype)
        found = np.zeros((len(lengths), *rows.shape[1:]), wide)
        filled = lengths > 0
        if filled.any():
            starts = (np.cumsum(lengths) - lengths)[filled]
            found[filled] = ufunc.reduceat(rows.astype(wide, copy=False), starts, axis=0)
        return found

    return reduce


segment_sums = _by_segments(np.add)
segment_maxima = _by_segments(np.maximum)


def segment_means(rows: Array, lengths: Array) -> Array:
    """The mean of each segment; 0 over none."""
    counts = across(np.maximum(lengths, 1), rows.ndim).astype(compute_dtype(rows.dtype))
    found: Array = segment_sums(rows, lengths) / counts
    return found


def places_in_segments(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each row its place in its segment: [2, 0, 3] gives [0, 1, 0, 1, 2]."""
    found: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return found


def rows_of_segments(lengths: Array, segments: Array) -> npt.NDArray[np.int64]:
    """The rows of the segments that are picked, one segment after another."""
    starts, counts = np.cumsum(lengths) - lengths, lengths[segments]
    found: npt.NDArray[np.int64] = np.repeat(starts[segments], counts) + places_in_segments(counts)
    return found


def across(values: Array, rank: int) -> Array:
    """A vector as a column of a tensor of `rank` axes."""
    return values.reshape(-1, *(1,) * (rank - 1))


def check_rows(call: OperatorCall, sparse: bool, weighted: bool) -> tuple[int, int]:
    """How many rows are reduced, and which input says their segments.

    Raises ShapeError unless there are data, with `weighted` a weight for each of these rows, and if `sparse` indices.
    """
    call.require_types(0, *FLOAT_TYPES)
    data, place = call.inputs[0], 1 + weighted
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    rows = data.shape[0]
    if sparse:
        (rows,) = call.require_rank(place, 1)
        call.require_types(place, *_INTEGERS)
        place += 1
    if weighted:
        call.require_types(1, *FLOAT_TYPES)
        call.require_shape(1, (rows,), "a weight for each row")
    return rows, place


def reduced_rows(call: OperatorCall, arrays: Sequence[Array], sparse: bool, weighted: bool) -> Array:
    """The rows to be reduced: those that the indices pick, times their weights. Raises IndexError."""
    rows = arrays[0]
    if sparse:
        check_indices(arrays[-2], 0, len(rows), call.label)
        rows = rows[arrays[-2]]
    return rows.astype(compute_dtype(rows.dtype), copy=False) * across(arrays[1], rows.ndim) if weighted else rows


def reduction_inputs(sparse: bool, weighted: bool, last: str) -> tuple[str, ...]:
    """The names of the inputs of a reduction over segments that `last` says."""
    return ("data", *(("weights",) if weighted else ()), *(("indices",) if sparse else ()), last)


def _infer(sparse: bool, weighted: bool) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        rows, place = check_rows(call, sparse, weighted)
        checked_lengths(call, place, rows)
        data = call.inputs[0]
        meta = FLOAT32 if sparse and data.meta is FLOAT16 else data.meta
        return [TensorType((call.inputs[place].shape[0], *data.shape[1:]), meta)]

    return infer


def _picking_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """A row is read and summed for each index; what else the table has does not count."""
    data, indices = call.inputs[0], call.inputs[-2]
    elements = indices.elements * (data.elements // max(1, data.shape[0]))
    beside = sum(kind.nbytes for kind in call.inputs[1:])
    return Cost(elements, elements * data.meta.itemsize + beside, outputs[0].nbytes)


GRAD_ON_WEIGHTS = {"grad_on_weights": "1: weights get a gradient, too, of operators with lengths (default 0)"}


def _define(name: str, reduce: Reduce, what: str, *, weighted: bool = False) -> None:
    """Register `Lengths<name>` and `SparseLengths<name>`."""
    for sparse in (False, True):
        inputs = reduction_inputs(sparse, weighted, "lengths")
        register = array_function(
            f"{'Sparse' * sparse}Lengths{name}",
            infer=_infer(sparse, weighted),
            doc=f"{what} of each segment of {'rows `indices` of the data' if sparse else 'rows'}.",
            input_names=inputs,
            output_names=("Y",),
            args=GRAD_ON_WEIGHTS if weighted else {},
            value_inputs=(len(inputs) - 1,),
            cost=_picking_cost if sparse else memory_cost,
        )

        def compute(call: OperatorCall, *arrays: Array, sparse: bool = sparse) -> Sequence[Array]:
            return [reduce(reduced_rows(call, arrays, sparse, weighted), arrays[-1])]

        register(compute)


_define("Sum", segment_sums, "The sum")
_define("Mean", segment_means, "The mean")
_define("Max", segment_maxima, "The maximum")
_define("WeightedSum", segment_sums, "The sum, each row times its weight,", weighted=True)


def _infer_positional(call: OperatorCall) -> list[TensorType]:
    """As of weights for rows, but a weight for each place in a segment. Raises ShapeError where one has no weight."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, *FLOAT_TYPES)
    call.require_types(2, *_INTEGERS)
    data, (places,), (rows,) = call.inputs[0], call.require_rank(1, 1), call.require_rank(2, 1)
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    checked_lengths(call, 3, rows)
    longest = int(call.known_value(3).max(initial=0))
    if longest > places:
        raise call.fail(f"expected a weight for each of {longest} places in the longest segment, found {places}")
    meta = FLOAT32 if data.meta is FLOAT16 else data.meta
    return [TensorType((call.inputs[3].shape[0], *data.shape[1:]), meta)]


@array_function(
    "SparseLengthsPositionalWeightedSum",
    infer=_infer_positional,
    doc="The sum of each segment of rows `indices` of the data, each row times the weight of its place in the segment.",
    input_names=("data", "weights", "indices", "lengths"),
    output_names=("Y",),
    value_inputs=(3,),
    cost=_picking_cost,
)
def positional_sum(call: OperatorCall, data: Array, weights: Array, indices: Array, lengths: Array) -> Sequence[Array]:
    """The weighted sum with the weights of the places."""
    by_row = weights[places_in_segments(lengths)]
    return [segment_sums(reduced_rows(call, (data, by_row, indices, lengths), sparse=True, weighted=True), lengths)]


not_differentiable("Caffe2 has none", "SparseLengthsPositionalWeightedSum", "SparseLengthsMax")
