"""FusedExpression: a region of element-wise operators as one, said as an expression."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.expressions import Expression, flops_of, from_lines, inputs_of
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType, any_to_first, memory_cost
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.broadcasting import require_inplace_fits
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.base.expression_steps import expression_steps


class WrittenFormula:
    """The expression that argument `nodes` says."""

    def expression(self, arguments: Arguments, _meta: TypeMeta) -> Expression:
        """It from the inputs' elements. Raises ArgumentError."""
        return arguments.once(self, partial(self._read, arguments))

    @staticmethod
    def _read(arguments: Arguments) -> Expression:
        try:
            return from_lines(arguments.strings("nodes"))
        except ValueError as error:
            raise ArgumentError(f"argument 'nodes': {error}") from None


_WRITTEN = WrittenFormula()


def infer_fused_expression(call: OperatorCall) -> list[TensorType]:
    """Y has the shape that all inputs broadcast to. Raises ArgumentError for an expression of other inputs."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    try:
        positions = inputs_of(_WRITTEN.expression(call.arguments, meta))
    except ArgumentError as error:
        raise ArgumentError(f"{call.label}: {error}") from None
    if positions != list(range(len(call.inputs))):
        raise ArgumentError(f"{call.label}: argument 'nodes' reads inputs {positions}, found {len(call.inputs)} inputs")
    try:
        shape = np.broadcast_shapes(*(kind.shape for kind in call.inputs))
    except ValueError:
        raise call.fail("the inputs must broadcast to one shape") from None
    output = TensorType(shape, meta)
    require_inplace_fits(call, output)
    return [output]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, flops_of(_WRITTEN.expression(call.arguments, call.inputs[0].meta)))


@new_operator(
    "FusedExpression",
    inputs=(1, UNBOUNDED),
    infer=infer_fused_expression,
    doc="Y = the expression `nodes` of the inputs, which broadcast as in NumPy. (dagexec's own; passes make it of "
    "regions of element-wise operators.)",
    input_names=("X0", "X1", "..."),
    output_names=("Y",),
    args={"nodes": "a primitive a string, such as 'multiply x0 %0': inputs, numbers, and strings before as operands"},
    required_args=("nodes",),
    inplace=any_to_first,
    cost=_cost,
    rows=elementwise,
    image_role=ImageRole.ELEMENTWISE,
)
class FusedExpression(Expressed):
    """A region of element-wise operators."""

    formula = _WRITTEN

    def prepare(self) -> Step:
        """The calls piece by piece."""
        y, expression = self.y(0), self.expression()
        inputs = [self.x(index) for index in range(len(self.input_blobs))]
        sources = [x.reshape((1,) * (y.ndim - x.ndim) + x.shape) for x in inputs]

        def passes(pieces: Sequence[Array], out: Array, scratch: Scratch) -> list[Step]:
            return expression_steps([expression], dict(enumerate(pieces)), [out], scratch)

        return reduced(self, y.shape, sources, y, passes)


not_differentiable("only inference makes it, by fusing operators; differentiate the net before", "FusedExpression")
