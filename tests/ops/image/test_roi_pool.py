"""Pooled and rotated regions against loops over pixels; rows of batches as Detectron moves them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(37)
X = RNG.normal(size=(2, 12, 9, 11)).astype(np.float32)
ROIS = np.array([[0, 1, 2, 12, 15], [1, -3.0, 4, 30, 9], [1, 5, 5, 5.5, 5.2], [0, 40, 40, 50, 50]], np.float32)
SIZES = {"pooled_h": 3, "pooled_w": 4, "spatial_scale": 0.5}


def rounded(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def part(start: int, end: int, place: int, count: int, size: int) -> range:
    length = max(end - start + 1, 1)
    low, high = start + place * length // count, start - (-(place + 1) * length // count)
    return range(min(max(low, 0), size), min(max(high, 0), size))


@pytest.mark.parametrize("op_type", ["RoIPool", "RoIPoolF"])
def test_maxima_of_parts_of_regions(op_type: str) -> None:
    found, places = run_operator(op_type, [X, ROIS], 2, **SIZES)
    assert places.dtype == np.int32
    expected, wanted = np.zeros(found.shape), np.full(found.shape, -1)
    for n, roi in enumerate(ROIS):
        x1, y1, x2, y2 = (rounded(float(value) * 0.5) for value in roi[1:])
        for c, i, j in np.ndindex(found.shape[1:]):
            rows, columns = part(y1, y2, i, 3, 9), part(x1, x2, j, 4, 11)
            for y in rows:
                for x in columns:
                    if wanted[n, c, i, j] < 0 or X[int(roi[0]), c, y, x] > expected[n, c, i, j]:
                        expected[n, c, i, j], wanted[n, c, i, j] = X[int(roi[0]), c, y, x], y * 11 + x
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(places, wanted)
    assert (wanted[3] == -1).all()
    dy = RNG.normal(size=found.shape).astype(np.float32)
    [dx] = run_operator(f"{op_type}Gradient", [X, ROIS, places, dy], **SIZES)
    slopes = np.zeros((2, 12, 99))
    for n, c, i, j in np.ndindex(found.shape):
        if wanted[n, c, i, j] >= 0:
            slopes[int(ROIS[n, 0]), c, wanted[n, c, i, j]] += dy[n, c, i, j]
    np.testing.assert_allclose(dx.reshape(slopes.shape), slopes, rtol=1e-5, atol=1e-6)


def test_regions_that_do_not_fit_are_refused() -> None:
    [alone] = run_operator("RoIPool", [X, ROIS], is_test=1, **SIZES)
    assert alone.shape == (4, 12, 3, 4)
    with pytest.raises(ShapeError, match="with is_test=1 there must be 1 output"):
        run_operator("RoIPool", [X, ROIS], 2, is_test=1)
    with pytest.raises(ArgumentError, match="'order' must be NCHW"):
        run_operator("RoIPool", [X, ROIS], 2, order="NHWC")
    with pytest.raises(OperatorError, match="one of 99 pixels"):
        run_operator("RoIPoolGradient", [X, ROIS, np.full(alone.shape, 99, np.int32), alone], **SIZES)
    for op_type in ("RoIPool", "PSRoIPool"):
        arguments = {"group_size": 2, "output_dim": 3} if op_type == "PSRoIPool" else {}
        with pytest.raises(OperatorError, match="there are 2"):
            run_operator(op_type, [X, ROIS + np.array([1, 0, 0, 0, 0], np.float32)], 2, **arguments)
        with pytest.raises(OperatorError, match="regions must be numbers"):
            run_operator(op_type, [X, ROIS * np.float32(np.nan)], 2, **arguments)
    with pytest.raises(ShapeError, match="3 \\* 3\\^2 channels, found 12"):
        run_operator("PSRoIPool", [X, ROIS], 2, group_size=3, output_dim=3)
    for op_type in ("RoIAlign", "RoIAlignRotated"):
        sides = [-4.0, 2.0] if op_type == "RoIAlignRotated" else [-4.0, 5.0]
        rois = np.array([[3.0, 4.0, *sides, 0.0][: 5 if op_type == "RoIAlignRotated" else 4]], np.float32)
        with pytest.raises(OperatorError, match="must not have negative sides"):
            run_operator(op_type, [X, rois], aligned=1)


def test_means_of_parts_of_regions_each_of_its_channel() -> None:
    arguments = {"group_size": 2, "output_dim": 3, "spatial_scale": 0.5}
    found, channels = run_operator("PSRoIPool", [X, ROIS], 2, **arguments)
    dy = RNG.normal(size=found.shape).astype(np.float32)
    [dx] = run_operator("PSRoIPoolGradient", [X, ROIS, channels, dy], **arguments)
    slopes = np.zeros(X.shape)
    for n, c, i, j in np.ndindex(4, 3, 2, 2):
        x1, y1, x2, y2 = (rounded(float(value)) for value in ROIS[n, 1:])
        rows, columns = (
            range(
                min(max(math.floor(low / 2 + place * length / 2), 0), size),
                min(max(math.ceil(low / 2 + (place + 1) * length / 2), 0), size),
            )
            for low, length, place, size in (
                (y1, max((y2 + 1 - y1) / 2, 0.1), i, 9),
                (x1, max((x2 + 1 - x1) / 2, 0.1), j, 11),
            )
        )
        channel, image = c * 4 + i * 2 + j, int(ROIS[n, 0])
        assert channels[n, c, i, j] == channel
        pixels = [X[image, channel, y, x] for y in rows for x in columns]
        np.testing.assert_allclose(found[n, c, i, j], np.mean(pixels) if pixels else 0, rtol=1e-5, atol=1e-6)
        for y in rows:
            for x in columns:
                slopes[image, channel, y, x] += dy[n, c, i, j] / len(pixels)
    np.testing.assert_allclose(dx, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("aligned", "ratio"), [(0, -1), (1, 2)])
def test_rotated_regions_are_means_of_samples(order: str, aligned: int, ratio: int) -> None:
    rois = np.array([[0, 9, 8, 7, 5, 30], [1, 4, 3, 9, 12, -120], [1, 10, 9, 0.1, 0.2, 0]], np.float32)
    arguments = {**SIZES, "sampling_ratio": ratio, "aligned": aligned, "order": order}
    last = order == "NHWC"
    x = np.ascontiguousarray(np.moveaxis(X, 1, -1)) if last else X
    [found] = run_operator("RoIAlignRotated", [x, rois], **arguments)
    dy = RNG.normal(size=found.shape).astype(np.float32)
    [dx] = run_operator("RoIAlignRotatedGradient", [x, rois, dy], **arguments)
    expected, slopes = np.zeros((3, 12, 3, 4)), np.zeros(X.shape)
    given = np.moveaxis(dy, -1, 1) if last else dy
    for n, (image, *numbers, degrees) in enumerate(rois.astype(float)):
        x_, y_, wide, high = (value * 0.5 for value in numbers)
        if aligned:
            x_, y_ = x_ - 0.5, y_ - 0.5
        else:
            wide, high = max(wide, 1), max(high, 1)
        down, right = (ratio, ratio) if ratio > 0 else (math.ceil(high / 3), math.ceil(wide / 4))
        for i, j, k, m in np.ndindex(3, 4, down, right):
            a = (j + (m + 0.5) / right) * wide / 4 - wide / 2
            b = (i + (k + 0.5) / down) * high / 3 - high / 2
            turn = complex(a, -b) * np.exp(1j * math.radians(degrees))  # up is the imaginary axis
            px, py = x_ + turn.real, y_ - turn.imag
            if not (-1 <= px <= 11 and -1 <= py <= 9):
                continue
            px, py = min(max(px, 0), 10), min(max(py, 0), 8)
            for row in range(int(py), min(int(py) + 1, 8) + 1):
                for column in range(int(px), min(int(px) + 1, 10) + 1):
                    share = (1 - abs(py - row)) * (1 - abs(px - column)) / (down * right)
                    expected[n, :, i, j] += share * X[int(image), :, row, column]
                    slopes[int(image), :, row, column] += share * given[n, :, i, j]
    np.testing.assert_allclose(np.moveaxis(found, -1, 1) if last else found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.moveaxis(dx, -1, 1) if last else dx, slopes, rtol=1e-4, atol=1e-5)


def test_an_angle_of_zero_is_upright() -> None:
    upright = np.array([[0, 1, 2, 12, 15]], np.float32)
    rotated = np.array([[0, 6.5, 8.5, 11, 13, 0]], np.float32)
    [expected] = run_operator("RoIAlign", [X, upright], **SIZES)
    [found] = run_operator("RoIAlignRotated", [X, rotated], **SIZES)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_a_batch_are_permuted_chosen_and_images_cut() -> None:
    order, labels = np.array([2, 0, 1], np.int32), np.array([0, 3, 1], np.int32)
    x = X.reshape(24, 9, 11)[:3]
    [permuted] = run_operator("BatchPermutation", [x, order])
    np.testing.assert_array_equal(permuted, np.stack([x[2], x[0], x[1]]))
    [back] = run_operator("BatchPermutationGradient", [order, permuted])
    np.testing.assert_array_equal(back, x)
    with pytest.raises(OperatorError, match="numbers of rows, 0 to 2"):
        run_operator("BatchPermutation", [x, order + np.int32(1)])
    [chosen] = run_operator("SampleAs", [x, labels])
    np.testing.assert_array_equal(chosen, x[1:])
    [zeros] = run_operator("SampleAsGradient", [x, labels, chosen])
    np.testing.assert_array_equal(zeros, np.stack([0 * x[0], x[1], x[2]]))
    [cut] = run_operator("SpatialNarrowAs", [X, x[:2, :7, :5]])
    np.testing.assert_array_equal(cut, X[:, :, :7, :5])
    with pytest.raises(ShapeError, match="no more rows or columns"):
        run_operator("SpatialNarrowAs", [x, np.zeros((3, 9, 12), np.float32)])
