"""Detectron's operators on boxes, against loops over boxes in float64; Caffe2's recordings have more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError
from tests.ops.running import run_operator

RNG = np.random.default_rng(17)


def boxes(count: int, largest: float = 60) -> np.ndarray:
    corners = RNG.uniform(0, 100, (count, 2))
    return np.concatenate([corners, corners + RNG.uniform(5, largest, (count, 2))], 1).astype(np.float32)


def moved(box: Sequence[float], delta: Sequence[float], size: tuple[float, float], one: int) -> list[float]:
    """A box moved by a delta, within an image of a height and width."""
    x1, y1, x2, y2 = map(float, box)
    w, h = x2 - x1 + one, y2 - y1 + one
    x, y = x1 + w / 2 + delta[0] * w, y1 + h / 2 + delta[1] * h
    w, h = w * math.exp(min(delta[2], math.log(62.5))), h * math.exp(min(delta[3], math.log(62.5)))
    limits = [size[1] - one, size[0] - one] * 2
    sides = [x - w / 2, y - h / 2, x + w / 2 - one, y + h / 2 - one]
    return [min(max(value, 0.0), limit) for value, limit in zip(sides, limits, strict=True)]


def overlap(a: Sequence[float], b: Sequence[float], one: int) -> float:
    area = lambda box: (box[2] - box[0] + one) * (box[3] - box[1] + one)  # noqa: E731
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + one)
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + one)
    return float(wide * high / (area(a) + area(b) - wide * high))


def kept(places: Sequence[Sequence[float]], order: Sequence[int], limit: float, one: int) -> list[int]:
    found: list[int] = []
    for number in order:
        if all(overlap(places[number], places[other], one) <= limit for other in found):
            found.append(number)
    return found


@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize("scaled", [0, 1])
def test_boxes_are_moved_and_clipped_in_their_image(one: int, scaled: int) -> None:
    sizes = np.array([[200, 100, 2], [300, 240, 1.5]], np.float32)
    rois = np.insert(boxes(7), 0, [0, 0, 0, 1, 1, 1, 1], 1).astype(np.float32)
    deltas = (RNG.normal(size=(7, 12)) * ([1.2, 1.2, 9, 9] * 3)).astype(np.float32)
    weights = [10.0, 5.0, 4.0, 2.0]
    found, splits = run_operator(
        "BBoxTransform", [rois, deltas, sizes], 2, weights=weights, apply_scale=scaled, legacy_plus_one=one
    )
    assert splits.tolist() == [3, 4]
    for row, (image, *box) in enumerate(rois):
        height, width, scale = map(float, sizes[int(image)])
        for label in range(3):
            delta = deltas[row, 4 * label : 4 * label + 4].astype(np.float64) / weights
            whole = int(height / scale + 0.5), int(width / scale + 0.5)
            expected = np.array(moved(np.array(box, np.float64) / scale, delta, whole, one))
            expected *= scale if scaled else 1
            np.testing.assert_allclose(found[row, 4 * label : 4 * label + 4], expected, rtol=1e-5, atol=1e-4)


def test_rotated_boxes_turn_within_the_bounds_and_upright_ones_are_clipped() -> None:
    rois = np.array([[50, 40, 20, 10, 0], [50, 40, 20, 10, 80], [95, 40, 20, 10, 0.5]], np.float32)
    deltas = np.zeros((3, 5), np.float32)
    deltas[1] = [0.5, 0, math.log(2), 0, math.radians(30)]
    [found] = run_operator("BBoxTransform", [rois, deltas, np.array([[80, 100, 1]], np.float32)], rotated=1)
    expected = [[50, 40, 20, 10, 0], [60, 40, 40, 10, -70], [92.25, 40, 14.5, 10, 0.5]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ArgumentError, match="a multiple of 180 apart"):
        run_operator("BBoxTransform", [rois, deltas, np.ones((1, 3), np.float32)], rotated=1, angle_bound_hi=80)


@pytest.mark.parametrize("op_type", ["GenerateProposals", "GenerateProposalsCPP"])
@pytest.mark.parametrize("one", [0, 1])
def test_proposals_are_the_best_anchors_that_do_not_overlap(op_type: str, one: int) -> None:
    count, height, width, stride = 3, 5, 6, 16
    anchors = np.array([[-8, -8, 8, 8], [-16, -8, 16, 8], [-4, -20, 4, 20]], np.float32)
    scores = RNG.permutation(2 * count * height * width).reshape(2, count, height, width).astype(np.float32)
    deltas = (RNG.normal(size=(2, 4 * count, height, width)) / 3).astype(np.float32)
    sizes = np.array([[70, 90, 1], [80, 60, 0.5]], np.float32)
    arguments = {"spatial_scale": 1 / stride, "pre_nms_topN": 60, "post_nms_topN": 12, "nms_thresh": 0.4}
    rois, found = run_operator(
        op_type, [scores, deltas, sizes, anchors], 2, min_size=14.0, legacy_plus_one=one, **arguments
    )
    expected = []
    for image, (high, wide, scale) in enumerate(sizes.astype(np.float64)):
        places = np.ndindex(count, height, width)
        best = sorted(places, key=lambda place: -scores[(image, *place)])[:60]
        shift = [np.array([x, y, x, y]) * stride for _, y, x in best]
        by_place = [deltas[image, 4 * a : 4 * a + 4, y, x].astype(np.float64) for a, y, x in best]
        all_boxes = [moved(anchors[best[n][0]] + shift[n], by_place[n], (high, wide), one) for n in range(len(best))]
        large = []
        for n, (x1, y1, x2, y2) in enumerate(all_boxes):
            w, h = x2 - x1 + one, y2 - y1 + one
            if min(w, h) >= 14 * scale and x1 + w / 2 < wide and y1 + h / 2 < high:
                large.append(n)
        chosen = kept(all_boxes, large, 0.4, one)[:12]
        expected += [[image, *all_boxes[n], scores[(image, *best[n])]] for n in chosen]
    assert len({row[0] for row in expected}) == 2
    np.testing.assert_allclose(np.column_stack([rois, found]), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("single", [0, 1])
def test_boxes_of_classes_are_limited_in_each_image(background: int, single: int) -> None:
    rows, classes, splits = 24, 4, np.array([10, 14], np.int32)
    scores = RNG.uniform(size=(rows, classes)).astype(np.float32)
    places = np.concatenate([boxes(rows) for _ in range(1 if single else classes - 1 + background)], 1)
    arguments = {"score_thresh": 0.2, "nms": 0.3, "detections_per_im": 6, "cls_agnostic_bbox_reg": single}
    outputs = run_operator(
        "BoxWithNMSLimit", [scores, places, splits], 6, input_boxes_include_bg_cls=background,
        output_classes_include_bg_cls=0, **arguments,
    )  # fmt: skip
    expected = []
    for image, (start, end) in enumerate([(0, 10), (10, 24)]):
        found = []
        for label in range(1, classes):
            own = scores[start:end, label if background else label - 1]
            column = 0 if single else 4 * (label if background else label - 1)
            corners = places[start:end, column : column + 4].astype(np.float64)
            order = [n for n in np.argsort(-own, kind="stable") if own[n] > 0.2]
            found += [(own[n], *corners[n], label - 1, n) for n in kept(corners, order, 0.3, 1)]  # type: ignore[arg-type]
        best = sorted(row[0] for row in found)[-6:]
        expected.append([row for row in found if row[0] in best])
        assert outputs[5][image].tolist() == [
            0,
            *(sum(row[5] == n for row in expected[-1]) for n in range(classes - 1)),
        ]
    assert outputs[3].tolist() == [len(image) for image in expected]
    np.testing.assert_allclose(
        np.column_stack([outputs[0], outputs[1], outputs[2], outputs[4]]), [*expected[0], *expected[1]], rtol=1e-6
    )


@pytest.mark.parametrize("method", ["linear", "gaussian"])
def test_soft_suppression_lowers_scores(method: str) -> None:
    scores = np.array([[0, 0.9], [0, 0.8], [0, 0.7], [0, 0.3]], np.float32)
    places = np.array([[0, 0, 9, 9], [0, 0, 9, 4], [20, 0, 29, 9], [0, 0, 9, 7]], np.float32)
    found, _, _ = run_operator(
        "BoxWithNMSLimit", [scores, places.repeat(2, 0).reshape(4, 8)], 3, soft_nms_enabled=1, soft_nms_method=method,
        nms=0.5, score_thresh=0.1, soft_nms_min_score_thres=0.05,
    )  # fmt: skip
    lowered = {  # the second overlaps the first by 0.5, the last the first by 0.8 and the second by 5 / 8
        "linear": [0.9, 0.8, 0.7],  # and 0.3 (1 - 0.8) (1 - 0.625) is less than 0.05
        "gaussian": [0.9, 0.7, 0.8 * math.exp(-0.5)],  # and the last 0.038
    }[method]
    np.testing.assert_allclose(found, lowered, rtol=1e-5)


def shared_area(a: np.ndarray, b: np.ndarray) -> float:
    """Of two rotated boxes: one polygon cut by each side of the other."""
    corners = []
    for x, y, w, h, degrees in (a, b):
        turn = np.exp(1j * math.radians(degrees))
        around = ((1, 1), (-1, 1), (-1, -1), (1, -1))
        corners.append([complex(x, y) + turn * complex(w * a, h * b) / 2 for a, b in around])
    polygon = corners[0]
    for start, end in zip(corners[1], [*corners[1][1:], corners[1][0]], strict=True):
        side = lambda p: ((end - start).conjugate() * (p - start)).imag  # noqa: B023, E731
        cut = []
        for p, q in zip(polygon, [*polygon[1:], polygon[0]], strict=True) if polygon else ():
            cut += [p] if side(p) >= 0 else []
            cut += [p + (q - p) * side(p) / (side(p) - side(q))] if side(p) * side(q) < 0 else []
        polygon = cut
    if not polygon:
        return 0.0
    return sum((p.conjugate() * q).imag for p, q in zip(polygon, [*polygon[1:], polygon[0]], strict=True)) / 2


def rotated_kept(places: np.ndarray, order: Sequence[int], limit: float) -> list[int]:
    found: list[int] = []
    for n in order:
        overlaps = []
        for other in found:
            common = shared_area(places[n], places[other])
            overlaps.append(common / (np.prod(places[n, 2:4]) + np.prod(places[other, 2:4]) - common))
        if max(overlaps, default=0) <= limit:
            found.append(n)
    return found


def rotated(count: int) -> np.ndarray:
    return np.column_stack(
        [RNG.uniform(0, 60, (count, 2)), RNG.uniform(8, 40, (count, 2)), RNG.uniform(-90, 90, count)]
    ).astype(np.float32)


def test_rotated_boxes_of_a_class_are_suppressed() -> None:
    places, scores = rotated(40), RNG.permutation(80).reshape(40, 2).astype(np.float32) / 100
    places[7] = places[3]
    inputs = [scores.reshape(40, 2, 1, 1), places.reshape(40, 5, 1, 1)]
    arguments = {"rotated": 1, "cls_agnostic_bbox_reg": 1, "detections_per_im": 0, "score_thresh": 0.1, "nms": 0.2}
    found = run_operator("BoxWithNMSLimit", inputs, 3, **arguments)
    order = [n for n in np.argsort(-scores[:, 1]) if scores[n, 1] > np.float32(0.1)]
    kept_ = rotated_kept(places.astype(float), order, 0.2)  # type: ignore[arg-type]
    assert 5 < len(kept_) < len(order)
    np.testing.assert_array_equal(found[1], places[kept_])
    np.testing.assert_array_equal(found[0], scores[kept_, 1])


def test_rotated_anchors_give_rotated_proposals() -> None:
    anchors = np.array([[8, 8, 30, 12, 40], [8, 8, 12, 30, 0]], np.float32)
    scores = RNG.permutation(40).reshape(1, 2, 4, 5).astype(np.float32)
    deltas = (RNG.normal(size=(1, 10, 4, 5)) / 4).astype(np.float32)
    image = np.array([[64, 80, 1]], np.float32)
    rois, _ = run_operator(
        "GenerateProposals", [scores, deltas, image, anchors], 2, nms_thresh=0.3, min_size=10.0, angle_bound_lo=-45,
        angle_bound_hi=135, clip_angle_thresh=-1.0,
    )  # fmt: skip
    boxes_ = []
    for a, y, x in sorted(np.ndindex(2, 4, 5), key=lambda place: -scores[(0, *place)]):
        dx, dy, dw, dh, da = deltas[0, 5 * a : 5 * a + 5, y, x].astype(float)
        cx, cy, w, h, degrees = anchors[a].astype(float)
        cx, cy, w, h = cx + 16 * x + dx * w, cy + 16 * y + dy * h, w * math.exp(dw), h * math.exp(dh)
        turned = degrees + math.degrees(da)
        turned += 180 if turned < -45 else -180 if turned > 135 else 0
        if min(w, h) >= 10 and cx < 80 and cy < 64:
            boxes_.append([cx, cy, w, h, turned])
    expected = np.array(boxes_)
    expected = expected[rotated_kept(expected, range(len(expected)), 0.3)]
    assert 5 < len(expected) < len(boxes_)
    np.testing.assert_allclose(rois[:, 1:], expected, rtol=1e-5, atol=1e-4)


def expected_levels(rois: np.ndarray) -> np.ndarray:
    areas = (rois[:, 3] - rois[:, 1] + 1.0) * (rois[:, 4] - rois[:, 2] + 1.0)
    found: np.ndarray = np.clip(np.floor(3 + np.log2(np.sqrt(areas) / 30 + 1e-6)), 2, 4)
    return found


def test_proposals_are_collected_and_distributed() -> None:
    rois = [np.insert(boxes(9, 90), 0, level, 1).astype(np.float32) for level in range(3)]
    scores = [RNG.uniform(size=9).astype(np.float32) for _ in range(3)]
    collect = {"rpn_min_level": 2, "rpn_max_level": 4, "rpn_post_nms_topN": 20}
    distribute = {"roi_min_level": 2, "roi_max_level": 4, "roi_canonical_scale": 30, "roi_canonical_level": 3}
    [collected] = run_operator("CollectRpnProposals", [*rois, *scores], **collect)
    best = np.argsort(-np.concatenate(scores))[:20]
    np.testing.assert_array_equal(collected, np.concatenate(rois)[best])
    *parts, restore = run_operator("DistributeFpnProposals", [collected], 4, **distribute)
    of_level = expected_levels(collected)
    assert len(set(of_level)) == 3
    for level, part in zip((2, 3, 4), parts, strict=True):
        np.testing.assert_array_equal(part, collected[of_level == level])
    assert restore.dtype == np.int32
    np.testing.assert_array_equal(np.concatenate(parts)[restore], collected)
    both = run_operator("CollectAndDistributeFpnRpnProposals", [*rois, *scores], 5, **collect, **distribute)
    for one, other in zip(both, [collected, *parts, restore], strict=True):
        np.testing.assert_array_equal(one, other)


def test_boxes_that_do_not_fit_are_refused() -> None:
    scores, sizes, anchors = (
        np.zeros((1, 2, 3, 3), np.float32),
        np.ones((1, 3), np.float32),
        np.ones((3, 4), np.float32),
    )
    with pytest.raises(OperatorError, match="4 numbers for each anchor, or 5"):
        run_operator("GenerateProposals", [scores, scores.repeat(4, 1), sizes, anchors], 2)
    splits = np.array([2], np.float32)
    with pytest.raises(OperatorError, match="the splits"):
        run_operator("BoxWithNMSLimit", [scores.reshape(9, 2), np.ones((9, 8), np.float32), splits], 3)
    rois, levels = np.ones((3, 5), np.float32), {"rpn_min_level": 1, "rpn_max_level": 1}
    with pytest.raises(OperatorError, match="a score a box"):
        run_operator("CollectRpnProposals", [rois, splits], **levels)
