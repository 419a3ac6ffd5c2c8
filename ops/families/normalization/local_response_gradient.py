"""The gradient of LRN."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, compute_dtype, convert, is_narrow, row_pieces
from dagexec.ops.base.layout import ImageOperator, channel_axis
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.normalization.local_response import (
    LRN,
    infer_lrn,
    lrn_scale_passes,
    window_passes,
    window_size,
)


def infer_lrn_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    for index in (1, 2):
        call.require_shape(index, call.inputs[0].shape, "the shape of X")
    return infer_lrn(call)


@new_operator(
    "LRNGradient",
    infer=infer_lrn_gradient,
    doc="dX = dY * scale^(-beta) - 2 alpha beta / size * X * (sum of dY * Y / scale over the `size` channels "
    "around each), with the scale of LRN, computed again.",
    input_names=("X", "Y", "dY"),
    output_names=("dX",),
    args=LRN.schema.args,
    required_args=("size",),
    cost=lambda call, outputs: memory_cost(call, outputs, 10 + 2 * call.arguments.int("size", 1)),
    rows=along_axis(0, 0, 1, 2),
)
class LRNGradient(ImageOperator):
    """The gradient of local response normalization."""

    def prepare(self) -> Step:
        """Piece by piece of whole images (NCHW) or pixels (NHWC)."""
        call, x = self.call(), self.x(0)
        if x.size == 0:
            return in_sequence([])
        axis = channel_axis(call)
        view = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
        count = min(view[0], max(1, BLOCK // (view[1] * view[2])))
        work, size = compute_dtype(x.dtype), window_size(call)
        spare = [self.scratch((count, *view[1:]), work) for _ in range(3)]
        wide = [self.scratch((count, *view[1:]), work) for _ in range(4)] if is_narrow(x.dtype) else []
        tensors = [self.x(index).reshape(view) for index in range(3)]
        steps: list[Step] = []
        for piece in row_pieces(view[0], count):
            sources, target = [tensor[piece] for tensor in tensors], self.y(0).reshape(view)[piece]
            memory = [array[: len(target)] for array in spare]
            if not wide:
                steps += self._passes(sources, target, memory, size)
                continue
            copies = [array[: len(target)] for array in wide]
            steps += [convert(source, copy) for source, copy in zip(sources, copies, strict=False)]
            steps += self._passes(copies[:3], copies[3], memory, size)
            steps.append(convert(copies[3], target))
        return in_sequence(steps)

    def _passes(self, tensors: list[Array], dx: Array, memory: list[Array], size: int) -> list[Step]:
        x, y, dy = tensors
        scale, ratio, sums = memory
        alpha, beta = self.arguments.float("alpha", 0.0), self.arguments.float("beta", 0.0)
        return [
            *lrn_scale_passes(self, x, ratio, scale, size),
            partial(np.multiply, dy, y, out=ratio),
            partial(np.divide, ratio, scale, out=ratio),
            *window_passes(ratio, sums, size),
            partial(np.multiply, sums, x, out=sums),
            scalar_pass(np.multiply, sums, -2 * alpha * beta / size, sums),
            *_divided_by_power(dy, scale, beta, ratio, dx),
            partial(np.add, dx, sums, out=dx),
        ]


def _divided_by_power(dy: Array, scale: Array, beta: float, spare: Array, out: Array) -> list[Step]:
    """The passes `out = dy * scale^(-beta)`; `scale` and `spare` are overwritten."""
    if beta != 0.75:
        return [scalar_pass(np.power, scale, -beta, spare), partial(np.multiply, dy, spare, out=out)]
    return [
        partial(np.sqrt, scale, out=spare),
        partial(np.sqrt, spare, out=scale),
        partial(np.multiply, spare, scale, out=spare),
        partial(np.divide, dy, spare, out=out),
    ]


@gradient_of("LRN")
def lrn_gradient(request: GradientRequest) -> GradientOperators:
    """LRNGradient(X, Y, dY) -> dX; from the second output, `scale`, none passes."""
    request.require_no_dy(1)
    return request.single("LRNGradient", [request.x(0), request.y(0), request.dy(0)], [0])
