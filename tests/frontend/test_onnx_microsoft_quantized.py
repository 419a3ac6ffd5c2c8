"""onnxruntime's own operators on integers (com.microsoft), one node at a time, against onnxruntime.

Weights have 7 bits, because onnxruntime without VNNI saturates sums of two products of 8. Where it computes in another
order of float32 operations, or by tables, a value that lies halfway between two integers may become the other one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_microsoft import by_onnxruntime, computed, normal, of_microsoft
from tests.frontend.test_onnx_operators import Case, Const, build, floats
from tests.frontend.test_onnx_quantized import scale, seven_bits, whole, zero

Array = npt.NDArray[Any]
RNG = np.random.default_rng(29)

A, B = whole((2, 5, 8), np.uint8), whole((2, 5, 8), np.uint8)
ROWS, SIGNED = A[0], whole((5, 8), np.int8)
MATRIX, COLUMNS = Const(seven_bits((8, 3), np.int8)), Const(np.float32([0.01, 0.02, 0.03]))
ZEROS = Const(np.int8([3, -4, 0]))
X, Y = (scale(0.02), zero(7)), (scale(0.03), zero(99))
IMAGE = whole((2, 3, 7, 6), np.uint8)
LAST = np.ascontiguousarray(np.moveaxis(IMAGE, 1, 3))
BIAS = Const(RNG.integers(-900, 900, 3).astype(np.int32))

CASES = [
    Case("QuantizeLinear", 17, (normal(3, 4), *X)),
    Case("DequantizeLinear", 17, (ROWS, Const(np.float32(RNG.uniform(0, 1, 8))), Const(whole((8,), np.uint8)))),
    Case("MatMulIntegerToFloat", 17, (ROWS, MATRIX, scale(0.1), scale(0.2))),
    Case("MatMulIntegerToFloat", 17, (A, MATRIX, np.array(0.1, np.float32), COLUMNS, np.array(9, np.uint8), ZEROS,
                                      floats(1, 2, 3))),
    Case("DynamicQuantizeMatMul", 17, (normal(2, 5, 8), MATRIX, COLUMNS, ZEROS, floats(1, 2, 3))),
    Case("DynamicQuantizeMatMul", 17, (normal(5, 8), MATRIX, scale(0.3))),
    Case("QAttention", 17, (A, Const(seven_bits((8, 12), np.int8)), Const(normal(12)), scale(0.02), scale(0.01), None,
                            zero(7), zero(0, np.int8)), {"num_heads": 2}),
    Case("QAttention", 17, (A, Const(seven_bits((8, 12), np.uint8)), Const(normal(12)), scale(0.02),
                            Const(np.full(12, 0.01, np.float32)), np.array([[1, 1, 1, 0, 0], [1] * 5], np.int32),
                            zero(7), Const(np.full(12, 60, np.uint8))), {"num_heads": 2, "unidirectional": 1}),
    Case("QGemm", 17, (ROWS, *X, MATRIX, COLUMNS, Const(np.zeros(3, np.int8)), BIAS, scale(0.5), zero(100))),
    Case("QGemm", 17, (ROWS, *X, Const(MATRIX.array.T.copy()), scale(0.01), zero(2, np.int8), None, scale(0.2),
                       zero(100)), {"transB": 1, "alpha": 0.75}),
    Case("QGemm", 17, (ROWS, *X, MATRIX, scale(0.01), zero(0, np.int8), BIAS)),
    Case("QGemm", 17, (ROWS.T.copy(), np.array(0.02, np.float32), np.array(7, np.uint8), MATRIX, COLUMNS, ZEROS, BIAS,
                       scale(0.5), zero(100)), {"transA": 1, "alpha": 0.5}),
    Case("QLinearAdd", 17, (A, *X, B, *Y, scale(0.06), zero(80))),
    Case("QLinearAdd", 17, (A, *X, B[:1, :1], *Y, scale(0.06), zero(80))),
    Case("QLinearMul", 17, (A, *X, Const(B[0]), *Y, scale(0.03), zero(80))),
    Case("QLinearSigmoid", 17, (SIGNED, scale(0.05), zero(-7, np.int8), scale(0.004), zero(-128, np.int8))),
    Case("QLinearLeakyRelu", 17, (A, scale(0.05), zero(120), scale(0.04), zero(90)), {"alpha": 0.2}),
    Case("QLinearSoftmax", 17, (A, scale(0.05), zero(120), scale(0.004), zero(0)), {"axis": 1, "opset": 13}),
    Case("QLinearSoftmax", 17, (A, scale(0.05), zero(120), scale(0.004), zero(0)), {"axis": 1, "opset": 11}),
    Case("QLinearGlobalAveragePool", 17, (IMAGE, *X, *Y), {"channels_last": 0}),
    Case("QLinearGlobalAveragePool", 17, (LAST, *X, *Y), {"channels_last": 1}),
    Case("QLinearAveragePool", 17, (IMAGE, *X, *Y), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    Case("QLinearAveragePool", 17, (LAST, *X, *Y), {"kernel_shape": [2, 2], "ceil_mode": 1, "strides": [2, 2],
                                                    "channels_last": 1}),
    Case("NhwcMaxPool", 17, (LAST,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    Case("QLinearConcat", 17, (*Y, A, *X, B, *Y, np.array([[[5] * 8]] * 2, np.uint8), *Y), {"axis": 1}),
    Case("QLinearWhere", 17, (A > 99, A, *X, B, *Y, scale(0.04), zero(9))),
    Case("QLinearConv", 17, (IMAGE, *X, Const(seven_bits((4, 3, 3, 3), np.uint8)), scale(0.01), zero(64), scale(0.3),
                             zero(128))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_node_computes_what_onnxruntime_does(case: Case) -> None:
    proto, feeds = of_microsoft(case)
    for found, expected in zip(computed(proto, feeds), by_onnxruntime(proto, feeds), strict=True):
        assert found.dtype == expected.dtype
        if expected.dtype == np.float32:
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
        else:
            assert found.shape == expected.shape
            assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def test_integers_are_concatenated_in_parts_of_three() -> None:
    proto, _ = of_microsoft(Case("QLinearConcat", 17, (*Y, A, *X, B)))
    with pytest.raises(ModelFormatError, match="expected a tensor, a scale and a zero point each"):
        from_model_proto(proto)


def quantized_lstm(dtype: Any, each: bool, largest: int) -> tuple[Case, list[Array], list[Array]]:
    """A node of two directions and one sequence, its inputs without those that make its weights, and real weights."""
    random = np.random.default_rng(41)
    steps, inputs, hidden = 6, 5, 4
    x = random.standard_normal((steps, 1, inputs)).astype(np.float32)
    bias = Const(random.standard_normal((2, 8 * hidden)).astype(np.float32))
    state = [random.standard_normal((2, 1, hidden)).astype(np.float32) for _ in range(2)]
    shape = (2, 4 * hidden) if each else (2,)
    zero = np.full(shape, 0 if each else 11, dtype)
    weights = [random.integers(0, largest, (2, size, 4 * hidden)).astype(dtype) for size in (inputs, hidden)]
    scales = [random.uniform(0.001, 0.004, shape).astype(np.float32) for _ in range(2)]
    quantized = [Const(array) for pair in zip(scales, (zero, zero), strict=True) for array in pair]
    attributes = {"hidden_size": hidden, "direction": "bidirectional"}
    middle = (bias, None, *state)
    case = Case("DynamicQuantizeLSTM", 17, (x, *map(Const, weights), *middle, None, *quantized), attributes, outputs=3)
    real = [
        ((array.astype(np.float32) - zero.reshape(2, 1, -1)) * one.reshape(2, 1, -1)).transpose(0, 2, 1)
        for array, one in zip(weights, scales, strict=True)
    ]
    return case, [x, *middle], real


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_dynamically_quantized_lstm_quantizes_x_and_the_state_of_each_step(dtype: Any, each: bool) -> None:
    case, _, _ = quantized_lstm(dtype, each, 128 if dtype is np.uint8 else 64)  # onnxruntime saturates without VNNI
    proto, feeds = of_microsoft(case)
    assert any(definition.type == "DynamicQuantLSTM" for definition in from_model_proto(proto).net.op)
    for found, expected in zip(computed(proto, feeds), by_onnxruntime(proto, feeds), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_where_int8_does_not_hold_the_weights_an_lstm_computes_with_what_they_stand_for() -> None:
    case, (x, *middle), real = quantized_lstm(np.uint8, each=True, largest=256)
    floats_of = [Const(np.ascontiguousarray(array)) for array in real]
    exact = by_onnxruntime(*build(Case("LSTM", 14, (x, *floats_of, *middle), case.attributes, outputs=3)))
    for found, expected in zip(computed(*of_microsoft(case)), exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
