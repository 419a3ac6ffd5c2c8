"""IntegralImage: sums over rectangles from the first pixel (Viola and Jones, 2001)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.rows import along_axis, first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_integral_image(call: OperatorCall) -> list[TensorType]:
    """A row and a column more."""
    meta = call.require_types(0, FLOAT32, FLOAT64)
    batch, channels, height, width = call.require_rank(0, 4)
    return [TensorType((batch, channels, height + 1, width + 1), meta)]


@array_function(
    "IntegralImage",
    infer=infer_integral_image,
    doc="Y[h, w] is the sum of X over rows below h and columns below w, of each channel of each image.",
    input_names=("X",),
    output_names=("Y",),
    rows=first_axis,
)
def integral_image(_call: OperatorCall, x: Array) -> Sequence[Array]:
    """Sums along both axes, behind a row and a column of zeros."""
    return [np.pad(_sums(x), ((0, 0), (0, 0), (1, 0), (1, 0)))]


def _sums(x: Array) -> Array:
    return x.cumsum(axis=2).cumsum(axis=3)


def infer_integral_image_gradient(call: OperatorCall) -> list[TensorType]:
    """As X."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type()
    batch, channels, height, width = call.require_rank(0, 4)
    call.require_shape(1, (batch, channels, height + 1, width + 1), "that of Y")
    return [call.inputs[0]]


@array_function(
    "IntegralImageGradient",
    infer=infer_integral_image_gradient,
    doc="What Caffe2 takes for the gradient of IntegralImage: sums of dY from the first pixel on, where the gradient "
    "is sums up to the last one. Gradients that are made here are right.",
    input_names=("X", "dY"),
    output_names=("dX",),
    rows=along_axis(0, 0, 1),
)
def integral_image_gradient(_call: OperatorCall, _x: Array, dy: Array) -> Sequence[Array]:
    """Sums along both axes."""
    return [_sums(dy[:, :, :-1, :-1])]


@gradient_of("IntegralImage")
def integral_image_maker(request: GradientRequest) -> GradientOperators:
    """A pixel counts for all sums behind it: dX is the sum of dY from there to the end."""
    if not request.has_dy(0):
        return request.result([], {})
    dx = request.dx(0)
    inner, by_row = f"{dx}_inner", f"{dx}_by_row"
    made = [
        request.plain_operator("Slice", [request.dy(0)], [inner], starts=[0, 0, 1, 1], ends=[-1, -1, -1, -1]),
        request.plain_operator("CumSum", [inner], [by_row], axis=2, reverse=1),
        request.plain_operator("CumSum", [by_row], [dx], axis=3, reverse=1),
    ]
    return request.result(made, {0: dx})
