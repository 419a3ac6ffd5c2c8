"""Resizing and channel shuffle, against indices written out and against onnxruntime."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.arguments import ArgumentValue
from dagexec.errors import ArgumentError, DagexecError, ResourceError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.drawing import drawn
from tests.ops.running import operator_def, run_operator, workspace_of
from tests.ops.windows import Array, run_onnx, to_channels_first, to_channels_last

Named = dict[str, ArgumentValue]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8]


def numbered(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return (np.arange(int(np.prod(shape))) % 251).reshape(shape).astype(dtype)


# ResizeNearest.


def resize(x: Array, height: float, width: float) -> Array:
    """Output pixel by output pixel, in float32 as Caffe2 computes it."""
    rows, columns = x.shape[2:]
    h, w = np.float32(height), np.float32(width)
    shape = int(np.float32(rows) * h), int(np.float32(columns) * w)
    y = np.zeros((*x.shape[:2], *shape), x.dtype)
    for i, j in product(range(shape[0]), range(shape[1])):
        row = min(int(np.float32(i) / h), rows - 1)
        column = min(int(np.float32(j) / w), columns - 1)
        y[:, :, i, j] = x[:, :, row, column]
    return y


SCALES = st.sampled_from([1.0, 2.0, 3.0, 0.5, 0.25, 1.5, 0.7, 2.6, 1 / 3, 0.1])


@pytest.mark.slow
@given(
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 10), st.integers(1, 10)),
    SCALES, SCALES, st.sampled_from(["NCHW", "NHWC"]), st.sampled_from(DTYPES), st.booleans(),
)  # fmt: skip
@drawn(200)
def test_resize_nearest_takes_the_pixel_at_the_scaled_place(
    shape: tuple[int, int, int, int], height: float, width: float, order: str, dtype: Any, by_input: bool
) -> None:
    x = numbered(shape, dtype)
    fed = to_channels_last(x) if order == "NHWC" else x
    if by_input:
        (y,) = run_operator("ResizeNearest", [fed, np.array([height, width], np.float32)], order=order)
    else:
        (y,) = run_operator("ResizeNearest", [fed], order=order, height_scale=height, width_scale=width)
    y = to_channels_first(y) if order == "NHWC" else y
    np.testing.assert_array_equal(y, resize(x, height, width), err_msg=f"{shape} by {height}, {width} {order}")


@pytest.mark.parametrize("scales", [(2.0, 2.0), (3.0, 1.0), (0.5, 0.25), (1.5, 2.0), (2.5, 0.5)])
def test_resize_nearest_agrees_with_onnxruntime(scales: tuple[float, float]) -> None:
    x = numbered((2, 3, 8, 12))
    (y,) = run_operator("ResizeNearest", [x], height_scale=scales[0], width_scale=scales[1])
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    found = run_onnx("Resize", [x, np.zeros(0, np.float32), np.array([1, 1, *scales], np.float32)], attributes)
    np.testing.assert_array_equal(y, found)


def test_a_whole_scale_is_exact_where_float32_is_not() -> None:
    x = np.zeros((1, 1, 1, (1 << 24) + 1), np.uint8)
    x[..., -1] = 1
    (y,) = run_operator("ResizeNearest", [x])
    assert y.tobytes() == x.tobytes()


def test_scales_fed_anew_change_the_size() -> None:
    workspace = workspace_of({"x": numbered((1, 1, 2, 2)), "s": np.array([2, 2], np.float32)})
    with SimpleNet(NetDef(name="n", op=[operator_def("ResizeNearest", ["x", "s"], ["y"])]), workspace) as net:
        net.run()
        assert workspace.fetch_blob("y").shape == (1, 1, 4, 4)
        workspace.feed_blob("s", np.array([0.5, 3], np.float32))
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), [[[[0, 0, 0, 1, 1, 1]]]])


# ChannelShuffle.


@pytest.mark.slow
@given(
    st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["NCHW", "NHWC"]),
    st.sampled_from(DTYPES),
)  # fmt: skip
@drawn(100)
def test_channel_shuffle_deals_the_channels_of_the_groups_in_turn(
    group: int, width: int, sizes: list[int], order: str, dtype: Any
) -> None:
    x = numbered((2, group * width, *sizes), dtype)
    (y,) = run_operator("ChannelShuffle", [to_channels_last(x) if order == "NHWC" else x], group=group, order=order)
    y = to_channels_first(y) if order == "NHWC" else y
    for k, g in product(range(width), range(group)):
        np.testing.assert_array_equal(y[:, k * group + g], x[:, g * width + k])


# Runs after the first.

# What is refused.

SMALL = (1, 4, 3, 5)
REFUSED: list[tuple[str, Named, type[DagexecError], str]] = [
    ("ResizeNearest", {"height_scale": 0.0}, ArgumentError, "height_scale must be a positive number, found 0.0"),
    ("ResizeNearest", {"width_scale": -1.0}, ArgumentError, "width_scale must be a positive number, found -1.0"),
    ("ResizeNearest", {"width_scale": float("inf")}, ArgumentError, "width_scale must be .*found inf"),
    ("ResizeNearest", {"width_scale": float("nan")}, ArgumentError, "'width_scale' is not a number"),
    ("ResizeNearest", {"height_scale": 1e9}, ArgumentError, "makes an axis of 3 too large"),
    ("ResizeNearest", {"height_scale": 1e8, "width_scale": 1e8}, ResourceError, "bytes|overflows"),
    ("ChannelShuffle", {"group": 3}, ArgumentError, "group must divide the 4 channels, found 3"),
    ("ChannelShuffle", {"group": 0}, ArgumentError, "group must divide the 4 channels, found 0"),
    ("ChannelShuffle", {"group": 2, "order": "NHWC"}, ArgumentError, "group must divide the 5 channels, found 2"),
]


@pytest.mark.parametrize(("op_type", "arguments", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.zeros(SMALL, np.float32)], **arguments)


@pytest.mark.parametrize("scales", [[1, np.nan], [0, 1], [1, -2], [np.inf, 1]])
def test_scales_that_are_no_positive_numbers_are_refused(scales: list[float]) -> None:
    with pytest.raises(DagexecError, match=r"ResizeNearest 'y0'.*must be a positive number, found"):
        run_operator("ResizeNearest", [np.zeros(SMALL, np.float32), np.array(scales, np.float32)])


@pytest.mark.parametrize(
    ("scales", "message"),
    [(np.ones(3, np.float32), r"must have shape \(2,\).*found \(3,\)"), (np.array([b"2", b"2"]), "found string")],
)
def test_scales_of_another_kind_are_refused(scales: Array, message: str) -> None:
    with pytest.raises(DagexecError, match=f"ResizeNearest 'y0'.*{message}"):
        run_operator("ResizeNearest", [np.zeros(SMALL, np.float32), scales])


def test_images_need_4_axes_and_a_shuffle_needs_channels() -> None:
    with pytest.raises(ShapeError, match=r"ResizeNearest 'y0'.*must have 4 axes, found 3"):
        run_operator("ResizeNearest", [np.zeros((1, 2, 3), np.float32)])
    with pytest.raises(ShapeError, match=r"ChannelShuffle 'y0'.*at least 2 axes, found 1"):
        run_operator("ChannelShuffle", [np.zeros(3, np.float32)])
