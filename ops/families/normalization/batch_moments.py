"""BatchMoments: of each channel the mean and the mean of squares, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import channel_axis, channels_last

_ARGS = {"order": "NCHW or NHWC: whether channels are the second or the last axis (default NCHW)"}


def _others(call: OperatorCall, rank: int) -> tuple[int, ...]:
    """The axes but that of channels."""
    axis = rank - 1 if channels_last(call) else 1
    return tuple(other for other in range(rank) if other != axis)


def infer_batch_moments(call: OperatorCall) -> list[TensorType]:
    """Two vectors of a number a channel."""
    meta = call.require_types(0, *FLOAT_TYPES)
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail("an image tensor has at least 2 axes")
    channels_last(call)
    return [TensorType((shape[channel_axis(call)],), meta)] * 2


@array_function(
    "BatchMoments",
    infer=infer_batch_moments,
    doc="Of each channel the mean of X, and that of X^2 (not the variance).",
    input_names=("X",),
    output_names=("mu", "squares"),
    args=_ARGS,
)
def batch_moments(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Means in float64; of nothing 0."""
    axes = _others(call, x.ndim)
    count = max(1, int(np.prod([x.shape[axis] for axis in axes])))
    wide = x.astype(np.float64)
    return [wide.sum(axes) / count, np.square(wide).sum(axes) / count]


def infer_batch_moments_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    call.require_types(2, *FLOAT_TYPES)
    call.require_same_type()
    shape = call.inputs[2].shape
    if len(shape) < 2:
        raise call.fail("an image tensor has at least 2 axes")
    channels = shape[-1] if channels_last(call) else shape[1]
    for index in (0, 1):
        call.require_shape(index, (channels,), "a number a channel")
    return [call.inputs[2]]


@array_function(
    "BatchMomentsGradient",
    infer=infer_batch_moments_gradient,
    doc="dX = (dmu + 2 X dsquares) / elements of a channel.",
    input_names=("dmu", "dsquares", "X"),
    output_names=("dX",),
    args=_ARGS,
)
def batch_moments_slope(call: OperatorCall, dmu: Array, dsquares: Array, x: Array) -> Sequence[Array]:
    """The formula, in float64."""
    axes = _others(call, x.ndim)
    spread = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    count = max(1, int(np.prod([x.shape[axis] for axis in axes])))
    slope = dmu.astype(np.float64).reshape(spread) + 2 * x.astype(np.float64) * dsquares.reshape(spread)
    return [slope / count]


gradient_by("BatchMoments", "BatchMomentsGradient", ("dY0", "dY1", "X"))
