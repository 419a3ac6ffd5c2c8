"""Moments: mean and variance over axes, and their gradient. 16-bit floats are computed in float32.

The variance is the mean of squared differences from the mean, taken in a second pass, so nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import reduced as reduced_rows
from dagexec.core.rows import summing
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, Scratch, compute_dtype, convert
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.reduction.axes import AXES_ARGS, named_axes, output_shape, reduction_cost


def infer_moments(call: OperatorCall) -> list[TensorType]:
    """Mean and variance have the shape that the reduction leaves."""
    meta = call.require_types(0, *FLOAT_TYPES)
    axes, keep = named_axes(call)
    return [TensorType(output_shape(call.inputs[0].shape, axes, keep), meta)] * 2


@new_operator(
    "Moments",
    infer=infer_moments,
    doc="Mean of X over `axes`, and the mean of (X - mean)^2; both NaN over no elements.",
    input_names=("X",),
    output_names=("mean", "variance"),
    args=AXES_ARGS,
    cost=reduction_cost,
    rows=summing(reduced_rows(named_axes), lambda call: named_axes(call)[0]),
)
class Moments(Operator):
    """Mean and variance."""

    def prepare(self) -> Step:
        """A sum, the differences, and the sum of their squares."""
        x = self.x(0)
        axes, _ = named_axes(self.call())
        kept, work = output_shape(x.shape, axes, True), compute_dtype(x.dtype)
        count = math.prod(x.shape[axis] for axis in axes)
        outputs = [self.y(index).reshape(kept) for index in (0, 1)]
        if not count:
            return in_sequence([partial(output.fill, math.nan) for output in outputs])
        mean, variance = (y if y.dtype == work else self.scratch(kept, work) for y in outputs)
        apart = self.scratch(x.shape, work)
        steps: list[Step] = [
            partial(np.add.reduce, x, axis=axes, dtype=work, keepdims=True, out=mean),
            scalar_pass(np.divide, mean, count, mean),
            partial(np.subtract, x, mean, out=apart),
            partial(np.square, apart, out=apart),
            partial(np.add.reduce, apart, axis=axes, keepdims=True, out=variance),
            scalar_pass(np.divide, variance, count, variance),
        ]
        pairs = zip((mean, variance), outputs, strict=True)
        return in_sequence([*steps, *(convert(found, y) for found, y in pairs if found is not y)])


def seen_from_x(call: OperatorCall) -> OperatorCall:
    """A call of the gradient as Moments has it."""
    return replace(call, inputs=call.inputs[2:3])


def infer_moments_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X; the others have the shape that the reduction leaves."""
    call.require_types(2, *FLOAT_TYPES)
    call.require_same_type()
    axes, keep = named_axes(seen_from_x(call))
    shape = output_shape(call.inputs[2].shape, axes, keep)
    for index in (0, 1, 3):
        call.require_shape(index, shape, "what the reduction of X gives")
    return [call.inputs[2]]


@new_operator(
    "MomentsGradient",
    infer=infer_moments_gradient,
    doc="dX = (dmean + 2 (X - mean) dvariance) / number of elements of a mean.",
    input_names=("dmean", "dvariance", "X", "mean"),
    output_names=("dX",),
    args=AXES_ARGS,
)
class MomentsGradient(Operator):
    """Gradient of Moments."""

    def prepare(self) -> Step:
        """The formula, piece by piece."""
        dx = self.y(0)
        if not dx.size:
            return nothing_to_do
        axes, _ = named_axes(seen_from_x(self.call()))
        kept = output_shape(dx.shape, axes, True)
        count = math.prod(dx.shape[axis] for axis in axes)
        sources = [self.x(2), *(self.x(index).reshape(kept) for index in (0, 1, 3))]

        def passes(pieces: Sequence[Array], out: Array, _scratch: Scratch) -> list[Step]:
            x, dmean, dvariance, mean = pieces
            return [
                partial(np.subtract, x, mean, out=out),
                partial(np.multiply, out, dvariance, out=out),
                scalar_pass(np.multiply, out, 2.0, out),
                partial(np.add, out, dmean, out=out),
                scalar_pass(np.divide, out, count, out),
            ]

        return reduced(self, dx.shape, sources, dx, passes)


gradient_by("Moments", "MomentsGradient", ("dY0", "dY1", "X", "Y"))
