"""Concat, ChannelShuffle, normalizations, Softmax, reductions and resizing by oneDNN, against formulas in float64."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.base.layout import BLOCKS, ORDERS
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import from_order, in_order, needs_onednn, normal, run_fallback, run_onednn
from tests.ops.running import Array, run_operator

pytestmark = needs_onednn


@pytest.mark.slow
@drawn(40)
@given(data=st.data())
def test_tensors_are_joined_along_any_axis(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(sum))
    parts = [
        np.random.default_rng(index).standard_normal((*shape[:axis], size, *shape[axis + 1 :])).astype(np.float32)
        for index, size in enumerate(sizes)
    ]
    joined, information = run_onednn("Concat", list(parts), 2, axis=axis, pieces=2)
    np.testing.assert_array_equal(joined, np.concatenate(parts, axis))
    np.testing.assert_array_equal(information, sizes)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_images_are_joined_along_their_channels(order: str, pieces: int) -> None:
    parts = [normal(index, 2, channels, 5, 4) for index, channels in enumerate((16, 48, 32))]
    (found,) = run_onednn("Concat", [in_order(part, order) for part in parts], order=order, pieces=pieces)
    np.testing.assert_array_equal(from_order(found, order), np.concatenate(parts, 1))


def test_a_new_axis_joins_tensors_of_one_shape() -> None:
    parts = [normal(index, 3, 4) for index in range(5)]
    (found,) = run_onednn("Concat", list(parts), axis=1, add_axis=1, pieces=2)
    np.testing.assert_array_equal(found, np.stack(parts, 1))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("channels", "group"), [(48, 1), (48, 2), (48, 3), (64, 2), (64, 4), (96, 48), (256, 16)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_channels_are_dealt_out_in_turn(order: str, channels: int, group: int, dtype: type) -> None:
    image = np.random.default_rng(1).integers(-99, 99, (2, channels, 3, 5)).astype(dtype)
    (found,) = run_onednn("ChannelShuffle", [in_order(image, order)], order=order, group=group)
    width = channels // group
    expected = np.empty_like(image)
    for number in range(channels):
        expected[:, number % width * group + number // width] = image[:, number]
    np.testing.assert_array_equal(from_order(found, order), expected)


def test_a_shuffle_in_float64_is_computed_by_numpy() -> None:
    image = normal(2, 1, 6, 2, 2).astype(np.float64)
    (found,), reason = run_fallback("ChannelShuffle", [image], group=3)
    np.testing.assert_array_equal(found, image[:, [0, 2, 4, 1, 3, 5]])
    assert "float64" in reason


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(7,), (5, 4), (3, 4, 2), (1,), (1, 1)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_batches_are_normalized_by_given_statistics(order: str, size: tuple[int, ...], pieces: int) -> None:
    channels = 32 if order in BLOCKS else 21
    image = normal(3, 2, channels, *size)
    scale, bias, mean = (normal(seed, channels) for seed in (4, 5, 6))
    variance = np.abs(normal(7, channels)) + np.float32(0.1)
    inputs = [in_order(image, order), scale, bias, mean, variance]
    (found,) = run_onednn("SpatialBN", list(inputs), order=order, is_test=1, epsilon=0.01, pieces=pieces)
    scale, bias, mean, variance = (
        array.astype(np.float64).reshape(-1, *(1,) * len(size)) for array in (scale, bias, mean, variance)
    )
    expected = (image - mean) / np.sqrt(variance + 0.01) * scale + bias
    np.testing.assert_allclose(from_order(found, order), expected, rtol=1e-4, atol=1e-5)


def test_a_matrix_is_normalized_by_numpy() -> None:
    parameters = [np.ones(5, np.float32) for _ in range(4)]
    (found,), _ = run_fallback("SpatialBN", [normal(8, 3, 5), *parameters], is_test=1, epsilon=0.0)
    np.testing.assert_allclose(found, normal(8, 3, 5), rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("window", "beta"), [(5, 0.75), (3, 0.5), (1, 1.0), (9, 0.75)])
def test_responses_are_normalized_across_channels(order: str, window: int, beta: float) -> None:
    image = normal(9, 2, 32, 5, 4)
    arguments: dict[str, ArgumentValue] = {"size": window, "alpha": 0.3, "beta": beta, "bias": 1.5, "order": order}
    runs = run_onednn if (window, beta) == (5, 0.75) else partial(run_operator, engine="ONEDNN")
    (found,) = runs("LRN", [in_order(image, order)], **arguments)
    wide = image.astype(np.float64)
    expected = np.empty_like(wide)
    for channel in range(32):
        near = wide[:, max(0, channel - window // 2) : channel + window // 2 + 1]
        expected[:, channel] = wide[:, channel] / (1.5 + 0.3 / window * (near**2).sum(1)) ** beta
    np.testing.assert_allclose(from_order(found, order), expected, rtol=1e-4, atol=1e-5)


def test_the_scale_of_lrn_is_computed_by_numpy() -> None:
    (y, scale), reason = run_fallback("LRN", [normal(10, 1, 4, 3, 3)], 2, size=3, alpha=1.0, beta=1.0)
    np.testing.assert_allclose(y * scale, normal(10, 1, 4, 3, 3), rtol=1e-5)
    assert "scale" in reason


@pytest.mark.parametrize(("shape", "axis"), [((6, 40), 1), ((2, 3, 4, 5), 2), ((7,), 0), ((3, 1000), -1)])
@pytest.mark.parametrize("affine", [False, True])
def test_layers_are_normalized(shape: tuple[int, ...], axis: int, affine: bool) -> None:
    x = normal(11, *shape)
    parameters = [normal(12, *shape[axis:]), normal(13, *shape[axis:])] if affine else []
    (found,) = run_onednn("LayerNorm", [x, *parameters], axis=axis, epsilon=0.01)
    axes = tuple(range(axis % len(shape), len(shape)))
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 0.01)
    if affine:
        expected = expected * parameters[0] + parameters[1]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_softmax_over_a_middle_axis_is_computed_by_numpy() -> None:
    x = normal(20, 2, 7, 4)
    (found,), _ = run_fallback("Softmax", [x], axis=1, single_axis=1)
    powers = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=1e-5)


REDUCTIONS = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min}


@pytest.mark.parametrize("op_type", REDUCTIONS)
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[3], [2, 3], [0, 1, 2, 3], [1], [0, 2], [1, 3], [-1, 1]])
def test_axes_are_reduced(op_type: str, keep: int, axes: list[int]) -> None:
    x = normal(15, 2, 3, 4, 5)
    (found,) = run_operator(op_type, [x], engine="ONEDNN", axes=axes, keepdims=keep)
    expected = REDUCTIONS[op_type](x.astype(np.float64), axis=tuple(axes), keepdims=bool(keep))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_the_last_axes_are_reduced_by_onednn(op_type: str) -> None:
    (found,) = run_onednn(op_type, [normal(16, 2, 48, 7, 7)], axes=[2, 3])
    expected = REDUCTIONS[op_type](normal(16, 2, 48, 7, 7).astype(np.float64), axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op_type", "sign"), [("ReduceMax", -1), ("ReduceMin", 1)])
def test_an_extreme_of_infinities_alone_is_infinite(op_type: str, sign: int) -> None:
    """oneDNN begins with the limit of the type; a mask may have that limit itself."""
    x = normal(21, 3, 64)
    x[0], x[1] = sign * np.inf, sign * np.finfo(np.float32).max
    (found,) = run_onednn(op_type, [x], axes=[1], keepdims=0)
    np.testing.assert_array_equal(found, REDUCTIONS[op_type](x, axis=1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("height", "width"), [(2.0, 2.0), (3.0, 1.0), (4.0, 5.0)])
def test_pixels_are_repeated(order: str, height: float, width: float) -> None:
    image = normal(17, 2, 16, 3, 5)
    fed = in_order(image, order)
    (found,) = run_onednn("ResizeNearest", [fed], order=order, height_scale=height, width_scale=width)
    expected = image.repeat(int(height), 2).repeat(int(width), 3)
    np.testing.assert_array_equal(from_order(found, order), expected)


@pytest.mark.slow
@drawn(40)
@given(height=st.floats(0.3, 3.5), width=st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 2.5]))
def test_pixels_are_found_by_the_operators_rule_whoever_computes_it(height: float, width: float) -> None:
    image = normal(18, 1, 16, 7, 9)
    (found,) = run_operator("ResizeNearest", [image], engine="ONEDNN", height_scale=height, width_scale=width)
    rows = [int(np.float32(i) / np.float32(height)) for i in range(found.shape[2])]
    columns = [int(np.float32(i) / np.float32(width)) for i in range(found.shape[3])]
    np.testing.assert_array_equal(found, image[:, :, np.minimum(rows, 6)][..., np.minimum(columns, 8)])


@pytest.mark.parametrize("order", BLOCKS)
def test_a_blocked_tensor_that_onednn_cannot_resize_is_resized_in_nchw(order: str) -> None:
    image = normal(19, 1, 16, 4, 4)
    arguments = {"engine": "ONEDNN", "order": order, "height_scale": 0.5}
    (found,) = run_operator("ResizeNearest", [in_order(image, order)], **arguments)
    (expected,) = run_operator("ResizeNearest", [image], height_scale=0.5)
    np.testing.assert_array_equal(from_order(found, order), expected)


def test_reductions_of_a_tensor_without_elements() -> None:
    empty: Array = np.ones((2, 0), np.float32)
    (found,) = run_operator("ReduceSum", [empty], engine="ONEDNN", axes=[1], keepdims=0)
    np.testing.assert_array_equal(found, [0, 0])
    assert math.prod(found.shape) == 2
