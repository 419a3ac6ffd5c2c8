"""Reorder: an image tensor from one order of its axes to another."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.blocks import Array
from dagexec.ops.layout import (
    BLOCK_CHANNELS,
    NCHW,
    NCHW16C,
    NHWC,
    image_order,
    image_shape,
    logical_shape,
)
from dagexec.ops.shape import copy_cost


def orders_of(call: OperatorCall) -> tuple[str, str]:
    """Arguments `from_order` and `to_order`. Raises ArgumentError for an unknown order."""
    return image_order(call, "from_order"), image_order(call, "to_order")


def infer_reorder(call: OperatorCall) -> list[TensorType]:
    """The shape of the same image tensor in the other order."""
    meta = call.require_types(0, *NUMBER_TYPES)
    source, target = orders_of(call)
    shape = call.inputs[0].shape
    least = 4 if source == NCHW16C else 3
    if len(shape) < least:
        raise call.fail(f"an image tensor in order {source} has at least {least} axes, found {len(shape)}")
    if source == NCHW16C and shape[-1] != BLOCK_CHANNELS:
        raise ArgumentError(f"{call.label}: in order NCHW16c the last axis has size 16, found shape {shape}")
    batch, channels, *sizes = logical_shape(source, shape)
    return [TensorType(image_shape(target, batch, channels, sizes, call.label), meta)]


def in_blocks(array: Array, order: str) -> Array:
    """A packed image tensor in `order`, seen as N, C/16, 16, spatial. C is a multiple of 16."""
    if order == NCHW:
        return array.reshape(array.shape[0], array.shape[1] // BLOCK_CHANNELS, BLOCK_CHANNELS, *array.shape[2:])
    if order == NHWC:
        array = np.moveaxis(array.reshape(*array.shape[:-1], -1, BLOCK_CHANNELS), -2, 1)
    return np.moveaxis(array, -1, 2)


def channels_second(array: Array, order: str) -> Array:
    """An image tensor in order NCHW or NHWC, seen as N, C, spatial."""
    return np.moveaxis(array, -1, 1) if order == NHWC else array


@operator(
    OpSchema(
        "Reorder",
        inputs=(1, 1),
        outputs=(1, 1),
        infer=infer_reorder,
        doc="Y = X, an image tensor, with its axes in another order. Into NCHW16c the channels must be a multiple of "
        "16. (dagexec's own; the layout pass puts it between operators of different orders.)",
        input_names=("X",),
        output_names=("Y",),
        args={
            "from_order": "order of X: NCHW, NHWC or NCHW16c (N, C/16, spatial, 16) (default NCHW)",
            "to_order": "order of Y (default NCHW)",
        },
        cost=copy_cost,
    )
)
class Reorder(Operator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Both tensors seen with their axes in one order."""
        source, target = orders_of(self.call())
        view = in_blocks if NCHW16C in (source, target) else channels_second
        return partial(np.copyto, view(self.y(0), target), view(self.x(0), source))
