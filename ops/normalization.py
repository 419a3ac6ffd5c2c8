"""Normalisation with given statistics (SpatialBN in inference) and over neighbouring channels (LRN).

Normalisation by statistics of the tensor itself is in `standardization`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES
from dagexec.core.errors import ArgumentError, UnsupportedFeatureError
from dagexec.core.operator import Step, in_sequence
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.blocks import BLOCK, Array, Index, Scratch, block_indices, blockwise, compute_dtype, convert, is_narrow
from dagexec.ops.layout import ORDER_HELP, ImageOperator, channel_axis, channel_count, check_blocks, image_order
from dagexec.ops.pointwise import scalar_pass

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace


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


def infer_spatial_bn(call: OperatorCall) -> list[TensorType]:
    """In inference, the output has the type of X."""
    call.require_types(0, *FLOAT_TYPES)
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(shape)}")
    if len(call.inputs) not in (5, 7) or len(call.definition.output) != 1:
        counts = f"{len(call.inputs)} and {len(call.definition.output)}"
        raise call.fail(f"with is_test=1 there are 5 inputs (or 7, the last two unread) and 1 output, found {counts}")
    epsilon_of(call)
    check_blocks(call, 0)
    require_channel_parameters(call, range(1, 5), channel_count(image_order(call), shape))
    return [call.inputs[0]]


def _spatial_bn_inplace(input_index: int, output_index: int) -> bool:
    return (input_index, output_index) in ((0, 0), (3, 1), (4, 2))


@operator(
    OpSchema(
        "SpatialBN",
        inputs=(5, 7),
        outputs=(1, 5),
        infer=infer_spatial_bn,
        doc="With is_test=1: Y = (X - mean) / sqrt(var + epsilon) * scale + bias, a channel each. Ioffe and Szegedy, "
        "2015, arXiv:1502.03167. Training mode is not implemented.",
        input_names=("X", "scale", "bias", "mean", "var", "sums", "sumsq"),
        output_names=("Y", "mean", "var", "saved_mean", "saved_inv_std"),
        args={
            "is_test": "1: inference",
            "epsilon": "added to the variance (default 1e-5)",
            "order": ORDER_HELP,
            "momentum": "of the running statistics, in training (default 0.9)",
            "num_batches": "batches that sums and sumsq are over, in training (default 1)",
        },
        required_args=("is_test",),
        inplace=_spatial_bn_inplace,
        enforced_inplace=((3, 1), (4, 2)),
        cost=lambda call, outputs: memory_cost(call, outputs, 2),
    )
)
class SpatialBN(ImageOperator):
    """Batch normalisation in inference."""

    def __init__(self, definition: OperatorDef, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError for training mode."""
        super().__init__(definition, workspace, index=index, net=net)
        if not self.arguments.bool("is_test"):
            raise UnsupportedFeatureError(f"{self.label}: training mode (is_test=0) is not implemented yet")

    def prepare(self) -> Step:
        """Y = X * factor + shift, with a factor and shift a channel that each run computes anew."""
        x, call = self.x(0), self.call()
        factor, shift, constants = self.affine()
        channels = channel_axis(call)
        view = (factor.size, *(1,) * (x.ndim - channels - 1))
        factors, shifts = factor.reshape(view), shift.reshape(view)
        if not is_narrow(x.dtype):
            y = self.y(0)
            return in_sequence([*constants, partial(np.multiply, x, factors, out=y), partial(np.add, y, shifts, out=y)])
        return in_sequence([*constants, self._narrow_step(factors, shifts)])

    def affine(self) -> tuple[Array, Array, list[Step]]:
        """The factor and shift of each channel, and the steps that compute them."""
        scale, bias, mean, variance = (self.x(index) for index in range(1, 5))
        work = compute_dtype(self.x(0).dtype)
        factor, shift = self.scratch(scale.shape, work), self.scratch(scale.shape, work)
        steps: list[Step] = [
            partial(np.add, variance, np.asarray(epsilon_of(self.call()), work), out=factor),
            partial(np.sqrt, factor, out=factor),
            partial(np.divide, scale, factor, out=factor),
            partial(np.multiply, mean, factor, out=shift),
            partial(np.subtract, bias, shift, out=shift),
        ]
        return factor, shift, steps

    def _narrow_step(self, factors: Array, shifts: Array) -> Step:
        """The affine map of 16-bit floats, piece by piece in float32."""
        x = self.x(0)
        factors, shifts = np.broadcast_to(factors, x.shape), np.broadcast_to(shifts, x.shape)

        def passes(index: Index, source: Array, target: Array, _scratch: Scratch) -> list[Step]:
            return [
                partial(np.multiply, source, factors[index], out=target),
                partial(np.add, target, shifts[index], out=target),
            ]

        return blockwise(self, x, self.y(0), passes)


def _window_size(call: OperatorCall) -> int:
    size = call.arguments.int("size", 0)
    if size < 1 or size % 2 == 0:
        raise ArgumentError(f"{call.label}: argument 'size' must be odd and at least 1, found {size}")
    return size


def infer_lrn(call: OperatorCall) -> list[TensorType]:
    """Both outputs have the type of X."""
    call.require_types(0, *FLOAT_TYPES)
    if len(call.inputs[0].shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(call.inputs[0].shape)}")
    _window_size(call)
    check_blocks(call, 0)
    for name in ("alpha", "beta", "bias"):
        call.arguments.float(name, 1.0)
    return [call.inputs[0]] * len(call.definition.output)


@operator(
    OpSchema(
        "LRN",
        inputs=(1, 1),
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
    )
)
class LRN(ImageOperator):
    """Local response normalisation across channels."""

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
        size = _window_size(call)
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
        alpha, beta = self.arguments.float("alpha", 0.0), self.arguments.float("beta", 0.0)
        steps: list[Step] = [partial(np.square, x, out=squares), partial(np.copyto, scale, squares)]
        for distance in range(1, min(size // 2 + 1, x.shape[1])):
            above, below = scale[:, distance:], scale[:, :-distance]
            steps.append(partial(np.add, above, squares[:, :-distance], out=above))
            steps.append(partial(np.add, below, squares[:, distance:], out=below))
        steps.append(scalar_pass(np.multiply, scale, alpha / size, scale))
        steps.append(scalar_pass(np.add, scale, self.arguments.float("bias", 1.0), scale))
        if beta == 0.75:
            return [
                *steps,
                partial(np.sqrt, scale, out=squares),
                partial(np.sqrt, squares, out=y),
                partial(np.multiply, squares, y, out=squares),
                partial(np.divide, x, squares, out=y),
            ]
        return [*steps, scalar_pass(np.power, scale, -beta, squares), partial(np.multiply, x, squares, out=y)]
