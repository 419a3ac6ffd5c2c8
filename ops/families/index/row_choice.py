"""Conditional: rows from one of two tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import BOOL
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_conditional(call: OperatorCall) -> list[TensorType]:
    """As both tensors."""
    call.require_types(0, BOOL)
    call.require_same_type(1, 2)
    (rows,) = call.require_rank(0, 1)
    shape = call.inputs[1].shape
    call.require_shape(2, shape, "the shape of the other")
    if shape[:1] != (rows,):
        raise call.fail(f"expected a condition for each of {shape[:1]} rows, found {rows}")
    return [call.inputs[1]]


@array_function(
    "Conditional",
    infer=infer_conditional,
    doc="Each row from the first tensor where its condition is true, else from the second.",
    input_names=("condition", "true rows", "false rows"),
    output_names=("Y",),
)
def conditional(_call: OperatorCall, condition: Array, rows: Array, others: Array) -> Sequence[Array]:
    """One choice a row."""
    return [np.where(condition.reshape(-1, *(1,) * (rows.ndim - 1)), rows, others)]


no_gradient("Conditional")
