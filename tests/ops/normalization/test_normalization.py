"""SpatialBN and LRN against element loops in float64, and onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dagexec import NetDef, Workspace
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import Array, operator_def, run_operator


def sample(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def statistics(channels: int, dtype: Any = np.float32) -> list[Array]:
    """scale, bias, mean, variance."""
    generator = np.random.default_rng(9)
    parts = [generator.normal(size=channels) for _ in range(3)]
    return [*(part.astype(dtype) for part in parts), generator.uniform(0.1, 2, channels).astype(dtype)]


def batch_norm(x: Array, parameters: list[Array], axis: int, epsilon: float) -> Array:
    moved = np.moveaxis(x.astype(np.float64), axis, -1)
    scale, bias, mean, variance = (part.astype(np.float64) for part in parameters)
    return np.moveaxis((moved - mean) / (variance + epsilon) ** 0.5 * scale + bias, -1, axis)


def by_onnxruntime(node: Any, inputs: dict[str, Array]) -> Array:
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, 1, value.shape) for name, value in inputs.items()],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    order=st.sampled_from(["NCHW", "NHWC"]),
    epsilon=st.sampled_from([1e-5, 0.5]),
)
def test_spatial_bn_applies_each_channels_statistics(shape: list[int], order: str, epsilon: float) -> None:
    axis = 1 if order == "NCHW" else len(shape) - 1
    x, parameters = sample(0, *shape), statistics(shape[axis])
    [y] = run_operator("SpatialBN", [x, *parameters], is_test=1, order=order, epsilon=epsilon)
    np.testing.assert_allclose(y, batch_norm(x, parameters, axis, epsilon), rtol=1e-4, atol=1e-5)


def test_spatial_bn_in_inference_does_not_read_the_sums_of_a_training_net() -> None:
    x, parameters = sample(0, 2, 3, 4, 4), statistics(3)
    [y] = run_operator("SpatialBN", [x, *parameters, np.full(3, np.nan), np.full(3, np.nan)], is_test=1)
    np.testing.assert_allclose(y, batch_norm(x, parameters, 1, 1e-5), rtol=1e-4, atol=1e-5)


def test_spatial_bn_agrees_with_onnxruntime() -> None:
    x, parameters = sample(0, 2, 5, 4, 3), statistics(5)
    names = ["x", "scale", "bias", "mean", "var"]
    node = helper.make_node("BatchNormalization", names, ["y"], epsilon=1e-3)
    expected = by_onnxruntime(node, dict(zip(names, [x, *parameters], strict=True)))
    [y] = run_operator("SpatialBN", [x, *parameters], is_test=1, epsilon=1e-3)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("parameter_dtype", [np.float16, np.float32])
def test_spatial_bn_of_16_bit_floats_takes_parameters_of_either_width(order: str, parameter_dtype: type) -> None:
    x, axis = sample(0, 3, 4, 100, 100, dtype=np.float16), 1 if order == "NCHW" else 3
    parameters = statistics(x.shape[axis], parameter_dtype)
    [y] = run_operator("SpatialBN", [x, *parameters], is_test=1, order=order)
    assert y.dtype == np.float16
    expected = batch_norm(x, parameters, axis, 1e-5)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2e-3, atol=2e-3)


def test_spatial_bn_in_place_and_with_parameters_fed_anew() -> None:
    x, parameters = sample(0, 2, 3, 4, 4), statistics(3)
    names = ["x", "scale", "bias", "mean", "var"]
    workspace = Workspace()
    for name, value in zip(names, [x, *parameters], strict=True):
        workspace.feed_blob(name, value)
    with SimpleNet(NetDef(name="n", op=[operator_def("SpatialBN", names, ["x"], is_test=1)]), workspace) as net:
        net.run()
        np.testing.assert_allclose(workspace.fetch_blob("x"), batch_norm(x, parameters, 1, 1e-5), rtol=1e-4, atol=1e-5)
        parameters[3] = parameters[3] * 4
        workspace.feed_blob("x", x)
        workspace.feed_blob("var", parameters[3])
        net.run()
    np.testing.assert_allclose(workspace.fetch_blob("x"), batch_norm(x, parameters, 1, 1e-5), rtol=1e-4, atol=1e-5)


def test_spatial_bn_refuses_what_it_cannot_do() -> None:
    x, parameters = sample(0, 2, 3, 4, 4), statistics(3)
    with pytest.raises(ShapeError, match=r"with is_test=0 expected 5 inputs .* and 5 outputs, found 5 and 1"):
        run_operator("SpatialBN", [x, *parameters], is_test=0)
    with pytest.raises(SchemaError, match="argument 'is_test' is required"):
        run_operator("SpatialBN", [x, *parameters])
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(4,\) .* found \(3,\)"):
        run_operator("SpatialBN", [x, *parameters], is_test=1, order="NHWC")
    with pytest.raises(ShapeError, match=r"5 inputs \(or 7, .*\) and 1 output, found 6 and 1"):
        run_operator("SpatialBN", [x, *parameters, parameters[0]], is_test=1)
    with pytest.raises(ArgumentError, match="'epsilon' is not a number"):
        run_operator("SpatialBN", [x, *parameters], is_test=1, epsilon=float("nan"))
    with pytest.raises(ArgumentError, match="'epsilon' must be at least 0, found -1"):
        run_operator("SpatialBN", [x, *parameters], is_test=1, epsilon=-1.0)
    with pytest.raises(ArgumentError, match="'order' must be NCHW, NHWC, NCHW8c or NCHW16c, found 'CHWN'"):
        run_operator("SpatialBN", [x, *parameters], is_test=1, order="CHWN")


def lrn(x: Array, size: int, alpha: float, beta: float, bias: float) -> tuple[Array, Array]:
    """Channel by channel; channels are axis 1."""
    exact = x.astype(np.float64)
    scale = np.empty_like(exact)
    for channel in range(x.shape[1]):
        window = [exact[:, c] ** 2 for c in range(x.shape[1]) if abs(c - channel) <= size // 2]
        scale[:, channel] = bias + alpha / size * sum(window)
    return exact * scale**-beta, scale


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    size=st.sampled_from([1, 3, 5, 9]),
    beta=st.sampled_from([0.75, 0.5, 1.0, 0.25]),
    last=st.booleans(),
    outputs=st.integers(1, 2),
)
def test_lrn_sums_squares_over_the_channels_of_a_clipped_window(
    shape: list[int], size: int, beta: float, last: bool, outputs: int
) -> None:
    x = sample(0, *shape)
    arguments = {"size": size, "alpha": 0.5, "beta": beta, "bias": 1.5}
    expected = lrn(x, size, 0.5, beta, 1.5)
    given_x = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
    found = run_operator("LRN", [given_x], outputs, order="NHWC" if last else "NCHW", **arguments)
    for one, other in zip(found, expected, strict=False):
        np.testing.assert_allclose(np.moveaxis(one, -1, 1) if last else one, other, rtol=1e-5)


def test_lrn_agrees_with_onnxruntime_on_several_pieces() -> None:
    x = sample(0, 3, 16, 70, 70)
    node = helper.make_node("LRN", ["x"], ["y"], size=5, alpha=1e-2, beta=0.75, bias=2.0)
    [y] = run_operator("LRN", [x], size=5, alpha=1e-2, beta=0.75, bias=2.0)
    np.testing.assert_allclose(y, by_onnxruntime(node, {"x": x}), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_lrn_of_16_bit_floats_squares_in_float32(dtype: Any, tolerance: float) -> None:
    x = (sample(0, 2, 6, 5, 5) * 300).astype(dtype)
    y, scale = run_operator("LRN", [x], 2, size=3, alpha=1e-4, beta=0.75, bias=1.0)
    for one, other in zip((y, scale), lrn(x, 3, 1e-4, 0.75, 1.0), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=tolerance, atol=tolerance)


def test_lrn_of_no_elements_and_bad_sizes() -> None:
    assert run_operator("LRN", [np.empty((0, 3, 2, 2), np.float32)], size=3)[0].shape == (0, 3, 2, 2)
    for size in (4, 0, -1):
        with pytest.raises(ArgumentError, match=f"'size' must be odd and at least 1, found {size}"):
            run_operator("LRN", [sample(0, 1, 3, 2, 2)], size=size)
    with pytest.raises(ShapeError, match="X must have at least 2 axes, found 1"):
        run_operator("LRN", [sample(0, 3)], size=3)
