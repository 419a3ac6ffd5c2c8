"""AveragedLoss: the mean of all elements, as the number to descend from."""

from __future__ import annotations

from dagexec.core.expressions import Expression, row_mean
from dagexec.core.schema import OperatorCall
from dagexec.ops.base.row_operator import all_axes, row_operator


def require_one_element(call: OperatorCall, index: int) -> None:
    """Raise ShapeError unless input `index`, the gradient of a number, has one element of X's type."""
    call.require_same_type(0, index)
    if call.inputs[index].elements != 1:
        name = call.definition.input[index]
        raise call.fail(f"the gradient {name!r} must have one element, found shape {call.inputs[index].shape}")


@row_operator("AveragedLoss", {}, members=all_axes, output="loss", gradient=("X", "dY"))
def averaged_loss(x: Expression) -> Expression:
    """The mean of all elements, a scalar; 0 when there are none."""
    return row_mean(x)
