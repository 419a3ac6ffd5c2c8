"""Gradients of sums, means and maxima over segments that lengths say: to each row what its segment has.

Caffe2 has two names for each: `LengthsSumGradient` reads dY and the lengths, `LengthsIndicesInGradientSumGradient` the
indices too, or the data, for the number of rows alone. With `grad_on_weights` the weights get a gradient as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import (
    GradientOperators,
    GradientRequest,
    SparseGradient,
    gradient_by,
    gradient_of,
    not_differentiable,
)
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import Compute, array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import GRAD_ON_WEIGHTS, across, checked_lengths


def _rows_of_lengths(call: OperatorCall, place: int) -> tuple[int, ...]:
    """The shape of a row for each row of the segments, which input `place` says; dY is the one before.

    Raises ShapeError unless dY has a row for each length.
    """
    dy = call.inputs[place - 1]
    if not dy.shape:
        raise call.fail("dY must have at least 1 axis")
    call.require_shape(place, dy.shape[:1], "a length for each row of dY")
    call.require_types(place, INT32, INT64)
    rows = int(call.known_value(place).sum(dtype=np.int64))
    if place + 1 < len(call.inputs):
        rows = (call.inputs[place + 1].shape or (-1,))[0]
    checked_lengths(call, place, rows)
    return (rows, *dy.shape[1:])


def _infer(weighted: bool) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(int(weighted), *FLOAT_TYPES)
        shape = _rows_of_lengths(call, 1 + weighted)
        if weighted:
            call.require_types(0, *FLOAT_TYPES)
            call.require_shape(0, shape[:1], "a weight for each row")
        return [TensorType(shape, meta)]

    return infer


def sum_gradient(_call: OperatorCall, dy: Array, lengths: Array, *_: Array) -> Sequence[Array]:
    """The gradient of its segment to each row."""
    return [np.repeat(dy, lengths, axis=0)]


def mean_gradient(_call: OperatorCall, dy: Array, lengths: Array, *_: Array) -> Sequence[Array]:
    """The same, over the number of rows."""
    wide = compute_dtype(dy.dtype)
    return [np.repeat(dy / across(np.maximum(lengths, 1), dy.ndim).astype(wide), lengths, axis=0)]


def weighted_gradient(_call: OperatorCall, weights: Array, dy: Array, lengths: Array, *_: Array) -> Sequence[Array]:
    """The same, times the weight of the row."""
    return [np.repeat(dy, lengths, axis=0) * across(weights, dy.ndim)]


_COMPUTED: dict[str, Compute] = {"Sum": sum_gradient, "Mean": mean_gradient, "WeightedSum": weighted_gradient}
_SECOND = "there are no second derivatives"

for _name, _compute in _COMPUTED.items():
    for _sparse in ("", "Sparse"):
        for _kind in ("", "IndicesInGradient"):
            _weighted = _name == "WeightedSum"
            _inputs = ("dY", "lengths", *((("indices" if _sparse else "data"),) if _kind else ()))
            array_function(
                f"{_sparse}Lengths{_kind}{_name}Gradient",
                infer=_infer(_weighted),
                doc=f"Gradient of {_sparse}Lengths{_name}: to each row the gradient of its segment.",
                input_names=("weights", *_inputs) if _weighted else _inputs,
                output_names=("dX",),
                value_inputs=(1 + _weighted,),
            )(_compute)
            if _kind:
                not_differentiable(_SECOND, f"{_sparse}Lengths{_kind}{_name}Gradient")


def _infer_with_weights(call: OperatorCall) -> list[TensorType]:
    """dX of the rows that were summed, and a number for each weight."""
    weights, meta = call.require_types(0, *FLOAT_TYPES), call.require_types(1, *FLOAT_TYPES)
    call.require_types(3, *FLOAT_TYPES)
    data = call.inputs[3]
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    (rows,) = call.require_rank(0, 1)
    call.require_shape(1, (call.inputs[2].elements, *data.shape[1:]), "a row for each length")
    checked_lengths(call, 2, rows)
    if len(call.inputs) == 5:
        call.require_types(4, INT32, INT64)
        call.require_shape(4, (rows,), "an index for each weight")
    elif data.shape[0] != rows:
        raise call.fail("there must be a weight for each row of the data")
    return [TensorType((rows, *data.shape[1:]), meta), TensorType((rows,), weights)]


def _both_gradients(
    call: OperatorCall, weights: Array, dy: Array, lengths: Array, data: Array, *indices: Array
) -> Sequence[Array]:
    """dX, and for each weight the product of its row and the gradient of the segment."""
    rows = data
    if indices:
        check_indices(indices[0], 0, len(data), call.label)
        rows = data[indices[0]]
    by_row = np.repeat(dy, lengths, axis=0).astype(compute_dtype(dy.dtype), copy=False)
    products = (by_row * rows).reshape(len(weights), -1)
    return [by_row * across(weights, dy.ndim), products.sum(axis=1)]


for _type in (
    "LengthsWeightedSumWithMainInputGradient",
    "SparseLengthsWeightedSumWithMainInputGradient",
    "SparseLengthsIndicesInGradientWeightedSumWithMainInputGradient",
):
    array_function(
        _type,
        infer=_infer_with_weights,
        doc="Gradient of a weighted sum of segments with grad_on_weights=1: of the rows, and of their weights.",
        input_names=("weights", "dY", "lengths", "data", *(("indices",) if _type.startswith("Sparse") else ())),
        output_names=("dX", "dweights"),
        args=GRAD_ON_WEIGHTS,
        value_inputs=(2,),
    )(_both_gradients)
    not_differentiable(_SECOND, _type)


@gradient_of(*(f"{sparse}Lengths{name}" for sparse in ("", "Sparse") for name in _COMPUTED))
def segment_gradient(request: GradientRequest) -> GradientOperators:
    """Dense, or of the sparse ones a row for each index; of the weights with `grad_on_weights`."""
    op_type, last = request.definition.type, len(request.definition.input) - 1
    sparse, weighted = op_type.startswith("Sparse"), op_type.endswith("WeightedSum")
    indices = [request.x(last - 1)] if sparse else []
    values = f"{request.dx(0)}_values" if sparse else request.dx(0)
    of_data = SparseGradient(indices[0], values) if sparse else values
    inputs = [*([request.x(1)] if weighted else []), request.dy(0), request.x(last)]
    if request.arguments.bool("grad_on_weights"):
        kind = op_type.replace("Lengths", "LengthsIndicesInGradient") if sparse else op_type
        outputs = [values, request.dx(1)]
        made = request.operator(f"{kind}WithMainInputGradient", [*inputs, request.x(0), *indices], outputs)
        return request.result([made], {0: of_data, 1: request.dx(1)})
    kind = op_type.replace("Lengths", "LengthsIndicesInGradient")
    made = request.operator(f"{kind}Gradient", [*inputs, *(indices or [request.x(0)])], [values])
    return request.result([made], {0: of_data})


def _infer_max_gradient(call: OperatorCall) -> list[TensorType]:
    """A row for each of the data."""
    meta = call.require_types(1, *FLOAT_TYPES)
    call.require_shape(0, call.inputs[1].shape, "that of dY")
    shape = _rows_of_lengths(call, 2)
    call.require_shape(3, shape, "a row for each of the segments, as wide as dY's")
    return [TensorType(shape, meta)]


@array_function(
    "LengthsMaxWithMainInputAndForwardOutputGradient",
    infer=_infer_max_gradient,
    doc="Gradient of LengthsMax: dY wherever the data are the maximum of their segment, 0 elsewhere.",
    input_names=("Y", "dY", "lengths", "data"),
    output_names=("dX",),
    value_inputs=(2,),
)
def max_gradient(_call: OperatorCall, y: Array, dy: Array, lengths: Array, data: Array) -> Sequence[Array]:
    """Each of several equal maxima has all of dY."""
    return [np.where(data == np.repeat(y, lengths, axis=0), np.repeat(dy, lengths, axis=0), 0)]


gradient_by("LengthsMax", "LengthsMaxWithMainInputAndForwardOutputGradient", ("Y", "dY", "X1", "X0"))
not_differentiable(_SECOND, "LengthsMaxWithMainInputAndForwardOutputGradient")
