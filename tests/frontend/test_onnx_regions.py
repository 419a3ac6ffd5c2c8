"""Operators on images and regions in random forms of ONNX's, against onnxruntime or onnx's reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.schema import OperatorCall
from dagexec.errors import DagexecError
from dagexec.ops.families.image import regions
from tests.frontend.one_node import Array, assert_same, by_onnxruntime, by_reference, computed, feeds_of, one_node
from tests.ops.running import run_operator


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample_computes_what_onnxruntime_does(mode: str, padding: str, aligned: int) -> None:
    rng = np.random.default_rng(1)
    attributes = {"padding_mode": padding, "align_corners": aligned}
    for sizes in ((5, 6),) if mode == "cubic" else ((5, 6), (3, 4, 5)):
        inputs = [normal(rng, 2, 3, *sizes), normal(rng, 2, *(4, 5, 3)[: len(sizes)], len(sizes))]
        model = one_node("GridSample", 20, inputs, mode=mode, **attributes)
        assert_same(computed(model, inputs), by_onnxruntime(model, inputs), atol=1e-4)


def test_places_that_are_no_numbers_are_outside() -> None:
    grid = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0], np.float32)
    x = np.ones((1, 1, 3, 3), np.float32)
    (found,) = run_operator("GridSample", [x, np.stack([grid, np.zeros_like(grid)], -1).reshape(1, 1, 6, 2)])
    np.testing.assert_array_equal(found.ravel()[-1:], [1])
    assert not found.ravel()[:-1].any()


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 2, 4, 3, 2)])
def test_affine_grid_computes_what_onnx_says(aligned: int, size: tuple[int, ...]) -> None:
    dims = len(size) - 2
    inputs = [normal(np.random.default_rng(2), size[0], dims, dims + 1), np.array(size)]
    model = one_node("AffineGrid", 20, inputs, align_corners=aligned)
    assert_same(computed(model, inputs), by_reference(model, inputs))


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("places", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_computes_what_onnxruntime_does(mode: str, places: str, ratio: int) -> None:
    rng = np.random.default_rng(3)
    corners = rng.uniform(-3, 14, (5, 2, 2)).astype(np.float32)
    regions = np.concatenate([corners.min(1), corners.max(1)], -1)
    inputs = [normal(rng, 2, 3, 9, 10), regions, rng.integers(0, 2, 5)]
    attributes = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.8}
    model = one_node("RoiAlign", 16, inputs, mode=mode, coordinate_transformation_mode=places, **attributes)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


def test_a_region_outside_of_the_image_is_zero() -> None:
    image = normal(np.random.default_rng(4), 1, 3, 9, 10)
    regions = np.float32([[20, 20, 25, 25], [-9, 0, -5, 4], [1, 2, 5, 6]])
    inputs = [image, regions, np.zeros(3, np.int64)]
    model = one_node("RoiAlign", 16, inputs, output_height=2, output_width=2, sampling_ratio=2)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


def test_without_regions_nothing_is_aligned() -> None:
    inputs = [normal(np.random.default_rng(4), 1, 3, 9, 10), np.zeros((0, 4), np.float32), np.zeros(0, np.int64)]
    model = one_node("RoiAlign", 16, inputs, output_height=2, output_width=2)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


def test_max_roi_pool_computes_what_onnxruntime_does() -> None:
    rng = np.random.default_rng(4)
    corners = np.sort(rng.uniform(0, 18, (6, 2, 2)), 1).reshape(6, 4)
    regions = np.concatenate([rng.integers(0, 2, (6, 1)), corners], 1).astype(np.float32)
    inputs = [normal(rng, 2, 3, 9, 10), regions]
    model = one_node("MaxRoiPool", 22, inputs, pooled_shape=[3, 2], spatial_scale=0.5)
    older = one_node("MaxRoiPool", 1, inputs, pooled_shape=[3, 2], spatial_scale=0.5)
    assert_same(computed(model, inputs), by_onnxruntime(older, inputs))


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("limits", [(), (3,), (50, 0.4), (50, 0.3, 0.2), (2, None, 0.5)])
def test_boxes_are_selected_as_onnxruntime_does(center: int, limits: tuple[float | None, ...]) -> None:
    rng = np.random.default_rng(5)
    types = (np.int64, np.float32, np.float32)
    given = [None if one is None else np.array([one], kind) for one, kind in zip(limits, types, strict=False)]
    inputs = [rng.random((2, 40, 4)).astype(np.float32), rng.random((2, 3, 40)).astype(np.float32), *given]
    model = one_node("NonMaxSuppression", 11, inputs, center_point_box=center)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


@pytest.mark.parametrize("limits", [(10, 0.4), (3000, 0.3), (3000, 0.1, 0.5)])
def test_boxes_of_classes_that_lie_apart_are_selected_as_onnxruntime_does(limits: tuple[float, ...]) -> None:
    types = (np.int64, np.float32, np.float32)
    inputs = [*_in_places(30, 20), *(np.array([one], kind) for one, kind in zip(limits, types, strict=False))]
    model = one_node("NonMaxSuppression", 11, inputs)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


def test_boxes_that_are_no_numbers_suppress_none_and_keep_none_apart() -> None:
    boxes, scores = _in_places(4, 5)
    lost = [2, 3, 13]
    scores[..., lost] = [4, 3, 2]
    boxes[0, lost, [0, 1, 3]] = np.nan
    others = np.delete(np.arange(20), lost)
    found, of_others = (_numbers(*one)[0] for one in ((boxes, scores), (boxes[:, others], scores[..., others])))
    assert found.tolist() == [*lost, *others[of_others]]


def test_boxes_are_compared_with_those_of_their_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    overlap = regions._overlap

    def counting(boxes: Array, others: Array, limit: float) -> Array:
        compared.append(boxes.shape[1] * others.shape[1])
        return overlap(boxes, others, limit)

    monkeypatch.setattr(regions, "_overlap", counting)
    _numbers(*_in_places(50, 20))
    assert 0 < sum(compared) <= 50 * 20 * 20


def test_boxes_are_selected_once_for_all_runs_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, scores = _in_places(3, 20)
    selections: list[int] = []
    select = regions._selected

    def counting(call: OperatorCall) -> Array:
        found = select(call)
        selections.append(len(found))
        return found

    monkeypatch.setattr(regions, "_selected", counting)
    first, again, other = _numbers(boxes, scores, runs=(scores, scores, -scores))
    assert selections == [len(first), len(other)]
    assert first.tolist() == again.tolist() != other.tolist()


def _numbers(boxes: Array, scores: Array, runs: Sequence[Array] = ()) -> list[Array]:
    """The numbers of the boxes that each run selects, of all, which may not overlap by more than 0.2."""
    inputs = [boxes, scores, np.array([scores.size]), np.array([0.2], np.float32)]
    with dagexec.compile(one_node("NonMaxSuppression", 11, inputs)) as executor:
        found = [executor.run(feeds_of([boxes, one, *inputs[2:]])) for one in runs or (scores,)]
    return [one["y0"][:, 2] for one in found]


def _in_places(places: int, boxes: int) -> list[Array]:
    """Boxes and scores: boxes lie in so many places apart from another, in random order, as of so many classes."""
    rng = np.random.default_rng(6)
    low = rng.random((places, boxes, 2)) + 3 * np.arange(places)[:, None, None]
    found = np.concatenate([low, low + rng.random((places, boxes, 2))], -1).reshape(-1, 4)
    return [rng.permutation(found)[None].astype(np.float32), rng.random((1, 1, places * boxes)).astype(np.float32)]


@pytest.mark.parametrize("seed", range(6))
def test_deformed_convolutions_compute_what_onnxruntime_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group, offset_group = 1 + seed % 2, 1 + seed // 2 % 2
    attributes: dict[str, Any] = {"strides": [1 + seed % 2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 1 + seed % 2]}
    high = (6 + 2 - 2) // attributes["strides"][0] + 1
    wide = 7 + 2 - attributes["dilations"][1] * 2
    inputs: list[Array | None] = [
        normal(rng, 2, 4, 6, 7),
        normal(rng, 6, 4 // group, 2, 3),
        normal(rng, 2, offset_group * 12, high, wide) * 2,
        normal(rng, 6) if seed % 3 else None,
        normal(rng, 2, offset_group * 6, high, wide) if seed % 2 else None,
    ]
    model = one_node("DeformConv", 19, inputs, group=group, offset_group=offset_group, **attributes)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs), atol=1e-4)


@pytest.mark.parametrize(
    ("image", "block", "attributes"),
    [
        ([7], [3], {"strides": [2], "pads": [1, 1]}),
        ([5, 6], [2, 3], {"dilations": [2, 1], "pads": [0, 1, 1, 0]}),
        ([3, 4, 5], [1, 2, 2], {}),
    ],
)
def test_columns_are_added_up_as_onnx_says(image: list[int], block: list[int], attributes: dict[str, Any]) -> None:
    rank = len(image)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    pads = attributes.get("pads", [0] * (2 * rank))
    counts = [
        (image[i] + pads[i] + pads[rank + i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    x = normal(np.random.default_rng(6), 2, 3 * int(np.prod(block)), int(np.prod(counts)))
    inputs = [x, np.array(image), np.array(block)]
    model = one_node("Col2Im", 18, inputs, **attributes)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


def test_maxima_go_back_to_where_they_were() -> None:
    x = normal(np.random.default_rng(7), 2, 3, 6, 8)
    pooling = one_node("MaxPool", 12, [x], 2, kernel_shape=[2, 3], strides=[2, 3], pads=[0, 0, 0, 1])
    maxima, places = by_onnxruntime(pooling, [x])
    model = one_node("MaxUnpool", 11, [maxima, places], kernel_shape=[2, 3], strides=[2, 3], pads=[0, 0, 0, 1])
    [found] = computed(model, [maxima, places])
    assert_same([found], by_onnxruntime(model, [maxima, places]))
    np.testing.assert_array_equal(found[found != 0], x[found != 0])


IMAGE = np.zeros((1, 2, 4, 4), np.float32)
COLUMNS = np.zeros((1, 4, 9), np.float32)
WRONG: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("RoiAlign", [IMAGE, np.zeros((1, 4), np.float32), np.array([1])], {}, "a region is of image 1 to 1; there are 1"),
    ("RoiAlign", [IMAGE, np.full((1, 4), np.nan, np.float32), np.array([0])], {}, "a region must be numbers"),
    ("RoiAlign", [IMAGE, np.array([[0, 0, 1e12, 1]], np.float32), np.array([0])], {}, "is too large to be sampled"),
    ("RoiAlign", [IMAGE, np.zeros((1, 4), np.float32), np.array([0])], {"output_width": 0}, "must have pixels"),
    ("RoiAlign", [IMAGE, np.zeros((1, 4), np.float32), np.array([0])], {"output_width": 1 << 60}, "bytes|overflows"),
    ("MaxRoiPool", [IMAGE, np.array([[-1, 0, 0, 1, 1]], np.float32)], {"pooled_shape": [2, 2]}, "a region is of image"),
    ("GridSample", [IMAGE, np.zeros((1, 2, 2, 3), np.float32)], {}, "as many coordinates"),
    ("GridSample", [IMAGE, np.zeros((1, 2, 2, 2), np.float32)], {"mode": "area"}, "'mode' must be one of linear"),
    ("AffineGrid", [np.zeros((1, 2, 3)), np.array([1, 1, -2, 2])], {}, "the size must be 4 or 5 numbers"),
    ("NonMaxSuppression", [np.zeros((1, 3, 4)), np.zeros((1, 2, 4))], {}, "batch, classes, boxes"),
    ("ColumnsToImage", [COLUMNS, np.array([4, 4]), np.array([2, 2])], {"strides": [0, 1]}, "do not fit"),
    ("ColumnsToImage", [COLUMNS, np.array([4, 4]), np.array([2, 3])], {}, "expected a multiple of 6 rows"),
    ("ColumnsToImage", [COLUMNS, np.array([4, 0]), np.array([2, 2])], {}, "sizes must be at least 1"),
    ("MaxUnpool", [IMAGE, np.full(IMAGE.shape, 99)], {"kernel_shape": [1, 1]}, r"a place must be in \[0, 31\]"),
    ("MaxUnpool", [IMAGE, np.zeros(IMAGE.shape, int), np.array([1, 2, 3, 4])], {"kernel_shape": [1, 1]}, "at least"),
    ("MaxUnpool", [IMAGE, np.zeros(IMAGE.shape, int)], {"kernel_shape": [1, 1], "pads": [2] * 4}, "leave nothing"),
    ("DeformConv", [IMAGE, IMAGE[:, :, :2, :2], IMAGE], {}, "offsets of the taps"),
    ("DeformConv", [IMAGE, IMAGE[:, :, :2, :2], IMAGE], {"group": 3}, "groups 3 and 1 do not fit"),
]


@pytest.mark.parametrize(("op_type", "inputs", "arguments", "message"), WRONG)
def test_what_does_not_fit_is_refused(op_type: str, inputs: list[Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=f"{op_type} 'y0'.*({message})"):
        run_operator(op_type, inputs, **arguments)
