"""RoIPool and RoIPoolF, maxima of the parts of regions, and PSRoIPool, means of which each is of a channel of its own.

Girshick, 2015, arXiv:1504.08083; Dai et al., 2016, arXiv:1605.06409. Parts are whole pixels, found in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, FeedError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.base.layout import ORDER_HELP
from dagexec.ops.families.image.regions import bin_slices, check_images
from dagexec.ops.families.image.roi_align import pooled_sizes

_SCALE = {"spatial_scale": "from coordinates of regions to pixels (default 1)"}
_FARTHEST = np.float32(1 << 24)
"""A pixel, at which float32 still counts: what lies beyond is in no image."""


def _rounded(values: Array) -> Array:
    """To the nearest integer, halves away from 0, in float32."""
    found: Array = np.trunc(values + np.copysign(np.float32(0.5), values))
    return found


def _regions(call: OperatorCall, x: Array, rois: Array) -> Iterator[tuple[int, Array]]:
    """The image of each region, and its corners. Raises ShapeError for a region that is not there."""
    numbers = rois.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ShapeError(f"{call.label}: regions must be numbers")
    check_images(call, numbers[:, 0], len(x))
    return ((int(region[0]), region[1:].clip(-_FARTHEST, _FARTHEST)) for region in numbers)


def _require_regions(call: OperatorCall) -> tuple[int, int]:
    """How many regions and channels there are. Raises ShapeError and ArgumentError."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1)
    channels, count = call.require_rank(0, 4)[1], call.require_rank(1, 2)[0]
    call.require_shape(1, (count, 5), "image, x1, y1, x2, y2 of each region")
    if call.arguments.string("order", "NCHW") != "NCHW":
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW")
    if not call.arguments.float("spatial_scale", 1.0) > 0:
        raise ArgumentError(f"{call.label}: 'spatial_scale' must be positive")
    return count, channels


def infer_roi_pool(call: OperatorCall) -> list[TensorType]:
    """An image for each region, and where the maxima are."""
    count, channels = _require_regions(call)
    shape = (count, channels, *pooled_sizes(call))
    wanted = 1 if call.arguments.bool("is_test") else 2
    if len(call.definition.output) != wanted:
        raise call.fail(f"with is_test={wanted % 2} there must be {wanted} output(s)")
    return [TensorType(shape, call.inputs[0].meta), TensorType(shape, INT32)][:wanted]


def _infer_gradient(call: OperatorCall, shape: tuple[int, ...]) -> list[TensorType]:
    """dX is like X; the places and dY have the shape of Y."""
    call.require_types(2, INT32)
    call.require_shape(2, shape, "the shape of Y")
    call.require_same_type(0, 3)
    call.require_shape(3, shape, "the shape of Y")
    return [call.inputs[0]]


def infer_roi_pool_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    return _infer_gradient(call, (*_require_regions(call), *pooled_sizes(call)))


def roi_pool(call: OperatorCall, x: Array, rois: Array) -> Sequence[Array]:
    """Bin by bin; of equal maxima the first."""
    width, sizes = x.shape[3], pooled_sizes(call)
    scale = np.float32(call.arguments.float("spatial_scale", 1.0))
    y = np.zeros((len(rois), x.shape[1], *sizes), x.dtype)
    places = np.full(y.shape, -1, np.int32)
    for target, place, (image, region) in zip(y, places, _regions(call, x, rois), strict=True):
        x1, y1, x2, y2 = _rounded(region * scale)
        rows, columns = bin_slices(y1, y2, sizes[0], x.shape[2]), bin_slices(x1, x2, sizes[1], width)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                part = x[image, :, row, column]
                if part.size:
                    best = part.reshape(len(part), -1).argmax(1)
                    high, wide = np.divmod(best, part.shape[2])
                    target[:, i, j] = part[np.arange(len(part)), high, wide]
                    place[:, i, j] = (row.start + high) * width + column.start + wide
    return [y, places][: len(call.definition.output)]


def roi_pool_gradient(call: OperatorCall, x: Array, rois: Array, places: Array, dy: Array) -> Sequence[Array]:
    """Each element of dY to the pixel that was the maximum."""
    dx = np.zeros((*x.shape[:2], x.shape[2] * x.shape[3]), compute_dtype(x.dtype))
    if places.size and not (places.min() >= -1 and places.max() < dx.shape[2]):
        raise FeedError(f"{call.label}: a maximum must be one of {dx.shape[2]} pixels, or -1 for none")
    channels = np.arange(x.shape[1])[:, None]
    for place, slope, (image, _) in zip(places, dy, _regions(call, x, rois), strict=True):
        flat = place.reshape(x.shape[1], -1)
        np.add.at(dx[image], (channels, np.maximum(flat, 0)), np.where(flat < 0, 0, slope.reshape(flat.shape)))
    return [dx]


def _maker(op_type: str) -> None:
    """The gradient reads output 1, which no gradient passes through."""

    @gradient_of(op_type)
    def maker(request: GradientRequest) -> GradientOperators:
        request.require_no_dy(1)
        inputs = [request.x(0), request.x(1), request.y(1), request.dy(0)]
        return request.single(f"{op_type}Gradient", inputs, (0,))


_POOL_ARGS = {"pooled_h": "rows of Y (default 1)", "pooled_w": "columns of Y (default 1)", **_SCALE}
_INPUTS = ("X, N x C x H x W", "RoIs: image, x1, y1, x2, y2")
for _name, _more in (
    ("RoIPool", {"is_test": "1: without output 1 (default 0)", "order": ORDER_HELP}),
    ("RoIPoolF", {}),
):
    array_function(
        _name,
        outputs=(1, 2),
        infer=infer_roi_pool,
        doc="Each region of an image as an image of one size: a pixel is the maximum of its part of it, 0 where "
        "that is empty.",
        input_names=_INPUTS,
        output_names=("Y", "argmaxes: the pixel in its channel, -1 for none"),
        args=_POOL_ARGS | _more,
    )(roi_pool)
    array_function(
        f"{_name}Gradient",
        infer=infer_roi_pool_gradient,
        doc=f"The gradient of {_name} by X; the values of X are not read.",
        input_names=(*_INPUTS, "argmaxes", "dY"),
        output_names=("dX",),
        args=_POOL_ARGS | _more,
    )(roi_pool_gradient)
    _maker(_name)


def _groups(call: OperatorCall) -> tuple[int, int, int, int]:
    """The shape of Y. Raises ShapeError unless X has a channel for each of its pixels."""
    count, channels = _require_regions(call)
    size, out = call.arguments.int("group_size", 1), call.arguments.int("output_dim", 1)
    if min(size, out) < 1 or channels != out * size * size:
        raise call.fail(f"X must have output_dim * group_size^2 = {out} * {size}^2 channels, found {channels}")
    return count, out, size, size


def infer_ps_roi_pool(call: OperatorCall) -> list[TensorType]:
    """An image for each region, and which channel each pixel is of."""
    shape = _groups(call)
    return [TensorType(shape, call.inputs[0].meta), TensorType(shape, INT32)]


def infer_ps_roi_pool_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    return _infer_gradient(call, _groups(call))


def _parts(call: OperatorCall, x: Array, rois: Array, size: int) -> Iterator[tuple[int, int, int, int, slice, slice]]:
    """Region, image, row and column of Y, and the rows and columns of X that are in it, if there are any."""
    scale = np.float32(call.arguments.float("spatial_scale", 1.0))
    for number, (image, region) in enumerate(_regions(call, x, rois)):
        low, high = _rounded(region[:2]) * scale, (_rounded(region[2:]) + np.float32(1)) * scale
        length = np.maximum(high - low, np.float32(0.1)) / np.float32(size)
        steps = np.arange(size + 1, dtype=np.float32)[:, None]
        limit = x.shape[:1:-1]  # width, height
        start = np.floor(steps[:-1] * length + low).clip(0, limit).astype(np.intp)
        end = np.ceil(steps[1:] * length + low).clip(0, limit).astype(np.intp)
        for i, j in np.ndindex(size, size):
            rows, columns = slice(start[i, 1], end[i, 1]), slice(start[j, 0], end[j, 0])
            if rows.start < rows.stop and columns.start < columns.stop:
                yield number, image, i, j, rows, columns


_PS_ARGS = {
    "group_size": "rows and columns of Y (default 1)",
    "output_dim": "channels of Y (default 1)",
    **_SCALE,
}


@array_function(
    "PSRoIPool",
    outputs=(2, 2),
    infer=infer_ps_roi_pool,
    doc="Each region of an image as a small image: a pixel is the mean of its part of the region, in a channel that is "
    "that pixel's alone, 0 where the part is empty.",
    input_names=("X, N x output_dim * group_size^2 x H x W", _INPUTS[1]),
    output_names=("Y", "mapping_channel: the channel of X of each pixel"),
    args=_PS_ARGS,
)
def ps_roi_pool(call: OperatorCall, x: Array, rois: Array) -> Sequence[Array]:
    """Part by part."""
    shape = _groups(call)
    pixels = x.reshape(len(x), *shape[1:], *x.shape[2:])
    y = np.zeros(shape, compute_dtype(x.dtype))
    for number, image, i, j, rows, columns in _parts(call, x, rois, shape[2]):
        y[number, :, i, j] = pixels[image, :, i, j, rows, columns].mean((1, 2), dtype=np.float64)
    channels = np.arange(x.shape[1]).reshape(shape[1:])
    return [y, np.broadcast_to(channels, shape)]


@array_function(
    "PSRoIPoolGradient",
    infer=infer_ps_roi_pool_gradient,
    doc="The gradient of PSRoIPool by X; the values of X and of the mapping are not read.",
    input_names=("X", "RoIs", "mapping_channel", "dY"),
    output_names=("dX",),
    args=_PS_ARGS,
)
def ps_roi_pool_gradient(call: OperatorCall, x: Array, rois: Array, _mapping: Array, dy: Array) -> Sequence[Array]:
    """Each element of dY to all pixels of its part."""
    shape = _groups(call)
    dx = np.zeros((len(x), *shape[1:], *x.shape[2:]), compute_dtype(x.dtype))
    for number, image, i, j, rows, columns in _parts(call, x, rois, shape[2]):
        part = dx[image, :, i, j, rows, columns]
        part += (dy[number, :, i, j].astype(dx.dtype) / (part.shape[1] * part.shape[2]))[:, None, None]
    return [dx]


_maker("PSRoIPool")
