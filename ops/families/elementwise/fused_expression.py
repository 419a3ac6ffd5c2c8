"""FusedExpression and FusedRows: regions of operators as one, said as an expression of elements or of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.expressions import Expression, element, flops_of, from_lines, inputs_of, with_inputs
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType, any_to_first, memory_cost
from dagexec.core.traits import ImageRole, Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, Scratch
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.broadcasting import require_inplace_fits
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.ops.base.row_operator import OfRows, Piece, Shape
from dagexec.ops.base.row_runs import RowRuns


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
    outputs = _infer(call)
    if _WRITTEN.expression(call.arguments, outputs[0].meta).joins_members:
        raise ArgumentError(f"{call.label}: argument 'nodes' joins the members of rows, which FusedRows does")
    return outputs


def infer_fused_rows(call: OperatorCall) -> list[TensorType]:
    """As FusedExpression, with an axis for the members of a row."""
    outputs = _infer(call)
    if not outputs[0].shape:
        raise call.fail("rows have an axis for their members")
    return outputs


def _infer(call: OperatorCall) -> list[TensorType]:
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


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Rows are on an axis before the last one."""
    found, last = elementwise(asked), len(asked.outputs[0].shape) - 1
    if found[0] is not None and found[0].axis == last:
        raise asked.mixes(last)
    return found


_ARGS = {"nodes": "a primitive a string, such as 'multiply x0 %0': inputs, numbers, and strings before as operands"}
_FIELDS: dict[str, Any] = {
    "inputs": (1, UNBOUNDED),
    "input_names": ("X0", "X1", "..."),
    "output_names": ("Y",),
    "args": _ARGS,
    "required_args": ("nodes",),
    "inplace": any_to_first,
    "cost": _cost,
}


@new_operator(
    "FusedExpression",
    infer=infer_fused_expression,
    doc="Y = the expression `nodes` of the inputs, which broadcast as in NumPy. (dagexec's own; passes make it of "
    "regions of element-wise operators.)",
    rows=elementwise,
    image_role=ImageRole.ELEMENTWISE,
    **_FIELDS,
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


@new_operator(
    "FusedRows",
    infer=infer_fused_rows,
    doc="As FusedExpression, where `nodes` join the members of rows, too, which are along the last axis. (dagexec's "
    "own; passes make it of normalizations, reductions, and what is around them.)",
    rows=_rows,
    **_FIELDS,
)
class FusedRows(OfRows):
    """A region of operators on rows."""

    formula = _WRITTEN

    def expressions(self) -> tuple[Expression, ...]:
        """The one result, from inputs of which some have one value a row."""
        shapes = [self.x(index).shape for index in range(len(self.input_blobs))]
        return (of_rows(self.expression(), self.y(0).shape[-1], shapes),)

    def elements(self) -> tuple[Shape, int]:
        """As they are."""
        return self.y(0).shape, self.y(0).ndim - 1

    def operands(self) -> Piece:
        """As they are, of at least one axis."""
        inputs = [self.x(index) for index in range(len(self.input_blobs))]
        return {index: x if x.ndim else x.reshape(1) for index, x in enumerate(inputs)}, [self.y(0)]

    def prepare(self) -> Step:
        """Runs of rows, piece by piece."""
        sources, [y] = self.operands()
        if not y.size:
            return nothing_to_do
        runs, most = RowRuns(y.shape[:-1], [y, *sources.values()]), max(1, BLOCK // y.shape[-1])
        pieces = [runs.views(piece) for piece in runs.cut(range(runs.rows), most)]
        return self.row_steps([(dict(zip(sources, views, strict=True)), [target]) for target, *views in pieces])


def of_rows(expression: Expression, members: int, shapes: Sequence[Shape]) -> Expression:
    """The expression, in which inputs of these shapes that have one value for the members of a row are of the row."""
    are_of_row = [members > 1 and shape[-1:] in ((), (1,)) for shape in shapes]
    return with_inputs(
        expression, {element(place): element(place, of_row=is_of_row) for place, is_of_row in enumerate(are_of_row)}
    )


not_differentiable(
    "only inference makes it, by fusing operators; differentiate the net before", "FusedExpression", "FusedRows"
)
