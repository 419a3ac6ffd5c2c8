"""Reductions of the rows of each segment at once, with segments that sorted numbers say: sums, means, maxima, and the
logarithms of sums and means of exponentials.

They differ from those of `segment_ids` in that no segment is without rows, and that gradients may read X and Y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segment_ids import sorted_segments
from dagexec.ops.families.sparse.segments import across, segment_maxima, segment_means, segment_sums


def log_sums_of_exponentials(rows: Array, lengths: Array) -> Array:
    """ln of the sum of exp(x), without overflow (Blanchard, Higham, Higham 2021)."""
    largest = segment_maxima(rows, lengths)
    shift = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        found: Array = np.log(segment_sums(np.exp(rows - np.repeat(shift, lengths, axis=0)), lengths)) + shift
    return found


def _log_means_of_exponentials(rows: Array, lengths: Array) -> Array:
    counts = across(lengths, rows.ndim).astype(compute_dtype(rows.dtype))
    found: Array = log_sums_of_exponentials(rows, lengths) - np.log(counts)
    return found


_REDUCTIONS = {
    "Sum": (segment_sums, "The sum"),
    "Mean": (segment_means, "The mean"),
    "Max": (segment_maxima, "The maximum"),
    "LogSumExp": (log_sums_of_exponentials, "ln of the sum of the exponentials"),
    "LogMeanExp": (_log_means_of_exponentials, "ln of the mean of the exponentials"),
}

_SLOPES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "Sum": lambda x, _y, _counts: np.ones_like(x),
    "Mean": lambda x, _y, counts: np.broadcast_to(1 / counts, x.shape),
    "Max": lambda x, y, _counts: (x == y).astype(x.dtype),
    "LogSumExp": lambda x, y, _counts: np.exp(x - y),
    "LogMeanExp": lambda x, y, counts: np.exp(x - y) / counts,
}
"""dY/dX from X, the Y of its segment and the number of rows there. Of several equal maxima each has all of dY."""


def infer_reduction(call: OperatorCall) -> list[TensorType]:
    """A row for each segment."""
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    if not shape:
        raise call.fail("the data must have at least 1 axis")
    return [TensorType((sorted_segments(call, 1, shape[0]), *shape[1:]), meta)]


def infer_gradient(call: OperatorCall) -> list[TensorType]:
    """That of the data. dY may have other axes than Y: that of a state of a RecurrentNetwork has those of the state."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1, 2)
    x, y = call.inputs[:2]
    if not x.shape or not y.shape or y.shape[1:] != x.shape[1:]:
        raise call.fail("X and Y must have rows of the same shape")
    if call.inputs[2].elements != y.elements:
        raise call.fail("dY must have as many elements as Y")
    call.require_types(3, INT32, INT64)
    call.require_shape(3, x.shape[:1], "the number of its segment for each row")
    return [x]


def _define(name: str) -> None:
    reduce, what = _REDUCTIONS[name]
    op_type = f"SortedSegmentRange{name}"

    def compute(_call: OperatorCall, data: Array, ids: Array) -> Sequence[Array]:
        return [reduce(data.astype(compute_dtype(data.dtype), copy=False), np.bincount(ids))]

    def gradient(call: OperatorCall, x: Array, y: Array, dy: Array, ids: Array) -> Sequence[Array]:
        check_indices(ids, 0, len(y), call.label)
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        counts = across(np.bincount(ids)[ids], x.ndim).astype(wide.dtype)
        return [dy.reshape(y.shape)[ids] * _SLOPES[name](wide, y[ids], counts)]

    array_function(
        op_type,
        infer=infer_reduction,
        doc=f"{what} of each segment of rows; their numbers begin with 0 and grow by 0 or 1 from row to row.",
        input_names=("data", "segment_ids"),
        output_names=("Y",),
        value_inputs=(1,),
    )(compute)
    array_function(
        f"{op_type}Gradient",
        infer=infer_gradient,
        doc=f"Gradient of {op_type}.",
        input_names=("data", "Y", "dY", "segment_ids"),
        output_names=("dX",),
    )(gradient)
    gradient_by(op_type, f"{op_type}Gradient", ("X0", "Y", "dY", "X1"))


for _name in _REDUCTIONS:
    _define(_name)
