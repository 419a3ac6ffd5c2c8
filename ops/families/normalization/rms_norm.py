"""RootMeanSquareNorm and MeanVarianceNorm: division by the root mean square, or by the deviation, over some axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import apart_from, before_axis, summing
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.ops.base.array_function import ArrayOperator, array_function
from dagexec.ops.base.blocks import BLOCK, Array, compute_dtype, row_pieces
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.normalization.local_response import epsilon_of
from dagexec.ops.families.reduction.axes import named_axes


def infer_rms_norm(call: OperatorCall) -> list[TensorType]:
    """Y has the shape of X, and the type of the scale."""
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_types(1, *FLOAT_TYPES)
    epsilon_of(call)
    shape, scale = call.inputs[0].shape, call.inputs[1].shape
    call.axis("axis", -1, len(shape))
    if len(scale) > len(shape) or any(
        size not in (1, wanted) for size, wanted in zip(scale[::-1], shape[::-1], strict=False)
    ):
        raise call.fail("the scale must broadcast to X")
    return [TensorType(shape, meta)]


@new_operator(
    "RootMeanSquareNorm",
    infer=infer_rms_norm,
    doc="Y = X / sqrt(mean of X^2 + epsilon) * scale, the mean being over the axes from `axis` on. Zhang and "
    "Sennrich, 2019, arXiv:1910.07467. (dagexec's own, for ONNX.)",
    input_names=("X", "scale, which broadcasts to X"),
    output_names=("Y",),
    args={"axis": "the first of the axes (default -1)", "epsilon": "added to the mean square (default 1e-5)"},
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
    onnx=(OnnxName("RMSNormalization", 23, {"axis": "axis", "epsilon": "epsilon"}),),
    rows=before_axis(lambda call: call.axis("axis", -1, len(call.inputs[0].shape))),
)
class RootMeanSquareNorm(ArrayOperator):
    """Some rows at a time, in float32 where they are of 16 bits."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """Squares, their mean, its inverse root, and the products; a scale of other axes at the end."""
        x, scale, y = *inputs, outputs[0]
        if not x.size:
            return nothing_to_do
        call = self.call()
        members = math.prod(x.shape[call.axis("axis", -1, x.ndim) :])
        rows, target = x.reshape(-1, members), y.reshape(-1, members)
        work = compute_dtype(x.dtype)
        by_row = scale.size == members and scale.ndim == x.ndim - call.axis("axis", -1, x.ndim)
        pieces = row_pieces(len(rows), max(1, BLOCK // members))
        squares = np.empty((pieces[0].stop, members), work)
        means = np.empty((pieces[0].stop, 1), work)
        steps: list[Step] = []
        for piece in pieces:
            count = len(rows[piece])
            part, mean = squares[:count], means[:count]
            steps += [
                partial(np.copyto, part, rows[piece]),
                partial(np.square, part, out=part),
                partial(np.mean, part, axis=1, keepdims=True, out=mean),
                scalar_pass(np.add, mean, epsilon_of(call), mean),
                partial(np.sqrt, mean, out=mean),
                partial(np.divide, rows[piece], mean, out=part),
            ]
            if by_row:
                steps.append(partial(np.multiply, part, scale.reshape(members), out=part, casting="unsafe"))
            steps.append(partial(np.copyto, target[piece], part, casting="unsafe"))
        if not by_row:
            steps.append(partial(np.multiply, y, scale, out=y))
        return in_sequence(steps)


def infer_mean_variance_norm(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X."""
    call.require_types(0, *FLOAT_TYPES)
    named_axes(call)
    return [call.inputs[0]]


_SMALLEST_DEVIATION = 1e-9  # added to the deviation, as ONNX says


@array_function(
    "MeanVarianceNorm",
    infer=infer_mean_variance_norm,
    doc="Y = (X - mean) / (deviation + 1e-9), mean and deviation being over `axes`. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={"axes": "the axes of a mean (default: all)"},
    cost=lambda call, outputs: memory_cost(call, outputs, 6),
    onnx=(OnnxName("MeanVarianceNormalization", 13, {"axes": "axes"}),),
    rows=summing(apart_from(lambda call: named_axes(call)[0]), lambda call: named_axes(call)[0]),
)
def mean_variance_norm(call: OperatorCall, x: Array) -> Sequence[Array]:
    """The variance from the differences, so that nothing cancels."""
    if not x.size:
        return [x]
    axes, _ = named_axes(call)
    wide = x.astype(compute_dtype(x.dtype))
    wide -= wide.mean(axes, keepdims=True)
    return [wide / (np.sqrt(np.square(wide).mean(axes, keepdims=True)) + wide.dtype.type(_SMALLEST_DEVIATION))]


not_differentiable("train with LayerNorm, InstanceNorm or SpatialBN", "RootMeanSquareNorm", "MeanVarianceNorm")
