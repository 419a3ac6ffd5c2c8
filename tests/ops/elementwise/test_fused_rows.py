"""FusedRows: expressions of rows and of inputs that are stretched to them, by all engines, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.expressions import (
    Expression,
    absolute,
    as_lines,
    element,
    evaluated,
    exp,
    from_lines,
    inputs_of,
    maximum,
    row_max,
    row_mean,
    row_min,
    row_sum,
    sqrt,
    square,
    tanh,
)
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.kernels.row_expressions import row_step
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import Array, operator_def, run_operator

ENGINES = ["", pytest.param("ONEDNN", marks=needs_onednn)]
X, A, B = element(0), element(1), element(2)


def softmax(x: Expression) -> Expression:
    powers = exp(x - row_max(x))
    return powers / row_sum(powers)


def standardized(x: Expression) -> Expression:
    below = x - row_mean(x)
    return below / sqrt(row_mean(square(below)) + 1e-3)


LAYER = maximum(standardized(X) * A + B, 0)
MASKED = softmax(X * 0.25 + A)
ROOT_MEAN_SQUARE = X / sqrt(row_mean(square(X)) + 1e-3) * A


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def computed(expression: Expression, arrays: Sequence[Array], engine: str) -> Array:
    [y] = run_operator("FusedRows", list(arrays), engine=engine, nodes=as_lines(expression))
    return y


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("members", [1, 7, 8, 129, 2100])
@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        (LAYER, [(2, 3, -1), (-1,), (-1,)]),
        (LAYER, [(2, 3, -1), (2, 3, 1), (3, 1)]),
        (ROOT_MEAN_SQUARE, [(5, -1), (1, 1)]),
        (ROOT_MEAN_SQUARE, [(-1,), (-1,)]),
        (MASKED, [(2, 3, 4, -1), (2, 1, 1, -1)]),
        (MASKED, [(2, 3, 4, -1), (1, 1, 4, -1)]),
        (MASKED, [(2, 3, 4, -1), (2, 1, 4, -1)]),
        (MASKED, [(4, -1), (2, 3, 4, 1)]),
        (X * row_sum(A) + row_max(B), [(3, -1), (-1,), (3, 1)]),
    ],
)
def test_inputs_are_stretched(expression: Expression, shapes: list[tuple[int, ...]], members: int, engine: str) -> None:
    sizes = [tuple(members if size < 0 else size for size in shape) for shape in shapes]
    arrays = [numbers(*shape, seed=seed) for seed, shape in enumerate(sizes)]
    [wanted] = evaluated([expression], [array.astype(np.float64) for array in arrays])
    y = computed(expression, arrays, engine)
    assert y.shape == np.broadcast_shapes(*sizes)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * max(1, np.abs(wanted).max()))


@needs_onednn
def test_a_kernel_computes_them() -> None:
    found = library()
    assert found is not None
    arrays = [numbers(2, 3, 4, 50), numbers(2, 1, 4, 50), numbers(50), numbers(2, 3, 4, 1)]
    expression = softmax(X + A) * B + element(3, of_row=True)
    y = np.empty((2, 3, 4, 50), np.float32)
    step = row_step(found.machine, (expression,), arrays, [y], 50, "rows")
    assert step is not None
    step()
    np.testing.assert_allclose(y, evaluated([expression], arrays)[0], rtol=1e-5, atol=1e-6)


UNARY = [tanh, exp, absolute, lambda x: x * 0.25 + 1, row_mean, row_max, row_min, row_sum, softmax]
BINARY = [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / (absolute(b) + 1), maximum]


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """A graph of a few primitives of up to three inputs, some of which join members."""
    nodes = [X, A, B]
    for _ in range(draw(st.integers(1, 7))):
        node = draw(st.sampled_from(nodes))
        if draw(st.booleans()):
            nodes.append(draw(st.sampled_from(UNARY))(tanh(node)))
        else:
            nodes.append(draw(st.sampled_from(BINARY))(node, draw(st.sampled_from(nodes))))
    return nodes[-1]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(expression=expressions(), rows=st.integers(1, 3), data=st.data())
def test_random_expressions_are_computed_by_all_engines(expression: Expression, rows: int, data: st.DataObject) -> None:
    assert from_lines(as_lines(expression)) is expression
    positions = inputs_of(expression)
    if positions != list(range(len(positions))):
        return
    shapes = [(rows, 37), *(data.draw(st.sampled_from([(rows, 37), (37,), (rows, 1)])) for _ in positions[1:])]
    arrays = [np.random.default_rng(seed).normal(0, 1, shape) for seed, shape in enumerate(shapes)]
    [wanted] = evaluated([expression], arrays)
    scale = np.maximum(np.abs(wanted).max(), 1)
    for engine in ("", "ONEDNN"):
        for dtype, tolerance in ((np.float32, 1e-4), (np.float64, 1e-11)):
            y = computed(expression, [array.astype(dtype) for array in arrays], engine)
            np.testing.assert_allclose(y, np.broadcast_to(wanted, y.shape), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_is_of_its_row_alone(engine: str) -> None:
    for expression in (LAYER, MASKED):
        for place in (0, 7, 40):
            arrays = [numbers(5, 41), numbers(41), numbers(41)][: 1 + len(inputs_of(expression)[1:])]
            arrays[0][2, place] = np.nan
            y = computed(expression, arrays, engine)
            np.testing.assert_array_equal(np.isnan(y).all(axis=1), np.arange(5) == 2)
            assert not np.isnan(np.delete(y, 2, axis=0)).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_minus_infinity_in_a_mask_takes_a_member_away(engine: str) -> None:
    mask = np.where(np.arange(40) < 30, 0, -np.inf).astype(np.float32)
    y = computed(MASKED, [numbers(3, 40), mask], engine)
    assert not y[:, 30:].any()
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "expression",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (LAYER, MASKED)), X - row_sum(A) * row_mean(B)],
)
def test_a_rows_bytes_do_not_depend_on_the_batch(expression: Expression, engine: str) -> None:
    arrays = [numbers(300, 4, 233), numbers(4, 233), numbers(233)][: len(inputs_of(expression))]
    y = computed(expression, arrays, engine)
    for rows in (slice(0, 1), slice(3, 8), slice(100, 250)):
        assert computed(expression, [arrays[0][rows], *arrays[1:]], engine).tobytes() == y[rows].tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_result_may_be_written_over_an_input(engine: str) -> None:
    workspace, nodes = Workspace(), as_lines(ROOT_MEAN_SQUARE)
    definition = operator_def("FusedRows", ["x", "a"], ["x"], nodes=nodes)
    definition.engine = engine
    arrays = {"x": numbers(6, 50), "a": numbers(50)}
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    workspace.run_operator_once(definition)
    wanted = computed(ROOT_MEAN_SQUARE, list(arrays.values()), engine)
    assert workspace.fetch_blob("x").tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("nodes", "arrays"), [(["row_sum x0"], [np.float32(1)]), (["row_sum x1"], [numbers(3)])])
def test_what_makes_no_sense_is_refused(nodes: list[str], arrays: list[Array]) -> None:
    with pytest.raises(DagexecError, match=r"rows have an axis|reads inputs"):
        run_operator("FusedRows", arrays, nodes=nodes)
