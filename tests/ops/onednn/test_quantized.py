"""Quantized operators by oneDNN against the default engine, which is exact: at most one step apart, and rarely that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import Workspace
from dagexec.ops.engines.onednn.binding import library
from tests.ops.onednn.engine import fallbacks, run_fallback, run_onednn
from tests.ops.quantized.test_quantized_products import full_range
from tests.ops.running import operator_def, run_net, run_operator

Array = npt.NDArray[Any]
F32 = np.float32

found_library = library()
pytestmark = pytest.mark.skipif(found_library is None or not found_library.isa.int8, reason="needs oneDNN, and VNNI")


def both(op: str, inputs: list[Array], **arguments: Any) -> tuple[Array, Array]:
    """The outputs of the default engine and of ONEDNN, which must have served."""
    expected, found = run_operator(op, list(inputs), **arguments)[0], run_onednn(op, list(inputs), **arguments)[0]
    assert found.dtype == expected.dtype
    return expected, found


def check_close(expected: Array, found: Array) -> None:
    """Floats within their rounding, integers one step apart at most: where a value lies between two of them within
    the rounding of float32, the order of its factors decides."""
    if expected.dtype == F32:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    else:
        assert np.abs(expected.astype(int) - found.astype(int)).max() <= 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_convolutions_agree_with_the_exact_ones(data: st.DataObject) -> None:
    draw = data.draw
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    group = draw(st.sampled_from([1, 1, 2, 16]))
    channels, filters = (16, 16) if group == 16 else (group * draw(st.integers(1, 20)) for _ in range(2))
    kernel, stride, pad, dilation = (draw(st.integers(*ends)) for ends in ((1, 3), (1, 3), (0, 3), (1, 2)))
    x_type, to = draw(st.sampled_from(["uint8", "int8"])), draw(st.sampled_from(["uint8", "int8", "float32"]))
    x = full_range(random, (2, 9, 8, channels), x_type)
    weights = full_range(random, (filters, kernel, kernel, channels // group), np.int8)
    w_scale = random.uniform(0.001, 0.02, draw(st.sampled_from([1, filters]))).astype(F32)
    inputs: list[Array] = [x, weights, w_scale]
    arguments: dict[str, Any] = {"kernel": kernel, "stride": stride, "pad": pad, "group": group, "to": to}
    arguments["dilation"] = dilation
    arguments |= {"x_scale": 0.0213, "x_zero_point": draw(st.sampled_from([0, int(full_range(random, (), x_type))]))}
    if to != "float32":
        zero = draw(st.sampled_from([0, int(full_range(random, (), to))]))
        arguments |= {"y_scale": 0.413, "y_zero_point": zero}
    if draw(st.booleans()):
        inputs.append(random.integers(-9000, 9000, filters).astype(np.int32))
        arguments["bias"] = 1
    post_ops = draw(st.sampled_from([[], ["relu"], ["clip:0.0:6.0"], ["leaky_relu:0.1"]]))
    if draw(st.booleans()):
        height, width = ((size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size in (9, 8))
        kind = draw(st.sampled_from(["uint8", "int8", "float32"]))
        shape = (2, height, width, filters)
        addend = random.standard_normal(shape).astype(F32) if kind == "float32" else full_range(random, shape, kind)
        add = f"add:{len(inputs)}"
        post_ops = draw(st.sampled_from([[add, *post_ops], [*post_ops, add]]))
        inputs.append(addend)
        if kind != "float32":
            arguments |= {"add_scale": 0.291, "add_zero_point": int(full_range(random, (), kind))}
    if draw(st.booleans()):
        inputs = [np.moveaxis(array, -1, 1).copy() if array.ndim == 4 else array for array in inputs]
    else:
        arguments["order"] = "NHWC"
    arguments["post_ops"] = post_ops
    found = run_operator("QuantConv", list(inputs), engine="ONEDNN", **arguments)  # groups may be left to NumPy
    check_close(run_operator("QuantConv", list(inputs), **arguments)[0], found[0])


def test_what_is_added_in_groups_is_what_is_in_the_same_place() -> None:
    """The library's product on unrolled windows, which computes groups of odd numbers of channels, takes others."""
    random = np.random.default_rng(5)
    x, w = full_range(random, (2, 9, 8, 2), np.uint8), full_range(random, (34, 1, 1, 1), np.int8)
    inputs = [x, w, random.uniform(0.001, 0.02, 34).astype(F32), full_range(random, (2, 13, 12, 34), np.uint8)]
    arguments: dict[str, Any] = {"order": "NHWC", "kernel": 1, "pad": 2, "group": 2, "x_scale": 0.02, "to": "uint8"}
    arguments |= {"post_ops": ["add:3"], "add_scale": 0.03, "y_scale": 0.1}
    found = run_operator("QuantConv", list(inputs), engine="ONEDNN", **arguments)
    check_close(run_operator("QuantConv", list(inputs), **arguments)[0], found[0])


@pytest.mark.parametrize("to", ["uint8", "int8", "float32"])
@pytest.mark.parametrize("zero_point", [0, 113])
@pytest.mark.parametrize("rows", [1, 5])
def test_fully_connected_layers_agree_with_the_exact_ones(to: str, zero_point: int, rows: int) -> None:
    random = np.random.default_rng(6)
    x, w = full_range(random, (rows, 100), np.uint8), full_range(random, (37, 100), np.int8)
    bias = random.integers(-9000, 9000, 37).astype(np.int32)
    added = full_range(random, (rows, 37), np.int8)
    arguments: dict[str, Any] = {} if to == "float32" else {"y_scale": 1.7, "y_zero_point": 5}
    expected, found = both(
        "QuantFC", [x, w, random.uniform(0.001, 0.02, 37).astype(F32), bias, added], bias=1, x_scale=0.021,
        x_zero_point=zero_point, to=to, post_ops=["add:4", "relu"], add_scale=0.3, add_zero_point=-7, **arguments,
    )  # fmt: skip
    check_close(expected, found)


@pytest.mark.parametrize("to", ["uint8", "int8"])
def test_sums_agree_with_the_exact_ones(to: str) -> None:
    random = np.random.default_rng(8)
    a, b = full_range(random, (3, 500), np.uint8), full_range(random, (3, 500), np.int8)
    expected, found = both(
        "QuantAdd", [a, b], x_scale=0.0217, x_zero_point=100, add_scale=0.031, add_zero_point=-3, to=to,
        post_ops=["add:1", "clip:0.0:5.0"], y_scale=0.041, y_zero_point=9,
    )  # fmt: skip
    check_close(expected, found)


def run_with_constants(op: str, x: Array, parameters: list[Array], engine: str) -> Array:
    """The output of an operator whose inputs but the first are constants."""
    workspace = Workspace()
    names = ["x", *(f"p{index}" for index in range(len(parameters)))]
    for name, array in zip(names, [x, *parameters], strict=True):
        workspace.feed_blob(name, array)
        if name != "x":
            workspace.get_blob(name).tensor().freeze()
    definition = operator_def(op, names, ["y"], engine=engine)
    run_net(workspace, definition)
    return workspace.fetch_blob("y")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("zero", [0, 37])
def test_quantizing_and_back_agree_with_the_exact_ones(dtype: Any, zero: int) -> None:
    x = (np.random.default_rng(9).standard_normal((3, 7, 11)) * 3).astype(F32)
    parameters = [np.array(0.0173, F32), np.array(zero, dtype)]
    expected = run_with_constants("QuantizeLinear", x, parameters, "")
    with fallbacks() as served_by_default:
        found = run_with_constants("QuantizeLinear", x, parameters, "ONEDNN")
        back = run_with_constants("DequantizeLinear", expected, parameters, "ONEDNN")
    assert not served_by_default
    check_close(expected, found)
    np.testing.assert_allclose(back, run_with_constants("DequantizeLinear", expected, parameters, ""), rtol=1e-6)


def test_scales_that_are_fed_are_computed_by_the_default_engine() -> None:
    found, why = run_fallback("QuantizeLinear", [np.ones(3, F32), F32(0.5)])
    assert "the scale or the zero point is not constant" in why
    assert found[0].tolist() == [2, 2, 2]


def test_sums_that_might_overflow_are_computed_by_the_default_engine() -> None:
    x, w = np.full((1, 70000), 255, np.uint8), np.full((1, 70000), 127, np.int8)
    found, why = run_fallback("QuantFC", [x, w, F32(1)])
    assert "a sum of 70000 products may not fit 32 bits" in why
    assert found[0] == F32(70000 * 255 * 127)


def test_a_processor_without_exact_sums_is_left_to_the_default_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_library is not None
    plain = replace(found_library, isa=replace(found_library.isa, int8=False))
    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.known_library", lambda: plain)
    _, why = run_fallback("QuantFC", [np.ones((1, 4), np.uint8), np.ones((1, 4), np.int8), F32(1)])
    assert "the processor has no exact 8-bit products (VNNI)" in why
