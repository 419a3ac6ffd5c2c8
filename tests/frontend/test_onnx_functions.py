"""Functions of ONNX models: nodes that stand for other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

import dagexec
from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import forms, from_model_proto, functions, graph
from dagexec.frontend.onnx.node import converter_of

from .test_onnx import tiny_model

Array = npt.NDArray[Any]


def function(
    name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str] = "a", outputs: Sequence[str] = "b",
    opset: int = 13, domain: str = "own", **keywords: object,
) -> onnx.FunctionProto:  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function(domain, name, inputs, outputs, nodes, imports, **keywords)  # type: ignore[arg-type]


def call(name: str, inputs: Sequence[str] = "x", outputs: Sequence[str] = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(name, inputs, outputs, domain="own", name="call", **attributes)


def model_with(nodes: list[onnx.NodeProto], *defined: onnx.FunctionProto, outputs: str = "y") -> onnx.ModelProto:
    model = tiny_model(nodes, list(outputs))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.extend(defined)
    return model


def leaky(**attributes: object) -> onnx.NodeProto:
    """A LeakyRelu whose slope is attribute `slope` of the function around it."""
    node = helper.make_node("LeakyRelu", ["a"], ["b"], **attributes)
    node.attribute.append(onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope"))
    return node


def _nested() -> onnx.ModelProto:
    inner = function("Inner", [helper.make_node("Neg", ["a"], ["t"]), helper.make_node("Exp", ["t"], ["b"])])
    outer = function("Outer", [call("Inner", "a", "t"), call("Inner", "t", "s"), helper.make_node("Abs", ["s"], ["b"])])
    return model_with([call("Outer", "x", "t"), call("Inner", "t", "y")], inner, outer)


def _unsorted() -> onnx.ModelProto:
    nodes = [helper.make_node("Exp", ["t"], ["b"]), helper.make_node("Neg", ["a"], ["t"])]
    return model_with([call("F")], function("F", nodes))


def _of_the_default_domain() -> onnx.ModelProto:
    relu = helper.make_node("Relu", ["x"], ["y"])
    return model_with([relu], function("Relu", [helper.make_node("Neg", ["a"], ["b"])], domain=""))


def _two_outputs() -> onnx.ModelProto:
    two = function("Two", [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Exp", ["b"], ["c"])], "a", "bc")
    return model_with([call("Two", "x", ["", "y"]), call("Two", "y", "z")], two)


def _of_another_opset() -> onnx.ModelProto:
    axes = helper.make_node("Squeeze", ["a"], ["t"], axes=[0])  # axes are an input since opset 13
    return model_with([call("F")], function("F", [axes, helper.make_node("Neg", ["t"], ["b"])], opset=11))


def _attribute(**given: float) -> onnx.ModelProto:
    return model_with([call("F", **given)], function("F", [leaky()], attributes=["slope"]))


def _attribute_default(**given: float) -> onnx.ModelProto:
    default = helper.make_attribute("slope", 0.25)
    return model_with([call("F", **given)], function("F", [leaky()], attribute_protos=[default]))


def _optional_input() -> onnx.ModelProto:
    low = helper.make_node("Constant", [], ["low"], value_float=0.5)
    clip = helper.make_node("Clip", ["a", "l", "h"], ["b"])
    return model_with([low, call("F", ["x", "low"], "t"), call("F", ["t", "", "low"])], function("F", [clip], "alh"))


def _leaky(slope: float) -> Callable[[Array], Array]:
    return lambda x: np.where(x < 0, x * slope, x)


CASES: dict[str, tuple[onnx.ModelProto, Callable[[Array], Array]]] = {
    "nested, with names that are used outside": (_nested(), lambda x: np.exp(-np.exp(-np.exp(-x)))),
    "nodes in another order": (_unsorted(), lambda x: np.exp(-x)),
    "an operator of the standard keeps its meaning": (_of_the_default_domain(), lambda x: np.maximum(x, 0)),
    "outputs that are not asked for": (_two_outputs(), lambda x: np.exp(-x)),
    "another version of the operators": (_of_another_opset(), lambda x: -x[0]),
    "an attribute": (_attribute(slope=0.5), _leaky(0.5)),
    "an absent attribute": (_attribute(), _leaky(0.01)),
    "an attribute's default": (_attribute_default(), _leaky(0.25)),
    "an attribute with a default": (_attribute_default(slope=0.75), _leaky(0.75)),
    "optional inputs": (_optional_input(), lambda x: np.full_like(x, 0.5)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_computes_what_its_nodes_do(case: str) -> None:
    model, formula = CASES[case]
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)
    with dagexec.compile(from_model_proto(model)) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], formula(x), rtol=1e-5)


def test_a_function_that_returns_its_input_copies_it() -> None:
    nodes = [call("F", "x", "yz")]
    model = model_with(nodes, function("F", [helper.make_node("Neg", ["a"], ["b"])], "a", "ab"), outputs="yz")
    x = np.ones((1, 2, 4, 4), np.float32)
    with dagexec.compile(from_model_proto(model)) as executor:
        found = executor.run({"x": x})
    np.testing.assert_array_equal(found["y"], x)
    np.testing.assert_array_equal(found["z"], -x)


def test_an_operator_without_a_converter_is_the_function_that_its_definition_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        graph, "converter_of", lambda name, domain: None if name == "HardSwish" else converter_of(name, domain)
    )
    monkeypatch.setattr(forms, "_known", {})
    x = np.linspace(-4, 4, 32, dtype=np.float32).reshape(1, 2, 4, 4)
    model = from_model_proto(tiny_model([helper.make_node("HardSwish", ["x"], ["y"])], ["y"], opset=14))
    assert len(model.net.op) > 1
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], x * np.clip(x / 6 + 0.5, 0, 1), rtol=1e-6, atol=1e-6)


def _doubling(depth: int) -> list[onnx.FunctionProto]:
    """Functions of which each calls the one before it twice."""
    chain = [function("F0", [helper.make_node("Neg", ["a"], ["b"])])]
    for level in range(1, depth):
        calls = [call(f"F{level - 1}", "a", "t"), call(f"F{level - 1}", "t", "b")]
        chain.append(function(f"F{level}", calls))
    return chain


def test_functions_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = model_with([call("F")], function("F", [call("F", "a", "b")]))
    with pytest.raises(ModelFormatError, match="functions call each other over 32 deep: F -> F"):
        from_model_proto(itself)
    monkeypatch.setattr(functions, "_MAX_NODES", 100)
    with pytest.raises(ModelFormatError, match="the model's functions expand to more than 100 nodes"):
        from_model_proto(model_with([call("F29")], *_doubling(30)))


REFUSED = {
    "more inputs than it has": (lambda: [call("F", "xx")], "has 1 inputs and 1 outputs, found 2 and 1"),
    "an attribute that it does not have": (lambda: [call("F", size=1)], "has no attribute 'size'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_the_function_is_refused(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ModelFormatError, match=message):
        from_model_proto(model_with(build(), function("F", [helper.make_node("Neg", ["a"], ["b"])])))


def test_a_function_that_is_defined_twice_or_has_unknown_nodes_is_refused() -> None:
    negate = function("F", [helper.make_node("Neg", ["a"], ["b"])])
    with pytest.raises(ModelFormatError, match="function 'F' of domain 'own' is defined twice"):
        from_model_proto(model_with([call("F")], negate, negate))
    fancy = function("F", [helper.make_node("Fancy", ["a"], ["b"], name="inner")])
    with pytest.raises(UnsupportedOperatorError, match="node 'call/inner': Fancy"):
        from_model_proto(model_with([call("F")], fancy), foreign=False)
    ghost = function("F", [helper.make_node("Neg", ["ghost"], ["b"])])
    with pytest.raises(ModelFormatError, match="Neg 'b' reads 'ghost', which nothing in function 'F' provides"):
        from_model_proto(model_with([call("F")], ghost))
    twice = function("F", [helper.make_node("Neg", ["a"], ["b"])] * 2)
    with pytest.raises(ModelFormatError, match="tensor 'b' of function 'F' has two origins"):
        from_model_proto(model_with([call("F")], twice))
