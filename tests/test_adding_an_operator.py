"""docs/adding-an-operator.md, followed: its operator is taken out of the registries and added from the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.reference
import pytest
from onnx import helper

import dagexec
from dagexec.core import gradient, registry
from dagexec.ops.engines.cuda.base import expressed
from dagexec.ops.engines.onednn import expressions
from dagexec.ops.engines.onednn.elementwise import register_declared
from tests.ops.base import test_row_operators
from tests.ops.elementwise import test_formulas
from tests.ops.running import run_operator
from tests.test_examples import blocks

ROOT = Path(__file__).resolve().parents[1]
MODULE, CASE, ROWS, *EXCERPTS = blocks("docs/adding-an-operator.md")
ARGUMENTS = ({}, {"alpha": 0.5})


@pytest.fixture
def celu_of_the_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries with what the page says of Celu, and nothing else of it."""
    registry.registered_engines("Celu", "cuda")  # those of CUDA register when one is asked for
    for module, name in (
        (registry, "_schemas"), (registry, "_onnx"), (registry, "_operators"), (registry, "_implemented"),
        (gradient, "_makers"),
    ):  # fmt: skip
        known = getattr(module, name)
        kept = [key for key in known if not {"Celu", "CeluGradient"} & {*(key if isinstance(key, tuple) else (key,))}]
        monkeypatch.setattr(module, name, {key: known[key] for key in kept} if isinstance(known, dict) else set(kept))
    assert not registry.is_registered("Celu")
    exec(compile(MODULE, "celu.py", "exec"), {"__name__": "celu"})
    register_declared("Celu")
    for op_type in ("Celu", "CeluGradient"):
        expressions.register_expression(op_type)
        expressed.register_expression(op_type)
    yield
    assert registry.operator_module("Celu") == "celu"


def test_the_page_shows_what_the_package_has() -> None:
    own = (ROOT / "ops/families/activation/celu.py").read_text()
    assert MODULE.split("\n\n\n", 1)[1] == own.split("\n\n\n", 1)[1]
    assert CASE.strip() in (ROOT / "tests/frontend/test_onnx_operators.py").read_text()


def test_the_other_blocks_are_python() -> None:
    for excerpt in EXCERPTS:
        compile(excerpt, "docs/adding-an-operator.md", "exec")


@pytest.mark.usefixtures("celu_of_the_page")
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_it_computes_its_formula_and_the_slopes_of_it(arguments: dict[str, float]) -> None:
    test_formulas.test_values_are_those_of_the_formula("Celu", arguments, np.float32, 1e-6)
    test_formulas.test_values_at_extremes_are_right_without_a_warning("Celu", arguments)
    test_formulas.test_gradients_are_the_slopes_of_the_formula("Celu", arguments)
    with pytest.raises(dagexec.DagexecError, match="'alpha' must be above 0"):
        test_formulas.test_values_are_those_of_the_formula("Celu", {"alpha": -1.0}, np.float32, 1e-6)


@test_formulas.needs_onednn
@pytest.mark.usefixtures("celu_of_the_page")
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_onednn_computes_it(arguments: dict[str, float]) -> None:
    test_formulas.test_onednn_computes_the_formula("Celu", arguments, np.float32, 1e-5)


@test_formulas.needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("celu_of_the_page")
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_cuda_computes_it(arguments: dict[str, float]) -> None:
    test_formulas.test_cuda_computes_the_formula_and_its_slopes("Celu", arguments)


@pytest.mark.usefixtures("celu_of_the_page")
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_model_of_onnx_has_it(arguments: dict[str, float]) -> None:
    node = helper.make_node("Celu", ["x"], ["y"], **arguments)
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)])
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    [expected] = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def squared_softmax_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries with the page's second operator, on all engines."""
    registry.registered_engines("Celu", "cuda")
    for module, name in (
        (registry, "_schemas"), (registry, "_onnx"), (registry, "_operators"), (registry, "_implemented"),
        (gradient, "_makers"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name).copy())
    exec(compile(ROWS, "squared_softmax.py", "exec"), {"__name__": "squared_softmax"})


@pytest.mark.usefixtures("squared_softmax_of_the_page")
@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=test_formulas.needs_onednn)])
def test_the_row_operator_is_what_it_says(engine: str) -> None:
    x = np.random.default_rng(0).normal(0, 1, (3, 50)).astype(np.float32)
    squares = x.astype(np.float64) ** 2
    [y] = run_operator("SquaredSoftmax", [x], engine=engine)
    np.testing.assert_allclose(y, squares / squares.sum(1, keepdims=True), rtol=1e-5)
    test_row_operators.test_a_rows_bytes_do_not_depend_on_the_batch("SquaredSoftmax", engine)
    test_row_operators.test_nan_is_of_its_row_alone("SquaredSoftmax", engine)


@pytest.mark.usefixtures("squared_softmax_of_the_page")
def test_the_row_operator_has_the_gradient_of_its_expression() -> None:
    test_row_operators.test_gradients_are_the_slopes_of_the_expression("SquaredSoftmax", 1)


@test_formulas.needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("squared_softmax_of_the_page")
def test_cuda_computes_the_row_operator() -> None:
    test_row_operators.test_cuda_computes_the_expression_and_its_gradient("SquaredSoftmax")
