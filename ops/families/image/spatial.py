"""Operators that move pixels: nearest-neighbor resizing, channel shuffle."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.layout import (
    NHWC,
    ORDER_HELP,
    ImageOperator,
    channel_axis,
    channel_count,
    channels_last,
    check_blocks,
    image_order,
    require_image,
)

Array = npt.NDArray[Any]


def resize_scales(call: OperatorCall) -> tuple[float, float]:
    """Height and width scale, from the second input or the arguments. Raises ArgumentError unless both are positive."""
    if len(call.inputs) == 2:
        call.require_shape(1, (2,), "height scale and width scale")
        call.require_types(1, *FLOAT_TYPES)
        height, width = (float(scale) for scale in call.known_value(1))
    else:
        height, width = call.arguments.float("height_scale", 1.0), call.arguments.float("width_scale", 1.0)
    for name, scale in (("height_scale", height), ("width_scale", width)):
        if not (math.isfinite(scale) and scale > 0):
            raise ArgumentError(f"{call.label}: {name} must be a positive number, found {scale}")
    return height, width


def _scaled(size: int, scale: float) -> int:
    """int(size * scale) in float32, as Caffe2 computes it; exact for whole numbers, which float32 may not hold."""
    if not size or scale.is_integer():
        return size * int(scale) if size else 0
    return int(np.float32(size) * np.float32(scale))


def infer_resize(call: OperatorCall) -> list[TensorType]:
    """Height and width are multiplied and rounded down."""
    shape = list(require_image(call, 0, (2,)))
    first = 1 if image_order(call) == NHWC else 2
    for axis, scale in zip((first, first + 1), resize_scales(call), strict=True):
        if shape[axis] * scale >= 1 << 31:
            raise ArgumentError(f"{call.label}: scale {scale} makes an axis of {shape[axis]} too large")
        shape[axis] = _scaled(shape[axis], scale)
    return [TensorType(tuple(shape), call.inputs[0].meta)]


RESIZE_ARGS = {
    "height_scale": "factor of the height, rounded down (default 1)",
    "width_scale": "factor of the width, rounded down (default 1)",
    "order": ORDER_HELP,
}


@new_operator(
    "ResizeNearest",
    inputs=(1, 2),
    infer=infer_resize,
    doc="Y = X with rows and columns repeated or left out: output pixel i is input pixel int(i / scale).",
    input_names=("X", "scales"),
    output_names=("Y",),
    args=RESIZE_ARGS,
    value_inputs=(1,),
    image_role=ImageRole.SAME_CHANNELS,
)
class ResizeNearest(ImageOperator):
    """Repetition by a view where scales are whole numbers, else gathers along each axis."""

    def prepare(self) -> Step:
        """The rows are resized first, then the columns."""
        call = self.call()
        height, width = resize_scales(call)
        x, y = self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        first = 1 if channels_last(call) else 2
        if height.is_integer() and width.is_integer():
            return self._repeat(x, y, first, int(height), int(width))
        rows = self.scratch((*x.shape[:first], y.shape[first], *x.shape[first + 1 :]), x.dtype)
        row_index = nearest_pixels(y.shape[first], height)
        column_index = nearest_pixels(y.shape[first + 1], width)
        return in_sequence(
            [
                partial(np.take, x, row_index, axis=first, out=rows, mode="clip"),
                partial(np.take, rows, column_index, axis=first + 1, out=y, mode="clip"),
            ]
        )

    @staticmethod
    def _repeat(x: Array, y: Array, first: int, height: int, width: int) -> Step:
        outer, (rows, columns), inner = x.shape[:first], x.shape[first : first + 2], x.shape[first + 2 :]
        target = y.reshape(*outer, rows, height, columns, width, *inner)
        source = x.reshape(*outer, rows, 1, columns, 1, *inner)
        return partial(np.copyto, target, source)


def nearest_pixels(out: int, scale: float) -> npt.NDArray[np.intp]:
    """The input pixel for each output pixel, in float32 arithmetic; rounding may put the last behind the image."""
    return (np.arange(out, dtype=np.float32) / np.float32(scale)).astype(np.intp)


def infer_shuffle(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the groups must divide the channels."""
    kind = call.inputs[0]
    if len(kind.shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(kind.shape)}")
    check_blocks(call, 0)
    channels, group = channel_count(image_order(call), kind.shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} channels, found {group}")
    return [kind]


@new_operator(
    "ChannelShuffle",
    infer=infer_shuffle,
    doc="Deals the channels of the groups out in turn: output channel k * group + g is input channel "
    "g * (C / group) + k. Zhang et al. 2017, arXiv:1707.01083.",
    input_names=("X",),
    output_names=("Y",),
    args={"group": "number of groups (default 1)", "order": ORDER_HELP},
    image_role=ImageRole.SAME_CHANNELS,
    moves_elements=True,
)
class ChannelShuffle(ImageOperator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Channels seen as (group, C / group) are written as (C / group, group)."""
        call = self.call()
        x, y = self.x(0), self.y(0)
        group, axis = self.arguments.int("group", 1), channel_axis(call)
        width = x.shape[axis] // group
        outer, inner = x.shape[:axis], x.shape[axis + 1 :]
        source = x.reshape(*outer, group, width, *inner)
        target = y.reshape(*outer, width, group, *inner)
        return partial(np.copyto, target, source.swapaxes(axis, axis + 1))
