"""Shrink: numbers moved towards 0, and those near to it to 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_shrink(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    call.require_types(0, *NUMBER_TYPES)
    for name, default in (("lambd", 0.5), ("bias", 0.0)):
        call.arguments.float(name, default)
    return [call.inputs[0]]


@array_function(
    "Shrink",
    infer=infer_shrink,
    doc="Y = X + bias where X < -lambd, X - bias where X > lambd, else 0. Of integers, fractions are cut off. "
    "(dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={"lambd": "up to where numbers become 0 (default 0.5)", "bias": "how far others are moved (default 0)"},
    onnx=(OnnxName("Shrink", 9, {"lambd": "lambd", "bias": "bias"}),),
    rows=elementwise,
)
def shrink(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Of integers in float64."""
    border, bias = call.arguments.float("lambd", 0.5), call.arguments.float("bias", 0.0)
    numbers = x.astype(np.float64) if x.dtype.kind in "iu" else x
    return [np.where(numbers < -border, numbers + bias, np.where(numbers > border, numbers - bias, 0))]


not_differentiable("nothing in dagexec trains through it", "Shrink")
