"""Detectron's operators on boxes: proposals from anchors, boxes of classes, and the levels of a pyramid of features.

Ren et al., 2015, arXiv:1506.01497; Lin et al., 2017, arXiv:1612.03144. What they select is known when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.image.boxes import (
    PLUS_ONE_HELP,
    by_score,
    clipped,
    clipped_rotated,
    moved,
    moved_rotated,
    softly_suppressed,
    suppressed,
)

_ANGLE_ARGS = {
    "angle_bound_on": "1: angles of rotated boxes are brought between the bounds (default 1)",
    "angle_bound_lo": "the lower bound in degrees (default -90)",
    "angle_bound_hi": "the upper bound, a multiple of 180 above (default 90)",
    "clip_angle_thresh": "rotated boxes are clipped that are turned by no more degrees (default 1)",
}
_LEGACY = ("correct_transform_coords",)
"""Caffe2's older nets have it. (Detectron's converter wrote nms_thres, which Caffe2 does not read.)"""


def _one(call: OperatorCall) -> int:
    return int(call.arguments.bool("legacy_plus_one", True))


def _angle_bounds(call: OperatorCall) -> tuple[float, float] | None:
    if not call.arguments.bool("angle_bound_on", True):
        return None
    low, high = call.arguments.int("angle_bound_lo", -90), call.arguments.int("angle_bound_hi", 90)
    if high <= low or (high - low) % 180:
        raise ArgumentError(f"{call.label}: the bounds of angles must be a multiple of 180 apart, found {low}, {high}")
    return low, high


def _type_of_results(compute: Callable[[OperatorCall], Sequence[Array]]) -> Callable[[OperatorCall], list[TensorType]]:
    """Inference by computing: which boxes there are follows from values."""

    def infer(call: OperatorCall) -> list[TensorType]:
        found = call.once(compute)[: len(call.definition.output)]
        return [TensorType(one.shape, INT32 if one.dtype == np.int32 else FLOAT32) for one in found]

    return infer


def _computed(compute: Callable[[OperatorCall], Sequence[Array]]) -> Callable[..., Sequence[Array]]:
    """What inference has computed."""
    return lambda call, *_: call.once(compute)[: len(call.definition.output)]


def _require(call: OperatorCall, index: int, shape: tuple[int | None, ...], what: str) -> Array:
    """The values of an input, in float32. Raises ShapeError unless it has such a shape; None is any size."""
    call.require_types(index, FLOAT32)
    found = call.inputs[index].shape
    if len(found) != len(shape) or any(size not in (None, there) for size, there in zip(shape, found, strict=True)):
        raise call.fail(f"input {call.definition.input[index]!r} must be {what}, found shape {found}")
    return call.known_value(index)


def _within(
    call: OperatorCall, boxes: Array, deltas: Array, weights: tuple[float, ...], size: tuple[float, float]
) -> Array:
    """Boxes, of 5 numbers if they are rotated, moved by deltas and clipped to an image of a height and width."""
    if boxes.shape[1] == 5:
        angle = call.arguments.float("clip_angle_thresh", 1.0)
        return clipped_rotated(moved_rotated(boxes, deltas, weights, _angle_bounds(call)), *size, angle, _one(call))
    return clipped(moved(boxes, deltas, weights, _one(call)), *size, _one(call))


def infer_bbox_transform(call: OperatorCall) -> list[TensorType]:
    """A box for each delta, and how many there are of each image."""
    for index in range(3):
        call.require_types(index, FLOAT32)
    sides = 5 if call.arguments.bool("rotated") else 4
    rows, columns = call.require_rank(0, 2)
    if columns not in (sides, sides + 1):
        raise call.fail(f"a box must have {sides} numbers, and may have its image before them; found {columns}")
    _, deltas = call.require_rank(1, 2)
    call.require_shape(1, (rows, deltas // sides * sides), f"{sides} numbers for each class of a box")
    images = call.require_rank(2, 2)[0]
    call.require_shape(2, (images, 3), "height, width and scale of each image")
    if columns == sides and images != 1:
        raise call.fail(f"boxes without their image are of 1 image, found {images}")
    if len(call.arguments.floats("weights") or [1] * 4) != 4:
        raise ArgumentError(f"{call.label}: 'weights' must be 4 numbers")
    _angle_bounds(call)
    return [call.inputs[1], TensorType((images,), FLOAT32)][: len(call.definition.output)]


@array_function(
    "BBoxTransform",
    outputs=(1, 2),
    infer=infer_bbox_transform,
    doc="Boxes moved by deltas, those of each class, and clipped to their image: in coordinates of the image as it "
    "was, or of the scaled one.",
    input_names=("rois: (image) and box", "deltas", "im_info: height, width, scale"),
    output_names=("box_out", "roi_batch_splits"),
    args={
        "weights": "what deltas of x, y, width and height are divided by (default 1, 1, 1, 1)",
        "apply_scale": "1: boxes are of the scaled image (default 1)",
        "rotated": "1: boxes and deltas have an angle (default 0)",
        "legacy_plus_one": PLUS_ONE_HELP,
        **_ANGLE_ARGS,
    },
    unread_args=_LEGACY,
)
def bbox_transform(call: OperatorCall, rois: Array, deltas: Array, images: Array) -> Sequence[Array]:
    """Image by image, class by class."""
    arguments, sides = call.arguments, 5 if call.arguments.bool("rotated") else 4
    weights = tuple(arguments.floats("weights") or [1.0] * 4)
    of_image = rois[:, 0].astype(np.int64) if rois.shape[1] > sides else np.zeros(len(rois), np.int64)
    if of_image.size and not (of_image.min() >= 0 and of_image.max() < len(images)):
        raise call.fail(f"a box is of image {of_image.min()} to {of_image.max()}; there are {len(images)}")
    result = np.empty(deltas.shape)
    for number, (height, width, scale) in enumerate(images.astype(np.float64)):
        own = of_image == number
        boxes = rois[own, -sides:].astype(np.float64)
        boxes[:, :4] /= scale
        high, wide = (float(int(size / scale + 0.5)) for size in (height, width))
        for start in range(0, deltas.shape[1], sides):
            change = deltas[own, start : start + sides].astype(np.float64)
            found = _within(call, boxes, change, weights, (high, wide))
            found[:, :4] *= scale if arguments.bool("apply_scale", True) else 1
            result[own, start : start + sides] = found
    return [result, np.bincount(of_image, minlength=len(images))][: len(call.definition.output)]


def _proposals(call: OperatorCall) -> Sequence[Array]:
    scores = _require(call, 0, (None,) * 4, "scores: images x anchors x height x width")
    images, count, height, width = scores.shape
    sides = 5 if call.inputs[3].shape[-1:] == (5,) else 4
    anchors = _require(call, 3, (count, sides), "4 numbers for each anchor, or 5 with an angle").astype(np.float64)
    deltas = _require(call, 1, (images, sides * count, height, width), f"{sides} deltas for each score")
    sizes = _require(call, 2, (images, 3), "height, width and scale of each image").astype(np.float64)
    arguments, one = call.arguments, _one(call)
    stride = 1 / arguments.float("spatial_scale", 0.0625)
    rois, probabilities = [np.zeros((0, sides + 1), np.float32)], [np.zeros(0, np.float32)]
    for number, (high, wide, scale) in enumerate(sizes):
        flat = scores[number].reshape(-1)
        order = by_score(flat, arguments.int("pre_nms_topN", 6000))
        anchor, y, x = np.unravel_index(order, (count, height, width))
        places = anchors[anchor]
        places[:, :2] += np.stack([x, y], 1) * stride
        if sides == 4:
            places[:, 2:] += np.stack([x, y], 1) * stride
        change = deltas[number].reshape(count, sides, height, width)[anchor, :, y, x].astype(np.float64)
        boxes = _within(call, places, change, (1.0,) * 4, (int(high), int(wide)))
        lengths = boxes[:, 2:4] if sides == 5 else boxes[:, 2:] - boxes[:, :2] + one
        centers = boxes[:, :2] + (0 if sides == 5 else lengths / 2)
        least = arguments.float("min_size", 16.0) * scale
        large = np.flatnonzero((lengths >= least).all(1) & (centers < [wide, high]).all(1))
        limit, most = arguments.float("nms_thresh", 0.7), arguments.int("post_nms_topN", 300)
        kept = suppressed(boxes, large, limit, one, most if most > 0 else -1)
        rois.append(np.insert(boxes[kept], 0, number, 1).astype(np.float32))
        probabilities.append(flat[order[kept]])
    return [np.concatenate(rois), np.concatenate(probabilities)]


for _name in ("GenerateProposals", "GenerateProposalsCPP"):
    array_function(
        _name,
        infer=_type_of_results(_proposals),
        doc="Boxes that may have objects: anchors at each pixel, moved by deltas and clipped, those of the best "
        "scores that are large enough and do not overlap; each with its image before it.",
        input_names=(
            "scores",
            "bbox_deltas",
            "im_info: height, width, scale",
            "anchors: boxes, or rotated ones of center, width, height and degrees",
        ),
        output_names=("rois", "rois_probs"),
        args={
            "spatial_scale": "pixels of the scores for one of the image (default 0.0625)",
            "pre_nms_topN": "how many scores are looked at, 0 for all (default 6000)",
            "post_nms_topN": "how many boxes of an image there are at most, 0 for all (default 300)",
            "nms_thresh": "the largest intersection over union with a better box (default 0.7)",
            "min_size": "the shortest side, in pixels of the image as it was (default 16)",
            "legacy_plus_one": PLUS_ONE_HELP,
            **_ANGLE_ARGS,
        },
        unread_args=(*_LEGACY, "nms_thres"),
        value_inputs=(0, 1, 2, 3),
    )(_computed(_proposals))


def _matrix(call: OperatorCall, index: int, rows: int | None, columns: int | None, what: str) -> Array:
    """The values of an input of two axes, or of two more of size 1, as fully connected layers on images give."""
    more = (1, 1) if len(call.inputs[index].shape) == 4 else ()
    values = _require(call, index, (rows, columns, *more), what)
    return values.reshape(values.shape[:2])


def _of_classes(call: OperatorCall) -> Sequence[Array]:
    scores = _matrix(call, 0, None, None, "scores: boxes x classes")
    rows, classes = scores.shape
    arguments, one = call.arguments, _one(call)
    single, with_background = (
        arguments.bool("cls_agnostic_bbox_reg"),
        arguments.bool("input_boxes_include_bg_cls", True),
    )
    sides = 5 if arguments.bool("rotated") else 4
    columns = sides if single else sides * (classes - (not with_background))
    boxes = _matrix(call, 1, rows, columns, f"boxes: {columns} numbers for each of {rows}").astype(np.float64)
    splits = call.known_value(2).astype(np.int64) if len(call.inputs) > 2 else np.asarray([rows])
    if splits.sum() != rows or (splits < 0).any():
        raise call.fail(f"the splits {splits.tolist()} must add up to the {rows} boxes")
    method = arguments.string("soft_nms_method", "linear")
    if method not in ("linear", "gaussian"):
        raise ArgumentError(f"{call.label}: 'soft_nms_method' must be linear or gaussian, found {method!r}")
    limit, least = arguments.float("nms", 0.3), arguments.float("score_thresh", 0.05)
    soft = (
        method, arguments.float("soft_nms_sigma", 0.5), arguments.float("soft_nms_min_score_thres", 0.001),
    )  # fmt: skip
    found: list[tuple[Array, Array, Array, Array]] = []
    sizes = np.zeros((len(splits), classes), np.int32)
    for number, (start, size) in enumerate(zip(np.cumsum(splits) - splits, splits, strict=True)):
        of_image = []
        for label in range(1, classes):
            own = scores[start : start + size, label - (not with_background)].astype(np.float64)
            column = 0 if single else sides * (label - (not with_background))
            places = boxes[start : start + size, column : column + sides]
            order = by_score(own)
            order = order[own[order] > np.float32(least)]
            if arguments.bool("soft_nms_enabled"):
                kept, own = softly_suppressed(places, own, order, limit, one, *soft)
            else:
                kept = suppressed(places, order, limit, one)
            of_image.append((own[kept], places[kept], np.full(len(kept), label), kept))
        most, total = arguments.int("detections_per_im", 100), sum(len(kept[0]) for kept in of_image)
        if 0 < most < total:
            best = np.zeros(total, bool)
            best[by_score(np.concatenate([kept[0] for kept in of_image]), most)] = True
            ends = np.cumsum([len(kept[0]) for kept in of_image])[:-1]
            of_image = [
                (own[stays], places[stays], labels[stays], kept[stays])
                for (own, places, labels, kept), stays in zip(of_image, np.split(best, ends), strict=True)
            ]
        sizes[number, 1:] = [len(kept[0]) for kept in of_image]
        found += of_image
    parts = [np.concatenate(part) for part in zip(*found, strict=True)] if found else [np.zeros(0)] * 4
    shift = 0 if arguments.bool("output_classes_include_bg_cls", True) else 1
    floats = [parts[0], parts[1].reshape(-1, sides), parts[2] - shift, sizes.sum(1)]
    return [*(part.astype(np.float32) for part in floats), parts[3].astype(np.int32), sizes]


array_function(
    "BoxWithNMSLimit",
    inputs=(2, 3),
    outputs=(3, 6),
    infer=_type_of_results(_of_classes),
    doc="Boxes of each class but the first, the background: those with high scores that do not overlap, the best of "
    "an image, class by class.",
    input_names=("scores", "boxes", "batch_splits: boxes of each image"),
    output_names=("scores", "boxes", "classes", "batch_splits", "keeps", "keeps_size"),
    args={
        "score_thresh": "what scores must exceed (default 0.05)",
        "nms": "the largest intersection over union with a better box of the class (default 0.3)",
        "detections_per_im": "how many boxes of an image there are at most, 0 for all (default 100)",
        "soft_nms_enabled": "1: boxes that overlap better ones get lower scores (default 0)",
        "soft_nms_method": "linear or gaussian (default linear)",
        "soft_nms_sigma": "the deviation of gaussian (default 0.5)",
        "soft_nms_min_score_thres": "below which a lowered score ends a box (default 0.001)",
        "rotated": "1: boxes have an angle (default 0)",
        "cls_agnostic_bbox_reg": "1: all classes have the same boxes (default 0)",
        "input_boxes_include_bg_cls": "0: there are no boxes of the background, whose score is the last (default 1)",
        "output_classes_include_bg_cls": "1: the background is class 0, else the first one behind it (default 1)",
        "legacy_plus_one": PLUS_ONE_HELP,
    },
    value_inputs=(0, 1, 2),
)(_computed(_of_classes))


_COLLECT_ARGS = {
    "rpn_min_level": "the first level of features that boxes come from (default 2)",
    "rpn_max_level": "the last one (default 6)",
    "rpn_post_nms_topN": "how many boxes there are at most (default 2000)",
}
_DISTRIBUTE_ARGS = {
    "roi_canonical_scale": "the side of boxes that go to the canonical level (default 224)",
    "roi_canonical_level": "that level; twice the side is the next level (default 4)",
    "roi_min_level": "the first level that boxes go to (default 2)",
    "roi_max_level": "the last one (default 5)",
    "legacy_plus_one": PLUS_ONE_HELP,
}


def _levels(call: OperatorCall, kind: str, last: int) -> range:
    first, end = call.arguments.int(f"{kind}_min_level", 2), call.arguments.int(f"{kind}_max_level", last) + 1
    if end <= first:
        raise ArgumentError(f"{call.label}: '{kind}_max_level' must be at least '{kind}_min_level'")
    return range(first, end)


def _collected(call: OperatorCall) -> Array:
    """The boxes of all levels with the best scores."""
    count = len(_levels(call, "rpn", 6))
    if len(call.inputs) != 2 * count:
        raise call.fail(f"expected boxes and scores of {count} levels, found {len(call.inputs)} inputs")
    rois = [_require(call, index, (None, 5), "image and box in each row") for index in range(count)]
    scores = [_require(call, count + index, (len(own),), "a score a box") for index, own in enumerate(rois)]
    order = by_score(np.concatenate(scores), call.arguments.int("rpn_post_nms_topN", 2000))
    collected: Array = np.concatenate(rois)[order]
    return collected


def _distributed(call: OperatorCall, rois: Array) -> list[Array]:
    """The boxes of each level, and where each box is among these."""
    arguments, levels = call.arguments, _levels(call, "roi", 5)
    if len(call.definition.output) != len(levels) + (2 if "Collect" in call.definition.type else 1):
        raise call.fail(f"expected outputs for {len(levels)} levels, found {len(call.definition.output)}")
    sides = rois[:, 3:].astype(np.float64) - rois[:, 1:3] + _one(call)
    scale = np.sqrt(np.maximum(sides, 0).prod(1)) / arguments.float("roi_canonical_scale", 224.0)
    level = np.floor(arguments.int("roi_canonical_level", 4) + np.log2(scale + 1e-6))
    own = [np.flatnonzero(level.clip(levels[0], levels[-1]) == one) for one in levels]
    return [*(rois[places] for places in own), np.argsort(np.concatenate(own)).astype(np.int32)]


def _collect(call: OperatorCall) -> Sequence[Array]:
    return [_collected(call)]


def _distribute(call: OperatorCall) -> Sequence[Array]:
    return _distributed(call, _require(call, 0, (None, 5), "image and box in each row"))


def _collect_and_distribute(call: OperatorCall) -> Sequence[Array]:
    rois = _collected(call)
    return [rois, *_distributed(call, rois)]


array_function(
    "CollectRpnProposals",
    inputs=(2, UNBOUNDED),
    outputs=(1, 1),
    infer=_type_of_results(_collect),
    doc="The boxes of several levels of features that have the best scores.",
    input_names=("rpn_rois...", "rpn_roi_probs..."),
    output_names=("rois",),
    args=_COLLECT_ARGS,
    value_inputs=tuple(range(64)),
)(_computed(_collect))
array_function(
    "DistributeFpnProposals",
    outputs=(2, UNBOUNDED),
    infer=_type_of_results(_distribute),
    doc="Boxes by the level of features that their size belongs to, and where each is when the levels follow one "
    "another.",
    input_names=("rois",),
    output_names=("rois_fpn...", "rois_idx_restore"),
    args=_DISTRIBUTE_ARGS,
    value_inputs=(0,),
)(_computed(_distribute))
array_function(
    "CollectAndDistributeFpnRpnProposals",
    inputs=(2, UNBOUNDED),
    outputs=(3, UNBOUNDED),
    infer=_type_of_results(_collect_and_distribute),
    doc="CollectRpnProposals, then DistributeFpnProposals.",
    input_names=("rpn_rois...", "rpn_roi_probs..."),
    output_names=("rois", "rois_fpn...", "rois_idx_restore"),
    args=_COLLECT_ARGS | _DISTRIBUTE_ARGS,
    value_inputs=tuple(range(64)),
)(_computed(_collect_and_distribute))

no_gradient(
    "BBoxTransform",
    "BoxWithNMSLimit",
    "CollectAndDistributeFpnRpnProposals",
    "CollectRpnProposals",
    "DistributeFpnProposals",
    "GenerateProposals",
    "GenerateProposalsCPP",
)
