"""FusedFC: a fully connected layer with post-ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import fully_connected
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.ops.families.activation.post_ops import (
    POST_OPS_HELP,
    infer_post_ops,
    post_op_flops,
    post_op_operands,
    post_op_passes,
    read_post_ops,
)
from dagexec.ops.families.product.products import FC_ARGS, FullyConnected, fc_cost, infer_fc

OWN_INPUTS = 3
"""X, W and b; operands of post-ops follow."""


def infer_fused_fc(call: OperatorCall) -> list[TensorType]:
    """FC's output, to which the operands broadcast."""
    output = infer_fc(call)
    infer_post_ops(call, output, OWN_INPUTS)
    return [output]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    product = fc_cost(call, outputs)
    return replace(product, flops=product.flops + post_op_flops(read_post_ops(call), outputs[0].elements))


def _operand_to_first(input_index: int, output_index: int) -> bool:
    return input_index >= OWN_INPUTS and output_index == 0


@new_operator(
    "FusedFC",
    inputs=(OWN_INPUTS, UNBOUNDED),
    infer=infer_fused_fc,
    doc="Y = post_ops(X W^T + b): FC, and what is done to its result at once. Inputs from number 3 on are operands "
    "of post_ops. (dagexec's own; passes make it.)",
    input_names=("X", "W", "b", "operands"),
    output_names=("Y",),
    args=FC_ARGS | {"post_ops": POST_OPS_HELP},
    inplace=_operand_to_first,
    cost=_cost,
    has_weights=True,
    rows=fully_connected,
)
class FusedFC(FullyConnected):
    """Fully connected layer with post-ops."""

    def prepare(self) -> Step:
        """The layer, then the post-ops on its result; what the output held is copied first where one adds it."""
        y = self.y(0)
        post_ops = read_post_ops(self.call())
        operands, before = post_op_operands(self, post_ops, y)
        return in_sequence([*before, super().prepare(), post_op_passes(self, post_ops, y, y, operands)])


not_differentiable("only inference makes it, by fusing operators; differentiate the net before", "FusedFC")
