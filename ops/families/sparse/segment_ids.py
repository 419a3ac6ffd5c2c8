"""Segments of rows, given by the number of its segment for each row (`segment_ids`): sums and means over each.

Of a `Sorted` operator the numbers are 0 at first and grow by 0 or 1 from row to row; of an `Unsorted` one they come in
any order, and a segment without rows is 0. Segments by lengths are in `segments`, reductions of whole ranges of rows in
`segment_ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, SparseGradient, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import GradientError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import (
    GRAD_ON_WEIGHTS,
    across,
    check_rows,
    reduced_rows,
    reduction_inputs,
    segment_means,
    segment_sums,
)

_NUM_SEGMENTS = {"num_segments": "how many segments there are (default: as many as the largest number needs)"}
_REDUCTIONS = {"Sum": segment_sums, "Mean": segment_means, "WeightedSum": segment_sums}


def sorted_segments(call: OperatorCall, index: int, rows: int) -> int:
    """How many segments the numbers of input `index`, one for each row, say.

    Raises ShapeError unless they begin with 0 and grow by 0 or 1.
    """
    ids = _ids(call, index, rows)
    if not rows:
        return 0
    if ids[0] != 0 or not np.isin(np.diff(ids), (0, 1)).all():
        raise call.fail("segment numbers must begin with 0 and grow by 0 or 1 from row to row")
    return int(ids[-1]) + 1


def _ids(call: OperatorCall, index: int, rows: int) -> Array:
    call.require_types(index, INT32, INT64)
    call.require_shape(index, (rows,), "the number of its segment for each row")
    return call.known_value(index)


def _unsorted_segments(call: OperatorCall, index: int, rows: int) -> int:
    ids, count = _ids(call, index, rows), call.arguments.int("num_segments", -1)
    if count < 0:
        count = int(ids.max(initial=-1)) + 1
    check_indices(ids, 0, count, call.label)
    return count


def _infer(kind: str, sparse: bool, weighted: bool) -> Callable[[OperatorCall], list[TensorType]]:
    count = sorted_segments if kind == "Sorted" else _unsorted_segments

    def infer(call: OperatorCall) -> list[TensorType]:
        rows, place = check_rows(call, sparse, weighted)
        return [TensorType((count(call, place, rows), *call.inputs[0].shape[1:]), call.inputs[0].meta)]

    return infer


def _infer_gradient(weighted: bool) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(int(weighted), *FLOAT_TYPES)
        dy, rows = call.inputs[int(weighted)], call.require_rank(1 + weighted, 1)
        call.require_types(1 + weighted, INT32, INT64)
        if not dy.shape:
            raise call.fail("dY must have at least 1 axis")
        if weighted:
            call.require_types(0, *FLOAT_TYPES)
            call.require_shape(0, rows, "a weight for each row")
        return [TensorType((*rows, *dy.shape[1:]), meta)]

    return infer


def _define(kind: str, name: str, sparse: bool) -> None:
    """Register `[Sparse]<kind>Segment<name>` and its gradient operator."""
    weighted, op_type = name == "WeightedSum", f"{'Sparse' * sparse}{kind}Segment{name}"
    inputs = reduction_inputs(sparse, weighted, "segment_ids")
    counts = {} if kind == "Sorted" else _NUM_SEGMENTS
    arguments = {**counts, **(GRAD_ON_WEIGHTS if weighted else {})}

    def compute(call: OperatorCall, *arrays: Array) -> Sequence[Array]:
        rows, ids = reduced_rows(call, arrays, sparse, weighted), arrays[-1]
        lengths = np.bincount(ids, minlength=max(0, call.arguments.int("num_segments", 0)))
        order = slice(None) if kind == "Sorted" else np.argsort(ids, kind="stable")
        return [_REDUCTIONS[name](rows[order], lengths)]

    def gradient(call: OperatorCall, *arrays: Array) -> Sequence[Array]:
        dy, ids = arrays[-2:]
        check_indices(ids, 0, len(dy), call.label)
        wide = compute_dtype(dy.dtype)
        if weighted:
            return [dy[ids].astype(wide, copy=False) * across(arrays[0], dy.ndim)]
        return [dy[ids] / across(np.bincount(ids)[ids], dy.ndim).astype(wide) if name == "Mean" else dy[ids]]

    what = "mean" if name == "Mean" else "sum"
    array_function(
        op_type,
        infer=_infer(kind, sparse, weighted),
        doc=f"The {what} of each segment of {'rows `indices` of the data' if sparse else 'rows'}"
        f"{', each row times its weight' if weighted else ''}; segments are said by the number of its segment for each "
        f"row, {'sorted and without gaps' if kind == 'Sorted' else 'in any order'}.",
        input_names=inputs,
        output_names=("Y",),
        args=arguments,
        value_inputs=(len(inputs) - 1,),
    )(compute)
    array_function(
        f"{op_type}Gradient",
        infer=_infer_gradient(weighted),
        doc=f"Gradient of {op_type}: to each row the gradient of its segment.",
        input_names=(*(("weights",) if weighted else ()), "dY", "segment_ids"),
        output_names=("dX",),
        args=arguments,
    )(gradient)


_ALL = list(product(("Sorted", "Unsorted"), _REDUCTIONS, (False, True)))
for _kind, _name, _sparse in _ALL:
    _define(_kind, _name, _sparse)


@gradient_of(*(f"{'Sparse' * sparse}{kind}Segment{name}" for kind, name, sparse in _ALL))
def segment_gradient(request: GradientRequest) -> GradientOperators:
    """Dense, or of the sparse ones a row for each index. Weights have none, as in Caffe2."""
    if request.arguments.bool("grad_on_weights"):
        raise GradientError(f"{request.label}: weights have a gradient only where lengths say the segments")
    op_type, last = request.definition.type, len(request.definition.input) - 1
    weights = [request.x(1)] if op_type.endswith("WeightedSum") else []
    sparse = op_type.startswith("Sparse")
    values = f"{request.dx(0)}_values" if sparse else request.dx(0)
    made = request.operator(f"{op_type}Gradient", [*weights, request.dy(0), request.x(last)], [values])
    return request.result([made], {0: SparseGradient(request.x(last - 1), values) if sparse else values})
