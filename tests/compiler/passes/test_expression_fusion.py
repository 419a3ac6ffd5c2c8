"""expression-fusion: regions of element-wise operators, as expressions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.compiler.passes.expression_fusion import PASS
from dagexec.core.expressions import (
    PRIMITIVES,
    Expression,
    absolute,
    apply,
    as_lines,
    element,
    evaluated,
    exp,
    from_lines,
    inputs_of,
    logistic,
    maximum,
    select,
    tanh,
)
from dagexec.errors import DagexecError
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import run_operator

MATRIX = {"x": (3, 40)}
GATES = [
    op("Sigmoid", ["x"], ["s"]), op("Tanh", ["x"], ["t"]), op("Mul", ["s", "t"], ["a"]),
    op("Softsign", ["x"], ["c"]), op("Add", ["a", "c"], ["y"]),
]  # fmt: skip


@needs_onednn
def test_branches_that_meet_are_one_expression() -> None:
    model = model_of(GATES, inputs=MATRIX)
    assert rewritten(PASS, model) == ["FusedExpression x -> y"]


@needs_onednn
def test_numbers_are_part_of_it_and_rows_are_operands() -> None:
    operators = [op("Mul", ["x", "n"], ["a"]), op("Add", ["x", "row"], ["c"]), op("Div", ["a", "c"], ["y"])]
    model = model_of(operators, inputs=MATRIX, n=np.array(0.5, np.float32), row=np.abs(normal(40)) + 9)
    assert rewritten(PASS, model) == ["FusedExpression x row -> y"]
    [fused] = PASS.apply(model).model.net.op
    [nodes] = [argument.strings for argument in fused.arg if argument.name == "nodes"]
    assert b"multiply x0 0.5" in nodes


@needs_onednn
def test_what_somebody_else_reads_is_not_taken_in() -> None:
    operators = [*GATES, op("Softmax", ["a"], ["z"], axis=0, single_axis=1)]
    model = model_of(operators, outputs=["y", "z"], inputs=MATRIX)
    assert rewritten(PASS, model) == ["FusedExpression x -> a", "FusedExpression a x -> y", "Softmax a -> z"]


@pytest.mark.parametrize("what", ["an output", "float64", "another shape", "an image with channels"])
def test_it_leaves_alone(what: str) -> None:
    gate = [op("Tanh", ["x"], ["t"]), op("Mul", ["x", "t"], ["y"])]
    if what == "an output":
        assert unchanged(PASS, model_of(gate, outputs=["t", "y"], inputs=MATRIX))
    elif what == "float64":
        assert unchanged(PASS, model_of([op("Cast", ["x"], ["w"], to="double"), op("Tanh", ["w"], ["t"]),
                                         op("Mul", ["w", "t"], ["y"])], inputs=MATRIX))  # fmt: skip
    elif what == "another shape":
        row = [op("Tanh", ["r"], ["t"]), op("Mul", ["x", "t"], ["y"])]
        assert unchanged(PASS, model_of(row, inputs={"x": (3, 40), "r": (40,)}))
    else:
        channels = [op("Tanh", ["x"], ["t"]), op("Mul", ["x", "k"], ["a"]), op("Add", ["a", "t"], ["y"])]
        assert unchanged(PASS, model_of(channels, k=normal(4, 1, 1)))


UNARY = [tanh, exp, logistic, absolute, lambda x: maximum(x, 0), lambda x: -x, lambda x: x * 0.25 + 1]
BINARY = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / (absolute(b) + 1),
    lambda a, b: select(a < b, a, b * 0.5), maximum,
]  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """A graph of a few primitives of up to three inputs, some of which are shared."""
    nodes = [element(0), element(1), element(2)]
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            nodes.append(draw(st.sampled_from(UNARY))(draw(st.sampled_from(nodes))))
        else:
            nodes.append(draw(st.sampled_from(BINARY))(draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))))
    return nodes[-1]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(expression=expressions(), rows=st.integers(1, 3), data=st.data())
def test_random_expressions_are_computed_by_all_engines(expression: Expression, rows: int, data: st.DataObject) -> None:
    positions = inputs_of(expression)
    if not positions or not expression.operands:
        return
    renamed = from_lines(as_lines(expression))
    assert renamed is expression
    if positions != list(range(len(positions))):
        return
    shapes = [(rows, 37), *(data.draw(st.sampled_from([(rows, 37), (37,), (rows, 1)])) for _ in positions[1:])]
    arrays = [np.random.default_rng(seed).normal(0, 1, shape) for seed, shape in enumerate(shapes)]
    [wanted] = evaluated([expression], arrays)
    wanted = np.broadcast_to(wanted, (rows, 37))
    for engine in ("", "ONEDNN"):
        for dtype, tolerance in ((np.float32, 2e-5), (np.float64, 1e-12)):
            inputs = [array.astype(dtype) for array in arrays]
            [found] = run_operator("FusedExpression", inputs, engine=engine, nodes=as_lines(expression))
            scale = np.maximum(1, np.abs(wanted))
            assert np.nanmax(np.abs(found - wanted) / scale) < tolerance or not np.isfinite(wanted).all()


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (["twist x0"], "no primitive"),
        (["add x0"], "expected 2"),
        (["add x0 %0"], "no line before"),
        (["add x0 ten"], "could not convert"),
        (["row_sum x0"], "which FusedRows does"),
        (["exp x1"], "reads inputs"),
        (["exp x0"] * 200, "at most"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(nodes: list[str], reason: str) -> None:
    with pytest.raises(DagexecError, match=reason):
        run_operator("FusedExpression", [np.ones(3, np.float32)], nodes=nodes)


def test_each_primitive_can_be_written() -> None:
    for kind, primitive in PRIMITIVES.items():
        expression = apply(kind, *map(element, range(primitive.arity)))
        assert from_lines(as_lines(expression)) is expression


@needs_onednn
def test_a_tensor_that_is_read_twice_at_each_step_is_composed_once() -> None:
    names = ["x", *(f"b{number}" for number in range(39)), "y"]
    operators = [op("Add", [x, x], [y]) for x, y in pairwise(names)]
    assert rewritten(PASS, model_of(operators, inputs=MATRIX)) == ["FusedExpression x -> y"]


@pytest.mark.slow
@needs_onednn
def test_a_chain_of_any_length_becomes_regions_that_kernels_hold() -> None:
    names = ["x", *(f"b{number}" for number in range(1999)), "y"]
    operators = [op("Softsign", [x], [y]) for x, y in pairwise(names)]
    model = PASS.apply(model_of(operators, inputs=MATRIX)).model
    assert {one.type for one in model.net.op} <= {"FusedExpression", "Softsign"}
    assert len(model.net.op) < 200
