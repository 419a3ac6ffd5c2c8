"""QuantConv, QuantFC, QuantAdd, ConvInteger and MatMulInteger: bit for bit what integers give, and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, DagexecError, ShapeError
from tests.ops.integers import convolution_sums, requantized
from tests.ops.quantized.test_quantized_linear import onnx_result
from tests.ops.running import run_operator

Array = npt.NDArray[Any]
F32 = np.float32


def full_range(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max + 1, shape).astype(dtype)


def expected_output(
    sums: Array, multiplier: Array, post_ops: list[str], addend: Array | None, y_scale: float, zero: int, to: Any
) -> Array:
    """v in float32 as the schema says it, then integers."""
    v = sums.astype(F32) * multiplier
    for text in post_ops:
        kind, *numbers = text.split(":")
        if kind == "relu":
            v = np.where(v > 0, v, F32(0))
        elif kind == "clip":
            low, high = (F32(number) / F32(y_scale) for number in numbers)
            v = np.minimum(np.maximum(v, low), high)
        elif kind == "leaky_relu":
            v = np.where(v > 0, v, v * F32(numbers[0]))
        else:
            assert addend is not None
            v = v + addend
    return v if to == "float32" else requantized(v, zero, np.dtype(to))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_convolution_gives_the_bits_of_integer_sums(data: st.DataObject) -> None:
    draw = data.draw
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    group = draw(st.sampled_from([1, 1, 2, 4]))
    channels = group * draw(st.integers(1, 1 if group == 4 else 9))
    filters = group * draw(st.integers(1, 3))
    kernel, stride, pad, dilation = (draw(st.integers(low, high)) for low, high in ((1, 3), (1, 2), (0, 2), (1, 2)))
    height, width = (draw(st.integers(dilation * (kernel - 1) + 1, 9)) for _ in range(2))
    x_type, to = draw(st.sampled_from(["uint8", "int8"])), draw(st.sampled_from(["uint8", "int8", "float32"]))
    x = full_range(random, (draw(st.integers(1, 2)), channels, height, width), x_type)
    weights = full_range(random, (filters, channels // group, kernel, kernel), np.int8)
    x_zero = int(full_range(random, (), x_type))
    x_scale, y_scale, add_scale = (F32(random.uniform(0.01, 0.1)) for _ in range(3))
    w_scale = random.uniform(0.001, 0.02, draw(st.sampled_from([1, filters]))).astype(F32)
    sums = convolution_sums(x, weights, x_zero, stride, pad, dilation, group)
    inputs: list[Array] = [x, weights, w_scale]
    arguments: dict[str, Any] = {"x_scale": float(x_scale), "x_zero_point": x_zero, "to": to, "group": group}
    arguments |= {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation}
    if draw(st.booleans()):
        bias = random.integers(-(1 << 24), 1 << 24, filters).astype(np.int32)
        inputs.append(bias)
        arguments["bias"] = 1
        sums = sums + bias[:, None, None]
    y_zero = 0
    if to == "float32":
        y_scale = F32(1)
    else:
        y_zero = int(full_range(random, (), to))
        arguments |= {"y_scale": float(y_scale), "y_zero_point": y_zero}
    post_ops, addend = draw(st.sampled_from([[], ["relu"], ["clip:0.0:6.0"], ["leaky_relu:0.1"]])), None
    if draw(st.booleans()):
        added = full_range(random, sums.shape, draw(st.sampled_from(["uint8", "int8"])))
        zero = int(full_range(random, (), added.dtype))
        addend = (added.astype(F32) - F32(zero)) * F32(add_scale / y_scale)
        post_ops = draw(st.sampled_from([[f"add:{len(inputs)}", *post_ops], [*post_ops, f"add:{len(inputs)}"]]))
        inputs.append(added)
        arguments |= {"add_scale": float(add_scale), "add_zero_point": zero}
    multiplier = (x_scale * w_scale / y_scale)[:, None, None]
    expected = expected_output(sums, multiplier, post_ops, addend, float(y_scale), y_zero, to)
    found = run_operator("QuantConv", inputs, post_ops=post_ops, **arguments)[0]
    np.testing.assert_array_equal(found, expected)
    last = [np.moveaxis(array, 1, -1).copy() if array.ndim == 4 else array for array in inputs]
    found = run_operator("QuantConv", last, post_ops=post_ops, order="NHWC", **arguments)[0]
    np.testing.assert_array_equal(np.moveaxis(found, -1, 1), expected)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_convolution_gives_the_bits_of_integers_and_of_onnxruntime(dtype: Any, per_channel: bool) -> None:
    random = np.random.default_rng(11)
    x = full_range(random, (2, 8, 12, 12), dtype)
    weights = full_range(random, (6, 8, 3, 3), np.int8)
    zero = dtype(random.integers(1, 100))
    w_scale = random.uniform(0.001, 0.01, 6 if per_channel else 1).astype(F32)
    x_scale, y_scale, y_zero = F32(0.021), F32(0.37), dtype(33)
    bias = random.integers(-9000, 9000, 6).astype(np.int32)

    def found(filters: Array) -> Array:
        return run_operator(
            "QuantConv", [x, filters, w_scale, bias], kernel=3, pad=1, bias=1, to=np.dtype(dtype).name,
            x_scale=float(x_scale), x_zero_point=int(zero), y_scale=float(y_scale), y_zero_point=int(y_zero),
        )[0]  # fmt: skip

    def by_integers(filters: Array) -> Array:
        sums = convolution_sums(x, filters, int(zero), pad=1) + bias[:, None, None]
        multiplier = (x_scale * w_scale / y_scale)[:, None, None]
        return expected_output(sums, multiplier, [], None, float(y_scale), int(y_zero), np.dtype(dtype).name)

    def by_onnxruntime(filters: Array) -> Array:
        given = w_scale if per_channel else w_scale.reshape(())
        inputs = [x, x_scale, zero, filters, given, np.zeros(given.shape, np.int8), y_scale, y_zero, bias]
        return onnx_result("QLinearConv", [np.asarray(array) for array in inputs], pads=[1, 1, 1, 1])[0]

    np.testing.assert_array_equal(found(weights), by_integers(weights))
    # MLAS and we round the same product to the nearest, ties to even; without VNNI it saturates pairs of wider products
    seven_bits = weights >> 1
    np.testing.assert_array_equal(found(seven_bits), by_onnxruntime(seven_bits))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(1, 700), st.integers(1, 9), st.booleans(), st.integers(0, 1000))
def test_fully_connected_layers_give_the_bits_of_integer_sums(
    rows: int, inner: int, units: int, biased: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, w = full_range(random, (rows, inner), np.uint8), full_range(random, (units, inner), np.int8)
    w_scale = random.uniform(0.001, 0.01, units).astype(F32)
    sums = (x.astype(np.int64) - 3) @ w.T.astype(np.int64)
    inputs: list[Array] = [x, w, w_scale]
    if biased:
        inputs.append(random.integers(-(2**31), 2**31, units).astype(np.int32))
        sums = sums + inputs[-1]
    multiplier = F32(0.02) * w_scale / F32(0.5)
    expected = expected_output(sums, multiplier, ["relu"], None, 0.5, -5, "int8")
    found = run_operator(
        "QuantFC", inputs, bias=int(biased), x_scale=float(F32(0.02)), x_zero_point=3, y_scale=0.5, y_zero_point=-5,
        to="int8", post_ops=["relu"],
    )[0]  # fmt: skip
    np.testing.assert_array_equal(found, expected)


def test_large_sums_are_exact_to_the_last_unit() -> None:
    x, w = np.full((1, 4, 1, 901), 255, np.uint8), np.full((1, 4, 1, 901), 127, np.int8)
    total = 4 * 901 * 255 * 127
    bias = np.array([1 - total], np.int32)
    found = run_operator("QuantFC", [x.reshape(1, -1), w.reshape(1, -1), F32(1), bias], bias=1)[0]
    assert found.tolist() == [[1.0]]
    found = run_operator("QuantConv", [x, w, F32(1), bias], bias=1, kernels=[1, 901])[0]
    assert found.tolist() == [[[[1.0]]]]


def test_an_image_is_folded_for_a_fully_connected_layer() -> None:
    random = np.random.default_rng(2)
    x, w = full_range(random, (2, 3, 4, 5), np.int8), full_range(random, (7, 60), np.int8)
    found = run_operator("QuantFC", [x, w, F32(0.01)], x_scale=0.5)[0]
    expected = (x.reshape(2, 60).astype(np.int64) @ w.T.astype(np.int64)).astype(F32) * (F32(0.5) * F32(0.01))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("to", ["uint8", "int8", "float32"])
def test_sums_of_two_quantized_tensors(to: str) -> None:
    random = np.random.default_rng(4)
    a, b = full_range(random, (3, 50), np.uint8), full_range(random, (3, 50), np.int8)
    y_scale = F32(1 if to == "float32" else 0.04)
    arguments: dict[str, Any] = {} if to == "float32" else {"y_scale": float(y_scale), "y_zero_point": 9}
    found = run_operator(
        "QuantAdd", [a, b], x_scale=0.02, x_zero_point=100, add_scale=0.03, add_zero_point=-3, to=to,
        post_ops=["add:1", "relu"], **arguments,
    )[0]  # fmt: skip
    v = (a.astype(F32) - 100) * (F32(0.02) / y_scale) + (b.astype(F32) + 3) * (F32(0.03) / y_scale)
    v = np.maximum(v, 0)
    np.testing.assert_array_equal(found, v if to == "float32" else requantized(v, 9, np.dtype(to)))


@pytest.mark.parametrize("inner", [3, 600])
def test_integer_products_without_scales_are_those_of_integers_and_of_onnxruntime(inner: int) -> None:
    random = np.random.default_rng(7)
    a, b = full_range(random, (2, 4, inner), np.uint8), full_range(random, (inner, 5), np.int8)
    a_zero, b_zero = np.array(17, np.uint8), full_range(random, (5,), np.int8)
    sums = (a.astype(np.int64) - 17) @ (b.astype(np.int64) - b_zero)
    np.testing.assert_array_equal(run_operator("MatMulInteger", [a, b, a_zero, b_zero])[0], sums)
    narrow = [a, b >> 1, a_zero, b_zero >> 1]  # of seven bits, which MLAS does not saturate without VNNI
    np.testing.assert_array_equal(run_operator("MatMulInteger", narrow)[0], onnx_result("MatMulInteger", narrow)[0])
    x, w = full_range(random, (1, 4, 9, 9), np.uint8), full_range(random, (3, 4, 3, 3), np.int8)
    found = run_operator("ConvInteger", [x, w, np.uint8(17)], kernel=3, pad=1)[0]
    np.testing.assert_array_equal(found, convolution_sums(x, w, 17, pad=1))
    assert found.dtype == np.int32


CONV = ([np.zeros((1, 2, 5, 5), np.uint8), np.zeros((3, 2, 3, 3), np.int8), np.ones(3, F32)], {"kernel": 3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_scale": 0.0}, "'x_scale' must be a finite scale above 0, found 0"),
        ({"x_scale": -1.0}, "'x_scale' must be a finite scale above 0, found -1"),
        ({"x_scale": float("nan")}, "'x_scale' is not a number"),
        ({"x_scale": float("inf")}, "'x_scale' must be a finite scale above 0, found inf"),
        ({"x_zero_point": 256}, "'x_zero_point' must be a zero point of uint8, 0 to 255, found 256"),
        ({"x_zero_point": -1}, "'x_zero_point' must be a zero point of uint8"),
        ({"to": "int8", "y_scale": 1.0, "y_zero_point": 128}, "zero point of int8, -128 to 127, found 128"),
        ({"to": "int8"}, "'y_scale' is required for a Y of int8"),
        ({"to": "int32"}, "'to' must be one of float32, uint8, int8, found int32"),
        ({"y_scale": 1.0}, "y_scale and y_zero_point require integer output"),
        ({"post_ops": ["sigmoid"]}, "'sigmoid' is not supported for integers"),
        ({"post_ops": ["clip:2:1"]}, "are invalid"),
        ({"post_ops": ["add:3"]}, "post_ops must add every input from 3 on"),
        ({"group": 3}, "group must divide the 2 input channels"),
        ({"bias": 1}, "with bias=1 the fourth input must be the bias"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=message) as error:
        run_operator("QuantConv", CONV[0], **CONV[1], **arguments)
    assert isinstance(error.value, ArgumentError | ShapeError)


def test_inputs_of_other_types_and_sizes_are_named() -> None:
    x, w, scale = CONV[0]
    with pytest.raises(ShapeError, match="must be one of uint8, int8, found float32"):
        run_operator("QuantConv", [x.astype(F32), w, scale], kernel=3)
    with pytest.raises(ShapeError, match="'x1' must be one of int8, found uint8"):
        run_operator("QuantConv", [x, w.astype(np.uint8), scale], kernel=3)
    with pytest.raises(ShapeError, match="one entry, or 3: one for each filter; found shape \\(2,\\)"):
        run_operator("QuantConv", [x, w, scale[:2]], kernel=3)
    with pytest.raises(ShapeError, match="must be one of int32"):
        run_operator("QuantConv", [x, w, scale, np.zeros(3, F32)], kernel=3, bias=1)
    with pytest.raises(ShapeError, match="the output's shape"):
        run_operator("QuantConv", [x, w, scale, np.zeros((1, 3, 3, 1), np.int8)], kernel=3, post_ops=["add:3"])
    with pytest.raises(ShapeError, match="W has 9 columns"):
        run_operator("QuantFC", [x.reshape(1, 50), np.zeros((4, 9), np.int8), F32(1)])
