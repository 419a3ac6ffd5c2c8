"""Nodes without operators of dagexec: which of them become one operator, why, and what the user is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core.model import Model
from dagexec.core.node import Node, arguments_of
from dagexec.errors import UnsupportedOperatorError
from dagexec.frontend.onnx import forms, from_model_proto
from dagexec.frontend.onnx import node as nodes
from dagexec.frontend.onnx.foreign_nodes import FOREIGN, merged
from dagexec.frontend.onnx.known_types import KnownTypes

pytestmark = pytest.mark.usefixtures("tables_are_foreign")

MATRICES = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)


def model_of(*nodes: onnx.NodeProto, outputs: str = "y", shape: Any = (None, 4, 4), **more: Any) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    returned = [helper.make_empty_tensor_value_info(name) for name in outputs.split(",")]
    graph = helper.make_graph(list(nodes), "net", [value("x", TensorProto.FLOAT, shape)], returned, **more)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(","), outputs.split(","), name=f"{op_type} {outputs}", **attributes)


def same(x: str, y: str) -> onnx.NodeProto:
    """A node that dagexec does not have, of one input and output of the same shape."""
    return node("Scaler", x, y, domain="ai.onnx.ml", offset=[0.5], scale=[2.0])


def parts(model: Model) -> list[list[str]]:
    """The nodes in each foreign operator."""
    found = [operator for operator in model.net.op if operator.type == FOREIGN]
    return [[line.split(":")[0] for line in arguments_of(one, "").strings("reasons")] for one in found]


def agrees(model: onnx.ModelProto, x: Any) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with dagexec.compile(model) as executor:
        found = executor.run({"x": x})
    for name, expected in zip(found, session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_connected_nodes_become_one_operator() -> None:
    model = model_of(same("x", "a"), same("a", "b"), node("Add", "a,b", "c"), same("c", "y"), shape=[3, 4])
    found = from_model_proto(model)
    assert parts(found) == [["Scaler 'Scaler a'", "Scaler 'Scaler b'"], ["Scaler 'Scaler y'"]]
    assert [operator.type for operator in found.net.op] == [FOREIGN, "Add", FOREIGN]
    agrees(model, MATRICES[0, :3])


def test_no_circle_is_closed_through_other_operators() -> None:
    """a and y touch, but Relu comes between them on another way, so both cannot be one."""
    model = model_of(same("x", "a"), node("Relu", "a", "r"), node("FeatureVectorizer", "a,r", "y", domain="ai.onnx.ml",
                     inputdimensions=[4, 4]), shape=[3, 4])  # fmt: skip
    assert len(parts(from_model_proto(model))) == 2
    agrees(model, MATRICES[0, :3])


def test_nodes_that_only_a_third_connects_become_one_whatever_their_order() -> None:
    joined = node("FeatureVectorizer", "a,b", "y", domain="ai.onnx.ml", inputdimensions=[4, 4])
    model = model_of(same("x", "a"), node("Relu", "x", "r"), same("r", "b"), joined, shape=[3, 4])
    found = from_model_proto(model)
    assert [operator.type for operator in found.net.op] == ["Relu", FOREIGN]
    assert found.net.SerializeToString() == from_model_proto(model).net.SerializeToString()
    agrees(model, MATRICES[0, :3])


def test_what_others_read_leaves_the_operator_and_nothing_else_does() -> None:
    nodes = same("x", "a"), same("a", "b"), same("b", "y"), node("Relu", "b", "z")
    model = model_of(*nodes, outputs="y,z", shape=[3, 4])
    [operator] = [one for one in from_model_proto(model).net.op if one.type == FOREIGN]
    assert list(operator.output) == ["b", "y"]
    agrees(model, MATRICES[0, :3])


def test_small_constants_are_inside_and_large_ones_are_parameters() -> None:
    for size, parameters in ((4, []), (1 << 15, ["w"])):
        table = numpy_helper.from_array(np.arange(size, dtype=np.float32), "w")
        model = model_of(
            node("ArrayFeatureExtractor", "w,i", "y", domain="ai.onnx.ml"),
            initializer=[table, numpy_helper.from_array(np.array([3, 1]), "i")],
        )
        model.graph.node.insert(0, same("x", "unused"))
        model.graph.output.append(helper.make_empty_tensor_value_info("unused"))
        assert [name for name in from_model_proto(model).parameters if name == "w"] == parameters


def test_types_that_follow_from_inputs_keep_the_net_static() -> None:
    model = model_of(node("Binarizer", "x", "a", domain="ai.onnx.ml", threshold=0.5), node("Relu", "a", "y"))
    [operator] = [one for one in from_model_proto(model).net.op if one.type == FOREIGN]
    assert arguments_of(operator, "").bool("inferred")
    with dagexec.compile(model) as executor:
        executor.run({"x": MATRICES})
        assert [type(step).__name__ for step in executor.net().prepared().steps].count("CheckedStep") == 0


def test_an_operator_that_refuses_the_elements_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_sigmoid(node: nodes.OnnxNode) -> list[Node]:
        return [node.operator("Sigmoid", node.inputs, node.outputs)]

    monkeypatch.setitem(nodes._converters, ("", "Abs"), (as_sigmoid, 99))
    monkeypatch.setattr(forms, "_known", {})
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(name, TensorProto.INT32, [2])] for name in "xy")
    graph = helper.make_graph([node("Abs", "x", "y")], "net", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    [reason] = arguments_of(from_model_proto(model).net.op[0], "").strings("reasons")
    assert "must be one of" in reason
    with dagexec.compile(model) as executor:
        assert executor.run({"x": np.array([-3, 4], np.int32)})["y"].tolist() == [3, 4]


def test_without_foreign_operators_the_reason_is_an_error() -> None:
    model = model_of(same("x", "y"))
    with pytest.raises(UnsupportedOperatorError, match=r"Scaler.*there is no converter for it"):
        dagexec.compile(model, foreign=False)
    with pytest.raises(UnsupportedOperatorError, match=r"Scaler.*there is no converter for it"):
        dagexec.load_model(model, foreign=False)


def test_nodes_that_no_runtime_has_are_refused_with_the_reasons_of_both() -> None:
    model = model_of(node("Frobnicate", "x", "y", domain="com.example"))
    model.opset_import.add(domain="com.example", version=1)
    with pytest.raises(UnsupportedOperatorError, match=r"Frobnicate.*onnxruntime: .*onnx.reference: ") as caught:
        from_model_proto(model)
    assert "1 operator(s) cannot be run" in str(caught.value)


def test_random_numbers_are_drawn_anew_in_each_run() -> None:
    model = model_of(node("Multinomial", "p", "d", sample_size=64), node("Relu", "x", "z"), outputs="d,z",
                     initializer=[numpy_helper.from_array(np.zeros((1, 1000), np.float32), "p")])  # fmt: skip
    with dagexec.compile(model) as executor:
        first, second = (executor.run({"x": MATRICES})["d"] for _ in range(2))
    assert not np.array_equal(first, second)


def test_a_graph_inside_a_node_goes_along_with_what_it_captures() -> None:
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph([node(op_type, "x", name)], name, [], [value(name, TensorProto.FLOAT, None)])
        for op_type, name in (("Det", "one"), ("Det", "other"))
    ]
    condition = numpy_helper.from_array(np.array(True), "c")
    choice = node("If", "c", "y", then_branch=branches[0], else_branch=branches[1])
    model = model_of(node("Relu", "x", "r"), choice, initializer=[condition])
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": MATRICES})["y"], np.linalg.det(MATRICES), rtol=1e-4)


def test_many_nodes_are_merged_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the search for circles takes too long, the rest stays apart, and the result is the same."""
    nodes = [node("Scaler", "x" if not i else f"t{i - 1}", f"t{i}", domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
             for i in range(40)]  # fmt: skip
    model = model_of(*nodes, node("Relu", "t39", "y"), shape=[3, 4])
    assert [len(part) for part in parts(from_model_proto(model))] == [40]
    monkeypatch.setattr("dagexec.frontend.onnx.foreign_nodes._MAX_STEPS", 10)
    assert len(parts(from_model_proto(model))) > 1
    agrees(model, MATRICES[0, :3])


def test_operators_of_dagexec_alone_stay_as_they_are() -> None:
    operators = [dagexec.op("Relu", ["x"], ["a"]), dagexec.op("Relu", ["a"], ["y"])]
    assert merged(operators, ["y"], KnownTypes({}, {})) == operators


def test_what_onnxruntime_has_no_kernel_for_takes_nothing_else_to_the_reference() -> None:
    """Its LinearRegressor is of float32 alone."""
    regressor = node("LinearRegressor", "x", "a", domain="ai.onnx.ml", coefficients=[1.0, 2.0], intercepts=[3.0])
    model, x = model_of(regressor, same("a", "b"), same("b", "y"), shape=[2, 2]), np.array([[1.0, 0.0], [0.5, -1.0]])
    assert parts(from_model_proto(model)) == [
        ["LinearRegressor 'LinearRegressor a'", "Scaler 'Scaler b'", "Scaler 'Scaler y'"]
    ]
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    found = from_model_proto(model)
    assert parts(found) == [["LinearRegressor 'LinearRegressor a'"], ["Scaler 'Scaler b'", "Scaler 'Scaler y'"]]
    with dagexec.compile(found) as executor:
        [result] = executor.run(x).values()
    np.testing.assert_allclose(result.reshape(-1), ((x @ [1, 2] + 3 - 0.5) * 2 - 0.5) * 2)


def test_foreign_nodes_of_constants_are_computed_once() -> None:
    constant = numpy_helper.from_array(MATRICES[0], "m")
    model = model_of(same("m", "d"), node("Add", "x,d", "y"), shape=[4, 4], initializer=[constant])
    found = from_model_proto(model)
    assert found.init_net is not None
    assert [one.type for one in found.init_net.op] == [FOREIGN]
    assert [one.type for one in found.net.op] == ["Add"]
    agrees(model, MATRICES[1])


def test_nodes_of_a_branch_that_is_chosen_at_load_are_merged_with_those_around() -> None:
    """They come as one operator of several nodes."""
    branch = helper.make_graph([same("x", "p"), same("p", "q")], "branch", [], [onnx.ValueInfoProto(name="q")])
    condition = numpy_helper.from_array(np.array(True), "c")
    choice = node("If", "c", "r", then_branch=branch, else_branch=branch)
    model = model_of(choice, same("r", "y"), shape=[4, 4], initializer=[condition])
    agrees(model, MATRICES[0])
