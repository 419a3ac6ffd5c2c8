"""Gradients of the operators that move pixels: ResizeNearestGradient, ChannelShuffleGradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis, first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, compute_dtype, convert
from dagexec.ops.base.layout import ORDER_HELP, ImageOperator, channel_axis, channels_last
from dagexec.ops.families.image.spatial import RESIZE_ARGS, infer_resize, infer_shuffle, nearest_pixels, resize_scales
from dagexec.ops.families.reduction.axes import reduction_cost
from dagexec.ops.families.shape.reshaping import copy_cost


def _forward(call: OperatorCall) -> OperatorCall:
    """The call as ResizeNearest has it: X, and the scales where they are an input."""
    return replace(call, inputs=call.inputs[1:], values=call.values[1:])


def _infer_resize(call: OperatorCall) -> list[TensorType]:
    """The type of X; dY must have the shape that resizing it gives."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1)
    call.require_shape(0, infer_resize(_forward(call))[0].shape, "dY: what resizing X gives")
    return [call.inputs[1]]


@new_operator(
    "ResizeNearestGradient",
    inputs=(2, 3),
    infer=_infer_resize,
    doc="Gradient of ResizeNearest, whose arguments it takes: dX = for each pixel the sum of dY over those that "
    "show it. The values of X are not read.",
    input_names=("dY", "X", "scales"),
    output_names=("dX",),
    args=RESIZE_ARGS,
    cost=reduction_cost,
    value_inputs=(2,),
    rows=along_axis(0, 0, 1),
)
class ResizeNearestGradient(ImageOperator):
    """Sums over the repetitions of a pixel, along the columns first; 16-bit floats are summed in float32."""

    def prepare(self) -> Step:
        """A sum over both axes of repetitions where scales are whole numbers, else sums of runs along each axis."""
        call = _forward(self.call())
        height, width = resize_scales(call)
        dy, dx = self.x(0), self.y(0)
        if not dx.size or not dy.size:
            return partial(dx.fill, 0)
        first = 1 if channels_last(call) else 2
        work = compute_dtype(dx.dtype)
        total = dx if work == dx.dtype else self.scratch(dx.shape, work)
        if height.is_integer() and width.is_integer():
            outer, (rows, columns), inner = dx.shape[:first], dx.shape[first : first + 2], dx.shape[first + 2 :]
            source = dy.reshape(*outer, rows, int(height), columns, int(width), *inner)
            steps: list[Step] = [partial(np.add.reduce, source, axis=(first + 1, first + 3), dtype=work, out=total)]
        else:
            steps, wide = ([], dy) if total is dx else self._widened(dy, work)
            half = self.scratch((*dy.shape[: first + 1], dx.shape[first + 1], *dy.shape[first + 2 :]), work)
            steps += [*self._sums(wide, half, first + 1, width), *self._sums(half, total, first, height)]
        return in_sequence(steps if total is dx else [*steps, convert(total, dx)])

    def _widened(self, dy: Array, work: np.dtype[Any]) -> tuple[list[Step], Array]:
        """dY in the type that is computed in, for NumPy would make that copy in every run."""
        wide = self.scratch(dy.shape, work)
        return [convert(dy, wide)], wide

    def _sums(self, source: Array, target: Array, axis: int, scale: float) -> list[Step]:
        """The passes that sum, for each pixel of `target` along `axis`, the pixels of `source` that show it."""
        shown = np.minimum(nearest_pixels(source.shape[axis], scale), target.shape[axis] - 1)
        pixels, starts = np.unique(shown, return_index=True)
        runs = self.scratch((*source.shape[:axis], len(pixels), *source.shape[axis + 1 :]), target.dtype)
        add = partial(np.add.reduceat, source, starts, axis=axis, out=runs)
        if len(pixels) == target.shape[axis]:
            return [add, partial(np.copyto, target, runs)]
        moved, found = np.moveaxis(target, axis, 0), np.moveaxis(runs, axis, 0)
        return [add, partial(target.fill, 0), partial(moved.__setitem__, pixels, found)]


@gradient_of("ResizeNearest")
def resize_gradient(request: GradientRequest) -> GradientOperators:
    """(dY, X, [scales]) -> dX, as Caffe2's; scales have no gradient."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("ResizeNearestGradient", [request.dy(0), *request.definition.input], [0])


@new_operator(
    "ChannelShuffleGradient",
    infer=infer_shuffle,
    doc="Gradient of ChannelShuffle, whose arguments it takes: dX = dY with its channels put back in the groups.",
    input_names=("dY",),
    output_names=("dX",),
    args={"group": "number of groups (default 1)", "order": ORDER_HELP},
    cost=copy_cost,
    rows=first_axis,
)
class ChannelShuffleGradient(ImageOperator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Channels seen as (C / group, group) are written as (group, C / group)."""
        dy, dx = self.x(0), self.y(0)
        if not dx.size:
            return nothing_to_do
        group, axis = self.arguments.int("group", 1), channel_axis(self.call())
        outer, inner = dx.shape[:axis], dx.shape[axis + 1 :]
        width = dx.shape[axis] // group
        source = dy.reshape(*outer, width, group, *inner)
        return partial(np.copyto, dx.reshape(*outer, group, width, *inner), source.swapaxes(axis, axis + 1))


gradient_by("ChannelShuffle", "ChannelShuffleGradient", ("dY",))
