"""RoIAlign and RoIAlignRotated as Caffe2 has them, with gradients; UpsampleNearest; HeatmapMaxKeypoint.

He et al., 2017, arXiv:1703.06870; Ma et al., 2017, arXiv:1703.01086.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.base.layout import ORDER_HELP, channels_last
from dagexec.ops.families.image.regions import Region, check_images
from dagexec.ops.families.image.rotated_region import RotatedRegion

_ALIGN_ARGS = {
    "spatial_scale": "from coordinates of regions to pixels (default 1)",
    "pooled_h": "rows of Y (default 1)",
    "pooled_w": "columns of Y (default 1)",
    "sampling_ratio": "samples along each side of a pixel of Y (default -1: as many as it has pixels of X)",
    "aligned": "1: the center of the first pixel is 1/2 (default 0: 0, and regions have at least one pixel)",
    "order": ORDER_HELP,
}


def pooled_sizes(call: OperatorCall) -> tuple[int, int]:
    """Rows and columns of Y. Raises ArgumentError for none."""
    sizes = call.arguments.int("pooled_h", 1), call.arguments.int("pooled_w", 1)
    if min(sizes) < 1:
        raise ArgumentError(f"{call.label}: 'pooled_h' and 'pooled_w' must be at least 1, found {sizes}")
    return sizes


def _sides(call: OperatorCall) -> int:
    """How many numbers a region has."""
    return 5 if call.definition.type.startswith("RoIAlignRotated") else 4


def infer_roi_align(call: OperatorCall) -> list[TensorType]:
    """An image for each region."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1)
    shape = call.require_rank(0, 4)
    count, columns = call.require_rank(1, 2)
    sides = _sides(call)
    if columns not in (sides, sides + 1):
        raise call.fail(f"a region must have {sides} numbers, and may have its image before them; found {columns}")
    if not call.arguments.float("spatial_scale", 1.0) > 0:
        raise ArgumentError(f"{call.label}: 'spatial_scale' must be positive")
    if channels_last(call):
        return [TensorType((count, *pooled_sizes(call), shape[3]), meta)]
    return [TensorType((count, shape[1], *pooled_sizes(call)), meta)]


def _regions(call: OperatorCall, x: Array, rois: Array) -> Iterator[tuple[int, Region | RotatedRegion]]:
    """Each region, and the number of its image in `x`, which is images x height x width x channels."""
    sides = _sides(call)
    images = rois[:, 0].astype(np.int64) if rois.shape[1] > sides else np.zeros(len(rois), np.int64)
    check_images(call, images, len(x))
    numbers = rois[:, -sides:].astype(np.float64)
    numbers[:, :4] *= call.arguments.float("spatial_scale", 1.0)
    numbers[:, : 2 if sides == 5 else 4] -= 0.5 if call.arguments.bool("aligned") else 0.0
    aligned = RotatedRegion if sides == 5 else Region.aligned
    for image, place in zip(images, numbers, strict=True):
        yield int(image), aligned(call, place, x.shape[1:3], pooled_sizes(call), x.dtype)


def _to_last(call: OperatorCall, x: Array) -> Array:
    return x if channels_last(call) else np.moveaxis(x, 1, -1)


def _from_last(call: OperatorCall, y: Array) -> Array:
    return y if channels_last(call) else np.moveaxis(y, -1, 1)


def roi_align(call: OperatorCall, x: Array, rois: Array) -> Sequence[Array]:
    """Region by region."""
    pixels = _to_last(call, x).astype(compute_dtype(x.dtype), order="C")
    y = np.zeros((len(rois), *pooled_sizes(call), pixels.shape[3]), pixels.dtype)
    for target, (image, region) in zip(y, _regions(call, pixels, rois), strict=True):
        target[...] = region.mean(pixels[image])
    return [_from_last(call, y)]


def infer_roi_align_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    [result] = infer_roi_align(call)
    call.require_same_type(0, 2)
    call.require_shape(2, result.shape, "the shape of Y")
    return [call.inputs[0]]


def roi_align_gradient(call: OperatorCall, x: Array, rois: Array, dy: Array) -> Sequence[Array]:
    """Region by region, in their order."""
    work = compute_dtype(x.dtype)
    dx = np.zeros(_to_last(call, x).shape, work)
    of_regions = _to_last(call, dy).astype(work, order="C")
    for of_region, (image, region) in zip(of_regions, _regions(call, dx, rois), strict=True):
        region.add_gradient(of_region, dx[image])
    return [_from_last(call, dx)]


for _name, _numbers in (
    ("RoIAlign", "x1, y1, x2, y2"),
    ("RoIAlignRotated", "the center's x and y, width, height, degrees counterclockwise"),
):
    array_function(
        _name,
        infer=infer_roi_align,
        doc="Each region of an image as an image of one size: a pixel is the mean of samples in its part of it, "
        "interpolated linearly.",
        input_names=("X", f"RoIs: (image), {_numbers}"),
        output_names=("Y",),
        args=_ALIGN_ARGS,
    )(roi_align)
    array_function(
        f"{_name}Gradient",
        infer=infer_roi_align_gradient,
        doc=f"The gradient of {_name} by its images; the values of X are not read.",
        input_names=("X", "RoIs", "dY"),
        output_names=("dX",),
        args=_ALIGN_ARGS,
    )(roi_align_gradient)
    gradient_by(_name, f"{_name}Gradient", ("X0", "X1", "dY"), of_inputs=(0,))

_FARTHEST = 1.5
"""Pixels from the largest one of a heatmap to its maximum, at most."""

_SCALE_ARGS = {"scale": "how often a pixel is repeated along each side (default 2)"}


def _upsampled(call: OperatorCall, index: int) -> tuple[int, ...]:
    """The shape of the upsampled input. Raises ShapeError or ArgumentError."""
    scale = call.arguments.int("scale", 2)
    if scale < 1:
        raise ArgumentError(f"{call.label}: 'scale' must be at least 1, found {scale}")
    shape = call.inputs[index].shape
    if len(shape) < 3:
        raise call.fail(f"expected images of at least 3 axes, found shape {shape}")
    return (*shape[:-2], shape[-2] * scale, shape[-1] * scale)


def infer_upsample_nearest(call: OperatorCall) -> list[TensorType]:
    """Rows and columns as often as `scale` says."""
    return [TensorType(_upsampled(call, 0), call.require_types(0, *FLOAT_TYPES))]


@array_function(
    "UpsampleNearest",
    infer=infer_upsample_nearest,
    doc="Images with each pixel repeated along both sides.",
    input_names=("X",),
    output_names=("Y",),
    args=_SCALE_ARGS,
)
def upsample_nearest(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Rows, then columns."""
    scale = call.arguments.int("scale", 2)
    return [x.repeat(scale, -2).repeat(scale, -1)]


def infer_upsample_nearest_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    call.require_same_type(0, 1)
    call.require_shape(1, _upsampled(call, 0), "the shape of Y")
    return [call.inputs[0]]


@array_function(
    "UpsampleNearestGradient",
    infer=infer_upsample_nearest_gradient,
    doc="The gradient of UpsampleNearest: the sum over the copies of a pixel. The values of X are not read.",
    input_names=("X", "dY"),
    output_names=("dX",),
    args=_SCALE_ARGS,
)
def upsample_nearest_gradient(call: OperatorCall, x: Array, dy: Array) -> Sequence[Array]:
    """Sums of squares of pixels."""
    scale = call.arguments.int("scale", 2)
    blocks = dy.reshape(*x.shape[:-2], x.shape[-2], scale, x.shape[-1], scale)
    return [blocks.astype(compute_dtype(dy.dtype), copy=False).sum((-3, -1))]


gradient_by("UpsampleNearest", "UpsampleNearestGradient", ("X0", "dY"), of_inputs=(0,))


def infer_keypoints(call: OperatorCall) -> list[TensorType]:
    """x, y, score and probability of each keypoint."""
    call.require_types(0, FLOAT32)
    call.require_types(1, FLOAT32)
    count, points, height, width = call.require_rank(0, 4)
    if height != width or height < 2:
        raise call.fail(f"heatmaps must be squares of at least 2 x 2 pixels, found {height} x {width}")
    if call.require_rank(1, 2)[0] != count or call.inputs[1].shape[1] < 4:
        raise call.fail(f"expected a box for each of {count} heatmaps, found shape {call.inputs[1].shape}")
    call.arguments.bool("should_output_softmax")
    return [TensorType((count, 4, points), FLOAT32)]


@array_function(
    "HeatmapMaxKeypoint",
    infer=infer_keypoints,
    doc="Where each heatmap of a box has its maximum, between pixels, in coordinates of the image; the score there, "
    "and the probability of the largest pixel.",
    input_names=("heatmaps, boxes x points x size x size", "bboxes"),
    output_names=("keypoints",),
    args={"should_output_softmax": "1: the last row is a probability, else 0 (default 0)"},
)
def heatmap_max_keypoint(call: OperatorCall, heatmaps: Array, boxes: Array) -> Sequence[Array]:
    """A parabola through the nine pixels around the largest one; beyond an edge they are those on its other side."""
    maps = heatmaps.astype(np.float64)
    count, points, size = maps.shape[:3]
    flat = maps.reshape(count, points, -1)
    place = flat.argmax(-1)
    y, x = np.divmod(place, size)
    offsets = np.arange(-1, 2)
    near = []
    for center in (y, x):
        found = center[..., None] + offsets
        near.append(np.where((found < 0) | (found >= size), center[..., None] - offsets, found).clip(0, size - 1))
    boxes_, points_ = np.ogrid[:count, :points]
    f = maps[boxes_[..., None, None], points_[..., None, None], near[0][..., :, None], near[1][..., None, :]]
    best = f[..., 1, 1]
    slope = np.stack([f[..., 1, 2] - f[..., 1, 0], f[..., 2, 1] - f[..., 0, 1]], -1) / 2
    xx, yy = f[..., 1, 0] - 2 * best + f[..., 1, 2], f[..., 0, 1] - 2 * best + f[..., 2, 1]
    xy = (f[..., 2, 2] - f[..., 2, 0] - f[..., 0, 2] + f[..., 0, 0]) / 4
    determinant = xx * yy - xy * xy
    flat_top = np.abs(determinant) < 1e-4
    divisor = np.where(flat_top, 1, determinant)
    step = -np.stack([yy * slope[..., 0] - xy * slope[..., 1], xx * slope[..., 1] - xy * slope[..., 0]], -1)
    step = np.where(flat_top[..., None], 0, step / divisor[..., None])
    largest = np.abs(step).max(-1, keepdims=True)
    step = np.where(largest > _FARTHEST, step / np.maximum(largest, _FARTHEST) * _FARTHEST, step)
    curved = xx * step[..., 0] ** 2 + 2 * xy * step[..., 0] * step[..., 1] + yy * step[..., 1] ** 2
    score = best + (slope * step).sum(-1) + curved / 2
    low = boxes[:, :2].astype(np.float64)
    sides = np.maximum(boxes[:, 2:4] - low, 1) / size
    places = low[:, None] + (np.stack([x, y], -1) + 0.5 + step) * sides[:, None]
    wanted = call.arguments.bool("should_output_softmax")
    probability = 1 / np.exp(flat - best[..., None]).sum(-1) if wanted else np.zeros_like(score)
    return [np.stack([places[..., 0], places[..., 1], score, probability], 1)]


no_gradient("HeatmapMaxKeypoint")
