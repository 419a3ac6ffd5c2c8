"""Quantised ONNX operators against onnxruntime, one node at a time and in whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec.core.errors import UnsupportedOperatorError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_operators import Case, Const, build

Array = npt.NDArray[Any]
RNG = np.random.default_rng(17)


def whole(shape: tuple[int, ...], dtype: Any) -> Array:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def scale(value: float) -> Const:
    return Const(np.float32(value))


def zero(value: int, dtype: Any = np.uint8) -> Const:
    return Const(np.array(value, dtype))


IMAGE = (RNG.standard_normal((2, 4, 7, 6)) * 3).astype(np.float32)
BYTES = whole((2, 4, 7, 6), np.uint8)
FILTER = Const(whole((6, 4, 3, 3), np.int8))
FILTER_SCALES = Const(RNG.uniform(0.001, 0.01, 6).astype(np.float32))
ZEROS = Const(np.zeros(6, np.int8))
BIAS = Const(RNG.integers(-9000, 9000, 6).astype(np.int32))
ROWS = whole((5, 8), np.int8)
MATRIX = Const(whole((8, 3), np.int8))
Y = (scale(0.41), zero(31))

CASES = [
    Case("QuantizeLinear", 13, (IMAGE, scale(0.07), zero(100))),
    Case("QuantizeLinear", 13, (IMAGE, Const(np.float32([0.1, 0.2, 0.3, 0.4])), Const(np.int8([1, -2, 3, -4])))),
    Case("QuantizeLinear", 10, (IMAGE, scale(0.07))),
    Case("QuantizeLinear", 21, (IMAGE, scale(0.07)), {"output_dtype": 3}),
    Case("DequantizeLinear", 13, (BYTES, Const(np.float32([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]))), {"axis": 2}),
    Case("DequantizeLinear", 10, (BYTES, scale(0.02), zero(9))),
    Case("DequantizeLinear", 13, (whole((3,), np.int32), scale(1e-4))),
    Case("DynamicQuantizeLinear", 11, (IMAGE,), outputs=3),
    Case("QLinearConv", 10, (BYTES, scale(0.02), zero(7), FILTER, FILTER_SCALES, ZEROS, *Y, BIAS)),
    Case("QLinearConv", 10, (BYTES, scale(0.02), zero(7), FILTER, scale(0.01), zero(0, np.int8), *Y),
         {"pads": [1, 1, 0, 1], "strides": [2, 1]}),
    Case("QLinearConv", 10, (BYTES, scale(0.02), zero(7), Const(whole((6, 2, 3, 3), np.int8)), scale(0.01),
                             zero(0, np.int8), *Y), {"group": 2, "auto_pad": "SAME_UPPER"}),
    Case("QLinearMatMul", 10, (ROWS, scale(0.02), zero(-7, np.int8), MATRIX, scale(0.01), zero(0, np.int8),
                               scale(0.1), zero(5, np.int8))),
    Case("QLinearMatMul", 21, (whole((2, 5, 8), np.uint8), scale(0.02), zero(7), whole((2, 8, 3), np.uint8),
                               scale(0.01), zero(3), scale(0.1), zero(5))),
    Case("ConvInteger", 10, (BYTES, FILTER, zero(7)), {"pads": [1, 1, 1, 1]}),
    Case("MatMulInteger", 10, (ROWS, MATRIX)),
    Case("MatMulInteger", 10, (ROWS, MATRIX, zero(-7, np.int8), zero(3, np.int8))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_node_gives_the_integers_of_onnxruntime(case: Case) -> None:
    proto, feeds = build(case)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    with dagexec.compile(proto, optimize=False) as executor:
        found = executor.run(feeds)
    for index, array in enumerate(expected):
        assert found[f"out{index}"].dtype == array.dtype
        if case.op == "QLinearMatMul" and array.ndim == 3:  # computed in float32: a tie may go either way
            assert np.abs(found["out0"].astype(int) - array.astype(int)).max() <= 1
        else:
            np.testing.assert_array_equal(found[f"out{index}"], array)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("QLinearConv", 10, (BYTES, scale(0.02), zero(7), Const(whole((6, 4, 3, 3), np.uint8)), scale(0.01),
                                  zero(128), *Y)), "weights of uint8 with a zero point are not supported"),
        (Case("QLinearConv", 10, (BYTES, np.float32(0.02), zero(7), FILTER, scale(0.01), zero(0, np.int8), *Y)),
         "its x_scale must be a constant"),
        (Case("ConvInteger", 10, (BYTES, FILTER, zero(7), zero(1, np.int8))), "a w_zero_point other than 0"),
        (Case("QuantizeLinear", 21, (IMAGE, Const(np.ones((2, 4, 7, 3), np.float32))), {"block_size": 2, "axis": 3}),
         "blocks with scales of their own"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(case: Case, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=reason):
        from_model_proto(build(case)[0])


def test_dequantised_weights_stay_integers_in_the_model() -> None:
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["wf"]),
        onnx.helper.make_node("MatMul", ["x", "wf"], ["y"]),
    ]
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, size])
        for name, size in (("x", 8), ("y", 3))
    ]
    weights = [onnx.numpy_helper.from_array(MATRIX.array, "w"), onnx.numpy_helper.from_array(np.float32(0.5), "s")]
    graph = onnx.helper.make_graph(nodes, "g", infos[:1], infos[1:], initializer=weights)
    model = from_model_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)]))
    assert [definition.type for definition in model.net.op] == ["DequantizeLinear", "BatchMatMul"]
    assert model.init_net is None
