"""RoiAlign and MaxRoiPool: regions of images as images of one size; NonMaxSuppression: boxes that do not overlap.

He et al., 2017, arXiv:1703.06870; Girshick, 2015, arXiv:1504.08083.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import no_gradient, not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.rows import along_axis
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype, row_pieces

MOST_SAMPLES = 1 << 20  # along an axis of a region
_CANDIDATES = 64  # boxes that are compared at a time
_COMPARED = 1024  # and with how many: what is computed of these stays in a core's cache


def _pooled(call: OperatorCall, count: int, sizes: Sequence[int]) -> list[TensorType]:
    """Regions x channels x the sizes. Raises ArgumentError for one below 1."""
    _, channels, height, width = call.require_rank(0, 4)
    if min(sizes) < 1:
        raise ArgumentError(f"{call.label}: the output must have pixels, found {sizes}")
    if count and not height * width:
        raise call.fail("an image must have pixels")
    scale = call.arguments.float("spatial_scale", 1.0)
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentError(f"{call.label}: 'spatial_scale' must be a positive number, found {scale}")
    return [TensorType((count, channels, *sizes), call.require_types(0, *FLOAT_TYPES))]


def _rows_of_regions(asked: RowsCall) -> list[Rows | None]:
    """Regions of images that all rows share. Regions name an image by its place in the batch."""
    if asked.rows[0] is not None:
        raise asked.refuse("regions count the images of all rows")
    return list(along_axis(0, *range(1, len(asked.rows)))(asked))


def infer_roi_align(call: OperatorCall) -> list[TensorType]:
    """An image for each region."""
    call.require_types(1, *FLOAT_TYPES)
    call.require_types(2, INT32, INT64)
    (count,) = call.require_rank(2, 1)
    call.require_shape(1, (count, 4), "x1, y1, x2, y2 for each region")
    if call.arguments.string("mode", "avg") not in ("avg", "max"):
        raise ArgumentError(f"{call.label}: 'mode' must be avg or max")
    if call.arguments.int("sampling_ratio", 0) < 0:
        raise ArgumentError(f"{call.label}: 'sampling_ratio' must not be negative")
    call.arguments.bool("aligned")
    return _pooled(call, count, [call.arguments.int(f"output_{side}", 1) for side in ("height", "width")])


@array_function(
    "RoiAlign",
    infer=infer_roi_align,
    doc="Each region of an image as an image of one size: a pixel is the mean, or the maximum, of samples in its "
    "part of the region, interpolated linearly. (dagexec's own, for ONNX.)",
    input_names=("X, batch x channels x height x width", "regions: x1, y1, x2, y2 each", "the image of each"),
    output_names=("Y",),
    args={
        "output_height": "pixels (default 1)",
        "output_width": "likewise",
        "sampling_ratio": "samples along each side of a pixel (default 0: as many as it has pixels of X)",
        "spatial_scale": "from coordinates of regions to pixels (default 1)",
        "mode": "avg or max (default avg)",
        "aligned": "1: the center of the first pixel is 1/2 (default 0: 0, and regions have at least one pixel)",
    },
    rows=_rows_of_regions,
)
def roi_align(call: OperatorCall, x: Array, regions: Array, images: Array) -> Sequence[Array]:
    """Region by region: products for rows and for columns, of all channels. Raises ShapeError for no such region."""
    arguments = call.arguments
    sizes = [arguments.int("output_height", 1), arguments.int("output_width", 1)]
    work, aligned = compute_dtype(x.dtype), arguments.bool("aligned")
    check_images(call, images, len(x))
    y = np.zeros((len(regions), x.shape[1], *sizes), work)
    scaled = regions.astype(np.float64) * arguments.float("spatial_scale", 1.0) - (0.5 if aligned else 0.0)
    ratio = arguments.int("sampling_ratio", 0)
    pixels = np.moveaxis(x, 1, -1).astype(work, order="C")  # batch, height, width, channels
    for target, number, (x1, y1, x2, y2) in zip(y, images, scaled, strict=True):
        image = x[int(number)].astype(work, copy=False)
        rows = _samples(call, y1, y2, sizes[0], ratio, aligned=aligned)
        columns = _samples(call, x1, x2, sizes[1], ratio, aligned=aligned)
        if not rows.size or not columns.size:
            continue
        if arguments.string("mode", "avg") == "max":
            target[...] = _maxima(image, rows, columns)
            continue
        by_rows, by_columns = (
            _mean_weights(samples, size, work) for samples, size in zip((rows, columns), image.shape[1:], strict=True)
        )
        target[...] = Region(by_rows, by_columns).mean(pixels[int(number)]).transpose(2, 0, 1)
    return [y]


class Region:
    """How much of each pixel of an image is in each pixel of a region: weights of its rows and of its columns."""

    def __init__(self, by_rows: Array, by_columns: Array) -> None:
        self.high, self.wide = _read(by_rows), _read(by_columns)
        self._by_rows = np.ascontiguousarray(by_rows[:, self.high])
        self._by_columns = np.ascontiguousarray(by_columns[:, self.wide])

    @classmethod
    def aligned(
        cls, call: OperatorCall, corners: Array, image: Sequence[int], sizes: Sequence[int], work: np.dtype
    ) -> Region:
        """That of scaled corners in an image of a height and a width, by arguments `sampling_ratio` and `aligned`."""
        ratio, aligned = max(0, call.arguments.int("sampling_ratio", 0)), call.arguments.bool("aligned")
        if aligned:
            require_sides(call, corners[2] - corners[0], corners[3] - corners[1])
        weights = []
        for axis, bins in enumerate(sizes):
            start, end = corners[1 - axis], corners[3 - axis]
            samples = _samples(call, start, end, bins, ratio, aligned=aligned)
            weights.append(_mean_weights(samples, image[axis], work) if samples.size else np.zeros((bins, 1), work))
        return cls(*weights)

    def mean(self, pixels: Array) -> Array:
        """The region of an image, both height x width x channels."""
        part = np.ascontiguousarray(pixels[self.high, self.wide])
        lines = self._by_rows @ part.reshape(len(part), math.prod(part.shape[1:]))  # output rows x (columns x channels)
        found: Array = self._by_columns @ lines.reshape(len(lines), *part.shape[1:])
        return found

    def add_gradient(self, of_region: Array, pixels: Array) -> None:
        """Add to the gradient of an image what the gradient of the region gives."""
        lines = self._by_rows.T @ of_region.reshape(len(of_region), math.prod(of_region.shape[1:]))
        pixels[self.high, self.wide] += self._by_columns.T @ lines.reshape(len(lines), *of_region.shape[1:])


def require_sides(call: OperatorCall, wide: float, high: float) -> None:
    """Raise ShapeError for sides below 0, which Caffe2 refuses of aligned regions."""
    if min(wide, high) < 0:
        raise ShapeError(f"{call.label}: an aligned region must not have negative sides, found {wide:g} x {high:g}")


def check_images(call: OperatorCall, images: Array, count: int) -> None:
    """Raise ShapeError unless each region is of one of so many images."""
    if images.size and not (images.min() >= 0 and images.max() < count):
        raise ShapeError(f"{call.label}: a region is of image {images.min()} to {images.max()}; there are {count}")


def _samples(call: OperatorCall, start: float, end: float, bins: int, ratio: int, *, aligned: bool) -> Array:
    """Places along an axis, bins x samples. Raises ShapeError for a region that is no number, or too large."""
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ShapeError(f"{call.label}: a region must be numbers, found {start} to {end}")
    length = end - start if aligned else max(end - start, 1.0)
    size = length / bins
    count = ratio or max(0, math.ceil(size))
    if count * bins > MOST_SAMPLES:
        raise ShapeError(f"{call.label}: a region from {start:g} to {end:g} is too large to be sampled")
    return start + size * (np.arange(bins)[:, None] + (np.arange(count) + 0.5) / max(1, count))


def corners_of(samples: Array, size: int) -> tuple[Array, Array, Array, Array]:
    """Pixels before and behind each place, the weight of the second, and whether the place is in the image."""
    inside = (samples >= -1) & (samples <= size)
    places = samples.clip(0, size - 1)
    low = np.floor(places).astype(np.intp)
    return low, np.minimum(low + 1, size - 1), places - low, inside


def _mean_weights(samples: Array, size: int, work: np.dtype) -> Array:
    """Bins x pixels: how much of each pixel is in the mean of a bin."""
    low, high, part, inside = corners_of(samples, size)
    found = np.zeros((len(samples), size))
    rows = np.arange(len(samples))[:, None]
    np.add.at(found, (rows, low), (1 - part) * inside)
    np.add.at(found, (rows, high), part * inside)
    weights: Array = (found / samples.shape[1]).astype(work)
    return weights


def _read(weights: Array) -> slice:
    """The pixels that some bin reads."""
    found = np.flatnonzero(weights.any(0))
    return slice(int(found[0]), int(found[-1]) + 1) if found.size else slice(0, 0)


def _maxima(image: Array, rows: Array, columns: Array) -> Array:
    """In each bin the largest weighted pixel, which is how ONNX's runtimes understand the maximum."""
    channels, height, width = image.shape
    y_low, y_high, y_part, y_inside = (one.reshape(-1) for one in corners_of(rows, height))
    x_low, x_high, x_part, x_inside = (one.reshape(-1) for one in corners_of(columns, width))
    inside = (y_inside[:, None] & x_inside).astype(image.dtype)
    found = np.full((channels, rows.size, columns.size), -np.inf, image.dtype)
    for ys, y_weight in ((y_low, 1 - y_part), (y_high, y_part)):
        for xs, x_weight in ((x_low, 1 - x_part), (x_high, x_part)):
            weight = (y_weight[:, None] * x_weight).astype(image.dtype) * inside
            np.maximum(found, image[:, ys[:, None], xs] * weight, out=found)
    best: Array = found.reshape(channels, *rows.shape, *columns.shape).max((2, 4))
    return best


def infer_max_roi_pool(call: OperatorCall) -> list[TensorType]:
    """An image for each region."""
    call.require_same_type(0, 1)
    count = call.require_rank(1, 2)[0]
    call.require_shape(1, (count, 5), "image, x1, y1, x2, y2 for each region")
    sizes = call.arguments.ints("pooled_shape")
    if len(sizes) != 2:
        raise ArgumentError(f"{call.label}: 'pooled_shape' must be height and width, found {sizes}")
    return _pooled(call, count, sizes)


@array_function(
    "MaxRoiPool",
    infer=infer_max_roi_pool,
    doc="Each region of an image as an image of one size: a pixel is the maximum of its part of a region, 0 for a "
    "part outside of the image. (dagexec's own, for ONNX.)",
    input_names=("X, batch x channels x height x width", "regions: image, x1, y1, x2, y2 each"),
    output_names=("Y",),
    args={"pooled_shape": "height and width of Y", "spatial_scale": "from coordinates to pixels (default 1)"},
    required_args=("pooled_shape",),
    rows=_rows_of_regions,
    onnx=(OnnxName("MaxRoiPool", 22, {"pooled_shape": "pooled_shape", "spatial_scale": "spatial_scale"}),),
)
def max_roi_pool(call: OperatorCall, x: Array, regions: Array) -> Sequence[Array]:
    """Bin by bin. Raises ShapeError for a region that is not there."""
    sizes = call.arguments.ints("pooled_shape")
    found = regions.astype(np.float64)
    if not np.isfinite(found).all():
        raise ShapeError(f"{call.label}: regions must be numbers")
    check_images(call, found[:, 0], len(x))
    places = np.floor(found[:, 1:] * call.arguments.float("spatial_scale", 1.0) + 0.5).clip(-(1 << 40), 1 << 40)
    y = np.zeros((len(regions), x.shape[1], *sizes), x.dtype)
    for target, number, (x1, y1, x2, y2) in zip(y, found[:, 0], places, strict=True):
        image = x[int(number)]
        rows, columns = bin_slices(y1, y2, sizes[0], image.shape[1]), bin_slices(x1, x2, sizes[1], image.shape[2])
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                part = image[:, row, column]
                if part.size:
                    target[:, i, j] = part.max((1, 2))
    return [y]


def bin_slices(start: float, end: float, count: int, size: int) -> list[slice]:
    """The pixels of each bin between two pixels, both included; in float32, as Caffe2 and onnxruntime divide them."""
    length = np.float32(max(end - start + 1, 1.0)) / np.float32(count)
    edges = [(math.floor(bin_ * length), math.ceil(np.float32(bin_ + 1) * length)) for bin_ in range(count)]
    return [slice(*(int(min(max(edge + start, 0), size)) for edge in pair)) for pair in edges]


def infer_non_max_suppression(call: OperatorCall) -> list[TensorType]:
    """Three numbers for each box that is selected."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, *FLOAT_TYPES)
    batch, boxes, _ = call.require_rank(0, 3)
    classes = call.require_rank(1, 3)[1]
    call.require_shape(0, (batch, boxes, 4), "4 coordinates a box")
    call.require_shape(1, (batch, classes, boxes), "batch, classes, boxes")
    if call.arguments.int("center_point_box", 0) not in (0, 1):
        raise ArgumentError(f"{call.label}: 'center_point_box' must be 0 or 1")
    for index in range(2, len(call.inputs)):
        call.require_types(index, *((INT32, INT64) if index == 2 and _has_count(call) else FLOAT_TYPES))
        if call.inputs[index].elements != 1:
            raise call.fail(f"input {call.definition.input[index]!r} must have one element")
    return [TensorType((len(call.once(_selected)), 3), INT64)]


def _has_count(call: OperatorCall) -> bool:
    return call.arguments.bool("max_output_input")


@array_function(
    "NonMaxSuppression",
    inputs=(2, 5),
    infer=infer_non_max_suppression,
    doc="Image, class and number of each box that is selected: for each image and class the box of the highest "
    "score, then the next that overlaps none of those selected by more than a limit. (dagexec's own, for ONNX.)",
    input_names=(
        "boxes, batch x boxes x 4",
        "scores, batch x classes x boxes",
        "how many of a class, with max_output_input=1",
        "threshold of intersection over union, with iou_input=1",
        "threshold of scores, with score_input=1",
    ),
    output_names=("selected",),
    args={
        "center_point_box": "1: boxes are x and y of the center, width, height; else y1, x1, y2, x2 (default 0)",
        "max_output_input": "1: the next input is how many boxes of a class are selected at most (default 0: none)",
        "iou_input": "1: the next input is the largest intersection over union that is kept (default: 0)",
        "score_input": "1: the next input is the score that boxes must exceed (default: all)",
    },
    value_inputs=(0, 1, 2, 3, 4),
)
def non_max_suppression(call: OperatorCall, *inputs: Array) -> Sequence[Array]:
    """As inference has found them."""
    return [call.once(_selected)]


def _selected(call: OperatorCall) -> Array:
    """Selected boxes: n x 3."""
    boxes, scores, *limits = (call.known_value(index) for index in range(len(call.inputs)))
    given = iter(float(limit.reshape(-1)[0]) for limit in limits)
    most, overlap, least = (
        next(given, default) if call.arguments.bool(name) else default
        for name, default in (("max_output_input", 0.0), ("iou_input", 0.0), ("score_input", -math.inf))
    )
    rows = []
    for image, (places, of_classes) in enumerate(zip(_as_corners(call, boxes), scores, strict=True)):
        corners = np.ascontiguousarray(places.T)
        for number, row in enumerate(of_classes):
            kept = _suppressed(corners, row.astype(np.float64), int(max(0.0, min(most, row.size))), overlap, least)
            rows.append(np.stack([np.full_like(kept, image), np.full_like(kept, number), kept], -1))
    return np.concatenate(rows) if rows else np.zeros((0, 3), np.int64)


def _as_corners(call: OperatorCall, boxes: Array) -> Array:
    """Least and largest coordinates: batch x boxes x (low, low, high, high), in float64."""
    wide = boxes.astype(np.float64)
    if call.arguments.int("center_point_box", 0):
        center, half = wide[..., :2], wide[..., 2:] / 2
        return np.concatenate([center - half, center + half], -1)
    return np.concatenate([np.minimum(wide[..., :2], wide[..., 2:]), np.maximum(wide[..., :2], wide[..., 2:])], -1)


def _suppressed(boxes: Array, scores: Array, most: int, overlap: float, least: float) -> Array:
    """Numbers of the boxes of a class that stay, the highest score first, of equal ones the first: int64.

    Boxes are 4 x boxes. Those of lower scores are looked at when the others are not enough: most lists end early.
    """
    candidates = np.flatnonzero(scores > least)
    order = candidates[np.argsort(-scores[candidates], kind="stable")].astype(np.int64, copy=False)
    looked_at = max(most, _CANDIDATES)
    while True:
        found = _first_of_each(boxes[:, order[:looked_at]], most, overlap)
        if len(found) == most or looked_at >= len(order):
            kept: Array = order[found]
            return kept
        looked_at *= 4


def _first_of_each(boxes: Array, most: int, limit: float) -> Array:
    """Places of the boxes, in the order in which they are to stay, that no earlier one suppresses; at most `most`.

    Detectors with many classes move the boxes of each to a place of its own; so only boxes of one place are compared.
    """
    found = [place[_unsuppressed(boxes[:, place], most, limit)] for place in _apart(boxes)]
    return np.sort(np.concatenate(found))[:most] if found else np.zeros(0, np.intp)


def _apart(boxes: Array) -> list[Array]:
    """Groups of the boxes, by their places in order, so that boxes of two groups have no area in common."""
    lows, highs = boxes[0], boxes[2]
    by_low = np.argsort(lows, kind="stable")  # what is no number comes last, and overlaps nothing
    reached = np.maximum.accumulate(highs[by_low])
    edges = np.flatnonzero(lows[by_low][1:] >= reached[:-1]) + 1
    return [np.sort(group) for group in np.split(by_low, edges)] if by_low.size else []


def _unsuppressed(boxes: Array, most: int, limit: float) -> Array:
    """As `_first_of_each`, of boxes in one place.

    A few candidates are compared at a time, with those that stay and among themselves.
    """
    kept = np.zeros(0, np.intp)
    for piece in row_pieces(boxes.shape[1], _CANDIDATES):
        block = boxes[:, piece]
        stays = np.ones(block.shape[1], bool)
        for others in row_pieces(len(kept), _COMPARED):
            stays &= ~_overlap(block, boxes[:, kept[others]], limit).any(1)
        among = _overlap(block, block, limit)
        for place in np.flatnonzero(stays):
            if stays[place]:
                stays[place + 1 :] &= ~among[place, place + 1 :]
        kept = np.concatenate([kept, piece.start + np.flatnonzero(stays)])
        if len(kept) >= most:
            break
    return kept[:most]


def _overlap(boxes: Array, others: Array, limit: float) -> Array:
    """Boxes x others: where the intersection is more than `limit` of the union; False for boxes without area."""
    shared = _shared(boxes, others, 0)
    shared *= _shared(boxes, others, 1)
    areas, of_others = ((one[2] - one[0]) * (one[3] - one[1]) for one in (boxes, others))
    least = areas[:, None] + of_others
    least -= shared
    least *= limit
    found: Array = (shared > 0) & (shared > least)
    return found


def _shared(boxes: Array, others: Array, axis: int) -> Array:
    """Boxes x others: how long the intersection is along an axis."""
    length: Array = np.minimum(boxes[2 + axis, :, None], others[2 + axis])
    length -= np.maximum(boxes[axis, :, None], others[axis])
    return np.maximum(length, 0, out=length)


no_gradient("NonMaxSuppression")
not_differentiable("dagexec has them for inference alone", "RoiAlign", "MaxRoiPool")
