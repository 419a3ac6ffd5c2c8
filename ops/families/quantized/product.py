"""QuantFC: a fully connected layer on 8-bit integers, with what follows it fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import INT8, INT32
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.rows import fully_connected
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.families.quantized.accumulation import centered, exact_dtype, widened
from dagexec.ops.families.quantized.requantization import (
    INPUT_ARGS,
    OUTPUT_ARGS,
    POST_OPS_ARGS,
    Requantization,
    check_bias,
    multiplier_steps,
    output_steps,
    read_requantization,
    scaled_sum_steps,
)
from dagexec.ops.families.quantized.scales import (
    BYTES,
    Array,
    checked_scales,
    require_scales,
    scale_argument,
    zero_point_argument,
)

WEIGHTS, WEIGHT_SCALE, BIAS = 1, 2, 3
"""Where the inputs are."""


def read_fc(call: OperatorCall) -> tuple[TensorType, Requantization]:
    """The type of QuantFC's Y and how it is made. Raises ArgumentError or ShapeError."""
    x_meta = call.require_types(0, *BYTES)
    call.require_types(WEIGHTS, INT8)
    scale_argument(call, "x_scale")
    zero_point_argument(call, "x_zero_point", x_meta)
    x = call.inputs[0].shape
    axis = call.axis("axis", 1, len(x), end=True)
    units, inner = call.require_rank(WEIGHTS, 2)
    if math.prod(x[axis:]) != inner:
        raise call.fail(f"X has {math.prod(x[axis:])} entries from axis {axis} on; W has {inner} columns")
    require_scales(call, WEIGHT_SCALE, units, "row of W")
    biased = call.arguments.bool("bias")
    if biased and len(call.inputs) > BIAS:
        check_bias(call, BIAS, units, (INT32,))
    elif biased:
        raise call.fail("with bias=1 the fourth input must be the bias")
    shape = (*x[:axis], units)
    what = read_requantization(call, shape, BIAS + 1 if biased else BIAS)
    return TensorType(shape, what.y), what


def _fc_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    inner = call.inputs[WEIGHTS].shape[-1]
    return Cost(2 * outputs[0].elements * inner, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


QUANT_FC = OpSchema(
    "QuantFC",
    inputs=(3, 5),
    infer=lambda call: [read_fc(call)[0]],
    doc="A fully connected layer on integers: sum = bias + (X - x_zero_point) W^T, exactly; then as QuantConv. X is "
    "uint8 or int8, folded to M x K at `axis`, W int8 of N x K, W_scale float32 of one entry or N, bias int32 of N.",
    input_names=("X", "W", "W_scale", "bias, with bias=1", "what post_ops add"),
    output_names=("Y",),
    args={"axis": "first axis of X that is summed over (default 1)", "bias": "1: there is a bias"}
    | INPUT_ARGS
    | OUTPUT_ARGS
    | POST_OPS_ARGS,
    cost=_fc_cost,
    is_quantized=True,
    rows=fully_connected,
)


@operator(QUANT_FC)
class QuantFC(Operator):
    """Product of 8-bit integers; bit for bit what a 32-bit accumulator gives."""

    def prepare(self) -> Step:
        """The product, then what makes it the output."""
        return self.finished(*self.sums()) if self.y(0).size else nothing_to_do

    def sums(self) -> tuple[Array, list[Step]]:
        """The sums without the bias, rows x units, and the steps that compute them."""
        units, inner = self.x(WEIGHTS).shape
        zero_point = self.arguments.int("x_zero_point", 0)
        work = exact_dtype(inner, self.input(0).meta, zero_point, INT8)
        x, center = centered(self, self.x(0).reshape(-1, inner), zero_point, work)
        w, widen = widened(self, WEIGHTS, self.x(WEIGHTS), work)
        sums = self.scratch((len(x), units), work)
        return sums, [center, widen, partial(np.matmul, x, w.T, out=sums)]

    def finished(self, sums: Array, before: Sequence[Step]) -> Step:
        """The step that makes the output of sums, which other steps compute `before`."""
        call, y = self.call(), self.y(0)
        _, what = read_fc(call)
        steps: list[Step] = [*checked_scales(self, WEIGHT_SCALE), *before]
        multiplier = self.scratch(self.x(WEIGHT_SCALE).shape, np.float32)
        steps += multiplier_steps(multiplier, scale_argument(call, "x_scale"), self.x(WEIGHT_SCALE), what.y_scale)
        target = y.reshape(sums.shape)
        values = target if y.dtype == np.float32 else self.scratch(sums.shape, np.float32)
        bias = self.x(BIAS) if self.arguments.bool("bias") else None
        steps += scaled_sum_steps(sums, bias, multiplier, values)
        return in_sequence([*steps, *output_steps(self, what, values.reshape(y.shape), y)])
