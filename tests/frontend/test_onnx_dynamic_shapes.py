"""ONNX models whose axes are free, as PyTorch exports them: one compiled model runs every batch, size and length."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.errors import OperatorError
from dagexec.scheduler.hazards.check import check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.dynamic import CheckedStep

Array = np.ndarray
NETS: tuple[type[BaseNet], ...] = (SimpleNet, DAGNet, AsyncDAGNet)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, int],
    constants: dict[str, Array],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "dynamic",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def size_of(source: str, axis: str, target: str) -> list[onnx.NodeProto]:
    """x.size(axis), as it is exported."""
    shape = f"{target}_shape"
    return [helper.make_node("Shape", [source], [shape]), helper.make_node("Gather", [shape, axis], [target])]


def image_model() -> onnx.ModelProto:
    """A convolution, padded to an even height, cut to half of it, and flattened with x.view(x.size(0), -1)."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "filter"], ["conv"], pads=[1, 1, 1, 1]),
        node("Relu", ["conv"], ["relu"]),
        *size_of("relu", "i2", "height"),
        node("Mod", ["height", "i2"], ["odd"]),
        node("Unsqueeze", ["odd", "v0"], ["odd_row"]),
        node("Concat", ["v000000", "odd_row", "v0"], ["pads"], axis=0),
        node("Pad", ["relu", "pads"], ["even"]),
        *size_of("even", "i2", "rows"),
        node("Div", ["rows", "i2"], ["half"]),
        node("Unsqueeze", ["half", "v0"], ["half_row"]),
        node("Slice", ["even", "v0", "half_row", "v2"], ["top"]),
        *size_of("top", "i0", "batch"),
        node("Unsqueeze", ["batch", "v0"], ["batch_row"]),
        node("Concat", ["batch_row", "v_1"], ["target"], axis=0),
        node("Reshape", ["top", "target"], ["flat"]),
        node("ReduceMean", ["flat"], ["mean"], axes=[1]),
    ]
    random = np.random.default_rng(0)
    constants = {
        "filter": random.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "i0": np.array(0), "i2": np.array(2), "v0": np.array([0]), "v2": np.array([2]), "v_1": np.array([-1]),
        "v000000": np.array([0, 0, 0, 0, 0, 0]),
    }  # fmt: skip
    inputs = {"x": (TensorProto.FLOAT, ["batch", 3, "height", "width"])}
    outputs = {"flat": TensorProto.FLOAT, "mean": TensorProto.FLOAT, "target": TensorProto.INT64}
    return model_of(nodes, inputs, outputs, constants)


def text_model() -> onnx.ModelProto:
    """Scores of a text under a causal mask of its length, made of Range, Expand and Less as exporters write it."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["words"]),
        node("Transpose", ["words"], ["turned"], perm=[0, 2, 1]),
        node("MatMul", ["words", "turned"], ["scores"]),
        *size_of("ids", "i0", "batch"),
        *size_of("ids", "i1", "length"),
        node("Range", ["i0", "length", "i1"], ["places"]),
        node("Unsqueeze", ["places", "v1"], ["column"]),
        node("Less", ["column", "places"], ["later"]),
        node("Unsqueeze", ["batch", "v0"], ["batch_row"]),
        node("Unsqueeze", ["length", "v0"], ["length_row"]),
        node("Concat", ["batch_row", "length_row", "length_row"], ["wanted"], axis=0),
        node("ConstantOfShape", ["v3"], ["ones"], value=numpy_helper.from_array(np.array([1]))),
        node("Mul", ["ones", "v_1"], ["minus"]),
        node("Equal", ["wanted", "minus"], ["open"]),
        node("Where", ["open", "ones", "wanted"], ["target"]),
        node("Expand", ["later", "target"], ["mask"]),
        node("Where", ["mask", "low", "scores"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("MatMul", ["weights", "words"], ["mixed"]),
    ]
    random = np.random.default_rng(1)
    constants = {
        "table": random.standard_normal((50, 8)).astype(np.float32), "low": np.array(-1e9, np.float32),
        "i0": np.array(0), "i1": np.array(1), "v0": np.array([0]), "v1": np.array([1]), "v3": np.array([3]),
        "v_1": np.array([-1]),
    }  # fmt: skip
    return model_of(
        nodes,
        {"ids": (TensorProto.INT64, ["batch", "length"])},
        {"mixed": TensorProto.FLOAT, "target": TensorProto.INT64},
        constants,
    )


def images(shape: tuple[int, ...]) -> dict[str, Array]:
    batch, height, width = shape
    return {"x": np.random.default_rng(sum(shape)).standard_normal((batch, 3, height, width)).astype(np.float32)}


def texts(shape: tuple[int, ...]) -> dict[str, Array]:
    return {"ids": np.random.default_rng(sum(shape)).integers(0, 50, shape)}


SIZES = [(1, 8, 8), (2, 8, 8), (1, 9, 7), (1, 8, 8), (5, 3, 12), (1, 4, 1), (8, 13, 5), (1, 9, 7), (3, 2, 2)]
LENGTHS = [(1, 4), (2, 4), (1, 1), (3, 9), (1, 70), (1, 4), (4, 65), (2, 17), (1, 70)]


def net_of(executor: dagexec.Executor) -> BaseNet:
    return executor._replicas.members[0].net


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize(("model", "feeds", "shapes"), [(image_model, images, SIZES), (text_model, texts, LENGTHS)])
def test_one_compiled_model_runs_every_shape(model, feeds, shapes, net_class: type[BaseNet], optimize: bool) -> None:  # type: ignore[no-untyped-def]
    """No operator waits for values, the order of all accesses is proven, and results are onnxruntime's."""
    proto = model()
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in proto.graph.output]
    with dagexec.compile(proto, net_type=net_class.net_type, optimize=optimize, num_workers=2) as executor:
        for shape in shapes:
            found = executor.run(feeds(shape))
            for name, expected in zip(names, session.run(names, feeds(shape)), strict=True):
                assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype)
                np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)
            again = executor.run(feeds(shape))
            assert all(again[name].tobytes() == found[name].tobytes() for name in names)
        net = net_of(executor)
        assert isinstance(net, net_class)
        assert not [step for step in net.prepared().steps if isinstance(step, CheckedStep)]
        assert net.prepared().settled
        assert check_net(net).holds


def test_what_depends_on_data_prepares_itself_anew() -> None:
    """Rows whose first element is above 0, from the second of them to the one whose number an input says."""
    node = helper.make_node
    nodes = [
        node("Slice", ["x", "v0", "v1", "v1"], ["first"]),
        node("Squeeze", ["first", "v1"], ["flat"]),
        node("Greater", ["flat", "zero"], ["above"]),
        node("NonZero", ["above"], ["found"]),
        node("Squeeze", ["found", "v0"], ["places"]),
        node("Gather", ["x", "places"], ["rows"]),
        node("Slice", ["rows", "v1", "end", "v0"], ["cut"]),
        *size_of("cut", "i0", "count"),
        node("Range", ["i0", "count", "i1"], ["numbers"]),
    ]
    constants = {
        "zero": np.array(0, np.float32), "i0": np.array(0), "i1": np.array(1), "v0": np.array([0]), "v1": np.array([1]),
    }  # fmt: skip
    inputs = {"x": (TensorProto.FLOAT, ["n", 2]), "end": (TensorProto.INT64, [1])}
    proto = model_of(nodes, inputs, {"cut": TensorProto.FLOAT, "numbers": TensorProto.INT64}, constants)
    with dagexec.compile(proto, num_workers=2, net_type="dag") as executor:
        for seed, end in enumerate((3, 3, 100, 1, -1)):
            x = np.random.default_rng(seed).standard_normal((9, 2)).astype(np.float32)
            found = executor.run({"x": x, "end": np.array([end])})
            expected = x[x[:, 0] > 0][1:end]
            assert found["cut"].tobytes() == expected.tobytes()
            assert found["numbers"].tolist() == list(range(len(expected)))
        assert [step for step in net_of(executor).prepared().steps if isinstance(step, CheckedStep)]


def test_a_slope_of_unknown_shape_is_applied() -> None:
    nodes = [helper.make_node("Reshape", ["s", "shape"], ["slope"]), helper.make_node("PRelu", ["x", "slope"], ["y"])]
    inputs = {
        "x": (TensorProto.FLOAT, ["n", 3]), "s": (TensorProto.FLOAT, ["k"]), "shape": (TensorProto.INT64, ["r"]),
    }  # fmt: skip
    proto = model_of(nodes, inputs, {"y": TensorProto.FLOAT}, {})
    x = np.array([[1, -2, -np.inf], [np.inf, -0.5, np.nan]], np.float32)
    with dagexec.compile(proto) as executor:
        for slope, shape in (([0.5], [1]), ([1, 2, 3], [3]), ([2, 0.5], [2, 1])):
            feeds = {"x": x, "s": np.array(slope, np.float32), "shape": np.array(shape)}
            expected = np.where(x < 0, x * feeds["s"].reshape(shape), x)
            np.testing.assert_array_equal(executor.run(feeds)["y"], expected)


@pytest.mark.parametrize(
    ("node", "value", "message"),
    [
        (helper.make_node("Tile", ["x", "v"], ["y"]), [-1, 1], "a count of at least 0 for each axis"),
        (helper.make_node("Pad", ["x", "v"], ["y"]), [-9, 0, 0, 0], "remove more than the 2 elements"),
        (helper.make_node("Unsqueeze", ["x", "v"], ["y"]), [7], r"expected axes in \[-3, 2\], found 7"),
        (helper.make_node("Expand", ["x", "v"], ["y"]), [10**15, 2, 1], "Expand 'y'.*overflows|needs"),
    ],
)
def test_computed_arguments_that_make_no_sense_are_refused(
    node: onnx.NodeProto, value: list[int], message: str
) -> None:
    inputs = {"x": (TensorProto.FLOAT, [2, 1]), "v": (TensorProto.INT64, ["k"])}
    proto = model_of([node], inputs, {"y": TensorProto.FLOAT}, {})
    with (
        dagexec.compile(proto) as executor,
        pytest.raises(OperatorError, match=message),
    ):
        executor.run({"x": np.zeros((2, 1), np.float32), "v": np.array(value)})
