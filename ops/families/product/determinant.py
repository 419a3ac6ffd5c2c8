"""Det: determinants of square matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype


def infer_det(call: OperatorCall) -> list[TensorType]:
    """The shape of X without the last two axes, which must be square matrices."""
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise call.fail("the last two axes of X must be square matrices")
    return [TensorType(shape[:-2], meta)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """A factorization of each matrix, n^3 2/3."""
    x = call.inputs[0]
    return Cost(x.elements * x.shape[-1] * 2 // 3, x.nbytes, outputs[0].nbytes)


@array_function(
    "Det",
    infer=infer_det,
    doc="The determinant of each matrix in the last two axes of X. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    cost=_cost,
    onnx=(OnnxName("Det", 22),),
)
def det(_call: OperatorCall, x: Array) -> Sequence[Array]:
    """By LAPACK's factorization."""
    return [np.linalg.det(x.astype(compute_dtype(x.dtype), copy=False))]


not_differentiable("nothing in dagexec trains through it", "Det")
