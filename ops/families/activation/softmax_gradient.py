"""Gradients of Softmax and LogSoftmax, from Y and dY.

With the sums over what is normalized together: dX = Y * (dY - sum of Y * dY) for Softmax, and
dX = dY - exp(Y) * sum of dY for LogSoftmax (Goodfellow et al., "Deep Learning", 2016, section 6.2.2).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import apart_from, summing
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.broadcast_reduction import row_sum_pass
from dagexec.ops.families.activation.softmax import SOFTMAX_ARGS, grouping, normalized_axes


def infer_softmax_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of Y, which dY has too."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    call.require_shape(1, call.inputs[0].shape, "that of Y")
    grouping(call)
    return [call.inputs[0]]


def softmax_gradient_schema(name: str, formula: str) -> OpSchema:
    """The schema that both gradients share."""
    return OpSchema(
        name,
        infer=infer_softmax_gradient,
        doc=f"{formula} The sum is over what the forward operator normalizes together.",
        input_names=("Y", "dY"),
        output_names=("dX",),
        args=SOFTMAX_ARGS,
        inplace=lambda source, target: source == 1 and target == 0,
        cost=lambda call, outputs: memory_cost(call, outputs, 4),
        rows=summing(apart_from(normalized_axes, 0, 1), normalized_axes),
    )


class NormalizationGradient(Operator):
    """Base of the two: pieces of whole groups."""

    def prepare(self) -> Step:
        """The passes of each piece; 16-bit floats are widened."""
        outer, group, inner = grouping(self.call())
        shape = (outer, group, inner)
        y, dy, dx = self.x(0).reshape(shape), self.x(1).reshape(shape), self.y(0).reshape(shape)
        if dx.size == 0:
            return in_sequence([])
        work = compute_dtype(dx.dtype)
        count = min(outer, max(1, BLOCK // (group * inner)))
        sums, scratch = self.scratch((count, 1, inner), work), self.scratch((count, group, inner), work)
        wide = [self.scratch((count, group, inner), work) for _ in range(2)] if is_narrow(dx.dtype) else []
        steps: list[Step] = []
        for (piece,) in block_indices((outer,), count):
            length = len(dx[piece])
            memory = (scratch[:length], sums[:length])
            if not wide:
                steps += self.passes(y[piece], dy[piece], dx[piece], *memory)
                continue
            value, gradient = (array[:length] for array in wide)
            steps += [convert(y[piece], value), convert(dy[piece], gradient)]
            steps += [*self.passes(value, gradient, gradient, *memory), convert(gradient, dx[piece])]
        return in_sequence(steps)

    @abstractmethod
    def passes(self, y: Array, dy: Array, dx: Array, scratch: Array, sums: Array) -> list[Step]:
        """The NumPy calls for whole groups along axis 1; `dx` may be `dy`."""


@operator(softmax_gradient_schema("SoftmaxGradient", "dX = Y * (dY - sum of Y * dY)."))
class SoftmaxGradient(NormalizationGradient):
    """Gradient of Softmax."""

    def passes(self, y: Array, dy: Array, dx: Array, scratch: Array, sums: Array) -> list[Step]:
        return [
            partial(np.multiply, y, dy, out=scratch),
            row_sum_pass(scratch, (1,), sums),
            partial(np.subtract, dy, sums, out=dx),
            partial(np.multiply, dx, y, out=dx),
        ]


@operator(softmax_gradient_schema("LogSoftmaxGradient", "dX = dY - exp(Y) * sum of dY."))
class LogSoftmaxGradient(NormalizationGradient):
    """Gradient of LogSoftmax."""

    def passes(self, y: Array, dy: Array, dx: Array, scratch: Array, sums: Array) -> list[Step]:
        return [
            row_sum_pass(dy, (1,), sums),
            partial(np.exp, y, out=scratch),
            partial(np.multiply, scratch, sums, out=scratch),
            partial(np.subtract, dy, scratch, out=dx),
        ]


for _forward in ("Softmax", "LogSoftmax"):
    gradient_by(_forward, f"{_forward}Gradient", ("Y", "dY"))
