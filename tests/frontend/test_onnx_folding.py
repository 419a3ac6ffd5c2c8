"""What ONNX models compute from constants and from shapes is known when they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.errors import DagexecError, FeedError, ModelFormatError, ResourceError, UnsupportedOperatorError
from dagexec.frontend.onnx import forms, from_model_proto, graph
from dagexec.frontend.onnx import node as node_module
from dagexec.frontend.onnx.node import Definition, OnnxNode


def model_of(
    *nodes: onnx.NodeProto, shape: Sequence[int | str] = (1, 2, 4, 6), opset: int = 17, **constants: object
) -> onnx.ModelProto:
    """A model with float input x and output y; `constants` are initializers, int64 unless they are floats."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arrays = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], initializer=arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def types(model: Model) -> list[str]:
    return [operator.type for operator in model.net.op]


def agrees(proto: onnx.ModelProto, *shapes: tuple[int, ...]) -> None:
    """The model computes what onnxruntime does, on inputs of these shapes, without what is stated between nodes."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.value_info[:]
    session = onnxruntime.InferenceSession(bare.SerializeToString(), providers=["CPUExecutionProvider"])
    with dagexec.compile(from_model_proto(proto)) as executor:
        for shape in shapes:
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            np.testing.assert_allclose(executor.run({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-5)


def computed_pads() -> list[onnx.NodeProto]:
    """Pads as PyTorch's exporter writes them: given from the last axis on, filled up with zeros, turned round."""
    return [
        helper.make_node(
            "ConstantOfShape", ["missing"], ["zeros"], value=numpy_helper.from_array(np.zeros(1, np.int64))
        ),
        helper.make_node("Concat", ["given", "zeros"], ["all"], axis=0),
        helper.make_node("Reshape", ["all", "pairs"], ["rows"]),
        helper.make_node("Slice", ["rows", "last", "first", "axis", "back"], ["turned"]),
        helper.make_node("Transpose", ["turned"], ["columns"], perm=[1, 0]),
        helper.make_node("Reshape", ["columns", "flat"], ["row"]),
        helper.make_node("Cast", ["row"], ["pads"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "pads"], ["y"], mode="reflect"),
    ]


PADS = {
    "missing": [4], "given": [1, 2, 3, 0], "pairs": [-1, 2], "last": [-1], "first": [-(1 << 62)], "axis": [0],
    "back": [-1], "flat": [-1],
}  # fmt: skip


def test_pads_behind_nodes_are_computed_at_load() -> None:
    proto = model_of(*computed_pads(), **PADS)
    model = from_model_proto(proto)
    assert types(model) == ["Pad"]
    assert model.init_net is None
    assert dict(model.parameters) == {}
    agrees(proto, (1, 2, 4, 6))


def reshaped_by_its_own_sizes() -> list[onnx.NodeProto]:
    """x with its last two axes joined, where the sizes are read from x."""
    return [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["batch"], axis=0),
        helper.make_node("Gather", ["sizes", "one"], ["channels"], axis=0),
        helper.make_node("Unsqueeze", ["batch", "axes"], ["b"]),
        helper.make_node("Unsqueeze", ["channels", "axes"], ["c"]),
        helper.make_node("Concat", ["b", "c", "rest"], ["shape"], axis=0),
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["y"]),
    ]


SIZES = {"zero": 0, "one": 1, "axes": [0], "rest": [-1]}


def test_shapes_fold_where_the_model_states_all_sizes() -> None:
    proto = model_of(*reshaped_by_its_own_sizes(), **SIZES)
    model = from_model_proto(proto)
    assert types(model) == ["Relu", "Reshape"]
    assert len(model.net.op[1].input) == 1
    agrees(proto, (1, 2, 4, 6))


@pytest.mark.parametrize("size", ["n", -1])
def test_open_sizes_stay_open_whatever_a_file_says_of_tensors_between(size: str | int) -> None:
    proto = model_of(*reshaped_by_its_own_sizes(), shape=("batch", 2, size, 6), **SIZES)
    proto.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 2, 4, 6]))
    proto.graph.node[0].input[0] = "r"
    assert "Shape" in types(from_model_proto(proto))
    agrees(proto, (1, 2, 4, 6), (3, 2, 5, 6))


def test_shapes_of_inner_tensors_follow_from_the_inputs() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2]),
        helper.make_node("Shape", ["c"], ["sizes"], start=2),
        helper.make_node("Cast", ["sizes"], ["lengths"], to=TensorProto.FLOAT),
        helper.make_node("ReduceProd", ["lengths"], ["area"], keepdims=0),
        helper.make_node("Div", ["c", "area"], ["y"]),
    ]
    proto = model_of(*nodes, w=np.ones((3, 2, 2, 2), np.float32))
    assert types(from_model_proto(proto)) == ["Conv", "Div"]
    agrees(proto, (1, 2, 4, 6))


def test_a_node_that_fails_is_left_to_the_run_that_tells_of_it() -> None:
    nodes = [helper.make_node("Reshape", ["given", "sizes"], ["wrong"]), helper.make_node("Add", ["x", "wrong"], ["y"])]
    model = from_model_proto(model_of(*nodes, given=np.ones(6, np.float32), sizes=[4]))
    assert model.init_net is not None
    with pytest.raises(DagexecError, match="Reshape"):
        dagexec.compile(model)


def test_an_index_out_of_range_is_left_to_the_run_as_well() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "index"], ["picked"]),
        helper.make_node("Add", ["x", "picked"], ["y"]),
    ]
    model = model_of(*nodes, table=np.float32([1, 2]), index=[2])
    loaded = from_model_proto(model)
    with pytest.raises(DagexecError, match=r"Gather.*index 2 at place 0 must be in \[-2, 2\)"):
        dagexec.compile(loaded).run({"x": np.zeros((1, 2, 4, 6), np.float32)})


def test_what_is_large_is_not_computed_at_load() -> None:
    large = helper.make_node("ConstantOfShape", ["sizes"], ["w"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    add = helper.make_node("Add", ["x", "w"], ["y"])
    model = from_model_proto(model_of(large, add, sizes=[1 << 20, 1 << 20]))
    assert model.init_net is not None
    assert dict(model.parameters) == {}


def model_of_open_sizes() -> onnx.ModelProto:
    """A model of open sizes that reads them."""
    return model_of(*reshaped_by_its_own_sizes(), shape=("batch", "channels", "h", "w"), **SIZES)


def test_shapes_of_inputs_replace_those_that_the_model_states() -> None:
    model = dagexec.load_model(model_of_open_sizes(), shapes={"x": (3, 2, 4, 5)})
    assert model.inputs["x"].shape == (3, 2, 4, 5)
    assert types(model) == ["Relu", "Reshape"]
    x = np.random.default_rng(0).normal(size=(3, 2, 4, 5)).astype(np.float32)
    with dagexec.compile(model) as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], np.maximum(x, 0).reshape(3, 2, 20))
        with pytest.raises(FeedError, match="must have shape"):
            executor.run({"x": x[:1]})
    stated = model_of(*reshaped_by_its_own_sizes(), **SIZES)
    stated.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 2, 4, 6]))
    assert dagexec.load_model(stated, shapes={"x": (5, 2, 4, 6)}).inputs["x"].shape == (5, 2, 4, 6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1,)}, "'z' is not an input; expected one of"),
        ({"x": (1, 2)}, "input 'x' has 4 axes, found"),
        ({"x": (1, 2, -1, 3)}, "a size is negative"),
    ],
)
def test_shapes_that_do_not_fit_the_inputs_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(FeedError, match=message):
        dagexec.load_model(model_of_open_sizes(), shapes=shapes)


def test_shapes_are_for_onnx_models() -> None:
    with pytest.raises(FeedError, match="the source is no ONNX model"):
        dagexec.load_model("zoo:lenet", shapes={"data": (1, 1, 28, 28)})


def test_compile_takes_its_shapes_where_a_model_cannot_be_run_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model_of(helper.make_node("Needy", ["x"], ["y"]), shape=("n", 2, 4, 6))

    def convert(node: OnnxNode) -> list[Node]:
        node.full_shape(0, "it is needy")
        return node.unary("Relu")

    monkeypatch.setattr(graph, "converter_of", lambda name, domain: (convert, 1))
    monkeypatch.setattr(forms, "_known", {})
    monkeypatch.setattr(graph.GraphConversion, "_check_node", lambda *_: None)
    monkeypatch.setattr(node_module, "definition_of", lambda *_: Definition(1, {}, {}))
    monkeypatch.setattr(graph, "definition_of", lambda *_: Definition(1, {}, {}))
    with pytest.raises(UnsupportedOperatorError, match="the model does not state the shape of 'x'"):
        dagexec.compile(proto)
    with dagexec.compile(proto, shapes={"x": (3, 2, 4, 6)}) as executor:
        assert executor.run({"x": np.ones((3, 2, 4, 6), np.float32)})["y"].shape == (3, 2, 4, 6)


def sparse(indices: object, dims: Sequence[int] = (2, 3), values: object = (1.0, 2.0)) -> onnx.SparseTensorProto:
    tensor = numpy_helper.from_array(np.array(values, np.float32), "w")
    return helper.make_sparse_tensor(tensor, numpy_helper.from_array(np.array(indices, np.int64)), dims)


def model_with_sparse(tensor: onnx.SparseTensorProto) -> onnx.ModelProto:
    proto = model_of(helper.make_node("Add", ["x", "w"], ["y"]), shape=(1,))
    proto.graph.sparse_initializer.append(tensor)
    return proto


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_initializers_have_their_zeros(indices: object) -> None:
    model = from_model_proto(model_with_sparse(sparse(indices)))
    np.testing.assert_array_equal(model.parameters["w"], [[0, 1, 0], [0, 0, 2]])


WRONG_SPARSE = {
    "an index beyond the end": (sparse([1, 6]), ModelFormatError, "an index is outside"),
    "a negative index": (sparse([[0, 1], [-1, 2]]), ModelFormatError, "an index is outside"),
    "too few indices": (sparse([1]), ModelFormatError, "must have as many rows"),
    "a negative size": (sparse([1, 2], (-2, 3)), ModelFormatError, "a size is negative"),
    "sizes without elements that are too large": (
        sparse(np.zeros(0), (1 << 62, 1 << 62, 0), ()), ModelFormatError, "too large"
    ),
    "more than memory holds": (sparse([1, 2], (1 << 30, 1 << 30)), ResourceError, "sparse initializer 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SPARSE)
def test_wrong_sparse_initializers_are_refused(case: str) -> None:
    tensor, error, message = WRONG_SPARSE[case]
    with pytest.raises(error, match=message):
        from_model_proto(model_with_sparse(tensor))
