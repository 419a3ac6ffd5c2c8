"""FusedElementwise: a chain of element-wise operators as one, whose links are post-ops."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType, any_to_first
from dagexec.core.traits import ImageRole
from dagexec.ops.families.activation.post_ops import (
    POST_OPS_HELP,
    infer_post_ops,
    post_op_flops,
    post_op_operands,
    post_op_passes,
    read_post_ops,
)


def infer_fused_elementwise(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X, to which the operands broadcast."""
    call.require_types(0, *FLOAT_TYPES)
    infer_post_ops(call, call.inputs[0], 1)
    return [call.inputs[0]]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    flops = post_op_flops(read_post_ops(call), outputs[0].elements)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


def _of_one_input(arguments: Arguments, _meta: TypeMeta, count: int) -> list[str] | None:
    """Its argument; None with operands, which broadcast to the first input alone."""
    return arguments.strings("post_ops") if count == 1 else None


@new_operator(
    "FusedElementwise",
    inputs=(1, UNBOUNDED),
    infer=infer_fused_elementwise,
    doc="Y = X with `post_ops` applied one after another. Further inputs are their operands and broadcast to X. "
    "(dagexec's own; passes make it of chains of element-wise operators.)",
    input_names=("X", "operand_1", "..."),
    output_names=("Y",),
    args={"post_ops": POST_OPS_HELP},
    inplace=any_to_first,
    cost=_cost,
    post_ops=_of_one_input,
    image_role=ImageRole.ELEMENTWISE,
)
class FusedElementwise(Operator):
    """A chain of element-wise operators."""

    def prepare(self) -> Step:
        """Piece by piece, all post-ops; what the output held is copied first where one adds it."""
        x, y = self.x(0), self.y(0)
        post_ops = read_post_ops(self.call())
        operands, before = post_op_operands(self, post_ops, y)
        in_place = self.input_blobs[0] is self.output_blobs[0]
        return in_sequence([*before, post_op_passes(self, post_ops, y if in_place else x, y, operands)])


not_differentiable("only inference makes it, by fusing operators; differentiate the net before", "FusedElementwise")
