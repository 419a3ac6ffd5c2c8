"""Rows of a batch as Detectron chooses them: BatchPermutation in another order, SampleAs those with a label above 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import FeedError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def _require_numbers(call: OperatorCall, rows: int, indices: int, what: str) -> TensorType:
    """The type of the rows. Raises ShapeError unless there is an int32 for each."""
    found = call.inputs[rows]
    call.require_types(indices, INT32)
    if not found.shape:
        raise call.fail("there must be at least 1 axis, found a scalar")
    call.require_shape(indices, found.shape[:1], what)
    return found


def infer_batch_permutation(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    return [_require_numbers(call, 0, 1, "the number of a row for each row")]


def _check_rows(call: OperatorCall, indices: Array, name: str) -> None:
    if indices.size and not (indices.min() >= 0 and indices.max() < len(indices)):
        raise FeedError(f"{call.label}: blob {name!r} must have numbers of rows, 0 to {len(indices) - 1}")


@array_function(
    "BatchPermutation",
    infer=infer_batch_permutation,
    doc="Row i of Y is row indices[i] of X.",
    input_names=("X", "indices"),
    output_names=("Y",),
)
def batch_permutation(call: OperatorCall, x: Array, indices: Array) -> Sequence[Array]:
    """A choice of rows."""
    _check_rows(call, indices, call.definition.input[1])
    return [x[indices]]


def infer_batch_permutation_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of dY."""
    call.require_types(1, *FLOAT_TYPES)
    return [_require_numbers(call, 1, 0, "the number of a row for each row")]


@array_function(
    "BatchPermutationGradient",
    infer=infer_batch_permutation_gradient,
    doc="The gradient of BatchPermutation: row indices[i] of dX is row i of dY, 0 or a sum where the indices are no "
    "permutation.",
    input_names=("indices", "dY"),
    output_names=("dX",),
)
def batch_permutation_gradient(call: OperatorCall, indices: Array, dy: Array) -> Sequence[Array]:
    """Rows put back."""
    _check_rows(call, indices, call.definition.input[0])
    dx = np.zeros_like(dy)
    np.add.at(dx, indices, dy)
    return [dx]


gradient_by("BatchPermutation", "BatchPermutationGradient", ("X1", "dY"))


def infer_sample_as(call: OperatorCall) -> list[TensorType]:
    """As many rows as labels above 0."""
    x = _require_numbers(call, 0, 1, "a label for each row")
    return [TensorType((int(np.count_nonzero(call.known_value(1) > 0)), *x.shape[1:]), x.meta)]


@array_function(
    "SampleAs",
    infer=infer_sample_as,
    doc="The rows of X whose label is above 0.",
    input_names=("X", "labels"),
    output_names=("Y",),
    value_inputs=(1,),
)
def sample_as(_call: OperatorCall, x: Array, labels: Array) -> Sequence[Array]:
    """A selection."""
    return [x[labels > 0]]


def infer_sample_as_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    [y] = infer_sample_as(call)
    call.require_same_type(0, 2)
    call.require_shape(2, y.shape, "a row for each label above 0")
    return [call.inputs[0]]


@array_function(
    "SampleAsGradient",
    infer=infer_sample_as_gradient,
    doc="The gradient of SampleAs by X: zeros in the rows that it leaves out. The values of X are not read.",
    input_names=("X", "labels", "dY"),
    output_names=("dX",),
    value_inputs=(1,),
)
def sample_as_gradient(_call: OperatorCall, x: Array, labels: Array, dy: Array) -> Sequence[Array]:
    """The rows put back."""
    dx = np.zeros_like(x)
    dx[labels > 0] = dy
    return [dx]


gradient_by("SampleAs", "SampleAsGradient", ("X0", "X1", "dY"))
