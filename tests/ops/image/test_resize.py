"""Resize: random forms of ONNX's operator against onnxruntime or onnx's reference, both engines, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import dagexec
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.families.image.resize import COORDINATES, ROUNDINGS
from tests.ops.running import run_operator

PLACES = sorted(COORDINATES.keys() - {"tf_half_pixel_for_nn"})  # that one left the standard with opset 13


def drawn_node(seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Attributes of a Resize of opset 19, and its inputs by name: x, roi, scales or sizes."""
    rng = np.random.default_rng(seed)
    mode = ["nearest", "linear", "cubic"][seed % 3]
    rank = 4 if mode == "cubic" else int(rng.integers(2, 6))
    shape = [2, 3, *rng.integers(2, 9, rank - 2)] if rank > 2 else rng.integers(2, 9, 2)
    axes = [rank - 2, rank - 1]
    attributes: dict[str, Any] = {
        "mode": mode,
        "axes": axes,
        "coordinate_transformation_mode": PLACES[seed // 3 % len(PLACES)],
        "nearest_mode": str(rng.choice(list(ROUNDINGS))),
        "exclude_outside": int(mode == "cubic" and rng.integers(2)),
    }
    feeds = {"x": rng.standard_normal(shape).astype(np.float32), "roi": np.zeros(0, np.float32)}
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        feeds["roi"] = np.array([*rng.uniform(0, 0.4, 2), *rng.uniform(0.5, 1.2, 2)], np.float32)
        attributes["extrapolation_value"] = -7.0
    elif rng.random() < 0.3 and mode != "nearest" and rank == 4:
        attributes |= {"antialias": 1, "exclude_outside": 1}
    if rng.random() < 0.5:
        feeds["scales"] = rng.choice([0.5, 2, 1.5, 3, 0.75], 2).astype(np.float32)
    else:
        feeds["sizes"] = rng.integers(1, 16, 2)
        attributes["keep_aspect_ratio_policy"] = str(rng.choice(["stretch", "not_larger", "not_smaller"]))
    return attributes, feeds


def is_the_standards_own(attributes: dict[str, Any]) -> bool:
    """True where onnxruntime rounds the output size first (align_corners), or reads roi of other axes."""
    return attributes["coordinate_transformation_mode"] in ("align_corners", "tf_crop_and_resize")


@pytest.mark.parametrize("seed", range(90))
def test_resize_computes_what_onnx_says(seed: int) -> None:
    attributes, feeds = drawn_node(seed)
    names = ["x", "roi", "scales" if "scales" in feeds else "", "sizes" if "sizes" in feeds else ""]
    node = helper.make_node("Resize", names, ["y"], **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)
    if is_the_standards_own(attributes):
        [expected] = ReferenceEvaluator(model).run(None, feeds)
    else:
        [expected] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run(feeds)["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.float16, np.float64])
def test_other_types_are_computed_in_wider_ones_and_cut_off(dtype: Any) -> None:
    x = np.array([[[0, 100, 50, 120]]]).astype(dtype)
    (found,) = run_operator("Resize", [x], mode="cubic", sizes=[1, 1, 9])
    (exact,) = run_operator("Resize", [x.astype(np.float64)], mode="cubic", sizes=[1, 1, 9])
    if np.dtype(dtype).kind in "iu":
        exact = np.trunc(exact.clip(np.iinfo(dtype).min, np.iinfo(dtype).max))
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2e-3)


def test_nearest_takes_any_type() -> None:
    (found,) = run_operator("Resize", [np.array([True, False])], sizes=[4])
    np.testing.assert_array_equal(found, [True, True, False, False])


@pytest.mark.skipif(library() is None, reason="needs oneDNN")
@pytest.mark.parametrize("sizes", [(9,), (5, 14), (14, 3), (4, 6, 11)])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners"])
def test_both_engines_agree(sizes: tuple[int, ...], mode: str, coordinates: str) -> None:
    x = np.random.default_rng(3).standard_normal((2, 16, 7, 7, 7)[: 2 + len(sizes)]).astype(np.float32)
    arguments: dict[str, Any] = {"mode": mode, "coordinates": coordinates, "sizes": [2, 16, *sizes]}
    (expected,) = run_operator("Resize", [x], **arguments)
    (found,) = run_operator("Resize", [x], engine="ONEDNN", **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sizes": [1, 2]}, "3 sizes are needed"),
    ({"scales": [1.0, 1.0, 0.0]}, "a scale must be a positive number, found 0.0"),
    ({"scales": [1.0, 1.0, float("inf")]}, "a scale must be a positive number"),
    ({"sizes": [1, 2, -3]}, "axis 2 cannot have -3 elements"),
    ({"sizes": [1 << 30, 1 << 30, 1 << 30]}, "bytes|overflows"),
    ({"sizes": [1, 2, 3], "axes": [0, 1, 1]}, "'axes' must be different axes"),
    ({"sizes": [4], "axes": [3]}, "'axes' must be different axes of a tensor of 3"),
    ({"sizes": [1, 2, 3], "mode": "spline"}, "'mode' must be one of nearest, linear, cubic"),
    ({"sizes": [1, 2, 3], "coordinates": "corners"}, "'coordinates' must be one of"),
    ({"sizes": [1, 2, 3], "rounding": "up"}, "'rounding' must be one of"),
    ({"sizes": [1, 2, 3], "coordinates": "tf_crop_and_resize"}, "tf_crop_and_resize needs the argument 'roi'"),
    ({"sizes": [1, 2, 3], "roi": [0.0] * 5 + [float("nan")], "coordinates": "tf_crop_and_resize"}, "'roi' must be num"),
    ({"sizes": [1, 2, 3], "scales_input": 1}, "its arguments ask for 2 inputs, found 1"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=rf"Resize 'y0'.*({message})"):
        run_operator("Resize", [np.zeros((1, 2, 3), np.float32)], **arguments)


def test_an_axis_without_elements_can_only_stay_so() -> None:
    empty = np.zeros((2, 0), np.float32)
    assert run_operator("Resize", [empty], mode="linear", sizes=[5, 0])[0].shape == (5, 0)
    with pytest.raises(DagexecError, match="axis 1 has no elements to make 3 of"):
        run_operator("Resize", [empty], sizes=[2, 3])
