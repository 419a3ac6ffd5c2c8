"""SpatialBN in training, its gradient, and its statistics over several batches."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from dagexec.ops.base.layout import BLOCKS
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.gradient_checks import check_gradient
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import Array, operator_def, run_operator

NAMES = ("y", "running mean", "running variance", "saved mean", "saved inverse")


def channel_of(x: Array, order: str) -> int:
    return x.ndim - 1 if order == "NHWC" else 1


def parameters(channels: int, dtype: Any, seed: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    normal = [rng.normal(size=channels) for _ in range(3)]
    return [array.astype(dtype) for array in (*normal, rng.uniform(0.5, 2, channels))]


def train(
    x: Array, given: list[Array], order: str = "NCHW", engine: str = "", runs: int = 1, **arguments: Any
) -> dict[str, Array]:
    """What SpatialBN writes in training."""
    inputs = ["x", "scale", "bias", "mean", "variance", "sums", "squares"][: 1 + len(given)]
    outputs = ["y", "mean", "variance", "saved_mean", "saved_inverse"]
    definition = operator_def("SpatialBN", inputs, outputs, is_test=0, order=order, **arguments)
    definition.engine = engine
    workspace = Workspace()
    for name, array in zip(inputs, [x, *given], strict=True):
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        for _ in range(runs):
            net.run()
    return {name: workspace.fetch_blob(blob).copy() for name, blob in zip(NAMES, outputs, strict=True)}


def expected(
    x: Array, given: list[Array], order: str = "NCHW", momentum: float = 0.9, epsilon: float = 1e-5
) -> dict[str, Array]:
    """The same by the definition, in float64, on channels as rows."""
    channel = channel_of(x, order)
    rows = np.moveaxis(x.astype(np.float64), channel, 0).reshape(x.shape[channel], -1)
    scale, bias, mean, variance = (array.astype(np.float64) for array in given[:4])
    averages = np.array([row.sum() / row.size for row in rows])
    deviations = rows - averages[:, None]
    spreads = np.array([(row @ row) / row.size for row in deviations])
    normal = deviations / np.sqrt(spreads + epsilon)[:, None] * scale[:, None] + bias[:, None]
    shape = np.moveaxis(x, channel, 0).shape
    return {
        "y": np.moveaxis(normal.reshape(shape), 0, channel),
        "running mean": momentum * mean + (1 - momentum) * averages,
        "running variance": momentum * variance + (1 - momentum) * spreads,
        "saved mean": averages,
        "saved inverse": (spreads + epsilon) ** -0.5,
    }


TOLERANCES = {np.float64: 1e-12, np.float32: 4e-6, np.float16: 6e-3, ml_dtypes.bfloat16: 5e-2}

SHAPES = st.tuples(
    st.integers(1, 40), st.integers(1, 20), st.lists(st.sampled_from([1, 2, 3, 5, 7, 16, 40]), max_size=3)
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sizes=SHAPES, order=st.sampled_from(["NCHW", "NHWC"]), dtype=st.sampled_from(list(TOLERANCES)))
def test_training_agrees_with_the_definition_in_float64(
    sizes: tuple[int, int, list[int]], order: str, dtype: Any
) -> None:
    batch, channels, pixels = sizes
    shape = (batch, *pixels, channels) if order == "NHWC" else (batch, channels, *pixels)
    x = np.random.default_rng(0).normal(2, 3, shape).astype(dtype)
    given_parameters = parameters(channels, np.float32 if np.dtype(dtype).itemsize == 2 else dtype)
    found, wanted = train(x, given_parameters, order), expected(x, given_parameters, order)
    for name in NAMES:
        # with few elements a channel the inverse deviation is up to 316, and so is what a rounding of X weighs
        weight = float(wanted["saved inverse"].max()) if name == "y" else 1.0
        tolerance = TOLERANCES[dtype if name == "y" else np.float64 if dtype == np.float64 else np.float32]
        np.testing.assert_allclose(
            found[name].astype(np.float64), wanted[name], tolerance, tolerance * max(1, weight), err_msg=name
        )


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(3, 40, 90, 80), (70_000, 4), (2, 1, 70_000), (9000, 3, 2, 2)], ids=str)
def test_tensors_of_many_pieces_are_put_together_exactly(shape: tuple[int, ...], order: str) -> None:
    x = np.random.default_rng(3).normal(-1, 2, shape)
    channels = x.shape[channel_of(x, order)]
    if channels > 5000:
        pytest.skip("as many channels as elements")
    given_parameters = parameters(channels, np.float64)
    found, wanted = train(x, given_parameters, order), expected(x, given_parameters, order)
    for name in NAMES:
        np.testing.assert_allclose(found[name], wanted[name], 1e-10, 1e-10, err_msg=name)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(8, 4, 64, 64), (2, 6, 300, 300), (20_000, 5)], ids=str)
def test_float32_keeps_its_accuracy_where_the_mean_is_ten_thousand_times_the_deviation(
    shape: tuple[int, ...], order: str
) -> None:
    shape = (shape[0], *shape[2:], shape[1]) if order == "NHWC" else shape
    x = np.random.default_rng(0).normal(1e3, 0.1, shape).astype(np.float32)
    given_parameters = parameters(x.shape[channel_of(x, order)], np.float32)
    found, wanted = train(x, given_parameters, order), expected(x, given_parameters, order)
    np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found["saved inverse"], wanted["saved inverse"], rtol=3e-6)


def test_running_statistics_move_on_in_every_run_and_forget_by_momentum() -> None:
    x = np.random.default_rng(0).normal(5, 2, (6, 3, 4, 4))
    given_parameters = parameters(3, np.float64)
    wanted = expected(x, given_parameters)
    found = train(x, given_parameters, runs=3, momentum=0.5)
    momentum = 0.5**3
    np.testing.assert_allclose(
        found["running mean"], momentum * given_parameters[2] + (1 - momentum) * wanted["saved mean"]
    )
    np.testing.assert_allclose(
        found["running variance"],
        momentum * given_parameters[3] + (1 - momentum) * x.transpose(1, 0, 2, 3).reshape(3, -1).var(1),
    )
    assert train(x, given_parameters, momentum=1.0)["running mean"].tolist() == given_parameters[2].tolist()


def test_y_may_overwrite_x() -> None:
    x = np.random.default_rng(1).normal(size=(5, 7, 90, 80)).astype(np.float32)
    names = ["scale", "bias", "mean", "variance"]
    definition = operator_def(
        "SpatialBN", ["x", *names], ["x", "mean", "variance", "saved_mean", "saved_inverse"], is_test=0
    )
    workspace = Workspace()
    given_parameters = parameters(7, np.float32)
    for name, array in zip(["x", *names], [x, *given_parameters], strict=True):
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), train(x, given_parameters)["y"])


def test_one_element_a_channel_has_variance_zero_and_gives_the_bias() -> None:
    x = np.array([[3.0, -2.0]])
    given_parameters = parameters(2, np.float64)
    found = train(x, given_parameters, epsilon=0.25)
    np.testing.assert_array_equal(found["y"], [given_parameters[1]])
    np.testing.assert_array_equal(found["saved inverse"], [2, 2])


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)])
def test_a_batch_without_elements_leaves_the_running_statistics_alone(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    given_parameters = parameters(3, np.float32)
    found = train(x, given_parameters)
    assert found["y"].shape == shape
    np.testing.assert_array_equal(found["running mean"], given_parameters[2])
    np.testing.assert_array_equal(found["running variance"], given_parameters[3])
    assert not found["saved mean"].any()
    assert not found["saved inverse"].any()
    dx, dscale, dbias = run_operator("SpatialBNGradient", [x, np.ones(3, np.float32), x, *given_parameters[2:]], 3)
    assert dx.shape == shape
    assert not dscale.any()
    assert not dbias.any()


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_nan_and_infinity_spoil_their_own_channel_only(order: str, engine: str) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 8, 4)).astype(np.float32)
    x[1, 1, 2, 1], x[0, 2, 3, 2] = np.nan, np.inf
    given_parameters = parameters(4, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train(x, given_parameters, order, engine)
    spoilt = np.moveaxis(~np.isfinite(found["y"]), channel_of(x, order), 0).reshape(4, -1)
    assert spoilt.any(axis=1).tolist() == [False, True, True, False]
    assert spoilt[1].all()
    assert np.isnan(found["running mean"]).tolist()[1]
    clean = train(np.nan_to_num(x, posinf=0), given_parameters, order, engine)
    np.testing.assert_array_equal(found["running mean"][[0, 3]], clean["running mean"][[0, 3]])


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(2, 4),
    channels=st.integers(1, 3),
    pixels=st.lists(st.integers(1, 2), max_size=3),
    order=st.sampled_from(["NCHW", "NHWC"]),
    test=st.booleans(),
)
def test_gradient_agrees_with_differences(batch: int, channels: int, pixels: list[int], order: str, test: bool) -> None:
    shape = (batch, *pixels, channels) if order == "NHWC" else (batch, channels, *pixels)
    x = np.random.default_rng(0).normal(size=shape)
    given_parameters = parameters(channels, np.float64)
    common: dict[str, Any] = {"wanted": [0, 1, 2], "order": order, "is_test": int(test), "epsilon": 0.1}
    if test:
        check_gradient("SpatialBN", [x, *given_parameters], **common)
    else:
        check_gradient("SpatialBN", [x, *given_parameters], outputs=5, weighted=[0], inplace={1: 3, 2: 4}, **common)


def gradient_by_rows(x: Array, scale: Array, dy: Array, order: str, epsilon: float) -> tuple[Array, Array, Array]:
    """The gradient as a projection: dY without its mean and without what is along X, divided by the deviation."""
    channel = channel_of(x, order)
    shape = np.moveaxis(x, channel, 0).shape
    rows, gradients = (np.moveaxis(a.astype(np.float64), channel, 0).reshape(shape[0], -1) for a in (x, dy))
    centered = rows - rows.mean(1, keepdims=True)
    inverse = 1 / np.sqrt((centered**2).mean(1, keepdims=True) + epsilon)
    normal = centered * inverse
    rest = gradients - gradients.mean(1, keepdims=True)
    rest = rest - normal * (rest * normal).mean(1, keepdims=True)
    dx = np.moveaxis((rest * inverse * scale[:, None]).reshape(shape), 0, channel)
    return dx, (gradients * normal).sum(1), gradients.sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-11), (np.float32, 2e-5), (np.float16, 1e-2), (ml_dtypes.bfloat16, 6e-2)]
)
@pytest.mark.parametrize("shape", [(4, 16, 9, 11), (3, 5, 200, 150), (6, 3, 2, 2), (5, 2, 3, 4, 5)], ids=str)
def test_forward_and_gradient_of_every_type_and_engine_agree_with_float64(
    shape: tuple[int, ...], dtype: Any, tolerance: float, order: str, engine: str
) -> None:
    shape = (shape[0], *shape[2:], shape[1]) if order == "NHWC" else shape
    rng = np.random.default_rng(4)
    x, dy = rng.normal(1, 2, shape).astype(dtype), rng.normal(size=shape).astype(dtype)
    narrow = np.dtype(dtype).itemsize == 2
    given_parameters = parameters(x.shape[channel_of(x, order)], np.float32 if narrow else dtype)
    found = train(x, given_parameters, order, engine, epsilon=0.5)
    wanted = expected(x, given_parameters, order, epsilon=0.5)
    for name in NAMES:
        np.testing.assert_allclose(found[name].astype(np.float64), wanted[name], tolerance, tolerance, err_msg=name)
    gradients = run_operator(
        "SpatialBNGradient",
        [x, given_parameters[0], dy, found["saved mean"], found["saved inverse"]],
        3,
        order=order,
        engine=engine,
        epsilon=0.5,
    )
    assert [gradients[0].dtype, gradients[1].dtype] == [np.dtype(dtype), given_parameters[0].dtype]
    reference = gradient_by_rows(x, given_parameters[0], dy, order, 0.5)
    count = x.size / x.shape[channel_of(x, order)]
    for one, other, size in zip(gradients, reference, (1, count**0.5, count**0.5), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other, tolerance, tolerance * size)


@needs_onednn
@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
def test_onednn_trains_in_blocks_of_channels(order: str, block: int) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(1, 2, (3, 32 // block, 5, 4, block)).astype(np.float32) for _ in range(2))
    plain, plain_dy = (a.transpose(0, 1, 4, 2, 3).reshape(3, 32, 5, 4) for a in (x, dy))
    given_parameters = parameters(32, np.float32)
    found, wanted = train(x, given_parameters, order, "ONEDNN"), expected(plain, given_parameters)
    y = found["y"].transpose(0, 1, 4, 2, 3).reshape(3, 32, 5, 4)
    np.testing.assert_allclose(y, wanted["y"], 1e-5, 1e-5)
    np.testing.assert_allclose(found["running variance"], wanted["running variance"], 1e-5)
    inputs = [x, given_parameters[0], dy, found["saved mean"], found["saved inverse"]]
    dx, dscale, _ = run_operator("SpatialBNGradient", inputs, 3, order=order, engine="ONEDNN")
    reference = gradient_by_rows(plain, given_parameters[0], plain_dy, "NCHW", 1e-5)
    np.testing.assert_allclose(dx.transpose(0, 1, 4, 2, 3).reshape(3, 32, 5, 4), reference[0], 1e-4, 1e-5)
    np.testing.assert_allclose(dscale, reference[1], 1e-4, 1e-4)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_sums_over_devices_give_what_one_device_gives_for_all_batches(order: str) -> None:
    rng = np.random.default_rng(5)
    shape = (6, 3, 5, 4) if order == "NCHW" else (6, 5, 4, 3)
    x, dy = rng.normal(2, 0.5, shape), rng.normal(size=shape)
    given_parameters = parameters(3, np.float64)
    whole = train(x, given_parameters, order)
    halves = np.split(x, 2)
    stats = [run_operator("ChannelStats", [half], 2, order=order) for half in halves]
    sums = [sum(pair) for pair in zip(*stats, strict=True)]
    parts = [train(half, [*given_parameters, *sums], order, num_batches=2) for half in halves]
    np.testing.assert_allclose(np.concatenate([part["y"] for part in parts]), whole["y"], 1e-11, 1e-11)
    for name in NAMES[1:]:
        np.testing.assert_allclose(parts[0][name], whole[name], 1e-11, err_msg=name)
        np.testing.assert_array_equal(parts[0][name], parts[1][name])
    saved = [whole["saved mean"], whole["saved inverse"]]
    scale = given_parameters[0]
    wanted = run_operator("SpatialBNGradient", [x, scale, dy, *saved], 3, order=order)
    pairs = list(zip(halves, np.split(dy, 2), strict=True))
    backward = [run_operator("ChannelBackpropStats", [half, *saved, up], 2, order=order) for half, up in pairs]
    totals = [sum(pair) for pair in zip(*backward, strict=True)]
    found = [
        run_operator("SpatialBNGradient", [half, scale, up, *saved, *totals], 3, order=order, num_batches=2)
        for half, up in pairs
    ]
    np.testing.assert_allclose(np.concatenate([one[0] for one in found]), wanted[0], 1e-10, 1e-12)
    for index in (1, 2):
        np.testing.assert_allclose(found[0][index] + found[1][index], wanted[index], 1e-10)


def test_a_variance_that_rounding_of_given_sums_makes_negative_counts_as_zero() -> None:
    x = np.full((4, 1, 3, 3), 1000.1, np.float32)
    sums = np.array([x.sum(dtype=np.float64)], np.float32), np.array([36 * 1000.0**2], np.float32)
    found = train(x, [*parameters(1, np.float32), *sums], epsilon=0.25)
    assert found["saved inverse"].tolist() == [2]
    assert np.isfinite(found["y"]).all()


@settings(max_examples=25, deadline=None)
@given(
    sizes=SHAPES, order=st.sampled_from(["NCHW", "NHWC"]), dtype=st.sampled_from([np.float64, np.float32, np.float16])
)
def test_channel_sums_are_sums_over_all_pieces(sizes: tuple[int, int, list[int]], order: str, dtype: Any) -> None:
    batch, channels, pixels = sizes
    shape = (batch, *pixels, channels) if order == "NHWC" else (batch, channels, *pixels)
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)
    total, squares = run_operator("ChannelStats", [x], 2, order=order)
    assert total.dtype == squares.dtype == (np.float64 if dtype == np.float64 else np.float32)
    rows = np.moveaxis(x.astype(np.int64), channel_of(x, order), 0).reshape(channels, -1)
    rounding = 0 if dtype == np.float64 else 2e-6  # of numbers beyond 2^24, and of their sums
    np.testing.assert_allclose(total, rows.sum(1), rounding, 1e-6 * np.abs(rows).sum(1).max() * (rounding > 0))
    np.testing.assert_allclose(squares, (rows * rows).sum(1), rounding)


def test_gradient_maker_uses_saved_statistics_in_training_given_ones_in_inference_and_sums_over_devices() -> None:
    names = ["x", "s", "b", "m", "v"]
    outputs = ["y", "m", "v", "sm", "si"]
    training = operator_def("SpatialBN", names, outputs, is_test=0, epsilon=0.5)
    [one] = gradient(training, ["y_grad", None, None, None, None]).operators
    assert list(one.input) == ["x", "s", "y_grad", "sm", "si"]
    assert list(one.output) == ["x_grad", "s_grad", "b_grad"]
    inference = operator_def("SpatialBN", names, ["y"], is_test=1)
    [one] = gradient(inference, ["y_grad"]).operators
    assert list(one.input) == ["x", "s", "y_grad", "m", "v"]
    several = operator_def("SpatialBN", [*names, "sums", "squares"], outputs, is_test=0, num_batches=2)
    first, second = gradient(several, ["y_grad", None, None, None, None]).operators
    assert (first.type, list(first.output)) == ("ChannelBackpropStats", ["s_grad_sum", "b_grad_sum"])
    assert list(second.input) == ["x", "s", "y_grad", "sm", "si", "s_grad_sum", "b_grad_sum"]


def test_spatial_bn_refuses_what_does_not_fit_in_training() -> None:
    x, given_parameters = np.ones((2, 3, 4, 4), np.float32), parameters(3, np.float32)
    with pytest.raises(SchemaError, match="output 1 must overwrite input 3 in place; expected 'x3', found 'y1'"):
        run_operator("SpatialBN", [x, *given_parameters], 5, is_test=0)
    for momentum in (-0.5, 1.5):
        with pytest.raises(ArgumentError, match=rf"'momentum' must be in \[0, 1\], found {momentum:g}"):
            train(x, given_parameters, momentum=momentum)
    with pytest.raises(ArgumentError, match="'momentum' is not a number"):
        train(x, given_parameters, momentum=float("nan"))
    with pytest.raises(ArgumentError, match="'epsilon' must be at least 0, found -1"):
        train(x, given_parameters, epsilon=-1.0)
    with pytest.raises(ArgumentError, match="'num_batches' must be at least 1, found 0"):
        train(x, given_parameters, num_batches=0)
    with pytest.raises(ShapeError, match=r"'sums' must have shape \(3,\).*found \(2,\)"):
        train(x, [*given_parameters, np.ones(2, np.float32), np.ones(3, np.float32)])
    with pytest.raises(ShapeError, match=r"'scale' must have shape \(3,\).*found \(4,\)"):
        train(x, [np.ones(4, np.float32), *given_parameters[1:]])
    with pytest.raises(ShapeError, match=r"must be one of float32.*found int32"):
        train(x.astype(np.int32), given_parameters)
    with pytest.raises(ShapeError, match=r"'x2' must have shape \(2, 3, 4, 4\) .* found \(2, 3, 4\)"):
        run_operator("SpatialBNGradient", [x, given_parameters[0], x[..., 0], *given_parameters[2:]], 3)
    with pytest.raises(ShapeError, match="at least 2 axes, found 1"):
        run_operator("ChannelStats", [np.ones(3, np.float32)], 2)
