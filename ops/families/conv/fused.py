"""FusedConv: a convolution that does more to its result before it is written (`post_ops`), perhaps in another order.

Passes over a graph make it of a Conv and what follows. NumPy computes the convolution by one of the algorithms of
Conv, then the post-ops in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, in_sequence
from dagexec.core.rows import images
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.layout import channels_last, image_order
from dagexec.ops.families.activation.post_ops import (
    POST_OPS_HELP,
    infer_post_ops,
    post_op_flops,
    post_op_operands,
    post_op_passes,
    read_post_ops,
)
from dagexec.ops.families.conv.convolution import CONV_ARGS, Convolution, conv_flops, conv_output, register_engines


def first_operand(call: OperatorCall) -> int:
    """The number of the first input that is an operand of `post_ops`: those before are X, filter and perhaps bias."""
    return 3 if call.arguments.bool("bias") else 2


def output_order(call: OperatorCall) -> str:
    """The order of Y: `output_order`, by default `order`. Raises ArgumentError."""
    return image_order(call, "output_order", image_order(call))


def infer_fused_conv(call: OperatorCall) -> list[TensorType]:
    """Y is N, M, out in the output's order. Checks filter, bias and the operands of post_ops."""
    own = first_operand(call)
    if len(call.inputs) < own:
        raise call.fail("with bias=1 input 2 is the bias; found 2 inputs")
    output = conv_output(call, output_order(call))
    if own == 3:
        call.require_shape(2, call.inputs[1].shape[:1], "one entry for each filter")
    infer_post_ops(call, output, own)
    nan = call.arguments.string("nan", "kept")
    if nan not in ("any", "kept"):
        raise ArgumentError(f"{call.label}: argument 'nan' must be 'kept' or 'any', found {nan!r}")
    return [output]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """That of the convolution, and of the post-ops."""
    y = outputs[0]
    flops = conv_flops(y, call.inputs[1]) + (y.elements if call.arguments.bool("bias") else 0)
    flops += post_op_flops(read_post_ops(call), y.elements)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), y.nbytes)


def _operand_to_result(input_index: int, output_index: int) -> bool:
    """Output 0 may be an operand that a `sum` reads; `infer_post_ops` checks that it is one."""
    return output_index == 0 and input_index >= 2


class FusedConvolution(Convolution):
    """Y = post_ops(X * filter + bias)."""

    def prepare(self) -> Step:
        """The convolution, the other order if there is one, and the post-ops in place."""
        call, y = self.call(), self.y(0)
        post_ops = read_post_ops(call)
        bias = self.x(2) if first_operand(call) == 3 else None
        operands, steps = post_op_operands(self, post_ops, y)
        if output_order(call) == image_order(call):
            steps.append(self.convolve(call, bias, y))
        else:
            result = self.scratch(conv_output(call).shape, y.dtype)
            view = np.moveaxis(result, -1, 1) if channels_last(call) else np.moveaxis(result, 1, -1)
            steps += [self.convolve(call, bias, result), partial(np.copyto, y, view)]
        return in_sequence([*steps, post_op_passes(self, post_ops, y, y, operands)])


FUSED_CONV = OpSchema(
    "FusedConv",
    inputs=(2, UNBOUNDED),
    infer=infer_fused_conv,
    doc="Y = post_ops(X * filter + bias): Conv over 1, 2 or 3 spatial axes, and what is done to its result at once. "
    "Inputs from number 3 on (2 without a bias) are operands of post_ops, in Y's order. (Made by passes.)",
    input_names=("X", "filter", "bias, with bias=1", "operands"),
    output_names=("Y",),
    args=CONV_ARGS
    | {
        "bias": "1: input 2 is the bias (default 0)",
        "post_ops": POST_OPS_HELP,
        "output_order": "the order of Y (default: order)",
    },
    inplace=_operand_to_result,
    cost=_cost,
    image_role=ImageRole.CONVOLUTION,
    has_weights=True,
    rows=images(first_operand),
)

register_engines(FUSED_CONV, FusedConvolution)


not_differentiable("only inference makes it, by fusing operators; differentiate the net before", "FusedConv")
