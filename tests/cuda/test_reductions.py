"""What is built on reductions on CUDA, where the tests of operators do not look: sizes, types, places, determinism."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device
from dagexec.core.registry import operator_module, registered_engines, registered_operators
from dagexec.devices.cuda import kernels
from dagexec.errors import OperatorError
from dagexec.ops.engines.cuda.base import row_reduction
from dagexec.ops.engines.cuda.index import top_k
from tests.cuda.emulated import cuda_devices
from tests.cuda.test_coverage import HOST
from tests.ops.running import Array, assert_rounds_to, on_device, operator_def

CUDA = Device("cuda", 0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(7)


def run(op_type: str, *inputs: Array, outputs: int = 1, **arguments: ArgumentValue) -> list[Array]:
    """The outputs on CUDA."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    with cuda_devices():
        return on_device(CUDA, definition, dict(zip(names, inputs, strict=True)))


def on_host(op_type: str, *inputs: Array, outputs: int = 1, **arguments: ArgumentValue) -> list[Array]:
    """The outputs on the host."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    return on_device(Device("cpu", 0), definition, dict(zip(names, inputs, strict=True)))


def normal(*shape: int, dtype: object = np.float32, mean: float = 0.0) -> Array:
    return (RNG.standard_normal(shape) + mean).astype(np.dtype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 1_000_000), [1]),  # one row, cut in pieces
        ((100_000, 10), [0]),  # few columns, cut in pieces
        ((3, 700), [1]),  # rows longer than a block
        ((20_000, 3), [1]),  # many tiny rows
        ((300, 70), [0]),  # columns
        ((2, 3, 40_000), [0, 2]),  # channels
        ((6, 5, 4, 3, 2), [0, 2, 4]),
        ((6, 5, 4, 3, 2), [1, 3]),
        ((1, 1, 1), [1]),
    ],
)
def test_sums_and_extremes_of_any_shape(shape: tuple[int, ...], axes: list[int]) -> None:
    x = normal(*shape)
    wide = x.astype(np.float64)
    [total] = run("ReduceSum", x, axes=axes)
    scale = np.abs(wide).sum(axis=tuple(axes), keepdims=True)
    np.testing.assert_array_less(np.abs(total - wide.sum(axis=tuple(axes), keepdims=True)), 1e-6 * scale)
    np.testing.assert_array_equal(run("ReduceMax", x, axes=axes)[0], x.max(axis=tuple(axes), keepdims=True))


def test_a_long_sum_of_float32_keeps_its_digits() -> None:
    x = np.full((1 << 20,), 0.1, np.float32)
    [total] = run("SumElements", x)
    assert abs(float(total) / (float(np.float32(0.1)) * (1 << 20)) - 1) < 1e-7


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceL2", "ReduceMin", "Softmax", "LogSoftmax"])
def test_16_bit_floats_are_computed_in_float32(dtype: object, op_type: str) -> None:
    x = normal(5, 300, dtype=dtype)
    arguments: dict[str, ArgumentValue] = {} if "Softmax" in op_type else {"axes": [1]}
    [found], [expected] = run(op_type, x, **arguments), on_host(op_type, x, **arguments)
    assert_rounds_to(found, expected, op_type)


def test_integers_wrap_in_sums_and_products() -> None:
    x = RNG.integers(-(2**31), 2**31, (3, 5000), dtype=np.int32)
    np.testing.assert_array_equal(run("ReduceSum", x, axes=[1])[0], x.sum(axis=1, keepdims=True, dtype=np.int32))
    y = RNG.integers(-100, 100, (3, 50), dtype=np.int8) | np.int8(1)
    np.testing.assert_array_equal(run("ReduceProd", y, axes=[1])[0], y.prod(axis=1, keepdims=True, dtype=np.int8))


def test_nan_and_infinity_go_where_they_do_on_the_host() -> None:
    x = normal(6, 400)
    x[1, 7], x[2, 9], x[3, 11], x[3, 12] = np.nan, np.inf, np.inf, -np.inf
    for op_type in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceMean"):
        [found], [expected] = run(op_type, x, axes=[1]), on_host(op_type, x, axes=[1])
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), op_type)
        assert_rounds_to(found, expected, op_type)
    for op_type in ("Softmax", "LogSoftmax"):
        [found], [expected] = run(op_type, x), on_host(op_type, x)
        assert_rounds_to(found, expected, op_type)


@pytest.mark.exact
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_axes_without_elements(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    for op_type in ("ReduceSum", "ReduceMean", "ReduceProd"):
        np.testing.assert_array_equal(run(op_type, x, axes=[1])[0], on_host(op_type, x, axes=[1])[0])
    np.testing.assert_array_equal(run("SumElements", x)[0], 0)
    np.testing.assert_array_equal(run("AveragedLoss", x)[0], 0)
    assert run("Softmax", x)[0].shape == shape


@given(st.integers(1, 40), st.integers(1, 400), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_the_place_of_an_extreme_is_the_first_or_last_of_equals(rows: int, columns: int, last: bool, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 5, (rows, columns)).astype(np.float32)
    x[np.random.default_rng(seed + 1).random(x.shape) < 0.01] = np.nan
    axis = 1 if last else 0
    np.testing.assert_array_equal(run("ArgMax", x, axis=axis, keepdims=0)[0], x.argmax(axis=axis))
    np.testing.assert_array_equal(run("ArgMin", x, axis=axis, keepdims=0)[0], x.argmin(axis=axis))
    from_the_end = x.shape[axis] - 1 - np.flip(x, axis).argmax(axis=axis)
    np.testing.assert_array_equal(run("ArgMax", x, axis=axis, keepdims=0, last=1)[0], from_the_end)
    from_the_end = x.shape[axis] - 1 - np.flip(x, axis).argmin(axis=axis)
    np.testing.assert_array_equal(run("ArgMin", x, axis=axis, keepdims=0, last=1)[0], from_the_end)


def test_the_gradient_of_a_product_is_that_of_the_other_factors() -> None:
    x = normal(7, 300, dtype=np.float64)
    x[1, 5] = x[2, 6] = x[2, 8] = 0
    x[3, 1], x[4, 2], x[4, 3], x[5, 4] = np.nan, -np.inf, 0, np.inf
    dy = normal(7, 1, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        y = x.prod(axis=1, keepdims=True)
    inputs = (dy, x, y)
    [found] = run("ReduceProdGradient", *inputs, axes=[1])
    with np.errstate(invalid="ignore"):
        others = np.array([[np.prod(np.delete(row, index)) for index in range(row.size)] for row in x])
        expected = dy * others
    for row in range(len(x)):
        finite = np.abs(expected[row][np.isfinite(expected[row])]).max(initial=0.0)
        np.testing.assert_allclose(found[row], expected[row], rtol=1e-11, atol=1e-11 * finite)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(2, 3, 40, 500), (4, 70, 5, 6), (1, 1, 3, 2)])
def test_variances_of_a_batch_survive_a_large_mean(order: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape, mean=1000.0)
    channels = shape[1]
    if order == "NHWC":
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    axes = (0, 2, 3) if order == "NCHW" else (0, 1, 2)
    scale, bias, mean, var = (normal(channels) for _ in range(4))
    definition = operator_def(
        "SpatialBN",
        ["x", "scale", "bias", "mean", "var"],
        ["y", "mean", "var", "saved_mean", "saved_inv_std"],
        is_test=0,
        order=order,
        momentum=0.5,
    )
    arrays = {"x": x, "scale": scale, "bias": bias, "mean": mean, "var": var}
    with cuda_devices():
        y, new_mean, new_var, saved_mean, saved_inverse = on_device(CUDA, definition, arrays)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(saved_mean, wide.mean(axis=axes), rtol=1e-6)
    np.testing.assert_allclose(saved_inverse, 1 / np.sqrt(wide.var(axis=axes) + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(new_mean, 0.5 * mean + 0.5 * wide.mean(axis=axes), rtol=1e-5)
    np.testing.assert_allclose(new_var, 0.5 * var + 0.5 * wide.var(axis=axes), rtol=1e-5, atol=1e-6)
    spread = (1, -1, 1, 1) if order == "NCHW" else (1, 1, 1, -1)
    centered = (wide - wide.mean(axis=axes, keepdims=True)) / np.sqrt(wide.var(axis=axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, centered * scale.reshape(spread) + bias.reshape(spread), atol=5e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 100_000), (300, 33)])
def test_layers_are_normalized_in_one_launch_or_in_pieces(shape: tuple[int, int]) -> None:
    x, gamma, beta = normal(*shape, mean=100.0), normal(shape[1]), normal(shape[1])
    y, mean, deviation = run("LayerNorm", x, gamma, beta, outputs=3)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean[:, 0], wide.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(deviation[:, 0], np.sqrt(wide.var(axis=1) + 1e-5), rtol=1e-5)
    expected = (wide - wide.mean(axis=1, keepdims=True)) / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, expected * gamma + beta, atol=2e-4, rtol=1e-4)
    dy = normal(*shape)
    inputs = (dy, x, gamma, beta)
    for found, expected in zip(
        run("LayerNormGradient", *inputs, outputs=3), on_host("LayerNormGradient", *inputs, outputs=3), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=3e-4 * np.abs(expected).max(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [3, 700, 200_000])
def test_softmax_of_rows_of_any_length_and_its_gradient(columns: int) -> None:
    x = normal(3, columns) * 50
    x[0] += 1e5
    wide = x.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    expected = powers / powers.sum(axis=1, keepdims=True)
    [y] = run("Softmax", x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-12)
    dy = normal(3, columns)
    [dx] = run("SoftmaxGradient", y, dy)
    inner = (y.astype(np.float64) * dy).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(dx, y * (dy - inner), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_the_gradient_of_softmax_may_take_the_place_of_that_of_its_result() -> None:
    y, dy = on_host("Softmax", normal(3, 100_000))[0], normal(3, 100_000)
    definition = operator_def("SoftmaxGradient", ["y", "dy"], ["dy"])
    with cuda_devices():
        [found] = on_device(CUDA, definition, {"y": y, "dy": dy.copy()})
    np.testing.assert_array_equal(found, run("SoftmaxGradient", y, dy)[0])


@pytest.mark.slow
def test_bytes_depend_neither_on_the_device_nor_on_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = normal(3, 40_000), np.array([5, 39_999, 0], np.int32)

    def found() -> list[bytes]:
        results = [run("ReduceSum", x, axes=[1]), run("Softmax", x), run("SoftmaxWithLoss", x, labels, outputs=2)]
        return [y.tobytes() for outputs in results for y in outputs]

    before = found()
    monkeypatch.setattr(kernels, "block_count", lambda elements, *_rest: min(elements, 3))
    assert found() == before
    monkeypatch.setenv("DAGEXEC_EMULATED_ORDER", "reverse")
    assert found() == before


def test_a_launch_depends_on_sizes_alone() -> None:
    """No number of the device goes into how work is cut."""
    cut = row_reduction._Cut.of(1, 1_000_000, row=True, chain=64)
    assert (cut.lanes, cut.width) == (256, 1)
    assert cut.piece * cut.pieces >= 1_000_000 > cut.piece * (cut.pieces - 1)
    assert row_reduction._Cut.of(100_000, 5, row=True, chain=64).pieces == 1


@pytest.mark.exact
@pytest.mark.parametrize("way", ["picked", "counted", "sorted"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8])
def test_the_largest_elements_are_found_in_order(monkeypatch: pytest.MonkeyPatch, way: str, dtype: type) -> None:
    monkeypatch.setattr(top_k, "FEW", 100 if way == "picked" else 0)
    monkeypatch.setattr(top_k, "COUNTED", 0 if way == "sorted" else 10_000)
    x = RNG.integers(0, 20, (3, 70, 2)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        x[1, 9:12, 0], x[2, 3, 1], x[0, 1, 0], x[0, 2, 0] = np.nan, -np.inf, -0.0, 0.0
    for axis, k in ((1, 33), (2, 2), (0, 1)):
        found = run("TopK", x, outputs=3, k=k, axis=axis)
        for one, other in zip(found, on_host("TopK", x, outputs=3, k=k, axis=axis), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op_type", ["LabelCrossEntropy", "SoftmaxWithLoss", "Accuracy", "MultiClassAccuracy"])
def test_a_label_out_of_range_fails_the_run_with_the_error_of_the_host(op_type: str) -> None:
    x, labels = np.abs(normal(3, 4)), np.array([1, 4, 0], np.int32)
    outputs = 1 if op_type in ("LabelCrossEntropy", "Accuracy") else 2
    with pytest.raises(OperatorError, match=r"label 4 at position \[1\] of blob .* expected 0 to 3 \(4 classes\)"):
        run(op_type, x, labels, outputs=outputs)


def test_labels_that_are_no_distribution_fail_the_run() -> None:
    x, target = normal(2, 3), np.array([[0.5, 0.5, 0], [0.5, 0.2, 0]], np.float32)
    with pytest.raises(OperatorError, match=r"row 1 of blob .* must sum to 1, found 0\.7"):
        run("SoftmaxWithLoss", x, target, outputs=2, label_prob=1)


FAMILIES = tuple(
    f"dagexec.ops.families.{name}."
    for name in ("reduction.arg_extreme", "reduction.axes", "reduction.gradient", "normalization", "loss")
)


def test_every_type_that_is_built_on_reductions_is_there() -> None:
    places = {name: f"{operator_module(name)}." for name in registered_operators()}
    types = [
        name
        for name, place in places.items()
        if place.startswith((*FAMILIES, "dagexec.ops.families.activation.softmax"))
    ]
    assert len(types) > 70
    assert [name for name in types if name not in HOST and not registered_engines(name, "cuda")] == []
