"""FlexibleTopK: the largest elements of each row, of each another number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def _require_counts(call: OperatorCall, index: int) -> int:
    """The sum of the numbers in input `index`. Raises ShapeError unless each row has one that fits it."""
    shape = call.inputs[0].shape
    call.require_types(index, INT64)
    if not shape:
        raise call.fail("X must have at least 1 axis")
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    if call.inputs[index].elements != rows:
        raise call.fail(f"there must be a number for each of {rows} rows, found {call.inputs[index].elements}")
    counts = call.known_value(index)
    if counts.size and not 0 < counts.min() <= counts.max() <= shape[-1]:
        raise call.fail(f"numbers must be from 1 to {shape[-1]}, found {int(counts.min())} to {int(counts.max())}")
    return int(counts.sum())


def infer_flexible_top_k(call: OperatorCall) -> list[TensorType]:
    """Vectors of as many elements as the numbers add up to."""
    call.require_types(0, FLOAT32, FLOAT64, INT32, INT64)
    total = _require_counts(call, 1)
    return [TensorType((total,), call.inputs[0].meta), TensorType((total,), INT64)]


@array_function(
    "FlexibleTopK",
    infer=infer_flexible_top_k,
    doc="The K[i] largest elements of row i of X, along its last axis, largest first and of equal ones the first one, "
    "one row after another; and where in their rows they are.",
    input_names=("X", "K"),
    output_names=("values", "indices"),
    value_inputs=(1,),
)
def flexible_top_k(_call: OperatorCall, x: Array, counts: Array) -> Sequence[Array]:
    """A stable sort of each row."""
    rows = x.reshape(-1, x.shape[-1])
    places = [
        np.argsort(row[::-1], kind="stable")[::-1][:count] for row, count in zip(rows, counts.reshape(-1), strict=True)
    ]
    chosen = [x.shape[-1] - 1 - place for place in places]
    values = [row[place] for row, place in zip(rows, chosen, strict=True)]
    return [np.concatenate(values or [x[:0].reshape(-1)]), np.concatenate(chosen or [np.empty(0, np.int64)])]


def infer_flexible_top_k_gradient(call: OperatorCall) -> list[TensorType]:
    """As X."""
    total = _require_counts(call, 1)
    call.require_types(2, INT64)
    call.require_same_type(0, 3)
    for index in (2, 3):
        call.require_shape(index, (total,), "an element for each that was taken")
    return [TensorType(call.inputs[0].shape, call.inputs[3].meta)]


@array_function(
    "FlexibleTopKGradient",
    infer=infer_flexible_top_k_gradient,
    doc="Gradient of FlexibleTopK: the values' gradients where these were in X, zeros elsewhere.",
    input_names=("X", "K", "indices", "dvalues"),
    output_names=("dX",),
    value_inputs=(1,),
)
def flexible_top_k_gradient(
    _call: OperatorCall, x: Array, counts: Array, indices: Array, dvalues: Array
) -> Sequence[Array]:
    """Rows put back."""
    found = np.zeros((counts.size, x.shape[-1]), dvalues.dtype)
    found[np.repeat(np.arange(counts.size), counts.reshape(-1)), indices] = dvalues
    return [found]


gradient_by("FlexibleTopK", "FlexibleTopKGradient", ("X0", "X1", "Y1", "dY0"))
