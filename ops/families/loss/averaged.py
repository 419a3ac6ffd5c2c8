"""AveragedLoss: the mean of all elements, as the number to descend from."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import is_narrow


def require_one_element(call: OperatorCall, index: int) -> None:
    """Raise ShapeError unless input `index`, the gradient of a number, has one element of X's type."""
    call.require_same_type(0, index)
    if call.inputs[index].elements != 1:
        name = call.definition.input[index]
        raise call.fail(f"the gradient {name!r} must have one element, found shape {call.inputs[index].shape}")


def infer_averaged_loss(call: OperatorCall) -> list[TensorType]:
    """A scalar of X's type."""
    return [TensorType((), call.require_types(0, *FLOAT_TYPES))]


@new_operator(
    "AveragedLoss",
    infer=infer_averaged_loss,
    doc="The mean of all elements, a scalar; 0 when there are none.",
    input_names=("X",),
    output_names=("loss",),
)
class AveragedLoss(Operator):
    """The mean of all elements. 16-bit floats are summed in float32, and pairwise, as NumPy sums."""

    def prepare(self) -> Step:
        """One sum and one division."""
        x, y = self.x(0).reshape(-1), self.y(0)
        total = np.dtype(np.float32) if is_narrow(x.dtype) else x.dtype

        def step() -> None:
            y[...] = np.add.reduce(x, dtype=total) / x.size if x.size else 0

        return step


def infer_averaged_loss_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    call.require_types(0, *FLOAT_TYPES)
    require_one_element(call, 1)
    return [call.inputs[0]]


@new_operator(
    "AveragedLossGradient",
    infer=infer_averaged_loss_gradient,
    doc="dX = dloss / (number of elements), everywhere.",
    input_names=("X", "dloss"),
    output_names=("dX",),
)
class AveragedLossGradient(Operator):
    """The gradient of the mean of all elements."""

    def prepare(self) -> Step:
        gradient, dx = self.x(1).reshape(-1), self.y(0)
        count = max(1, dx.size)

        def step() -> None:
            dx.fill(float(gradient[0]) / count)

        return step


gradient_by("AveragedLoss", "AveragedLossGradient", ("X", "dY"))
