"""Gradients of LRN, InstanceNorm, GroupNorm and LayerNorm; Normalize and NormalizeL1."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, ShapeError
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.onednn.engine import AVX512, needs_onednn, run_onednn
from tests.ops.running import Array, operator_def, run_operator

TYPES = [(np.float32, 2e-5), (np.float16, 1e-2), (ml_dtypes.bfloat16, 8e-2)]
NORMS: list[tuple[str, dict[str, Any]]] = [
    ("InstanceNorm", {"order": "NCHW"}),
    ("InstanceNorm", {"order": "NHWC"}),
    ("GroupNorm", {"order": "NCHW", "group": 2}),
    ("GroupNorm", {"order": "NHWC", "group": 2}),
    ("GroupNorm", {"order": "NCHW", "group": 1}),
    ("LayerNorm", {"axis": 1}),
    ("LayerNorm", {"axis": -1}),
    ("LayerNorm", {"axis": 0}),
]


def affine(op_type: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> list[Array]:
    """Scale and bias for X of that shape."""
    rng = np.random.default_rng(9)
    if op_type == "LayerNorm":
        size: tuple[int, ...] = shape[arguments["axis"] :]
    else:
        size = (shape[-1 if arguments["order"] == "NHWC" else 1],)
    return [rng.normal(size=size), rng.normal(size=size)]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 2),
    channels=st.integers(1, 5),
    pixels=st.lists(st.integers(1, 2), max_size=2),
    order=st.sampled_from(["NCHW", "NHWC"]),
    size=st.sampled_from([1, 3, 5, 9]),
    beta=st.sampled_from([0.75, 0.5, 2.0]),
)
def test_lrn_gradient_agrees_with_differences(
    batch: int, channels: int, pixels: list[int], order: str, size: int, beta: float
) -> None:
    shape = (batch, *pixels, channels) if order == "NHWC" else (batch, channels, *pixels)
    x = np.random.default_rng(0).normal(0, 2, shape)
    check_gradient("LRN", [x], size=size, alpha=0.7, beta=beta, bias=1.5, order=order)
    check_gradient("LRN", [x], outputs=2, weighted=[0], size=size, alpha=0.7, beta=beta, bias=1.5, order=order)


def lrn_gradient(x: Array, dy: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    """By the matrix of derivatives of the channels of each pixel; x and dy are pixels x channels."""
    channels = x.shape[1]
    near = (abs(np.arange(channels)[:, None] - np.arange(channels)) <= size // 2).astype(float)
    scale = bias + alpha / size * (x * x) @ near
    dx = np.empty_like(x)
    for pixel in range(len(x)):
        own = np.diag(scale[pixel] ** -beta)
        cross = -2 * alpha * beta / size * np.outer(x[pixel] * scale[pixel] ** (-beta - 1), x[pixel]) * near
        dx[pixel] = (own + cross).T @ dy[pixel]
    return dx


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("channels", [16, 7])
def test_lrn_gradient_of_every_type_and_engine_agrees_with_its_matrix(
    channels: int, dtype: Any, tolerance: float, order: str, engine: str
) -> None:
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(0, 3, (2, 9, 11, channels)).astype(dtype) for _ in range(2))
    numbers: dict[str, Any] = {"size": 5, "alpha": 0.5, "beta": 0.75, "bias": 2.0}
    rows = [array.astype(np.float64).reshape(-1, channels) for array in (x, dy)]
    wanted = lrn_gradient(*rows, **numbers).reshape(x.shape)
    if order == "NCHW":
        x, dy = (np.ascontiguousarray(array.transpose(0, 3, 1, 2)) for array in (x, dy))
        wanted = wanted.transpose(0, 3, 1, 2)
    [y] = run_operator("LRN", [x], order=order, **numbers)
    [dx] = run_operator("LRNGradient", [x, y, dy], engine=engine, order=order, **numbers)
    assert dx.dtype == dtype
    np.testing.assert_allclose(dx.astype(np.float64), wanted, tolerance, tolerance)


@needs_onednn
def test_onednn_computes_lrns_gradient_in_nhwc() -> None:
    x = np.ones((2, 5, 5, 16), np.float32)
    run_onednn("LRNGradient", [x, x, x], lanes=AVX512, order="NHWC", size=5, beta=0.75)


def test_lrn_gradient_of_nothing_and_of_many_pieces() -> None:
    empty = np.zeros((0, 3, 4, 4), np.float32)
    assert run_operator("LRNGradient", [empty] * 3, size=3)[0].shape == empty.shape
    rng = np.random.default_rng(2)
    x, y, dy = (rng.normal(size=(5, 20, 60, 50)).astype(np.float32) for _ in range(3))
    numbers: dict[str, Any] = {"size": 5, "alpha": 0.5, "beta": 0.75}
    [whole] = run_operator("LRNGradient", [x, y, dy], **numbers)
    parts = [run_operator("LRNGradient", [a[i : i + 1] for a in (x, y, dy)], **numbers)[0] for i in range(5)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize(("op_type", "arguments"), NORMS, ids=str)
@pytest.mark.parametrize("outputs", [1, 3])
def test_gradient_agrees_with_differences_with_and_without_saved_statistics(
    op_type: str, arguments: dict[str, Any], outputs: int
) -> None:
    shape = (2, 4, 3, 2) if arguments.get("order") != "NHWC" else (2, 3, 2, 4)
    x = np.random.default_rng(3).normal(1, 2, shape)
    common: dict[str, Any] = {"outputs": outputs, "weighted": [0], "epsilon": 0.01}
    check_gradient(op_type, [x, *affine(op_type, arguments, shape)], **common, **arguments)
    if op_type == "LayerNorm":
        check_gradient(op_type, [x], **common, **arguments)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from([2, 4]), st.integers(1, 3)),
    case=st.sampled_from(NORMS),
)
def test_gradient_takes_any_shape(shape: tuple[int, int, int], case: tuple[str, dict[str, Any]]) -> None:
    op_type, arguments = case
    shape = (shape[0], shape[2], shape[1]) if arguments.get("order") == "NHWC" else shape
    x = np.random.default_rng(3).normal(1, 2, shape)
    inputs = [x, *affine(op_type, arguments, shape)]
    check_gradient(op_type, inputs, outputs=3, weighted=[0], epsilon=0.1, rtol=1e-5, atol=1e-6, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "arguments"), NORMS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_gradient_of_every_type_agrees_with_float64(
    op_type: str, arguments: dict[str, Any], dtype: Any, tolerance: float, outputs: int
) -> None:
    shape = (5, 8, 50, 40) if arguments.get("order") != "NHWC" else (5, 50, 40, 8)
    rng = np.random.default_rng(4)
    x, dy = rng.normal(1, 2, shape).astype(dtype), rng.normal(size=shape).astype(dtype)
    parameters = [array.astype(dtype) for array in affine(op_type, arguments, shape)]
    names = ["x", "scale", "bias"]
    definition = operator_def(op_type, names, ["y", "mean", "spread"][:outputs], **arguments)
    found = analytic_gradients(definition, [x, *parameters], {0: dy}, [0, 1, 2])
    wide = [array.astype(np.float64) for array in (x, *parameters)]
    wanted = analytic_gradients(definition, wide, {0: dy.astype(np.float64)}, [0, 1, 2])
    for index, size in ((0, 1.0), (1, (x.size / parameters[0].size) ** 0.5), (2, (x.size / parameters[0].size) ** 0.5)):
        assert found[index].dtype == dtype
        np.testing.assert_allclose(
            found[index].astype(np.float64), wanted[index], tolerance, tolerance * size * 2, err_msg=str(index)
        )


def gradient_by_projection(
    op_type: str, arguments: dict[str, Any], x: Array, scale: Array, dy: Array, epsilon: float
) -> tuple[Array, Array, Array]:
    """dX: dY * scale without its mean and without what is along X, divided by the deviation; group after group."""
    last = arguments.get("order") == "NHWC"
    if op_type == "LayerNorm":
        axis = arguments["axis"] % x.ndim
        ids = np.broadcast_to(
            np.arange(math.prod(x.shape[:axis])).reshape(*x.shape[:axis], *(1,) * (x.ndim - axis)), x.shape
        )
        weight, others = np.broadcast_to(scale, x.shape), tuple(range(axis))
    else:
        channel = x.ndim - 1 if last else 1
        channels = x.shape[channel]
        groups = arguments.get("group", channels)
        place = np.arange(channels).reshape([-1 if a == channel else 1 for a in range(x.ndim)])
        image = np.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1))
        ids = np.broadcast_to(image * groups + place // (channels // groups), x.shape)
        weight = np.broadcast_to(scale[place], x.shape)
        others = tuple(a for a in range(x.ndim) if a != channel)
    normal, dx = np.empty_like(x), np.empty_like(x)
    for number in np.unique(ids):
        own = ids == number
        centered = x[own] - x[own].mean()
        inverse = 1 / math.sqrt((centered**2).mean() + epsilon)
        normal[own] = centered * inverse
        up = dy[own] * weight[own]
        up = up - up.mean()
        dx[own] = (up - normal[own] * (up * normal[own]).mean()) * inverse
    return dx, (dy * normal).sum(others), dy.sum(others)


@pytest.mark.parametrize(("op_type", "arguments"), NORMS, ids=str)
def test_gradient_over_many_pieces_of_the_batch_is_a_projection(op_type: str, arguments: dict[str, Any]) -> None:
    shape = (5, 4, 90, 60) if arguments.get("order") != "NHWC" else (5, 90, 60, 4)
    rng = np.random.default_rng(7)
    x, dy = rng.normal(1, 2, shape), rng.normal(size=shape)
    parameters = affine(op_type, arguments, shape)
    if arguments.get("axis") == -1:
        x, dy = x[:2, :2, :20], dy[:2, :2, :20]
    definition = operator_def(op_type, ["x", "scale", "bias"], ["y"], epsilon=0.5, **arguments)
    found = analytic_gradients(definition, [x, *parameters], {0: dy}, [0, 1, 2])
    wanted = gradient_by_projection(op_type, arguments, x, parameters[0], dy, 0.5)
    for index in range(3):
        np.testing.assert_allclose(found[index], wanted[index], 1e-9, 1e-9, err_msg=str(index))


@pytest.mark.parametrize(("op_type", "arguments"), NORMS, ids=str)
def test_gradient_of_an_empty_batch_is_zero_for_scale_and_bias(op_type: str, arguments: dict[str, Any]) -> None:
    if arguments.get("axis") == 0:
        pytest.skip("there the batch is part of the group")
    shape = (0, 4, 3, 4)
    x = np.zeros(shape)
    definition = operator_def(op_type, ["x", "scale", "bias"], ["y"], **arguments)
    found = analytic_gradients(definition, [x, *affine(op_type, arguments, shape)], {0: x}, [0, 1, 2])
    assert found[0].shape == shape
    assert not found[1].any()
    assert not found[2].any()


def test_nan_stays_in_its_group() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    x[1, 2, 3] = np.nan
    dx, dscale, _ = run_operator("InstanceNormGradient", [x, np.ones(3), np.ones(3), np.ones((2, 3, 4))], 3)
    assert np.isnan(dx).reshape(6, 4).all(axis=1).tolist() == [False] * 5 + [True]
    assert not np.isnan(dx).reshape(6, 4)[:5].any()
    assert np.isnan(dscale).tolist() == [False, False, True]


def test_makers_name_the_inputs_in_caffe2s_order_and_do_not_need_y() -> None:
    names, outputs = ["x", "s", "b"], ["y", "m", "d"]
    expected = {
        "InstanceNorm": ["x", "s", "b", "dy", "m", "d"],
        "GroupNorm": ["dy", "x", "s", "b", "m", "d"],
        "LayerNorm": ["dy", "x", "m", "d", "x", "s"],
    }
    for op_type, inputs in expected.items():
        [made] = gradient(operator_def(op_type, names, outputs), ["dy", None, None]).operators
        assert list(made.input) == inputs, op_type
        assert list(made.output) == ["x_grad", "s_grad", "b_grad"]
    [made] = gradient(operator_def("LayerNorm", ["x"], ["y"]), ["dy"]).operators
    assert (list(made.input), list(made.output)) == (["dy", "x"], ["x_grad"])
    [made] = gradient(operator_def("LRN", ["x"], ["y", "scale"], size=3), ["dy", None]).operators
    assert (made.type, list(made.input)) == ("LRNGradient", ["x", "y", "dy"])


def vectors(x: Array, axis: int) -> Array:
    return np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 40]), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    kind=st.sampled_from([(np.float64, 1e-12), *TYPES]),
)
def test_vectors_are_divided_by_their_length(shape: list[int], axis: int, kind: tuple[Any, float]) -> None:
    dtype, tolerance = kind
    axis = axis % len(shape) - len(shape)
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    rows = vectors(x.astype(np.float64), axis).tolist()
    for op_type, length in (("Normalize", math.hypot), ("NormalizeL1", lambda *row: math.fsum(map(abs, row)))):
        [y] = run_operator(op_type, [x], axis=axis)
        assert y.dtype == dtype
        wanted = [[value / length(*row) for value in row] for row in rows]
        np.testing.assert_allclose(vectors(y.astype(np.float64), axis), wanted, tolerance, tolerance)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_normalize_gradient_agrees_with_differences(axis: int) -> None:
    check_gradient("Normalize", [np.random.default_rng(0).normal(size=(3, 4, 2))], axis=axis)


def test_vectors_of_zeros_stay_zeros_and_nothing_stays_nothing() -> None:
    zeros = np.zeros((2, 3), np.float32)
    for op_type in ("Normalize", "NormalizeL1"):
        assert not run_operator(op_type, [zeros])[0].any()
        assert run_operator(op_type, [zeros[:, :0]])[0].shape == (2, 0)
    [dx] = run_operator("NormalizeGradient", [zeros, np.ones((2, 3), np.float32)])
    np.testing.assert_allclose(dx, np.full((2, 3), 1e12), rtol=1e-6)
    assert gradient(operator_def("NormalizeL1", ["x"], ["y"]), ["dy"]).inputs == (None,)


def test_gradients_of_normalizations_refuse_what_does_not_fit() -> None:
    x, four = np.ones((2, 4, 3), np.float32), np.ones(4, np.float32)
    with pytest.raises(ShapeError, match=r"'x2' must have shape \(2, 4, 3\) .* found \(2, 4\)"):
        run_operator("LRNGradient", [x, x, x[..., 0]], size=3)
    with pytest.raises(ArgumentError, match="'size' must be odd and at least 1, found 4"):
        run_operator("LRNGradient", [x, x, x], size=4)
    with pytest.raises(ShapeError, match="wrong number of inputs, 5: X, scale, bias, dY"):
        run_operator("InstanceNormGradient", [x, four, four, x, x], 3)
    with pytest.raises(ShapeError, match=r"'x4' must have shape \(2, 4\) \(one element a group\), found \(4,\)"):
        run_operator("InstanceNormGradient", [x, four, four, x, four, four], 3)
    with pytest.raises(ArgumentError, match="'group' must divide the 4 channels, found 3"):
        run_operator("GroupNormGradient", [x, x, four, four], 3, group=3)
    with pytest.raises(ShapeError, match="must have 12 elements, found shape"):
        run_operator("LayerNormGradient", [x, x, four, four], 3)
    with pytest.raises(ShapeError, match="expected 3 outputs, found 1"):
        run_operator("LayerNormGradient", [x, x, np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)])
    with pytest.raises(ArgumentError, match="'epsilon' must be at least 0, found -1"):
        run_operator("LayerNormGradient", [x, x], epsilon=-1.0)
    with pytest.raises(ShapeError, match=r"argument 'axis' must be in \[-3, 2\], found 3"):
        run_operator("Normalize", [x], axis=3)
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator("NormalizeL1", [x.astype(np.int32)])
