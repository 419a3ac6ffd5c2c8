"""Boxes of detectors, as Caffe2 has them: moved by deltas, clipped to images, suppressed where they overlap.

A box is x1, y1, x2, y2. Its last pixel belongs to it where `one` is 1 (`legacy_plus_one`): a width is x2 - x1 + 1. A
rotated box is the center's x and y, width, height and an angle in degrees.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.ops.base.blocks import Array
from dagexec.ops.families.image.rotated_boxes import rotated_overlaps

LARGEST_LOG = math.log(1000 / 16)
"""The logarithm of how often a delta multiplies a side at most."""

PLUS_ONE_HELP = "1: the last pixel of a box belongs to it (default 1)"


def moved(boxes: Array, deltas: Array, weights: tuple[float, ...], one: int) -> Array:
    """Boxes whose centers and sides are changed by deltas, each divided by its weight."""
    sides = boxes[:, 2:] - boxes[:, :2] + one
    centers, sides = _moved(boxes[:, :2] + sides / 2, sides, deltas, weights)
    return np.concatenate([centers - sides / 2, centers + sides / 2 - one], 1)


def moved_rotated(boxes: Array, deltas: Array, weights: tuple[float, ...], bounds: tuple[float, float] | None) -> Array:
    """As `moved`, with a delta of the angle, in radians; angles outside of the bounds are turned by their distance."""
    centers, sides = _moved(boxes[:, :2], boxes[:, 2:4], deltas, weights)
    angles = boxes[:, 4] + np.degrees(deltas[:, 4])
    if bounds is not None:
        low, high = bounds
        angles = np.where(angles < low, angles + (high - low), np.where(angles > high, angles - (high - low), angles))
    return np.concatenate([centers, sides, angles[:, None]], 1)


def _moved(centers: Array, sides: Array, deltas: Array, weights: tuple[float, ...]) -> tuple[Array, Array]:
    scaled = deltas[:, :4] / np.asarray(weights)
    return centers + scaled[:, :2] * sides, sides * np.exp(np.minimum(scaled[:, 2:], LARGEST_LOG))


def clipped(boxes: Array, height: float, width: float, one: int) -> Array:
    """Boxes within an image."""
    most = np.maximum(np.asarray([width, height] * 2) - one, 0)
    found: Array = np.minimum(np.maximum(boxes, 0), most)
    return found


def clipped_rotated(boxes: Array, height: float, width: float, angle: float, one: int) -> Array:
    """Boxes that are turned by no more than `angle` are clipped as if they were upright."""
    half = (boxes[:, 2:4] - one) / 2
    upright = clipped(np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1), height, width, one)
    sides = upright[:, 2:] - upright[:, :2] + one
    within = np.concatenate([(upright[:, :2] + upright[:, 2:]) / 2, sides, boxes[:, 4:]], 1)
    return np.where(np.abs(boxes[:, 4:]) <= angle, within, boxes)


def suppressed(boxes: Array, order: Array, limit: float, one: int, most: int = -1) -> Array:
    """Of the boxes `order` those that no earlier one overlaps by more than `limit`; at most `most`, if it is not -1."""
    kept: list[int] = []
    while order.size and len(kept) != most:
        first, order = order[0], order[1:]
        kept.append(first)
        order = order[overlaps(boxes[first], boxes[order], one) <= limit]
    return np.asarray(kept, np.intp)


def softly_suppressed(
    boxes: Array, scores: Array, order: Array, limit: float, one: int, method: str, sigma: float, least: float
) -> tuple[Array, Array]:
    """Boxes in the order in which they are the best, and all scores, lowered for overlaps with better boxes.

    Those whose score falls below `least` are gone. Bodla et al., 2017, arXiv:1704.04503.
    """
    scores, kept = scores.copy(), []
    while order.size:
        place = int(np.argmax(scores[order]))
        best, order = order[place], np.delete(order, place)
        kept.append(best)
        shared = overlaps(boxes[best], boxes[order], one)
        if method == "gaussian":
            scores[order] *= np.exp(-(shared**2) / sigma)
        else:
            scores[order] *= np.where(shared > limit, 1 - shared, 1)
        order = order[scores[order] >= least]
    return np.asarray(kept, np.intp), scores


def overlaps(box: Array, others: Array, one: int) -> Array:
    """Intersection over union of a box with each of others."""
    if box.size == 5:
        return rotated_overlaps(box, others)
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = np.maximum(high - low + one, 0).prod(1)
    areas = (others[:, 2:] - others[:, :2] + one).prod(1) + (box[2:] - box[:2] + one).prod() - shared
    found: Array = np.divide(shared, areas, out=np.zeros_like(shared), where=areas > 0)
    return found


def by_score(scores: Array, most: int = 0) -> Array:
    """Places of the scores, the highest first, of equal ones the first; at most `most`, if any."""
    order = np.argsort(-scores, kind="stable")
    return order[:most] if most > 0 else order
