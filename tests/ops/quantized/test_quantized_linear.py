"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, against onnxruntime and integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from dagexec.core.dtypes import TypeMeta
from dagexec.errors import ArgumentError, OperatorError, ShapeError
from dagexec.ops.families.quantized.linear import QUANTIZED, QUANTIZED_FLOATS
from tests.ops.integers import requantized
from tests.ops.running import computed, run_operator

Array = npt.NDArray[Any]
F32 = np.float32


def onnx_result(op: str, inputs: list[Array], outputs: int = 1, **attributes: Any) -> list[Array]:
    names = [f"x{index}" for index in range(len(inputs))]
    results = [f"y{index}" for index in range(outputs)]
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
    ]
    node = onnx.helper.make_node(op, names, results, **attributes)
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_empty_tensor_value_info(n) for n in results])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_quantizing_and_back_agree_with_onnxruntime(dtype: Any, axis: int | None) -> None:
    random = np.random.default_rng(3)
    x = (random.standard_normal((3, 4, 5)) * 60).astype(F32)
    count = 1 if axis is None else x.shape[axis]
    limits = np.iinfo(dtype)
    scale = random.uniform(0.1, 1, count).astype(F32)
    zero = random.integers(limits.min, limits.max + 1, count).astype(dtype)
    if axis is None:
        scale, zero = scale.reshape(()), zero.reshape(())
    given_axis = {} if axis is None else {"axis": axis}
    quantized = run_operator("QuantizeLinear", [x, scale, zero], **given_axis)[0]
    np.testing.assert_array_equal(quantized, onnx_result("QuantizeLinear", [x, scale, zero], **given_axis)[0])
    assert quantized.dtype == dtype
    back = run_operator("DequantizeLinear", [quantized, scale, zero], **given_axis)[0]
    np.testing.assert_array_equal(back, onnx_result("DequantizeLinear", [quantized, scale, zero], **given_axis)[0])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-700, 700), min_size=1, max_size=30),
    st.sampled_from([np.uint8, np.int8]),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.data(),
)
def test_halves_go_to_the_even_integer_and_the_ends_saturate(
    halves: list[int], dtype: Any, scale: float, data: st.DataObject
) -> None:
    limits = np.iinfo(dtype)
    zero = data.draw(st.integers(int(limits.min), int(limits.max)))
    x = np.array(halves, F32) * F32(scale / 2)
    found = run_operator("QuantizeLinear", [x, F32(scale), dtype(zero)])[0]
    np.testing.assert_array_equal(found, requantized(x / F32(scale), zero, dtype))


def test_what_is_no_number_becomes_the_least_integer_and_infinity_saturates() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1], F32)
    for dtype, expected in ((np.uint8, [0, 255, 0, 8]), (np.int8, [-128, 127, -128, 8])):
        assert run_operator("QuantizeLinear", [x, F32(1), dtype(7)])[0].tolist() == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_quantized_as_the_float32_they_stand_for(dtype: Any) -> None:
    x = np.random.default_rng(1).standard_normal((4, 70000)).astype(dtype)
    found = run_operator("QuantizeLinear", [x, F32(0.013)], to="int8")[0]
    np.testing.assert_array_equal(found, run_operator("QuantizeLinear", [x.astype(F32), F32(0.013)], to="int8")[0])
    back = run_operator("DequantizeLinear", [found, dtype(0.125)])[0]
    assert back.dtype == dtype
    np.testing.assert_array_equal(back.astype(F32), found.astype(F32) * F32(0.125))


def test_biases_of_32_bits_are_dequantized_without_losing_bits_before_the_product() -> None:
    x = np.array([16777217, -16777219, 2**31 - 1], np.int32)
    found = run_operator("DequantizeLinear", [x, F32(1)])[0]
    np.testing.assert_array_equal(found, x.astype(F32))
    assert run_operator("DequantizeLinear", [x[:1], F32(1), np.int32(1)])[0] == 16777216


def test_no_elements_and_no_axes_work() -> None:
    assert run_operator("QuantizeLinear", [np.zeros((0, 3), F32), F32(1)])[0].shape == (0, 3)
    assert run_operator("QuantizeLinear", [F32(3.4), F32(1)])[0] == 3


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_is_none_fails_the_run_that_it_is_fed_to(value: float) -> None:
    for op, x in (("QuantizeLinear", np.zeros(3, F32)), ("DequantizeLinear", np.zeros(3, np.int8))):
        with pytest.raises(OperatorError, match=r"scales 'x1' must be finite and above 0, found"):
            run_operator(op, [x, np.array([value], F32)])


def test_parameters_that_do_not_fit_are_shape_errors() -> None:
    x = np.zeros((2, 3), F32)
    with pytest.raises(ShapeError, match="the scale must be one number, or 3 for axis 1; found shape \\(2,\\)"):
        run_operator("QuantizeLinear", [x, np.ones(2, F32)])
    with pytest.raises(ShapeError, match="the zero point must have the scale's shape"):
        run_operator("QuantizeLinear", [x, np.ones(3, F32), np.zeros(2, np.int8)])
    with pytest.raises(ShapeError, match="argument 'to' is uint8, the zero point is int8"):
        run_operator("QuantizeLinear", [x, F32(1), np.int8(0)], to="uint8")
    with pytest.raises(ArgumentError, match=r"'to' must be one of uint8, int8, uint16, int16, .*found float32"):
        run_operator("QuantizeLinear", [x, F32(1)], to="float32")
    with pytest.raises(ShapeError, match="must be one of int8, found uint8"):
        run_operator("DequantizeLinear", [np.zeros((2, 3), np.int8), F32(1), np.uint8(0)])


@pytest.mark.parametrize("low", [-3.0, 0.5, -0.001])
def test_the_range_of_the_data_gives_the_parameters(low: float) -> None:
    x = np.random.default_rng(5).uniform(low, 4, (7, 9)).astype(F32)
    found = run_operator("DynamicQuantizeLinear", [x], 3)
    for one, other in zip(found, onnx_result("DynamicQuantizeLinear", [x], 3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_zeros_alone_have_scale_one() -> None:
    y, scale, zero = run_operator("DynamicQuantizeLinear", [np.zeros(4, F32)], 3)
    assert (y.tolist(), float(scale), int(zero)) == ([0, 0, 0, 0], 1.0, 0)


@pytest.mark.parametrize("meta", [*QUANTIZED[4:], *QUANTIZED_FLOATS], ids=str)
def test_types_of_few_bits_agree_with_the_reference(meta: TypeMeta) -> None:
    random = np.random.default_rng(9)
    x, scale = (random.standard_normal((3, 8)) * 90).astype(F32), random.uniform(0.1, 9, (3, 4)).astype(F32)
    blocks = {"axis": 1, "block_size": 2}
    node = onnx.helper.make_node("QuantizeLinear", ["x", "s"], ["y"], output_dtype=meta.onnx, **blocks)
    back = onnx.helper.make_node("DequantizeLinear", ["y", "s"], ["z"], **blocks)
    infos = [onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", x), ("s", scale))]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in "yz"]
    graph = onnx.helper.make_graph([node, back], "g", infos, results)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 25)], ir_version=12)
    expected = ReferenceEvaluator(model).run(None, {"x": x, "s": scale})
    quantized = computed("QuantizeLinear", {"x": x, "s": scale}, ["y"], to=meta.name, **blocks)[0]
    assert quantized.dtype == meta.numpy
    np.testing.assert_array_equal(quantized, expected[0])
    again = computed("DequantizeLinear", {"y": quantized, "s": scale}, ["z"], **blocks)[0]
    np.testing.assert_array_equal(again, expected[1])


def test_floats_of_few_bits_become_infinite_where_they_do_not_saturate() -> None:
    x = np.array([1e6, -1e6, 3], F32)
    found = computed("QuantizeLinear", {"x": x, "s": F32(1)}, ["y"], to="float8e5m2", saturate=0)[0]
    assert found.astype(F32).tolist() == [np.inf, -np.inf, 3]
