"""LpNorm: the sum of magnitudes or of squares of all elements, and its gradient. 16-bit floats are summed in float32.

For p = 2 it is the sum of squares, without a root: that is what Caffe2 computes under this name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch, compute_dtype, convert, is_narrow
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.reduction.axes import reduction_cost

_ARGS = {
    "p": "1 for the sum of magnitudes, 2 for that of squares (default 2)",
    "average": "1: divide by the number of elements (default 0)",
}


def norm_power(call: OperatorCall) -> int:
    """Argument `p`. Raises ArgumentError unless it is 1 or 2."""
    power = call.arguments.int("p", 2)
    if power not in (1, 2):
        raise ArgumentError(f"{call.label}: argument 'p' must be 1 or 2, found {power}")
    call.arguments.bool("average")
    return power


def divisor(owner: Operator, elements: int) -> int:
    """What the sum over `elements` is divided by; the average of nothing is 0."""
    return elements if owner.arguments.bool("average") and elements else 1


def infer_lp_norm(call: OperatorCall) -> list[TensorType]:
    """One element, of the type of X."""
    norm_power(call)
    return [TensorType((1,), call.require_types(0, *FLOAT_TYPES))]


@new_operator(
    "LpNorm",
    infer=infer_lp_norm,
    doc="The sum of |X|^p over all elements, a vector of one; for p = 2 it has no root, as in Caffe2.",
    input_names=("X",),
    output_names=("Z",),
    args=_ARGS,
    cost=reduction_cost,
)
class LpNorm(Operator):
    """Sum of powers."""

    def prepare(self) -> Step:
        """Magnitudes or a BLAS dot product, into a float32 where the output has 16 bits."""
        x, y = self.x(0).reshape(-1), self.y(0)
        steps: list[Step] = []
        work = compute_dtype(x.dtype)
        if is_narrow(x.dtype):
            wide = self.scratch(x.shape, work)
            steps.append(convert(x, wide))
            x = wide
        total = self.scratch((1,), work) if is_narrow(y.dtype) else y
        if norm_power(self.call()) == 1:
            magnitudes = self.scratch(x.shape, work)
            steps += [partial(np.absolute, x, out=magnitudes)]
            steps += [partial(np.add.reduce, magnitudes, keepdims=True, out=total)]
        else:
            steps.append(partial(np.dot, x, x, out=total.reshape(())))
        if (count := divisor(self, x.size)) != 1:
            steps.append(scalar_pass(np.divide, total, count, total))
        return in_sequence(steps if total is y else [*steps, convert(total, y)])


def infer_lp_norm_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X; dZ has one element."""
    norm_power(call)
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    if call.inputs[1].elements != 1:
        raise call.fail("the gradient of the norm must have one element")
    return [call.inputs[0]]


@new_operator(
    "LpNormGradient",
    infer=infer_lp_norm_gradient,
    doc="dX = dZ sign(X) for p = 1, 2 dZ X for p = 2; divided by the number of elements where Z is an average.",
    input_names=("X", "dZ"),
    output_names=("dX",),
    args=_ARGS,
    inplace=lambda source, target: source == target == 0,
)
class LpNormGradient(Operator):
    """Gradient of LpNorm."""

    def prepare(self) -> Step:
        """The signs or the elements, times dZ and a factor."""
        x, dx = self.x(0).reshape(-1), self.y(0).reshape(-1)
        power = norm_power(self.call())
        factor = power / divisor(self, x.size)

        def passes(pieces: Sequence[Array], out: Array, _scratch: Scratch) -> list[Step]:
            value, dz = pieces
            first: Step = partial(np.sign, value, out=out) if power == 1 else partial(np.multiply, value, dz, out=out)
            second = [partial(np.multiply, out, dz, out=out)] if power == 1 else []
            return [first, *second, *([scalar_pass(np.multiply, out, factor, out)] if factor != 1 else [])]

        return reduced(self, x.shape, [x, self.x(1).reshape(1)], dx, passes)


gradient_by("LpNorm", "LpNormGradient", ("X", "dY"))
