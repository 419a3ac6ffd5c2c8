"""RoIAlignFixedPoint: regions of images of bytes as images of one size, as Caffe2's int8 nets for phones compute them.

The shares of the four pixels around a sample are whole 255ths, and a pixel outside of the image counts as the byte 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, UINT8
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.image.regions import MOST_SAMPLES, check_images, corners_of
from dagexec.ops.families.image.roi_align import pooled_sizes
from dagexec.ops.families.quantized.fixed_point import fixed_point, scaled
from dagexec.ops.families.quantized.scales import scale_argument, zero_point_argument

_WHOLE = 255


def infer_roi_align_fixed_point(call: OperatorCall) -> list[TensorType]:
    """An image for each region."""
    call.require_types(0, UINT8)
    call.require_types(1, FLOAT32)
    channels, (count, columns) = call.require_rank(0, 4)[3], call.require_rank(1, 2)
    if columns not in (4, 5):
        raise call.fail(f"a region must have 4 numbers, and may have its image before them; found {columns}")
    if not call.arguments.float("spatial_scale", 1.0) > 0:
        raise ArgumentError(f"{call.label}: 'spatial_scale' must be positive")
    for name in "xy":
        scale_argument(call, f"{name}_scale")
        zero_point_argument(call, f"{name}_zero_point", UINT8)
    return [TensorType((count, *pooled_sizes(call), channels), UINT8)]


def _samples(start: np.float32, length: np.float32, bins: int, count: int) -> Array:
    """Places along an axis, bins x samples, in float32."""
    size = length / np.float32(bins)
    within = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * size / np.float32(count)
    return start + np.arange(bins, dtype=np.float32)[:, None] * size + within


@array_function(
    "RoIAlignFixedPoint",
    infer=infer_roi_align_fixed_point,
    doc="Each region of an image of uint8, N, height, width, channels, as an image of one size and another scale: a "
    "pixel is the mean of samples in its part of the region.",
    input_names=("X", "RoIs: (image), x1, y1, x2, y2"),
    output_names=("Y",),
    args={
        "spatial_scale": "from coordinates of regions to pixels (default 1)",
        "pooled_h": "rows of Y (default 1)",
        "pooled_w": "columns of Y (default 1)",
        "sampling_ratio": "samples along each side of a pixel of Y (default -1: as many as it has pixels of X)",
        **{f"{name}_scale": f"{name.upper()}'s scale" for name in "xy"},
        **{f"{name}_zero_point": f"{name.upper()}'s zero point (default 0)" for name in "xy"},
    },
    required_args=("x_scale", "y_scale"),
)
def roi_align_fixed_point(call: OperatorCall, x: Array, rois: Array) -> Sequence[Array]:
    """Region by region: sums of bytes times shares, then the scale. Raises ShapeError for no such region."""
    sizes, ratio = pooled_sizes(call), call.arguments.int("sampling_ratio", -1)
    images = rois[:, 0].astype(np.int64) if rois.shape[1] == 5 else np.zeros(len(rois), np.int64)
    check_images(call, images, len(x))
    corners = rois[:, -4:] * np.float32(call.arguments.float("spatial_scale", 1.0))
    if not np.isfinite(corners).all():
        raise ShapeError(f"{call.label}: regions must be numbers")
    zero, zero_y = (zero_point_argument(call, f"{name}_zero_point", UINT8) for name in "xy")
    y = np.zeros((len(rois), *sizes, x.shape[3]), np.uint8)
    for target, image, (x1, y1, x2, y2) in zip(y, images, corners, strict=True):
        lengths = [np.maximum(y2 - y1, np.float32(1)), np.maximum(x2 - x1, np.float32(1))]
        counts = [
            ratio if ratio > 0 else int(np.ceil(length / size)) for length, size in zip(lengths, sizes, strict=True)
        ]
        if counts[0] * counts[1] * sizes[0] * sizes[1] > MOST_SAMPLES:
            raise ShapeError(
                f"{call.label}: a region of {lengths[1]:g} x {lengths[0]:g} pixels is too large to be sampled"
            )
        axes = zip((y1, x1), lengths, sizes, counts, x.shape[1:3], strict=True)
        rows, columns = (corners_of(_samples(*axis), size) for *axis, size in axes)
        sums = np.full(target.shape, -_WHOLE * int(zero) * counts[0] * counts[1], np.int64)
        for of_rows, high in ((rows[0], 1 - rows[2]), (rows[1], rows[2])):
            for of_columns, wide in ((columns[0], 1 - columns[2]), (columns[1], columns[2])):
                high_, inside = high[:, :, None, None], rows[3][:, :, None, None] & columns[3]
                shares = (np.floor(high_ * wide * np.float32(_WHOLE) + np.float32(0.5)) * inside).astype(np.int64)
                pixels = x[image][of_rows[:, :, None, None], of_columns].astype(np.int64)
                sums += (shares[..., None] * pixels).sum((1, 3))
        factor = scale_argument(call, "x_scale") / (
            np.float64(scale_argument(call, "y_scale")) * _WHOLE * counts[0] * counts[1]
        )
        target[...] = np.clip(scaled(sums, fixed_point(float(factor))) + zero_y, 0, 255)
    return [y]


not_differentiable("its numbers are integers", "RoIAlignFixedPoint")
