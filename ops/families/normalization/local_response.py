"""Normalization over neighboring channels (LRN), and what normalizations check.

Batch normalization is in `batch_norm`, that by statistics of each image in `standardization`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.layout import ORDER_HELP, ImageOperator, channel_axis, check_blocks
from dagexec.ops.base.passes import scalar_pass


def epsilon_of(call: OperatorCall) -> float:
    """Argument `epsilon`, by default 1e-5. Raises ArgumentError when it is negative."""
    epsilon = call.arguments.float("epsilon", 1e-5)
    if epsilon < 0:
        raise ArgumentError(f"{call.label}: argument 'epsilon' must be at least 0, found {epsilon:g}")
    return epsilon


def require_channel_parameters(call: OperatorCall, indices: Sequence[int], channels: int) -> None:
    """Raise ShapeError unless the inputs have an element a channel, all of X's type or all of float32."""
    for index in indices:
        call.require_shape(index, (channels,), "one element for each channel of X")
        call.require_types(index, call.inputs[0].meta, FLOAT32)
    call.require_same_type(*indices)


def window_size(call: OperatorCall) -> int:
    """Argument `size`. Raises ArgumentError unless it is odd and at least 1."""
    size = call.arguments.int("size", 0)
    if size < 1 or size % 2 == 0:
        raise ArgumentError(f"{call.label}: argument 'size' must be odd and at least 1, found {size}")
    return size


def infer_lrn(call: OperatorCall) -> list[TensorType]:
    """Both outputs have the type of X."""
    call.require_types(0, *FLOAT_TYPES)
    if len(call.inputs[0].shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(call.inputs[0].shape)}")
    window_size(call)
    check_blocks(call, 0)
    for name in ("alpha", "beta", "bias"):
        call.arguments.float(name, 1.0)
    return [call.inputs[0]] * len(call.definition.output)


@new_operator(
    "LRN",
    outputs=(1, 2),
    infer=infer_lrn,
    doc="Y = X * scale^(-beta), scale = bias + alpha / size * (sum of X^2 over the `size` channels around each, "
    "fewer at the ends). Krizhevsky et al., 2012, section 3.3.",
    input_names=("X",),
    output_names=("Y", "scale"),
    args={
        "size": "channels in the window, odd",
        "alpha": "factor of the mean square (default 0)",
        "beta": "exponent (default 0)",
        "bias": "added to the sum (default 1)",
        "order": ORDER_HELP,
    },
    required_args=("size",),
    cost=lambda call, outputs: memory_cost(call, outputs, 6 + call.arguments.int("size", 1)),
    onnx=(OnnxName("LRN", 13, {name: name for name in ("size", "alpha", "beta", "bias")}),),
    results=1,
    image_role=ImageRole.SAME_CHANNELS,
)
class LRN(ImageOperator):
    """Local response normalization across channels."""

    def prepare(self) -> Step:
        """Piece by piece of whole images (NCHW) or pixels (NHWC)."""
        call, x = self.call(), self.x(0)
        if x.size == 0:
            return in_sequence([])
        axis = channel_axis(call)
        view = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
        outputs = [self.y(index).reshape(view) for index in range(len(self.output_blobs))]
        count = min(view[0], max(1, BLOCK // (view[1] * view[2])))
        wide = is_narrow(x.dtype)
        spare = [self.scratch((count, *view[1:]), compute_dtype(x.dtype)) for _ in range(4 if wide else 2)]
        size = window_size(call)
        steps: list[Step] = []
        for (piece,) in block_indices((view[0],), count):
            source, target = x.reshape(view)[piece], outputs[0][piece]
            squares, scale, *wide_pair = (array[: len(source)] for array in spare)
            if wide_pair:
                steps.append(convert(source, wide_pair[0]))
                steps += self._passes(wide_pair[0], wide_pair[1], squares, scale, size)
                steps.append(convert(wide_pair[1], target))
            else:
                steps += self._passes(source, target, squares, scale, size)
            if len(outputs) > 1:
                steps.append(convert(scale, outputs[1][piece]))
        return in_sequence(steps)

    def _passes(self, x: Array, y: Array, squares: Array, scale: Array, size: int) -> list[Step]:
        beta = self.arguments.float("beta", 0.0)
        steps = lrn_scale_passes(self, x, squares, scale, size)
        if beta == 0.75:
            return [
                *steps,
                partial(np.sqrt, scale, out=squares),
                partial(np.sqrt, squares, out=y),
                partial(np.multiply, squares, y, out=squares),
                partial(np.divide, x, squares, out=y),
            ]
        return [*steps, scalar_pass(np.power, scale, -beta, squares), partial(np.multiply, x, squares, out=y)]


def window_passes(x: Array, out: Array, size: int) -> list[Step]:
    """The passes that write to `out` the sums of `x` over the `size` neighbors on axis 1, fewer at the ends."""
    steps: list[Step] = [partial(np.copyto, out, x)]
    for distance in range(1, min(size // 2 + 1, x.shape[1])):
        above, below = out[:, distance:], out[:, :-distance]
        steps.append(partial(np.add, above, x[:, :-distance], out=above))
        steps.append(partial(np.add, below, x[:, distance:], out=below))
    return steps


def lrn_scale_passes(owner: Operator, x: Array, squares: Array, scale: Array, size: int) -> list[Step]:
    """The passes that write LRN's `scale`; `squares` is overwritten."""
    alpha = owner.arguments.float("alpha", 0.0)
    return [
        partial(np.square, x, out=squares),
        *window_passes(squares, scale, size),
        scalar_pass(np.multiply, scale, alpha / size, scale),
        scalar_pass(np.add, scale, owner.arguments.float("bias", 1.0), scale),
    ]
