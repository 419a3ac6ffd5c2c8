"""QuantAdd: the sum of two quantized tensors, quantized, with what follows it fused."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.ops.families.quantized.requantization import (
    INPUT_ARGS,
    OUTPUT_ARGS,
    POST_OPS_ARGS,
    Requantization,
    output_steps,
    read_requantization,
)
from dagexec.ops.families.quantized.scales import BYTES, scale_argument, zero_point_argument


def read_add(call: OperatorCall) -> tuple[TensorType, Requantization]:
    """The type of QuantAdd's Y and how it is made. Raises ArgumentError or ShapeError."""
    meta = call.require_types(0, *BYTES)
    scale_argument(call, "x_scale")
    zero_point_argument(call, "x_zero_point", meta)
    shape = call.inputs[0].shape
    what = read_requantization(call, shape, 1)
    return TensorType(shape, what.y), what


QUANT_ADD = OpSchema(
    "QuantAdd",
    infer=lambda call: [read_add(call)[0]],
    doc="v = (X - x_zero_point) * (x_scale / y_scale) in float32; post_ops on v, which must add input 1, of X's shape; "
    "Y = saturate(round(v) + y_zero_point), ties to even, or v itself as float32. X is uint8 or int8.",
    input_names=("X", "what post_ops add"),
    output_names=("Y",),
    args=INPUT_ARGS | OUTPUT_ARGS | POST_OPS_ARGS,
    image_role=ImageRole.ON_INTEGERS,
    is_quantized=True,
    rows=elementwise,
)


@operator(QUANT_ADD)
class QuantAdd(Operator):
    """Sum of two tensors of 8-bit integers."""

    def prepare(self) -> Step:
        """X scaled to units of Y, then the addend and what follows."""
        call = self.call()
        _, what = read_add(call)
        x, y = self.x(0), self.y(0)
        values = y if y.dtype == np.float32 else self.scratch(y.shape, np.float32)
        zero_point = np.float32(call.arguments.int("x_zero_point", 0))
        factor = np.float32(scale_argument(call, "x_scale") / what.y_scale)
        steps: list[Step] = [
            partial(np.subtract, x, zero_point, out=values, dtype=np.float32),
            partial(np.multiply, values, factor, out=values),
        ]
        return in_sequence([*steps, *output_steps(self, what, values, y)])
