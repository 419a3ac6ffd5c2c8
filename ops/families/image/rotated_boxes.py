"""How much rotated boxes overlap. A box is the center's x and y, width, height and an angle in degrees."""

from __future__ import annotations

import numpy as np

from dagexec.ops.base.blocks import Array

_CLOSE = 1e-9
"""Of a box's longer side, how far from it a corner still counts as inside; and the least sine of crossing lines."""


def rotated_overlaps(box: Array, others: Array) -> Array:
    """Intersection over union of a box with each of others, in float64."""
    shared = _intersections(box[None], others)
    union = box[2] * box[3] + others[:, 2] * others[:, 3] - shared
    found: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return found


def _corners(boxes: Array) -> Array:
    """Boxes x 4 x 2, one after another around each box."""
    angles = np.radians(boxes[:, 4])
    right = np.stack([np.cos(angles), np.sin(angles)], 1) * boxes[:, 2:3] / 2
    up = np.stack([-np.sin(angles), np.cos(angles)], 1) * boxes[:, 3:4] / 2
    offsets = np.stack([right + up, up - right, -right - up, right - up], 1)
    found: Array = boxes[:, None, :2] + offsets
    return found


def _inside(points: Array, boxes: Array) -> Array:
    """Which points, boxes x points x 2, are in their box."""
    offsets, angles = points - boxes[:, None, :2], np.radians(boxes[:, 4:])
    right = offsets[..., 0] * np.cos(angles) + offsets[..., 1] * np.sin(angles)
    up = offsets[..., 1] * np.cos(angles) - offsets[..., 0] * np.sin(angles)
    half = boxes[:, 2:4] / 2 + _CLOSE * boxes[:, 2:4].max(1, initial=0, keepdims=True)
    found: Array = (np.abs(right) <= half[:, :1]) & (np.abs(up) <= half[:, 1:])
    return found


def _cross(a: Array, b: Array) -> Array:
    found: Array = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return found


def _intersections(box: Array, others: Array) -> Array:
    """The areas that others share with a box: of the polygon of corners in the other box and of crossings of sides."""
    first, rest = _corners(box).repeat(len(others), 0), _corners(others)
    along, across = (np.roll(corners, -1, 1) - corners for corners in (first, rest))
    sine = _cross(along[:, :, None], across[:, None])
    sines = np.linalg.norm(along, axis=2)[:, :, None] * np.linalg.norm(across, axis=2)[:, None]
    crossing = np.abs(sine) > _CLOSE * sines
    gap, divisor = rest[:, None] - first[:, :, None], np.where(crossing, sine, 1)
    t, u = _cross(gap, across[:, None]) / divisor, _cross(gap, along[:, :, None]) / divisor
    crossing &= (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    crossings = first[:, :, None] + t[..., None] * along[:, :, None]
    points = np.concatenate([first, rest, crossings.reshape(len(others), 16, 2)], 1)
    among = np.concatenate(
        [_inside(first, others), _inside(rest, box.repeat(len(others), 0)), crossing.reshape(len(others), 16)], 1
    )
    count = among.sum(1)
    center = (points * among[..., None]).sum(1) / np.maximum(count, 1)[:, None]
    points = np.where(among[..., None], points - center[:, None], 0)
    order = np.argsort(np.where(among, np.arctan2(points[..., 1], points[..., 0]), np.inf), 1, kind="stable")
    points = np.take_along_axis(points, order[..., None], 1)
    points = np.where((np.arange(24) < count[:, None])[..., None], points, points[:, :1])
    found: Array = np.abs(_cross(points, np.roll(points, -1, 1)).sum(1)) / 2
    return found
