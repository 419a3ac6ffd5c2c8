"""Reorder: an image tensor from one order of its axes to another."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import BLOCKS, KNOWN_ORDERS, NCHW, image_order, image_shape, logical_shape
from dagexec.ops.families.shape.reshaping import copy_cost


def orders_of(call: OperatorCall) -> tuple[str, str]:
    """Arguments `from_order` and `to_order`. Raises ArgumentError for an unknown order."""
    return image_order(call, "from_order"), image_order(call, "to_order")


def infer_reorder(call: OperatorCall) -> list[TensorType]:
    """The shape of the same image tensor in the other order."""
    meta = call.require_types(0, *NUMBER_TYPES)
    source, target = orders_of(call)
    shape = call.inputs[0].shape
    least = 4 if source in BLOCKS else 3
    if len(shape) < least:
        raise call.fail(f"an image tensor in order {source} has at least {least} axes, found {len(shape)}")
    block = BLOCKS.get(source)
    if block is not None and shape[-1] != block:
        raise ArgumentError(f"{call.label}: in order {source} the last axis has size {block}, found shape {shape}")
    batch, channels, *sizes = logical_shape(source, shape)
    return [TensorType(image_shape(target, batch, channels, sizes, call.label), meta)]


def in_common_blocks(array: Array, order: str, other: str) -> Array:
    """A packed image tensor in `order`, seen as N, C / outer, outer / inner, inner, spatial; it is not empty.

    Every order is N, C/k, spatial, k, for NCHW with k = 1 and for NHWC with k = C. `inner` and `outer` are the smaller
    and the larger k of `order` and `other`.
    """
    batch, channels, *sizes = logical_shape(order, array.shape)
    own = _block(order, channels)
    inner, outer = sorted((own, _block(other, channels)))
    if own == inner:
        blocks = array.reshape(batch, channels // outer, outer // inner, *sizes, inner)
        return blocks.transpose(0, 1, 2, blocks.ndim - 1, *range(3, blocks.ndim - 1))
    blocks = array.reshape(batch, channels // outer, *sizes, outer // inner, inner)
    return blocks.transpose(0, 1, blocks.ndim - 2, blocks.ndim - 1, *range(2, blocks.ndim - 2))


def _block(order: str, channels: int) -> int:
    """The channels that lie side by side."""
    if order in BLOCKS:
        return BLOCKS[order]
    return 1 if order == NCHW else channels


@new_operator(
    "Reorder",
    infer=infer_reorder,
    doc="Y = X, an image tensor, with its axes in another order. Into blocks the channels must be a multiple of "
    "theirs. (dagexec's own; the layout pass puts it between operators of different orders.)",
    input_names=("X",),
    output_names=("Y",),
    args={
        "from_order": f"order of X: {KNOWN_ORDERS}; the last is N, C/16, spatial, 16 (default NCHW)",
        "to_order": "order of Y (default NCHW)",
    },
    cost=copy_cost,
    moves_elements=True,
    rows=first_axis,
)
class Reorder(Operator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Both tensors seen with their axes in one order."""
        x, y = self.x(0), self.y(0)
        if not x.size:
            return nothing_to_do
        source, target = orders_of(self.call())
        return partial(np.copyto, in_common_blocks(y, target, source), in_common_blocks(x, source, target))
