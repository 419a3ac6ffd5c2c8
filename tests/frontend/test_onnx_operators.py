"""Converters against onnxruntime, one node at a time, across the operator sets in which the node changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.errors import UnsupportedOperatorError
from dagexec.frontend.onnx import from_model_proto

RNG = np.random.default_rng(7)
IMAGE = RNG.standard_normal((2, 3, 7, 6)).astype(np.float32)

TIES = np.round(IMAGE)


@dataclass(frozen=True)
class Case:
    """A node: its inputs in order (arrays are fed, `Const` are initializers, None is absent) and its attributes."""

    op: str
    opset: int
    inputs: tuple[Any, ...] = (IMAGE,)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def __str__(self) -> str:
        shown = ",".join(f"{key}={value}" for key, value in self.attributes.items() if not isinstance(value, bytes))
        return f"{self.op}-{self.opset}-{len(self.inputs)}-{shown:.60}"


class Const:
    """An input that is an initializer of the model."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.array = np.asarray(value, dtype)


def ints(*values: int) -> Const:
    return Const(values, np.int64)


def floats(*values: float) -> Const:
    return Const(values, np.float32)


def build(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The one-node model and its feeds."""
    names, feeds, infos, initializers = [], {}, [], []
    for index, value in enumerate(case.inputs):
        name = "" if value is None else f"in{index}"
        names.append(name)
        if isinstance(value, Const):
            initializers.append(numpy_helper.from_array(value.array, name))
        elif value is not None:
            feeds[name] = value
            number = helper.np_dtype_to_tensor_dtype(value.dtype)
            infos.append(helper.make_tensor_value_info(name, number, value.shape))
    outputs = [f"out{index}" for index in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, **case.attributes)
    types = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node], "one", infos, types, initializer=initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=8), feeds


SLOPES = floats(0.1, 0.2, 0.3)
FILTER = Const(RNG.standard_normal((4, 3, 3, 3)), np.float32)
TURNED = Const(RNG.standard_normal((3, 4, 3, 3)), np.float32)
FILTER_2D = Const(RNG.standard_normal((5, 6)), np.float32)
ROWS = RNG.standard_normal((4, 6)).astype(np.float32)
CHANNELS = tuple(Const(RNG.uniform(0.5, 1.5, 3), np.float32) for _ in range(4))
DEEP = RNG.standard_normal((2, 12, 3, 2)).astype(np.float32)
UPSAMPLING = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}

CASES = [
    Case("Conv", 11, (IMAGE, FILTER), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("Conv", 11, (IMAGE, FILTER), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    Case("Conv", 11, (IMAGE, FILTER), {"auto_pad": "VALID"}),
    Case("Conv", 22, (IMAGE, FILTER, floats(1, 2, 3, 4)), {"pads": [0, 1, 2, 1], "dilations": [2, 1]}),
    Case("Conv", 7, (IMAGE, Const(FILTER.array[:3, :1])), {"group": 3, "kernel_shape": [3, 3]}),
    Case("ConvTranspose", 1, (IMAGE, TURNED)),
    Case("ConvTranspose", 11, (IMAGE, TURNED, floats(0, 1, 2, 3)), {"strides": [2, 3], "pads": [1, 0, 0, 2]}),
    Case("ConvTranspose", 11, (IMAGE, TURNED), {"strides": [2, 2], "output_padding": [1, 0], "dilations": [2, 1]}),
    Case("ConvTranspose", 11, (IMAGE, TURNED), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    Case("ConvTranspose", 11, (IMAGE, TURNED), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    Case("ConvTranspose", 22, (IMAGE, TURNED), {"strides": [2, 2], "output_shape": [14, 11]}),
    Case("ConvTranspose", 22, (IMAGE, TURNED), {"output_shape": [8, 7], "auto_pad": "SAME_UPPER"}),
    Case("ConvTranspose", 22, (DEEP, Const(RNG.standard_normal((12, 2, 2, 2)), np.float32)), {"group": 3}),
    Case("MaxPool", 8, (IMAGE,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    Case("MaxPool", 12, (IMAGE,), {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    Case("MaxPool", 12, (IMAGE,), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    Case("AveragePool", 7, (IMAGE,), {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1]}),
    Case("AveragePool", 19, (IMAGE,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    Case("AveragePool", 10, (IMAGE,), {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("MaxPool", 8, (TIES,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, outputs=2),
    Case("MaxPool", 12, (TIES,), {"kernel_shape": [2, 3], "strides": [2, 1], "storage_order": 1}, outputs=2),
    Case("MaxPool", 12, (TIES,), {"kernel_shape": [2, 2], "dilations": [2, 3], "ceil_mode": 1}, outputs=2),
    Case("MaxPool", 22, (TIES[:, :, None],), {"kernel_shape": [1, 2, 2], "storage_order": 1}, outputs=2),
    Case("LpPool", 2, (IMAGE,), {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    Case("LpPool", 11, (IMAGE,), {"kernel_shape": [3, 2], "p": 1, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("LpPool", 18, (IMAGE,), {"kernel_shape": [3, 2], "p": 3, "dilations": [1, 2], "ceil_mode": 1}),
    Case("LpPool", 18, (IMAGE,), {"kernel_shape": [2, 3], "strides": [2, 2]}),
    Case("GlobalLpPool", 2),
    *(Case(name, 9, (IMAGE / 5,)) for name in ("Sinh", "Cosh", "Asinh", "Acosh", "Atanh")),
    *(Case(name, 7, (IMAGE / 5,)) for name in ("Tan", "Asin", "Acos", "Atan")),
    Case("IsNaN", 13, (np.where(IMAGE > 1, np.float32(np.nan), IMAGE),)),
    Case("ThresholdedRelu", 10, (IMAGE,), {"alpha": 0.5}),
    Case("Range", 11, tuple(np.array(v, np.float32) for v in (1.5, -4, -0.75))),
    Case("Range", 11, tuple(map(np.array, (2, 9, 3)))),
    Case("Mod", 13, (np.arange(-9, 9), np.array(5))),
    Case("Mod", 13, (IMAGE, SLOPES.array.reshape(3, 1, 1)), {"fmod": 1}),
    *(Case(name, 18, (np.arange(-9, 9), np.arange(18) % 7)) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    Case("BitwiseNot", 18, (np.arange(-9, 9),)),
    Case("GlobalLpPool", 2, (IMAGE,), {"p": 3}),
    Case("AveragePool", 19, (IMAGE,), {"kernel_shape": [3, 2], "dilations": [2, 3], "strides": [1, 2]}),
    Case("GlobalAveragePool", 7),
    Case("GlobalMaxPool", 7),
    Case("BatchNormalization", 7, (IMAGE, *CHANNELS), {"epsilon": 1e-3}),
    Case("BatchNormalization", 15, (IMAGE, *CHANNELS)),
    Case("InstanceNormalization", 6, (IMAGE, *CHANNELS[:2])),
    Case("LayerNormalization", 17, (ROWS, Const(np.ones(6) * 2, np.float32), Const(np.arange(6), np.float32))),
    Case("LRN", 13, (IMAGE,), {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}),
    Case("Gemm", 7, (ROWS, FILTER_2D, floats(1, 2, 3, 4, 5)), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Gemm", 11, (ROWS, FILTER_2D), {"transB": 1}),
    Case("MatMul", 13, (IMAGE, Const(RNG.standard_normal((6, 5)), np.float32))),
    Case("MatMul", 9, (ROWS, Const(RNG.standard_normal((3, 6, 2)), np.float32))),
    Case("Softmax", 11, (IMAGE,), {"axis": 2}),
    Case("Softmax", 11),
    Case("Softmax", 13),
    Case("Softmax", 13, (IMAGE,), {"axis": 1}),
    Case("LogSoftmax", 13, (IMAGE,), {"axis": 2}),
    *(
        Case(op, 13)
        for op in (
            "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Reciprocal", "Sign", "Floor", "Ceil", "Exp",
            "Abs", "Neg", "Sin", "Cos", "LeakyRelu", "Elu", "Selu", "HardSigmoid",
        )
    ),
    Case("Sqrt", 13, (np.abs(IMAGE),)),
    Case("Log", 13, (np.abs(IMAGE),)),
    Case("HardSwish", 14),
    Case("Gelu", 20),
    Case("Gelu", 20, (IMAGE,), {"approximate": "tanh"}),
    Case("Mish", 18),
    Case("Celu", 12, (IMAGE,), {"alpha": 0.5}),
    Case("CastLike", 15, (IMAGE, np.zeros(1, np.int64))),
    Case("PRelu", 9, (IMAGE, Const(SLOPES.array.reshape(3, 1, 1)))),
    Case("PRelu", 9, (IMAGE, floats(0.25))),
    Case("PRelu", 9, (IMAGE, floats(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))),
    Case("PRelu", 16, (IMAGE, Const(RNG.uniform(0, 1, (7, 6)), np.float32))),
    Case("Clip", 6, (IMAGE,), {"min": -0.5, "max": 0.25}),
    Case("Clip", 11, (IMAGE, Const(np.float32(-0.5)), Const(np.float32(0.25)))),
    Case("Clip", 13, (IMAGE, None, Const(np.float32(0.25)))),
    Case("Clip", 13, (IMAGE, np.array(-0.5, np.float32), np.array(0.25, np.float32))),
    Case("Clip", 13, (IMAGE,)),
    *(Case(op, 13, (IMAGE, IMAGE[:1, :, :1] + 0.5)) for op in ("Add", "Sub", "Mul", "Div")),
    Case("Pow", 13, (np.abs(IMAGE), floats(1.5))),
    Case("Equal", 13, (IMAGE, np.round(IMAGE))),
    Case("Greater", 13, (IMAGE, floats(0))),
    Case("LessOrEqual", 16, (IMAGE, floats(0))),
    *(Case(op, 13, (IMAGE, floats(0), -IMAGE)) for op in ("Sum", "Mean", "Max", "Min")),
    Case("Where", 9, (IMAGE > 0, IMAGE, floats(-1))),
    Case("Cast", 13, (IMAGE,), {"to": TensorProto.INT64}),
    Case("Cast", 9, (IMAGE,), {"to": TensorProto.DOUBLE}),
    Case("Dropout", 7, (IMAGE,), {"ratio": 0.3}),
    Case("Dropout", 13, (IMAGE, Const(np.float32(0.3))), outputs=2),
    Case("Identity", 13),
    Case("Reshape", 13, (IMAGE, ints(0, -1, 2))),
    Case("Reshape", 13, (IMAGE, np.array([6, -1], np.int64))),
    Case("Flatten", 13, (IMAGE,), {"axis": 2}),
    Case("Flatten", 11, (IMAGE,), {"axis": -1}),
    Case("Transpose", 13, (IMAGE,), {"perm": [0, 2, 3, 1]}),
    Case("Transpose", 13),
    Case("Squeeze", 11, (IMAGE[:, :1],), {"axes": [1]}),
    Case("Squeeze", 13, (IMAGE[:, :1], ints(-3))),
    Case("Squeeze", 13, (IMAGE[:, :1],)),
    Case("Unsqueeze", 11, (ROWS,), {"axes": [0, 3]}),
    Case("Unsqueeze", 13, (ROWS, ints(-1, 0))),
    Case("Concat", 13, (IMAGE, IMAGE), {"axis": 1}),
    Case("Concat", 13, (IMAGE, IMAGE), {"axis": -1}),
    Case("Split", 11, (ROWS,), {"axis": 1, "split": [1, 5]}, outputs=2),
    Case("Split", 13, (ROWS, ints(1, 5)), {"axis": 1}, outputs=2),
    Case("Split", 13, (ROWS,), {"axis": 1}, outputs=3),
    Case("Split", 18, (IMAGE,), {"axis": 2, "num_outputs": 4}, outputs=4),
    Case("Slice", 9, (IMAGE,), {"starts": [1, -4], "ends": [3, 1000], "axes": [1, 3]}),
    Case("Slice", 13, (IMAGE, ints(5, 0), ints(-100, 3), ints(2, 3), ints(-2, 1))),
    Case("Slice", 10, (IMAGE, ints(1), ints(2))),
    Case("Gather", 13, (IMAGE, ints(-1, 0)), {"axis": 2}),
    Case("Gather", 13, (IMAGE, Const(np.int64(1))), {"axis": 1}),
    Case("Expand", 13, (IMAGE[:, :1], ints(2, 3, 7, 6))),
    Case("Expand", 13, (IMAGE[:, :1], np.array([3, 1, 1], np.int64))),
    Case("Tile", 13, (ROWS, ints(2, 3))),
    Case("Tile", 13, (ROWS, ints(1, 1))),
    Case("Pad", 2, (IMAGE,), {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "value": 1.5}),
    Case("Pad", 11, (IMAGE, ints(0, 0, 1, 2, 0, 0, 0, 1), Const(np.float32(1.5)))),
    Case("Pad", 13, (IMAGE, ints(0, 0, 1, 2, 0, 0, 0, 1)), {"mode": "reflect"}),
    Case("Pad", 18, (IMAGE, ints(1, 2), None, ints(-1)), {"mode": "edge"}),
    Case("Slice", 13, (IMAGE, np.array([9, -1]), np.array([0, -9]), np.array([2, -1]), np.array([-2, -1]))),
    Case("Slice", 13, (IMAGE, np.array([1]), ints(9), ints(-2))),
    Case("Slice", 13, (IMAGE, *np.array([[1, 2], [9, 9]], np.int32), None, np.array([1, 2], np.int32))),
    Case("Reshape", 14, (np.empty((0, 3), np.float32), ints(3, 0)), {"allowzero": 1}),
    Case("Reshape", 14, (np.empty((0, 3), np.float32), np.array([3, 0])), {"allowzero": 1}),
    Case("Squeeze", 13, (IMAGE[:1, :1], np.array([-3, 0]))),
    Case("Squeeze", 13, (IMAGE[:1, :1],)),
    Case("Unsqueeze", 13, (IMAGE, np.array([-1, 0]))),
    Case("Split", 13, (IMAGE, np.array([1, 0, 2])), {"axis": 1}, outputs=3),
    Case("Split", 18, (IMAGE,), {"axis": -1, "num_outputs": 3}, outputs=3),
    Case("Tile", 13, (IMAGE, np.array([1, 2, 1, 3]))),
    Case("Pad", 19, (IMAGE, np.array([1, -1, 0, 2, 0, 3, -2, 1]), np.array(2.5, np.float32))),
    Case("Pad", 19, (IMAGE, np.array([9, 20]), None, np.array([-2]))  , {"mode": "wrap"}),
    Case("Pad", 19, (IMAGE, ints(2, 1, 1, 3), None, np.array([3, 1])), {"mode": "edge"}),
    Case("Pad", 19, (IMAGE, np.array([2, 1, 1, 2]), None, ints(3, 2)), {"mode": "reflect"}),
    Case("Pad", 19, (np.arange(6), ints(1, 2), Const(np.array(2**60 + 1)))),
    Case("ReduceMean", 18, (IMAGE, np.array([-1, 1]))),
    Case("ReduceSum", 13, (IMAGE, np.array([], np.int64)), {"noop_with_empty_axes": 1}),
    Case("ReduceMax", 18, (IMAGE, np.array([], np.int64)), {"keepdims": 0}),
    Case("ReduceSumSquare", 18, (IMAGE, np.array([2])), {"keepdims": 0}),
    Case("Expand", 13, (IMAGE[:, :1], np.array([2, 1, 3, 1, 1]))),
    Case("DepthToSpace", 13, (DEEP,), {"blocksize": 2}),
    Case("DepthToSpace", 11, (DEEP,), {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", 13, (IMAGE[:, :, :6],), {"blocksize": 2}),
    Case("Shape", 13),
    Case("Shape", 15, (IMAGE,), {"start": 1, "end": -1}),
    Case("Size", 13),
    Case("ReduceSum", 11, (IMAGE,), {"axes": [1, -1]}),
    Case("ReduceSum", 13, (IMAGE, ints(1, -1)), {"keepdims": 0}),
    Case("ReduceSum", 13, (IMAGE,), {"noop_with_empty_axes": 1}),
    Case("ReduceMean", 13, (IMAGE,), {"axes": [2, 3]}),
    Case("ReduceMean", 18, (IMAGE, ints(2, 3))),
    Case("ReduceMax", 13, (IMAGE,), {"axes": [1], "keepdims": 0}),
    Case("ReduceMin", 13),
    Case("ReduceProd", 13, (IMAGE,), {"axes": [1]}),
    Case("ReduceL1", 13, (IMAGE,), {"axes": [1]}),
    Case("ReduceL2", 18, (IMAGE, ints(1))),
    Case("ReduceSumSquare", 13, (IMAGE,), {"axes": [1]}),
    Case("ReduceLogSum", 13, (np.abs(IMAGE),), {"axes": [1]}),
    Case("ReduceLogSumExp", 13, (IMAGE,), {"axes": [1, 2], "keepdims": 0}),
    Case("ReduceLogSumExp", 18, (IMAGE, ints(-1))),
    Case("ArgMax", 13, (IMAGE,), {"axis": 1, "keepdims": 0}),
    Case("ArgMin", 13, (IMAGE,), {"axis": -1}),
    Case("Upsample", 7, (IMAGE,), {"scales": [1.0, 1.0, 2.0, 3.0]}),
    Case("Upsample", 9, (IMAGE, floats(1, 1, 2, 2))),
    Case("Resize", 10, (IMAGE, floats(1, 1, 2, 3))),
    Case("Resize", 11, (IMAGE, floats(), floats(1, 1, 2, 2)), UPSAMPLING),
    Case("Resize", 13, (IMAGE, None, floats(1, 1, 3, 2))),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_node_computes_what_onnxruntime_computes(case: Case) -> None:
    proto, feeds = build(case)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    with dagexec.compile(from_model_proto(proto), net_type="simple") as executor:
        found = list(executor.run(feeds).values())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


REFUSED = [
    (Case("BatchNormalization", 7, (IMAGE, *CHANNELS), {"spatial": 0}), "spatial=0"),
    (Case("ConvTranspose", 11, (IMAGE, TURNED), {"output_shape": [8, 7, 6]}), r"output_shape \[8, 7, 6\] must have 2"),
    (Case("Gelu", 20, (IMAGE,), {"approximate": "cubic"}), "approximate = 'cubic'"),
]


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_what_would_be_computed_differently_is_refused_with_the_reason(case: Case, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=reason):
        from_model_proto(build(case)[0], foreign=False)


def test_old_attributes_of_batch_normalization_are_understood() -> None:
    """consumed_inputs (opset 1) and is_test (opset 6) predate every runtime at hand; the reference is the formula."""
    scale, shift, mean, variance = (channel.array.reshape(3, 1, 1) for channel in CHANNELS)
    expected = (IMAGE - mean) / np.sqrt(variance.astype(np.float64) + 1e-5) * scale + shift
    for opset, attributes in ((1, {"is_test": 1, "consumed_inputs": [0, 0, 0, 1, 1]}), (6, {"is_test": 1})):
        proto, feeds = build(Case("BatchNormalization", opset, (IMAGE, *CHANNELS), attributes))
        with dagexec.compile(from_model_proto(proto)) as executor:
            np.testing.assert_allclose(executor.run(feeds)["out0"], expected, rtol=1e-5, atol=1e-5)


def test_an_output_shape_may_have_the_batch_and_the_channels_too() -> None:
    found = []
    for sizes in ([14, 11], [2, 4, 14, 11]):
        proto, feeds = build(Case("ConvTranspose", 11, (IMAGE, TURNED), {"strides": [2, 2], "output_shape": sizes}))
        with dagexec.compile(from_model_proto(proto)) as executor:
            found.append(executor.run(feeds)["out0"])
    assert found[0].shape == (2, 4, 14, 11)
    np.testing.assert_array_equal(found[0], found[1])


def test_the_exponent_of_an_old_norm_is_a_float() -> None:
    """Opset 1 predates every runtime at hand; the reference is the formula."""
    proto, feeds = build(Case("GlobalLpPool", 1, (IMAGE,), {"p": 1.5}))
    expected = (np.abs(IMAGE.astype(np.float64)) ** 1.5).sum(axis=(2, 3), keepdims=True) ** (1 / 1.5)
    with dagexec.compile(from_model_proto(proto)) as executor:
        np.testing.assert_allclose(executor.run(feeds)["out0"], expected, rtol=1e-5)


def test_the_indices_of_maxima_alone_are_given() -> None:
    nodes = [helper.make_node("MaxPool", ["x"], ["m", "i"], kernel_shape=[2, 2])]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 2])]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_empty_tensor_value_info("i")])
    with dagexec.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])) as executor:
        [indices] = executor.run({"x": np.array([[[[0, 1], [2, 0]]]], np.float32)}).values()
    assert indices.tolist() == [[[[2]]]]


def test_broadcast_by_axis_of_old_operator_sets_is_understood() -> None:
    proto, feeds = build(Case("Mul", 6, (IMAGE, SLOPES), {"broadcast": 1, "axis": 1}))
    with dagexec.compile(from_model_proto(proto)) as executor:
        np.testing.assert_allclose(executor.run(feeds)["out0"], IMAGE * SLOPES.array.reshape(3, 1, 1), rtol=1e-6)


def test_constants_are_parameters_and_an_identity_of_one_is_the_same_array() -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        helper.make_node("Identity", ["c"], ["d"]),
        helper.make_node("Add", ["x", "c"], ["s"]),
        helper.make_node("Mul", ["s", "d"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_empty_tensor_value_info("y")])
    model = from_model_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]))
    assert model.parameters["c"] is model.parameters["d"]
    assert [operator.type for operator in model.net.op] == ["Add", "Mul"]
    row = np.arange(1, 7, dtype=np.float32)
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": ROWS})["y"], (ROWS + row) * row, rtol=1e-6)


def test_a_shape_computed_by_the_model_is_followed_from_run_to_run() -> None:
    """The pattern exporters write for x.view(x.size(0), -1)."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["batch"], axis=0),
        helper.make_node("Unsqueeze", ["batch", "axes"], ["batch1"]),
        helper.make_node("Concat", ["batch1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1])}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 7, 6])]
    returned = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", infos, returned, initializer=initializers)
    model = from_model_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]))
    with dagexec.compile(model) as executor:
        for batch in (2, 1, 2):
            x = IMAGE[:batch]
            np.testing.assert_array_equal(executor.run({"x": x})["y"], x.reshape(batch, -1))


@pytest.mark.parametrize(
    ("node", "constant", "expected"),
    [
        (("PRelu", ["h", "c"]), SLOPES.array.reshape(3, 1, 1), IMAGE * SLOPES.array.reshape(3, 1, 1)),
        (("Unsqueeze", ["h", "c"]), np.array([-1, 1]), IMAGE[:, None, :, :, :, None]),
        (("Squeeze", ["h", "c"]), np.array([-4]), IMAGE[0]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_node_on_a_tensor_whose_shape_the_model_does_not_state_is_run(
    node: tuple[str, list[str]], constant: np.ndarray, expected: np.ndarray
) -> None:
    """Exporters state the shapes of inputs and outputs only."""
    x = np.abs(IMAGE[:1]) if node[0] == "Squeeze" else np.abs(IMAGE)
    nodes = [helper.make_node("Neg", ["x"], ["h"]), helper.make_node(*node, ["y"])]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    returned = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", infos, returned, initializer=[numpy_helper.from_array(constant, "c")])
    with dagexec.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])) as executor:
        [y] = executor.run({"x": x}).values()
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, -np.abs(expected), rtol=1e-6)
