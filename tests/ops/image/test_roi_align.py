"""RoIAlign, UpsampleNearest and HeatmapMaxKeypoint against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(23)
X = RNG.normal(size=(2, 3, 9, 11)).astype(np.float32)
ROIS = np.array([[0, 1, 2, 12, 14], [1, -3, 4, 30, 9], [1, 5, 5, 5.5, 5.2], [0, 40, 40, 50, 50]], np.float32)
SIZES = {"pooled_h": 3, "pooled_w": 4, "spatial_scale": 0.5}


def weights(roi: np.ndarray, ratio: int, aligned: int) -> np.ndarray:
    """Of each pixel of a region, in order, how much of each pixel of the image is in it."""
    x1, y1, x2, y2 = roi[1:].astype(np.float64) * 0.5 - (0.5 if aligned else 0)
    wide, high = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1), max(y2 - y1, 1))
    found = np.zeros((3, 4, 9, 11))
    for i in range(3):
        for j in range(4):
            rows, columns = ratio or math.ceil(high / 3), ratio or math.ceil(wide / 4)
            for n in range(rows * columns):
                y = y1 + high / 3 * (i + (n // columns + 0.5) / rows)
                x = x1 + wide / 4 * (j + (n % columns + 0.5) / columns)
                if not (-1 <= y <= 9 and -1 <= x <= 11):
                    continue
                y, x = min(max(y, 0), 8), min(max(x, 0), 10)
                low, left = int(y), int(x)
                for row, part in ((low, 1 - (y - low)), (min(low + 1, 8), y - low)):
                    for column, share in ((left, 1 - (x - left)), (min(left + 1, 10), x - left)):
                        found[i, j, row, column] += part * share / (rows * columns)
    return found


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_regions_are_means_of_samples(aligned: int, ratio: int, order: str) -> None:
    arguments = {**SIZES, "sampling_ratio": ratio, "aligned": aligned, "order": order}
    last = order == "NHWC"
    x = np.ascontiguousarray(np.moveaxis(X, 1, -1)) if last else X
    [found] = run_operator("RoIAlign", [x, ROIS], **arguments)
    by_pixel = [weights(roi, max(ratio, 0), aligned) for roi in ROIS]
    expected = np.stack(
        [np.einsum("ijhw,chw->cij", one, X[int(roi[0])]) for one, roi in zip(by_pixel, ROIS, strict=True)]
    )
    np.testing.assert_allclose(np.moveaxis(found, -1, 1) if last else found, expected, rtol=1e-5, atol=1e-5)
    dy = RNG.normal(size=found.shape).astype(np.float32)
    [dx] = run_operator("RoIAlignGradient", [x, ROIS, dy], **arguments)
    slopes = np.zeros(X.shape)
    for one, roi, slope in zip(by_pixel, ROIS, np.moveaxis(dy, -1, 1) if last else dy, strict=True):
        slopes[int(roi[0])] += np.einsum("ijhw,cij->chw", one, slope)
    np.testing.assert_allclose(np.moveaxis(dx, -1, 1) if last else dx, slopes, rtol=1e-5, atol=1e-5)


def test_a_region_has_the_same_bytes_in_any_batch_and_is_of_the_only_image_by_default() -> None:
    [together] = run_operator("RoIAlign", [X, ROIS], **SIZES)
    for number in range(len(ROIS)):
        [alone] = run_operator("RoIAlign", [X, ROIS[number : number + 1]], **SIZES)
        assert alone.tobytes() == together[number].tobytes()
    [first] = run_operator("RoIAlign", [X[:1], ROIS[:1, 1:]], **SIZES)
    assert first.tobytes() == together[0].tobytes()


def test_regions_of_no_image_are_refused() -> None:
    rois = ROIS.copy()
    rois[0, 0] = 2
    with pytest.raises(OperatorError, match="a region is of image 0 to 2; there are 2"):
        run_operator("RoIAlign", [X, rois], **SIZES)
    with pytest.raises(ShapeError, match="may have its image before them"):
        run_operator("RoIAlign", [X, ROIS[:, :3]], **SIZES)
    with pytest.raises(ArgumentError, match="'pooled_h' and 'pooled_w'"):
        run_operator("RoIAlign", [X, ROIS], pooled_h=0)


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_pixels_are_repeated(scale: int) -> None:
    [found] = run_operator("UpsampleNearest", [X], scale=scale)
    rows, columns = np.arange(9 * scale) // scale, np.arange(11 * scale) // scale
    np.testing.assert_array_equal(found, X[:, :, rows[:, None], columns])
    dy = RNG.normal(size=found.shape).astype(np.float32)
    expected = np.zeros(X.shape)
    np.add.at(expected, (slice(None), slice(None), rows[:, None], columns[None]), dy)
    [dx] = run_operator("UpsampleNearestGradient", [X, dy], scale=scale)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)


def test_keypoints_are_the_maxima_of_heatmaps() -> None:
    size, wanted = 12, np.array([[[4.3, 6.8], [7.0, 3.4]], [[5.5, 5.1], [8.2, 8.9]]])  # boxes, points, x and y
    grid = np.arange(size)
    x, y = wanted[..., 0, None, None], wanted[..., 1, None, None]
    squares = (grid - x) ** 2 + 1.5 * (grid[:, None] - y) ** 2
    maps = (5 - squares / 4).astype(np.float32)
    boxes = np.array([[10, 20, 34, 56], [0, 0, 0.5, 24]], np.float32)  # a side is 1 at least
    [found] = run_operator("HeatmapMaxKeypoint", [maps, boxes], should_output_softmax=1)
    low, sides = boxes[:, None, :2], np.array([[[24, 36]], [[1, 24]]]) / size
    np.testing.assert_allclose(found[:, :2].transpose(0, 2, 1), low + (wanted + 0.5) * sides, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found[:, 2], 5, rtol=1e-5)  # the maps are parabolas
    shares = np.exp(maps.astype(np.float64)).reshape(2, 2, -1)
    np.testing.assert_allclose(found[:, 3], shares.max(-1) / shares.sum(-1), rtol=1e-5)
    [without] = run_operator("HeatmapMaxKeypoint", [maps, boxes])
    np.testing.assert_array_equal(without, found * np.array([1, 1, 1, 0], np.float32)[:, None])
    flat = run_operator("HeatmapMaxKeypoint", [np.zeros((1, 1, 4, 4), np.float32), boxes[:1]], should_output_softmax=1)[
        0
    ]
    np.testing.assert_allclose(flat[0, :, 0], [10 + 0.5 * 6, 20 + 0.5 * 9, 0, 1 / 16], rtol=1e-6)
