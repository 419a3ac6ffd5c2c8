"""The gradients of ResizeNearest, ChannelShuffle, PadImage and Pad: against central differences."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import ShapeError
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]


def numbers(*shape: int) -> Array:
    return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("scales", [(2, 3), (1, 1), (1.5, 2.5), (0.5, 0.3), (2, 0.7), (3, 1.2)])
def test_resizing_gradients_equal_differences(order: str, scales: tuple[float, float]) -> None:
    x = numbers(2, 2, 4, 5)
    height, width = scales
    check_gradient("ResizeNearest", [x], height_scale=float(height), width_scale=float(width), order=order)
    check_gradient("ResizeNearest", [x, np.array(scales, np.float32)], wanted=[0], order=order)


def test_resizing_to_nothing_leaves_zeros() -> None:
    dy, x = np.ones((1, 1, 0, 3)), np.ones((1, 1, 1, 3))
    assert not run_operator("ResizeNearestGradient", [dy, x], height_scale=0.5)[0].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [50.0, 50.5])
def test_repeated_pixels_of_16_bits_are_summed_in_float32(dtype: Any, scale: float) -> None:
    size = int(2 * scale)
    dy = np.ones((1, 1, size, size), dtype)
    found = run_operator(
        "ResizeNearestGradient", [dy, np.ones((1, 1, 2, 2), dtype)], height_scale=scale, width_scale=scale
    )
    counts = np.bincount((np.arange(size) / scale).astype(int))
    np.testing.assert_array_equal(found[0][0, 0], np.outer(counts, counts).astype(dtype))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_shuffling_gradients_equal_differences(order: str, group: int) -> None:
    shape = (2, 6, 1, 2) if order == "NCHW" else (2, 1, 2, 6)
    check_gradient("ChannelShuffle", [numbers(*shape)], group=group, order=order)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_image_padding_gradients_equal_differences(mode: str, order: str) -> None:
    check_gradient("PadImage", [numbers(2, 3, 4, 2)], mode=mode, order=order, pads=[1, 1, 2, 0], value=3.0)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 4), st.integers(-1, 1), st.integers(-1, 1)), min_size=1, max_size=3),
    st.sampled_from(["constant", "reflect", "edge"]),
)
def test_padding_and_cutting_gradients_equal_differences(axes: list[tuple[int, int, int]], mode: str) -> None:
    heads, tails = [head for _, head, _ in axes], [tail for _, _, tail in axes]
    if mode == "reflect":
        heads = [head if size + min(0, head) + min(0, tail) > 1 else 0 for size, head, tail in axes]
    check_gradient("Pad", [numbers(*(size for size, _, _ in axes))], mode=mode, pads=[*heads, *tails])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_padding_shown_often_is_summed_in_float32(dtype: Any) -> None:
    found = run_operator("PadGradient", [np.ones(3002, dtype)], mode="edge", pads=[3000, 0])[0]
    np.testing.assert_array_equal(found, np.array([3001, 1], dtype))


def test_padding_without_elements_has_a_gradient() -> None:
    assert run_operator("PadGradient", [np.ones((2, 3))], pads=[2, 0, 0, 0])[0].shape == (0, 3)


def test_gradients_of_another_shape_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"must have shape \(1, 1, 4, 4\).*found \(1, 1, 4, 5\)"):
        run_operator(
            "ResizeNearestGradient", [np.ones((1, 1, 4, 5)), np.ones((1, 1, 2, 2))], height_scale=2.0, width_scale=2.0
        )
    with pytest.raises(ShapeError, match="pads 2 and 2 exceed the size 3 of axis 0"):
        run_operator("PadGradient", [np.ones(3)], pads=[2, 2])


def test_scales_have_no_gradient() -> None:
    assert gradient(operator_def("ResizeNearest", ["x", "s"], ["y"]), ["g"], wanted=[1]).inputs == (None, None)
