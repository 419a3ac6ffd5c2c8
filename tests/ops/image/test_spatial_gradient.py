"""The gradients of ResizeNearest, ChannelShuffle, PadImage and Pad: against central differences."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import ShapeError
from tests.ops.running import operator_def, run_operator


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
