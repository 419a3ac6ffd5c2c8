"""Nodes of a domain of one's own: what docs/onnx.md says of them, followed, and what becomes of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core import proto, registry
from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import forms, node
from tests.test_examples import blocks

DOMAIN = "com.example"
CONVERTERS = Path(node.__file__).parent / "converters"
OPERATOR, CONVERTER = (block for block in blocks("docs/onnx.md") if DOMAIN in block)
X, Y = (np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float32) for seed in (1, 2))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the page says of its domain, for one test."""
    monkeypatch.setattr(forms, "_known", {})
    for block in (OPERATOR, CONVERTER):
        exec(compile(block, "docs/onnx.md", "exec"), {"__name__": "page"})
    yield
    for table in (registry._schemas, registry._onnx, registry._operators, registry._implemented, node._converters):
        own = [key for key in table if {"Saturate", "AddScaled"} & {*(key if isinstance(key, tuple) else (key,))}]
        assert own
        for key in own:
            table.discard(key) if isinstance(table, set) else table.pop(key)


def model(saturate: dict[str, Any], add_scaled: dict[str, Any], version: int = 2) -> onnx.ModelProto:
    nodes = [
        helper.make_node("AddScaled", ["x", "y"], ["sum"], domain=DOMAIN, **add_scaled),
        helper.make_node("Relu", ["sum"], ["positive"]),
        helper.make_node("Saturate", ["positive"], ["z"], domain=DOMAIN, **saturate),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xyz"]
    graph = helper.make_graph(nodes, "g", ends[:2], ends[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, version)])


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("saturate", [{}, {"bound": 0.5}])
@pytest.mark.parametrize("factor", [{}, {"factor": -2.0}])
@pytest.mark.parametrize("optimize", [False, True])
def test_a_model_of_the_domain_of_the_page_runs(
    saturate: dict[str, float], factor: dict[str, float], optimize: bool
) -> None:
    limit, scale = saturate.get("bound", 1.0), factor.get("factor", 1.0)
    expected = limit * np.tanh(np.maximum(X + scale * Y.astype(np.float64), 0) / limit)
    message = model(saturate, {**factor, "mode": "linear"})
    with dagexec.compile(message, optimize=optimize, foreign=False, net_type="dag", num_workers=2) as executor:
        np.testing.assert_allclose(executor.run({"x": X, "y": Y})["z"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    ("saturate", "add_scaled", "version", "reason"),
    [
        ({}, {}, 3, "version 3 of the operator is newer than 2"),
        ({"soft": 1}, {}, 2, "its attribute soft = 1 is not supported"),
        ({}, {"mode": "log"}, 2, "only its mode 'linear' is supported"),
    ],
)
def test_what_the_page_does_not_know_is_refused(
    saturate: dict[str, Any], add_scaled: dict[str, Any], version: int, reason: str
) -> None:
    message = model(saturate, add_scaled, version)
    for foreign in (False, True):
        with pytest.raises(UnsupportedOperatorError, match=reason):
            dagexec.load_model(message, foreign=foreign)


@pytest.mark.usefixtures("page")
def test_an_attribute_of_another_kind_is_an_error() -> None:
    graph = helper.make_graph([], "inner", [], [])
    with pytest.raises(ModelFormatError, match="Saturate 'z': attribute 'bound' must be numbers, text or a tensor"):
        dagexec.load_model(model({"bound": graph}, {}))


def test_a_tensor_and_texts_are_arguments_too() -> None:
    attributes = {"t": numpy_helper.from_array(X), "s": "text", "n": [1, 2], "f": 0.5}
    message = helper.make_node("Any", ["x"], ["y"], domain=DOMAIN, **attributes)
    seen = node.OnnxNode(message, 1, node.Scope({}, {}, set()))
    assert [seen.argument(name) for name in "snf"] == ["text", [1, 2], 0.5]
    tensor = seen.argument("t")
    assert isinstance(tensor, proto.TensorProto)
    assert list(tensor.float_data) == X.reshape(-1).tolist()
    assert seen.argument("missing") is None
    seen.check_all_read()


@pytest.mark.usefixtures("page")
def test_operators_of_other_domains_are_not_exported() -> None:
    from dagexec.export import to_onnx

    loaded = dagexec.load_model(model({}, {}))
    with pytest.raises(UnsupportedOperatorError, match=r"Saturate of the domain com\.example, and only"):
        to_onnx(loaded)


def test_a_module_of_converters_is_found_by_being_there() -> None:
    registered = {function.__module__.rpartition(".")[2] for function, _ in node._converters.values()}
    assert {path.stem for path in CONVERTERS.glob("[!_]*.py")} <= registered
