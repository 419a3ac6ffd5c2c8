"""What all pooling operators share before they compute: names, the window over the input, inference and cost.

An operator `MaxPool` has names of fixed rank beside it, `MaxPool1D` and so on; the gradient of `MaxPool2D` is
`MaxPool2DGradient`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.operator import Operator
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, CostFunction, InferFunction, OperatorCall, OpSchema, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK
from dagexec.ops.base.geometry import COMPUTED_PADS, Axis, Window, output_sizes, read_window, tap_count
from dagexec.ops.base.layout import image_order, require_image, spatial_sizes

Array = npt.NDArray[Any]

RANKS = ("", "1D", "2D", "3D")


def pool_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a pooling operator, and its axes over the input's size. Raises ArgumentError or ShapeError."""
    fixed = re.search(r"Pool.*([123])D", call.definition.type)
    ranks = (int(fixed[1]),) if fixed else (1, 2, 3)
    shape = require_image(call, 0, ranks)
    window = read_window(call, len(spatial_sizes(image_order(call), shape)), blocked=True)
    sizes = window.spatial(shape)
    if any(size == 0 for size in sizes):
        raise call.fail("nothing to pool: a spatial size is 0")
    axes = window.over(sizes)
    if window.legacy_pad not in COMPUTED_PADS:
        for axis, head, tail in zip(axes, window.head, window.tail, strict=True):
            if max(head, tail) >= axis.extent and not window.global_pooling:
                raise ArgumentError(
                    f"{call.label}: pads must be less than the kernel {axis.kernel}, found {head} and {tail}"
                )
    for axis in axes:
        if (axis.out - 1) * axis.stride >= axis.size + axis.head:
            raise ArgumentError(
                f"{call.label}: legacy_pad CAFFE_LEGACY_POOLING rounds up: the last of {axis.out} windows, with stride "
                f"{axis.stride}, starts after the {axis.size} pixels"
            )
    return window, axes


def is_whole(axes: Sequence[Axis]) -> bool:
    """True when the one window is the image, pixel for pixel."""
    return all(axis.kernel == axis.size and axis.out == 1 and not axis.reads_padding for axis in axes)


def pooled_type(call: OperatorCall, metas: tuple[TypeMeta, ...]) -> TensorType:
    """The type of Y for X, input 0, of one of the types `metas`. Raises ArgumentError or ShapeError."""
    meta = call.require_types(0, *metas)
    window, axes = pool_window(call)
    call.arguments.bool("count_include_pad")
    shape = call.inputs[0].shape
    return TensorType(window.image_shape(shape[0], window.channels(shape), output_sizes(axes)), meta)


def infer_pooling(metas: tuple[TypeMeta, ...]) -> InferFunction:
    """Inference of an operator with one output Y."""

    def infer(call: OperatorCall) -> list[TensorType]:
        return [pooled_type(call, metas)]

    return infer


def infer_gradient(forward: InferFunction) -> InferFunction:
    """Inference of (X, Y, dY) -> dX: Y and dY must have the type that `forward` gives for X."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *FLOAT_TYPES)
        (pooled,) = forward(call)
        for index, name in ((1, "Y"), (2, "dY")):
            call.require_shape(index, pooled.shape, f"{name}: what pooling X gives")
            call.require_types(index, pooled.meta)
        return [call.inputs[0]]

    return infer


WindowsOf = Callable[[OperatorCall, Sequence[TensorType]], TensorType]


def pooling_cost(flops_per_tap: int, windows: WindowsOf) -> CostFunction:
    """Cost of an operator that does `flops_per_tap` operations for each tap of each element of `windows`, a tensor."""

    def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
        _, axes = pool_window(call)
        flops = windows(call, outputs).elements * tap_count(axes) * flops_per_tap
        return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))

    return cost


def of_output(_call: OperatorCall, outputs: Sequence[TensorType]) -> TensorType:
    """Each element of output 0 is a window."""
    return outputs[0]


def of_input(call: OperatorCall, _outputs: Sequence[TensorType]) -> TensorType:
    """Each element of input 1 is a window, or the gradient of one."""
    return call.inputs[1]


def register_pooling(computes: type[Operator], schemas: Sequence[OpSchema]) -> None:
    """Register a class of its own, made from `computes`, for each of `schemas`."""
    for schema in schemas:
        operator(schema)(type(schema.type, (computes,), {"__doc__": computes.__doc__}))


def window_sizes(axes: Sequence[Axis], window: Window, work: np.dtype[Any], *, with_padding: bool) -> Array:
    """How many pixels each window has, as an array that divides Y; of no axes when all have the same number.

    For a window with none, which dilation makes possible, it is 1, so that the mean is 0, as in onnxruntime.
    """
    sizes = np.ones((), work)
    for axis in axes:
        sizes = sizes[..., None] * np.asarray(axis.window_sizes(with_padding=with_padding), work)
    sizes = np.maximum(sizes, 1)
    if (sizes == sizes.flat[0]).all():
        return np.asarray(sizes.flat[0])
    return sizes[..., None] if window.channels_last else sizes


def image_blocks(images: int, elements: int) -> list[slice]:
    """Slices that cut so many images, of so many elements each, into blocks that stay in the cache.

    The first is the largest. Without images there is one block, of none.
    """
    count = max(1, BLOCK // max(1, elements))
    return [slice(start, min(start + count, images)) for start in range(0, max(1, images), count)]


def as_images(array: Array, window: Window) -> Array:
    """N, C, spatial as N * C planes; N, spatial, C as it is: so that axes 1 and up are spatial, then any channels."""
    first = 1 if window.channels_last else 2
    return array.reshape(-1, *array.shape[first:])
