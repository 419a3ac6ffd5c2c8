"""Segments of rows, given by their lengths: sums, means and maxima over each, and lengths in other words.

`lengths` of [2, 0, 3] are a segment of the first two rows, one of none and one of the last three. A sparse operator
takes rows `indices` of the data, in that order; of float16 it gives float32, as Caffe2's. Over no rows a sum, a mean
and a maximum are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT16, FLOAT32, FLOAT_TYPES, INT32, INT64, TypeMeta
from dagexec.core.gradient import (
    GradientOperators,
    GradientRequest,
    SparseGradient,
    gradient_of,
    no_gradient,
    not_differentiable,
)
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import Compute, array_function
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


def across(values: Array, rank: int) -> Array:
    """A vector as a column of a tensor of `rank` axes."""
    return values.reshape(-1, *(1,) * (rank - 1))


def _infer(sparse: bool, weighted: bool) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        data, place = call.inputs[0], 1 + weighted
        meta = call.require_types(0, *FLOAT_TYPES)
        if not data.shape:
            raise call.fail("the data must have at least 1 axis")
        rows = data.shape[0]
        if sparse:
            call.require_rank(place, 1)
            call.require_types(place, *_INTEGERS)
            rows, place = call.inputs[place].shape[0], place + 1
        if weighted:
            call.require_types(1, *FLOAT_TYPES)
            call.require_shape(1, (rows,), "a weight for each row")
        checked_lengths(call, place, rows)
        meta = FLOAT32 if sparse and meta is FLOAT16 else meta
        return [TensorType((call.inputs[place].shape[0], *data.shape[1:]), meta)]

    return infer


def _picking_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """A row is read and summed for each index; what else the table has does not count."""
    data, indices = call.inputs[0], call.inputs[-2]
    elements = indices.elements * (data.elements // max(1, data.shape[0]))
    beside = sum(kind.nbytes for kind in call.inputs[1:])
    return Cost(elements, elements * data.meta.itemsize + beside, outputs[0].nbytes)


def _define(name: str, reduce: Reduce, what: str, *, weighted: bool = False) -> None:
    """Register `Lengths<name>` and `SparseLengths<name>`."""
    for sparse in (False, True):
        inputs = ("data", *(("weights",) if weighted else ()), *(("indices",) if sparse else ()), "lengths")
        register = array_function(
            f"{'Sparse' * sparse}Lengths{name}",
            infer=_infer(sparse, weighted),
            doc=f"{what} of each segment of {'rows `indices` of the data' if sparse else 'rows'}.",
            input_names=inputs,
            output_names=("Y",),
            args={"grad_on_weights": "1: weights get a gradient; not offered (default 0)"} if weighted else {},
            value_inputs=(len(inputs) - 1,),
            cost=_picking_cost if sparse else memory_cost,
        )

        def compute(call: OperatorCall, data: Array, *others: Array, sparse: bool = sparse) -> Sequence[Array]:
            rows, lengths = data, others[-1]
            if sparse:
                check_indices(others[-2], 0, len(data), call.label)
                rows = data[others[-2]]
            if weighted:
                rows = rows.astype(compute_dtype(rows.dtype), copy=False) * across(others[0], rows.ndim)
            return [reduce(rows, lengths)]

        register(compute)


_define("Sum", segment_sums, "The sum")
_define("Mean", segment_means, "The mean")
_define("Max", segment_maxima, "The maximum")
_define("WeightedSum", segment_sums, "The sum, each row times its weight,", weighted=True)


def _define_gradient(name: str, sparse: bool, *, mean: bool = False, weighted: bool = False) -> None:
    """Register `[Sparse]LengthsIndicesInGradient<name>Gradient`: a row of dY for each row of its segment."""

    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(int(weighted), *FLOAT_TYPES)
        dy, place = call.inputs[int(weighted)], 1 + weighted
        if not dy.shape or not call.inputs[place + 1].shape:
            raise call.fail("dY and the last input must have rows")
        call.require_shape(place, dy.shape[:1], "a length for each row of dY")
        rows = call.inputs[place + 1].shape[0]
        checked_lengths(call, place, rows)
        if weighted:
            call.require_types(0, *FLOAT_TYPES)
            call.require_shape(0, (rows,), "a weight for each row")
        return [TensorType((rows, *dy.shape[1:]), meta)]

    names = ("dY", "lengths", "indices" if sparse else "data")
    array_function(
        f"{'Sparse' * sparse}LengthsIndicesInGradient{name}Gradient",
        inputs=(3 + weighted, 3 + weighted),
        infer=infer,
        doc=f"Gradient of {'Sparse' * sparse}Lengths{name}: to each row the gradient of its segment.",
        input_names=("weights", *names) if weighted else names,
        output_names=("dX",),
        value_inputs=(1 + weighted,),
    )(_weighted_gradient if weighted else _mean_gradient if mean else _sum_gradient)


def _sum_gradient(_call: OperatorCall, dy: Array, lengths: Array, _rows: Array) -> Sequence[Array]:
    return [np.repeat(dy, lengths, axis=0)]


def _mean_gradient(_call: OperatorCall, dy: Array, lengths: Array, _rows: Array) -> Sequence[Array]:
    wide = compute_dtype(dy.dtype)
    return [np.repeat(dy / across(np.maximum(lengths, 1), dy.ndim).astype(wide), lengths, axis=0)]


def _weighted_gradient(_call: OperatorCall, weights: Array, dy: Array, lengths: Array, _rows: Array) -> Sequence[Array]:
    return [np.repeat(dy, lengths, axis=0) * across(weights, dy.ndim)]


for _sparse in (False, True):
    _define_gradient("Sum", _sparse)
    _define_gradient("Mean", _sparse, mean=True)
    _define_gradient("WeightedSum", _sparse, weighted=True)


@gradient_of(*(f"{sparse}Lengths{name}" for sparse in ("", "Sparse") for name in ("Sum", "Mean", "WeightedSum")))
def segment_gradient(request: GradientRequest) -> GradientOperators:
    """Dense, or of the sparse ones a row for each index. Weights have none."""
    if request.arguments.bool("grad_on_weights"):
        raise ArgumentError(f"{request.label}: grad_on_weights=1 is not supported")
    op_type, last = request.definition.type, len(request.definition.input) - 1
    sparse, weighted = op_type.startswith("Sparse"), op_type.endswith("WeightedSum")
    rows = request.x(last - 1) if sparse else request.x(0)
    values = f"{request.dx(0)}_values" if sparse else request.dx(0)
    inputs = [*([request.x(1)] if weighted else []), request.dy(0), request.x(last), rows]
    kind = op_type.replace("Lengths", "LengthsIndicesInGradient")
    made = request.operator(f"{kind}Gradient", inputs, [values])
    return request.result([made], {0: SparseGradient(rows, values) if sparse else values})


not_differentiable(
    "there are no second derivatives",
    *(
        f"{sparse}LengthsIndicesInGradient{name}Gradient"
        for sparse in ("", "Sparse")
        for name in ("Sum", "Mean", "WeightedSum")
    ),
)
not_differentiable("Caffe2's needs the data and is not here yet", "LengthsMax", "SparseLengthsMax")


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
        call.require_rank(0, 1)
        call.require_types(0, *_INTEGERS)
        lengths = call.known_value(0)
        if (lengths < 0).any():
            raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
        call.arguments.float("power", 0.5)
        return [TensorType(shape(len(lengths), int(lengths.sum(dtype=np.int64))), meta)]

    return array_function(
        name, infer=infer, doc=doc, input_names=("lengths",), output_names=("Y",), args=args or {}, value_inputs=(0,)
    )


@_from_lengths("LengthsToSegmentIds", INT32, "The number of its segment for each row.", lambda _, total: (total,))
def segment_ids(_call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 0, 1] gives [0, 0, 2]."""
    return [np.repeat(np.arange(len(lengths)), lengths)]


@_from_lengths("LengthsToRanges", INT32, "The first row and the length of each segment.", lambda count, _: (count, 2))
def segment_ranges(_call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 0, 1] gives [[0, 2], [2, 0], [2, 1]]."""
    return [np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)]


@_from_lengths(
    "LengthsToWeights",
    FLOAT32,
    "For each row 1 / (length of its segment)^power.",
    lambda _, total: (total,),
    {"power": "the exponent (default 0.5)"},
)
def segment_weights(call: OperatorCall, lengths: Array) -> Sequence[Array]:
    """[2, 1] with power 1 gives [1/2, 1/2, 1]."""
    power = call.arguments.float("power", 0.5)
    return [np.repeat(np.maximum(lengths, 1).astype(np.float64) ** -power, lengths)]


def infer_segment_lengths(call: OperatorCall) -> list[TensorType]:
    """As many lengths as the largest number needs. Raises ShapeError for numbers that are not sorted."""
    call.require_rank(0, 1)
    call.require_types(0, *_INTEGERS)
    ids = call.known_value(0)
    if ids.size and (int(ids[0]) < 0 or (np.diff(ids) < 0).any()):
        raise call.fail("segment numbers must be at least 0 and not decrease")
    return [TensorType((int(ids[-1]) + 1 if ids.size else 0,), INT32)]


@array_function(
    "SegmentIdsToLengths",
    infer=infer_segment_lengths,
    doc="The length of each segment, from the number of its segment for each row.",
    input_names=("segment_ids",),
    output_names=("lengths",),
    value_inputs=(0,),
)
def segment_lengths(_call: OperatorCall, ids: Array) -> Sequence[Array]:
    """[0, 0, 2] gives [2, 0, 1]."""
    return [np.bincount(ids)]


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
    padded = np.full((len(lengths) * target, *data.shape[1:]), call.arguments.float("padding_value", -1.0), data.dtype)
    padded[_places(lengths, target)] = data
    return [padded]


def _places(lengths: npt.NDArray[Any], stride: int) -> npt.NDArray[np.int64]:
    """Where each row goes when segment i begins at row i * stride."""
    starts = np.cumsum(lengths) - lengths
    shifts = np.repeat(np.arange(len(lengths)) * stride - starts, lengths)
    found: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) + shifts
    return found


not_differentiable("Caffe2 has none", "LengthsPad")
no_gradient("SegmentIdsToLengths")
