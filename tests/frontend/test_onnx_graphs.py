"""Graphs of ONNX models: the order of nodes, and graphs that nodes hold."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import folding, from_model_proto
from dagexec.frontend.onnx import node as nodes
from dagexec.frontend.onnx.node import OnnxNode, Subgraph
from dagexec.frontend.onnx.scoping import listed, sorted_nodes
from tests.frontend.one_node import one_node

from .test_onnx import tiny_model


def test_nodes_in_any_order_are_computed() -> None:
    rng = np.random.default_rng(0)
    chain = [helper.make_node("Sub", ["x", f"t{i}"], [f"t{i + 1}"]) for i in range(9)]
    chain = [helper.make_node("Neg", ["x"], ["t0"]), *chain, helper.make_node("Mul", ["t3", "t9"], ["y"])]
    x = rng.normal(size=(1, 2, 4, 4)).astype(np.float32)
    results = []
    for order in (range(len(chain)), reversed(range(len(chain))), rng.permutation(len(chain))):
        with dagexec.compile(from_model_proto(tiny_model([chain[int(i)] for i in order], ["y"]))) as executor:
            results.append(executor.run({"x": x})["y"])
    assert results[0].std() > 0
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])


def test_nodes_keep_their_order_where_they_may() -> None:
    first = helper.make_node("Neg", ["c"], ["y"], name="first")
    rest = [helper.make_node("Neg", ["x"], [name], name=name) for name in "abc"]
    assert [node.proto.name for node in sorted_nodes(listed([first, *rest]))] == ["a", "b", "c", "first"]
    assert [node.proto.name for node in sorted_nodes(listed([*rest, first]))] == ["a", "b", "c", "first"]


def test_a_circle_of_nodes_is_refused_by_name() -> None:
    circle = [
        helper.make_node("Neg", ["x"], ["before"], name="before"),
        helper.make_node("Add", ["before", "r"], ["a"], name="sum"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Neg", ["r"], ["y"], name="after"),
    ]
    with pytest.raises(ModelFormatError, match=r"wait for each other in a circle: .*Add 'sum'") as caught:
        from_model_proto(tiny_model(circle, ["y"]))
    assert "Relu 'relu'" in str(caught.value)
    assert "before'" not in str(caught.value)
    assert "after" not in str(caught.value)


def branch(*operators: onnx.NodeProto, returned: str, **initializers: object) -> onnx.GraphProto:
    """A graph without inputs that returns one tensor."""
    arrays = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in initializers.items()]
    output = helper.make_tensor_value_info(returned, TensorProto.FLOAT, None)
    return helper.make_graph(operators, "branch", [], [output], initializer=arrays)


@pytest.fixture
def converted_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Subgraph]:
    """What the branches of the nodes of type If become, in a model that is loaded."""
    found: list[Subgraph] = []

    def convert(node: OnnxNode) -> list[Node]:
        graphs = [node.subgraph(name, 0) for name in ("then_branch", "else_branch")]
        found.extend(graphs)
        captured = [name for graph in graphs for name in graph.captured]
        return [node.operator("Sum", [*dict.fromkeys([*node.inputs, *captured])], node.outputs)]

    monkeypatch.setitem(nodes._converters, ("", "If"), (convert, 99))
    return found


def test_graphs_of_nodes_have_tensors_of_their_own_and_capture_those_around(
    converted_graphs: list[Subgraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "MAX_ELEMENTS", 1)
    then = branch(
        helper.make_node("Neg", ["w"], ["t"]),  # of constants alone: computed once
        helper.make_node("Add", ["t", "late"], ["s"]),
        helper.make_node("Relu", ["s"], ["out"]),
        returned="out",
        w=[1, 2],
    )
    otherwise = branch(helper.make_node("Relu", ["x"], ["s"]), returned="s", w=[3, 4])
    shadowing = branch(
        helper.make_node("If", ["c"], ["deep"], then_branch=then, else_branch=otherwise), returned="deep"
    )
    operators = [
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=shadowing),
        helper.make_node("Abs", ["x"], ["s"]),
        helper.make_node("Neg", ["s"], ["late"]),
        helper.make_node("Constant", [], ["c"], value_float=1.0),
    ]
    model = from_model_proto(tiny_model(operators, ["y"]))
    assert [operator.output[0] for operator in model.net.op] == ["s", "late", "y"]
    assert model.init_net is not None
    [first, *_] = converted_graphs
    assert [operator.type for operator in first.net.op] == ["Add", "Relu"]
    assert first.inputs == ()
    assert set(first.captured) >= {"late"}
    own = [name for graph in converted_graphs for operator in graph.net.op for name in operator.output]
    assert len(own) == len(set(own))
    assert not {"s", "late", "c", "x", "y"} & set(own)
    for graph in converted_graphs:
        known = {*graph.captured, *graph.inputs, *(name for operator in graph.net.op for name in operator.output)}
        assert set(graph.outputs) <= known
        assert {name for operator in graph.net.op for name in operator.input} <= known
    negated = {operator.output[0] for operator in model.init_net.op}
    assert {name for name in first.captured if name != "late"} <= negated
    weights = sorted(array.tolist() for array in model.parameters.values() if array.shape == (2,))
    assert weights == [[1, 2], [1, 2]]


def test_a_graph_of_a_node_that_reads_what_nothing_provides_is_refused(converted_graphs: list[Subgraph]) -> None:
    wrong = branch(helper.make_node("Neg", ["ghost"], ["out"]), returned="out")
    right = branch(helper.make_node("Neg", ["x"], ["inside"]), returned="inside")
    choice = helper.make_node("If", ["x"], ["y"], then_branch=wrong, else_branch=right)
    with pytest.raises(ModelFormatError, match="If 'y' reads 'ghost', which nothing in the model provides"):
        from_model_proto(tiny_model([choice], ["y"]))
    visible_elsewhere = branch(helper.make_node("Neg", ["inside"], ["out"]), returned="out")
    choice = helper.make_node("If", ["x"], ["y"], then_branch=visible_elsewhere, else_branch=right)
    with pytest.raises(ModelFormatError, match="If 'y' reads 'inside', which nothing in the model provides"):
        from_model_proto(tiny_model([choice], ["y"]))
    assert converted_graphs == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_split_of_another_number_of_outputs_does_not_reach_inference(inside: bool) -> None:
    """The onnx package's ended the process."""
    split = helper.make_node("Split", ["x"], ["y", "z"], num_outputs=1, axis=1)
    branch = helper.make_graph([split], "branch", [], [onnx.ValueInfoProto(name="y")])
    condition = numpy_helper.from_array(np.array(True), "c")
    node = helper.make_node("If", ["c"], ["r"], then_branch=branch, else_branch=branch) if inside else split
    model = tiny_model([node], ["r" if inside else "y"], opset=18, initializer=[condition])
    with pytest.raises(ModelFormatError, match="Split 'y': num_outputs is 1, and it has 2 outputs"):
        from_model_proto(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (one_node("Einsum", 12, [None], equation="->"), "as Einsum: expected at least 1 input"),
        (
            one_node("LayerNormalization", 17, [np.ones((2, 3), np.float32)] * 2, outputs=2, axis=-(2**45)),
            "no array has .* axes, as axis -35184372088832 asks for",
        ),
    ],
    ids=["no inputs", "axis"],
)
def test_a_node_that_no_operator_can_be_made_of_is_refused(model: onnx.ModelProto, reason: str) -> None:
    """It once ended in IndexError and MemoryError."""
    with pytest.raises(UnsupportedOperatorError, match=reason):
        from_model_proto(model, foreign=False)
