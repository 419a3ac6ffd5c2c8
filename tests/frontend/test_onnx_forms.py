"""Nodes of one form: converted once, and renamed to what each would have become by itself."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.frontend.onnx import forms, from_model_proto, known_types
from dagexec.frontend.onnx import graph as graph_module
from dagexec.frontend.onnx.known_types import KnownTypes
from dagexec.frontend.onnx.node import OnnxNode


def model_of(nodes: list[onnx.NodeProto], **constants: object) -> onnx.ModelProto:
    """Of nodes that read x, 2 by 3 by 4 numbers, and return what is not read."""
    read = {name for node in nodes for name in node.input}
    results = [name for node in nodes for name in node.output if name and name not in read]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
        [helper.make_value_info(name, onnx.TypeProto()) for name in results],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a converter is called, by ONNX operator."""
    counts: Counter[str] = Counter()
    find = graph_module.converter_of

    def counting(op_type: str, domain: str) -> tuple[Callable[[OnnxNode], list[Node]], int] | None:
        found = find(op_type, domain)
        if found is None:
            return None

        def convert(node: OnnxNode) -> list[Node]:
            counts[op_type] += 1
            return found[0](node)

        return convert, found[1]

    monkeypatch.setattr(graph_module, "converter_of", counting)
    monkeypatch.setattr(forms, "_known", {})
    return counts


def described(model: Model) -> list[str]:
    return [str(operator) for operator in model.net.op]


def each_alone(proto: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model with every node converted by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(graph_module, "form_of", lambda *_: None)
        return from_model_proto(proto)


def layers(count: int, **axes: int) -> list[onnx.NodeProto]:
    """Each of a node that becomes one operator and of one that becomes several, with names between them."""
    nodes, last = [], "x"
    for number in range(count):
        nodes.append(helper.make_node("Softmax", [last], [f"s{number}"], name=f"soft {number}", **axes))
        nodes.append(helper.make_node("PRelu", [f"s{number}", "slope"], [f"p{number}"], name=f"rectify {number}"))
        last = f"p{number}"
    return nodes


def test_nodes_of_one_form_are_converted_once(converted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model_of(layers(5), slope=np.float32([0.1, 0.2, 0.3, 0.4]))
    model = from_model_proto(proto)
    assert converted == {"Softmax": 1, "PRelu": 1}
    assert len(model.net.op) == 15
    assert {operator.name for operator in model.net.op} == {f"{n} {i}" for n in ("soft", "rectify") for i in range(5)}
    assert described(model) == described(each_alone(proto, monkeypatch))


def test_a_further_model_of_known_forms_calls_no_converter(converted: Counter[str]) -> None:
    slope = np.float32([0.1, 0.2, 0.3, 0.4])
    from_model_proto(model_of(layers(2), slope=slope))
    of_more = from_model_proto(model_of(layers(3), slope=slope))
    assert converted == {"Softmax": 1, "PRelu": 1}
    assert [operator.output[0] for operator in of_more.net.op if operator.type == "Softmax"] == ["s0", "s1", "s2"]


def test_operators_of_a_further_model_are_not_asked_for_their_types_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    infer = KnownTypes._inferred

    def noted(types: KnownTypes, operator: Node, *seen: Any) -> Any:
        asked.append(operator.type)
        return infer(types, operator, *seen)

    monkeypatch.setattr(KnownTypes, "_inferred", noted)
    monkeypatch.setattr(known_types, "_answers", {})
    slope = np.float32([0.1, 0.2, 0.3, 0.4])
    from_model_proto(model_of(layers(2), slope=slope))
    first = len(asked)
    from_model_proto(model_of(layers(3), slope=slope))
    assert first == len(set(asked)) == len(asked)


def test_a_form_is_of_one_operator_set(converted: Counter[str]) -> None:
    models = [model_of([helper.make_node("Softmax", ["x"], ["y"])]) for _ in range(2)]
    models[0].opset_import[0].version = 11  # which makes a matrix of x, with axis 1
    assert len({str(from_model_proto(model).net) for model in models}) == 2
    assert converted == {"Softmax": 2}


def test_no_more_forms_are_kept_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_known", {})
    monkeypatch.setattr(forms, "_KEPT", 3)
    from_model_proto(
        model_of([helper.make_node("Softmax", ["x"], [f"y{axis}"], axis=axis) for axis in (-3, -2, -1, 0, 1)])
    )
    assert len(forms._known) == 2


UNEQUAL = {
    "attributes": [helper.make_node("Softmax", ["x"], [name], axis=axis) for axis, name in enumerate("ab")],
    "attribute names": [
        helper.make_node("LRN", ["x"], ["a"], size=3), helper.make_node("LRN", ["x"], ["b"], size=3, alpha=0.5),
    ],
    "inputs that are the same": [helper.make_node("Add", ["x", name], [f"{name}+"]) for name in ("x", "row")],
    "inputs that are left out": [
        helper.make_node("Clip", ["x", "low", "high"], ["a"]), helper.make_node("Clip", ["x", "", "high"], ["b"]),
    ],
    "values": [helper.make_node("Clip", ["x", low, "high"], [f"{low}+"]) for low in ("low", "lower")],
    "sizes": [helper.make_node("Flatten", ["x"], ["f"], axis=1), *(
        helper.make_node("PRelu", [of, slope], [f"{of}+"]) for of, slope in (("x", "row"), ("f", "column")))],
    "outputs that are read": [
        helper.make_node("Dropout", ["x"], ["a", "unread"]), helper.make_node("Dropout", ["x"], ["b", "mask"]),
        helper.make_node("Not", ["mask"], ["m"]),
    ],
    "domains": [helper.make_node("Gelu", ["x"], [f"{domain} y"], domain=domain) for domain in ("com.microsoft", "")],
}  # fmt: skip


@pytest.mark.parametrize("what", UNEQUAL)
def test_nodes_that_differ_in_more_than_names_are_converted_each(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"low": np.float32(0), "lower": np.float32(-2), "high": np.float32(6)}
    constants |= {"row": np.ones(4, np.float32), "column": np.ones((1, 1), np.float32)}
    nodes = UNEQUAL[what]
    read = {name for node in nodes for name in node.input}
    proto = model_of(nodes, **{name: value for name, value in constants.items() if name in read})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert described(from_model_proto(proto)) == described(each_alone(proto, monkeypatch))


def test_equal_values_under_other_names_are_one_form(converted: Counter[str]) -> None:
    nodes = [helper.make_node("Clip", ["x", low, high], [f"y{low}"]) for low, high in (("a", "b"), ("c", "d"))]
    model = from_model_proto(model_of(nodes, a=np.float32(0), b=np.float32(6), c=np.float32(0), d=np.float32(6)))
    assert converted == {"Clip": 1}
    assert len({str(operator.arg) for operator in model.net.op}) == 1


def test_a_converter_that_looks_further_is_called_for_every_node(converted: Counter[str]) -> None:
    nodes = [helper.make_node("Identity", ["c"], [f"i{number}"]) for number in range(3)]
    nodes += [helper.make_node("Add", ["x", f"i{number}"], [f"y{number}"]) for number in range(3)]
    model = from_model_proto(model_of(nodes, c=np.ones(4, np.float32)))
    assert converted == {"Identity": 3, "Add": 1}
    assert sorted(model.parameters) == ["i0", "i1", "i2"]


def calls_to_load(proto: onnx.ModelProto) -> int:
    """How many functions of Python are called."""
    found = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        from_model_proto(proto)
    finally:
        sys.setprofile(None)
    return found


def test_a_further_layer_of_the_same_form_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_layer() -> float:
        few, more = (model_of(layers(count), slope=np.float32([0.1, 0.2, 0.3, 0.4])) for count in (10, 60))
        calls_to_load(few)
        return (calls_to_load(more) - calls_to_load(few)) / 50

    renamed = of_a_layer()
    monkeypatch.setattr(graph_module, "form_of", lambda *_: None)
    assert renamed < 0.6 * of_a_layer()


def test_calls_grow_with_the_number_of_nodes_though_each_of_a_form_has_other_values() -> None:
    def clips(count: int) -> onnx.ModelProto:
        bounds = {f"b{number}": np.float32(number) for number in range(count)}
        nodes = [helper.make_node("Clip", ["x", "", name], [f"y{name}"]) for name in bounds]
        return model_of(nodes, **bounds)

    calls_to_load(clips(10))
    few, more, most = (calls_to_load(clips(count)) for count in (50, 150, 250))
    assert most - more < 1.2 * (more - few) + 40


def test_the_form_of_a_constant_is_not_looked_for() -> None:
    [node] = graph_module.listed([helper.make_node("Constant", [], ["c"], value_float=1.0)])
    assert forms.form_of(node, 17, {"c"}) is None
