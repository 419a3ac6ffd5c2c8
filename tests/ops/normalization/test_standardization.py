"""InstanceNorm, GroupNorm and LayerNorm against loops over groups in float64, and onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dagexec.errors import ArgumentError, ShapeError
from tests.ops.normalization.test_normalization import by_onnxruntime, sample
from tests.ops.running import Array, run_operator


def standardized(group: Array, epsilon: float) -> tuple[Array, float, float]:
    """The group, its mean, and the root of its variance plus epsilon; population variance, by `statistics`' formula."""
    values = group.astype(np.float64)
    mean = math.fsum(values.ravel().tolist()) / values.size
    deviation = math.sqrt(math.fsum(((values - mean) ** 2).ravel().tolist()) / values.size + epsilon)
    return (values - mean) / deviation, mean, deviation


def by_group(x: Array, groups: int, scale: Array, bias: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """Y, mean, inverse deviation; channels are axis 1."""
    y = np.empty(x.shape)
    mean, inverse = np.empty((len(x), groups)), np.empty((len(x), groups))
    width = x.shape[1] // groups
    for image in range(len(x)):
        for group in range(groups):
            part = slice(group * width, (group + 1) * width)
            y[image, part], mean[image, group], deviation = standardized(x[image, part], epsilon)
            inverse[image, group] = 1 / deviation
    view = (-1, *(1,) * (x.ndim - 2))
    return y * scale.reshape(view) + bias.reshape(view), mean, inverse


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    width=st.integers(1, 3),
    pixels=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    last=st.booleans(),
    instance=st.booleans(),
)
def test_instance_and_group_norm_standardize_each_group(
    batch: int, groups: int, width: int, pixels: list[int], last: bool, instance: bool
) -> None:
    channels = groups * width
    x, scale, bias = sample(0, batch, channels, *pixels), sample(1, channels), sample(2, channels)
    given_x = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
    arguments: dict[str, Any] = {"order": "NHWC" if last else "NCHW", "epsilon": 0.01}
    if instance:
        groups = channels
    else:
        arguments["group"] = groups
    found = run_operator("InstanceNorm" if instance else "GroupNorm", [given_x, scale, bias], 3, **arguments)
    expected = by_group(x, groups, scale, bias, 0.01)
    np.testing.assert_allclose(np.moveaxis(found[0], -1, 1) if last else found[0], expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data(), affine=st.booleans())
def test_layer_norm_standardizes_from_axis_on(shape: list[int], data: st.DataObject, affine: bool) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x, normalized = sample(0, *shape), shape[axis % len(shape) :]
    gamma, beta = (sample(1, *normalized), sample(2, *normalized)) if affine else (np.ones(1), np.zeros(1))
    inputs = [x, gamma, beta] if affine else [x]
    y, mean, std = run_operator("LayerNorm", inputs, 3, axis=axis, epsilon=0.01)
    leading = shape[: axis % len(shape)]
    groups = [standardized(group, 0.01) for group in x.reshape(math.prod(leading), *normalized)]
    expected = np.stack([group[0] * gamma + beta for group in groups]).reshape(shape)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert mean.shape == std.shape == (*leading, 1)
    np.testing.assert_allclose(mean.ravel(), [group[1] for group in groups], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(std.ravel(), [group[2] for group in groups], rtol=1e-4)


def test_instance_norm_agrees_with_onnxruntime_on_several_pieces() -> None:
    x, scale, bias = sample(0, 3, 8, 110, 110), sample(1, 8), sample(2, 8)
    node = helper.make_node("InstanceNormalization", ["x", "scale", "bias"], ["y"], epsilon=1e-3)
    expected = by_onnxruntime(node, {"x": x, "scale": scale, "bias": bias})
    y, mean, _ = run_operator("InstanceNorm", [x, scale, bias], 3, epsilon=1e-3)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(axis=(2, 3)), rtol=1e-3, atol=1e-6)


def test_16_bit_floats_are_standardized_in_float32() -> None:
    x = (sample(0, 4, 3000) * 100 + 200).astype(np.float16)
    y, mean, std = run_operator("LayerNorm", [x], 3)
    assert y.dtype == mean.dtype == std.dtype == np.float16
    for row, found in zip(x, y, strict=True):
        np.testing.assert_allclose(found.astype(np.float64), standardized(row, 1e-5)[0], atol=2e-3)


def test_a_batch_without_elements_gives_one() -> None:
    y, mean, _ = run_operator("InstanceNorm", [np.empty((0, 3, 4), np.float32), sample(1, 3), sample(2, 3)], 3)
    assert (y.shape, mean.shape) == ((0, 3, 4), (0, 3))


def test_bad_groups_parameters_and_ranks_are_refused() -> None:
    x = sample(0, 2, 6, 3)
    with pytest.raises(ArgumentError, match="'group' must divide the 6 channels, found 4"):
        run_operator("GroupNorm", [x, sample(1, 6), sample(2, 6)], group=4)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(6,\).*found \(3,\)"):
        run_operator("InstanceNorm", [x, sample(1, 3), sample(2, 6)])
    with pytest.raises(ShapeError, match="X must have at least 3 axes, found 2"):
        run_operator("InstanceNorm", [sample(0, 2, 6), sample(1, 6), sample(2, 6)])
    with pytest.raises(ShapeError, match=r"elementwise_affine=1 requires 3 input\(s\)"):
        run_operator("LayerNorm", [x], elementwise_affine=1)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(6, 3\) .*found \(3,\)"):
        run_operator("LayerNorm", [x, sample(1, 3), sample(2, 3)])
