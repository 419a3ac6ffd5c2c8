"""ByteWeightDequant: weights of a byte each as floats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, STRING, UINT8
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_dequant(call: OperatorCall) -> list[TensorType]:
    """Float32 of argument `shape`, whose elements are as many as the bytes."""
    meta = call.require_types(0, UINT8, STRING)
    made = TensorType(tuple(call.arguments.ints("shape")), FLOAT32)
    if any(extent < 0 for extent in made.shape):
        raise call.fail(f"argument 'shape' must not be negative, found {list(made.shape)}")
    if call.inputs[0].elements != (1 if meta is STRING else made.elements):
        raise call.fail(f"expected {made.elements} bytes, or a string of them; found {call.inputs[0]}")
    return [made]


@array_function(
    "ByteWeightDequant",
    infer=infer_dequant,
    doc="Y = min + X * (max - min) / 255, of bytes or of one string of them, in argument `shape`.",
    input_names=("X",),
    output_names=("Y",),
    args={"shape": "of Y", "min": "what 0 stands for (default -3)", "max": "what 255 stands for (default 3)"},
    required_args=("shape",),
)
def byte_weight_dequant(call: OperatorCall, x: Array) -> Sequence[Array]:
    """In float32."""
    (made,) = infer_dequant(call)
    data = x if call.inputs[0].meta is UINT8 else np.frombuffer(x.reshape(-1)[0], np.uint8)
    if data.size != made.elements:
        raise ShapeError(f"{call.label}: expected a string of {made.elements} bytes, found {data.size}")
    low, high = call.arguments.float("min", -3.0), call.arguments.float("max", 3.0)
    return [data.astype(np.float32) * np.float32((high - low) / 255) + np.float32(low)]


no_gradient("ByteWeightDequant")
