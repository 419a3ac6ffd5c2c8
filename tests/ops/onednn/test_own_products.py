"""Products without oneDNN, by kernels of our own: of what a run brings, in stacks, with factors and sums."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, op
from dagexec.ops.engines.onednn import matrix_product
from dagexec.ops.engines.onednn.binding import own_kernels
from dagexec.ops.engines.onednn.matrix_product import matrix_step
from dagexec.scheduler.nets.simple import SimpleNet
from tests.guarded import Guards
from tests.ops.onednn.engine import fallbacks, normal
from tests.ops.running import Array, computed, run_operator, workspace_of

pytestmark = pytest.mark.skipif(own_kernels() is None, reason="no kernels run here")

SIZES = [
    (1, 1, 1),
    (1, 5, 7),
    (5, 3, 9),
    (7, 13, 31),
    (13, 17, 1),
    (3, 8, 49),
    (1, 64, 130),
    (11, 128, 5),
    (33, 9, 24),
    (40, 31, 25),
    (70, 1024, 30),
]
"""Rows, elements that are summed up, columns."""

STACKS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ()), ((2, 1), (1, 3)), ((), (2,)), ((4,), ())]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN is as if it were absent, and NumPy does nothing behind a product."""
    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.known_library", own_kernels)
    monkeypatch.delattr("dagexec.ops.engines.onednn.finishing.post_op_passes")


def alike(op_type: str, inputs: list[Array], constant: str = "", **arguments: Any) -> Array:
    """What kernels compute of an operator, in one piece and in three, which are to have the same bytes."""
    arrays = {f"{place}": array for place, array in enumerate(inputs)}
    with fallbacks() as reasons:
        found, cut = (computed(op_type, arrays, ["y"], constant, pieces=pieces, **arguments)[0] for pieces in (1, 3))
    assert not reasons
    assert found.tobytes() == cut.tobytes()
    return found


def require_close(found: Array, expected: Array, inner: int) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7 * inner**0.5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_stacks_of_matrices_are_multiplied(
    sizes: tuple[int, int, int], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_packed:
        monkeypatch.setattr(matrix_product, "_PACKED_ROWS", 1)
        monkeypatch.setattr(matrix_product, "_PACKED_BYTES", 1)
    rows, inner, columns = sizes
    for (of_a, of_b), *turned in product(STACKS, (0, 1), (0, 1)):
        a, b = normal(1, *of_a, rows, inner), normal(2, *of_b, inner, columns)
        inputs = [np.ascontiguousarray(x.swapaxes(-1, -2)) if t else x for x, t in zip((a, b), turned, strict=True)]
        found = alike("BatchMatMul", inputs, broadcast=1, trans_a=turned[0], trans_b=turned[1])
        require_close(found, a.astype(np.float64) @ b.astype(np.float64), inner)


def test_a_stack_of_more_matrices_than_kernels_copy_is_multiplied() -> None:
    a, b = normal(1, 5000, 2, 9), normal(2, 5000, 11, 9)
    require_close(alike("BatchMatMul", [a, b], trans_b=1), np.einsum("sij,skj->sik", a, b, dtype=np.float64), 9)


@pytest.mark.parametrize("behind", [False, True])
def test_nothing_beside_operands_is_touched(behind: bool) -> None:
    guards = Guards(behind)
    owner = _operator(guards)
    for (rows, inner, columns), *turned in product(SIZES, (0, 1), (0, 1)):
        a, b = normal(1, rows, inner), normal(2, inner, columns)
        x, w = (guards.copy(one.T.copy()).T if t else guards.copy(one) for one, t in zip((a, b), turned, strict=True))
        y = guards.like(np.empty((rows, columns), np.float32))
        step = matrix_step(owner, x, w, y, has_examples=bool(turned[0]))
        assert step is not None
        step()
        require_close(y, a.astype(np.float64) @ b, inner)


def _operator(guards: Guards) -> Any:
    """What `matrix_step` asks of an operator."""
    return SimpleNamespace(onednn=own_kernels(), label="test", working_memory=guards.memory)


def test_a_vector_may_have_gaps() -> None:
    x, w, y = normal(1, 5, 33), normal(2, 33, 3)[:, 1:2], np.empty((5, 1), np.float32)
    step = matrix_step(_operator(Guards(behind=True)), x, w, y, has_examples=False)
    assert step is not None
    step()
    require_close(y, x.astype(np.float64) @ w, 33)


def test_vectors_are_multiplied() -> None:
    for a, b in (((9,), (9, 4)), ((9,), (3, 9, 20)), ((5, 19), (19,)), ((2, 5, 19), (19,))):
        x, y = normal(1, *a), normal(2, *b)
        require_close(alike("BatchMatMul", [x, y], broadcast=1), x.astype(np.float64) @ y.astype(np.float64), a[-1])


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize(("inner", "columns"), [(13, 31), (64, 40), (40, 1), (5, 3)])
@pytest.mark.parametrize("op_type", ["MatMul", "FC"])
def test_a_row_has_the_same_bytes_however_many_there_are(op_type: str, inner: int, columns: int, turned: int) -> None:
    x, w = normal(1, 37, inner), normal(2, *((columns, inner) if turned else (inner, columns)))
    kind = "FCTransposed" if op_type == "FC" and not turned else op_type
    others = [normal(3, columns)] if op_type == "FC" else []
    arguments = {"trans_b": turned} if op_type == "MatMul" else {}
    whole = alike(kind, [x, w, *others], **arguments)
    for count in (1, 2, 3, 11):
        assert alike(kind, [x[:count], w, *others], **arguments).tobytes() == whole[:count].tobytes()


@pytest.mark.parametrize("constant", ["", "1"])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0), (2.0, 0.0)])
def test_general_products_have_factors_and_a_sum(factors: tuple[float, float], constant: str) -> None:
    alpha, beta = factors
    for trans_a, shape in product((0, 1), [(), (21,), (7, 1), (7, 21)]):
        a, b, c = normal(1, *((13, 7) if trans_a else (7, 13))), normal(2, 21, 13), normal(3, *shape)
        arguments = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": 1}
        plain = (a.T if trans_a else a).astype(np.float64) @ b.T
        require_close(alike("Gemm", [a, b, c], constant, **arguments), alpha * plain + beta * c, 13)
        require_close(alike("Gemm", [a, b], constant, **arguments), alpha * plain, 13)


def test_a_layer_with_weights_of_a_run_has_functions_and_other_operands() -> None:
    inputs = [normal(1, 2, 9, 13), normal(2, 21, 13), normal(3, 21), normal(4, 2, 9, 21), normal(5, 21)]
    arguments = {"axis": 2, "post_ops": ["gelu_erf", "add:3", "mul:4", "elu:1.5"]}
    [expected] = run_operator("FusedFC", [one.astype(np.float64) for one in inputs], **arguments)
    require_close(alike("FusedFC", inputs, **arguments), expected, 13)


def test_gradients_of_layers_are_products() -> None:
    arrays = {"x": normal(1, 19, 13), "w": normal(2, 21, 13), "dy": normal(3, 19, 21)}
    x, w, dy = (one.astype(np.float64) for one in arrays.values())
    with fallbacks() as reasons, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagexec.ops.engines.onednn.matrix_pieces.np.matmul", None)
        found = computed("FCGradient", arrays, ["dw", "db", "dx"], pieces=3, batch_invariant=0)
    assert not reasons
    for one, expected in zip(found, (dy.T @ x, dy.sum(0), dy @ w), strict=True):
        require_close(one, expected, 21)


@pytest.mark.parametrize(("rows", "columns"), [(6, 30), (1, 30), (6, 1), (6, 5)])
def test_what_is_no_number_reaches_its_row_and_its_column_alone(rows: int, columns: int) -> None:
    a, b = normal(1, 2, rows, 11), normal(2, 2, columns, 11)
    a[0, -1, 3], b[1, 0, 10], b[0, 0, 2] = np.nan, np.inf, -np.inf
    found = alike("BatchMatMul", [a, b], trans_b=1)
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64).swapaxes(1, 2)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


def test_nothing_is_summed_up_where_there_is_nothing() -> None:
    assert not computed("BatchMatMul", {"a": normal(1, 2, 3, 0), "b": normal(1, 2, 0, 4)}, ["y"])[0].any()
    assert computed("BatchMatMul", {"a": normal(1, 0, 3, 2), "b": normal(1, 0, 2, 4)}, ["y"])[0].shape == (0, 3, 4)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", [(3, 5, 9), (3, 9, 31)]),
        ("bhid,bhjd->bhij", [(2, 3, 7, 12), (2, 3, 5, 12)]),
        ("bind,bjnd->bnij", [(2, 7, 3, 12), (2, 5, 3, 12)]),
        ("bi,bi->b", [(4, 33), (4, 33)]),
        ("ij,jk,kl->il", [(3, 9), (9, 11), (11, 10)]),
        ("iij,jk->ik", [(8, 8, 5), (5, 17)]),
        ("ki,kj,i->j", [(9, 20), (9, 1), (20,)]),
    ],
)
def test_equations_are_computed(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [normal(number, *shape) for number, shape in enumerate(shapes)]
    expected = np.einsum(equation, *(one.astype(np.float64) for one in inputs))
    require_close(alike("Einsum", inputs, equation=equation), np.asarray(expected), 33)


@pytest.mark.parametrize("equation", ["bj,jk->bk", "kj,bj->kb", "kj,jb->bk", "cbj,cjk->bck", "j,bj->b", "cj,cbj->bc"])
def test_an_example_of_an_equation_has_the_same_bytes_in_any_batch(equation: str) -> None:
    sizes = {"b": 6, "c": 2, "j": 40, "k": 9}
    terms, _, output = equation.partition("->")
    inputs = [normal(number, *(sizes[name] for name in term)) for number, term in enumerate(terms.split(","))]
    whole = np.moveaxis(alike("Einsum", inputs, equation=equation), output.index("b"), 0)
    for count in (1, 2, 5):
        part = [
            np.ascontiguousarray(one.take(range(count), term.index("b"))) if "b" in term else one
            for one, term in zip(inputs, terms.split(","), strict=True)
        ]
        found = np.moveaxis(alike("Einsum", part, equation=equation), output.index("b"), 0)
        assert found.tobytes() == whole[:count].tobytes()


@pytest.mark.parametrize("zeros", ["", "of A", "of both", "of columns"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 700, 6), (5, 70, 33), (2, 3, 1)])
def test_integers_are_multiplied_exactly(rows: int, inner: int, columns: int, zeros: str) -> None:
    random = np.random.default_rng(rows)
    a, b = random.integers(0, 256, (2, rows, inner), np.uint8), random.integers(-60, 60, (inner, columns), np.int8)
    of_a, of_b = np.uint8(203), random.integers(-9, 9, columns if zeros == "of columns" else (), np.int8)
    given = {"": [], "of A": [of_a]}.get(zeros, [of_a, of_b])
    found = alike("MatMulInteger", [a, b, *map(np.asarray, given)], "13" if len(given) > 1 else "1")
    wide, weights = (
        a.astype(np.int64) - int(bool(given)) * 203,
        b.astype(np.int64) - int(len(given) > 1) * of_b.astype(np.int64),
    )
    np.testing.assert_array_equal(found, wide @ weights)


@pytest.mark.parametrize("zero", [0, 203])
def test_layers_of_integers_have_the_bytes_of_the_default_engine(zero: int) -> None:
    random = np.random.default_rng(zero)
    x, w = random.integers(0, 256, (5, 600), np.uint8), random.integers(-100, 101, (37, 600), np.int8)
    bias = random.integers(-90000, 90000, 37).astype(np.int32)
    inputs = [x, w, random.uniform(0.001, 0.01, 37).astype(np.float32), bias]
    arguments = {"bias": 1, "x_scale": 0.02, "x_zero_point": zero, "y_scale": 9.0, "to": "int8", "post_ops": ["relu"]}
    [expected] = run_operator("QuantFC", inputs, **arguments)
    np.testing.assert_array_equal(alike("QuantFC", inputs, "1", **arguments), expected)


def test_weights_have_another_zero_point_in_every_operator() -> None:
    feeds = {"a": np.full((2, 9), 3, np.uint8), "b": np.ones((9, 5), np.int8), "none": np.uint8(0)}
    feeds |= {"two": np.int8(2), "four": np.int8(4)}
    workspace = workspace_of({name: np.asarray(array) for name, array in feeds.items()})
    for name in ("b", "two", "four"):
        workspace.get_blob(name).tensor().freeze()
    operators = [
        op("MatMulInteger", ["a", "b", "none", zero], [f"y {zero}"], engine="ONEDNN") for zero in ("two", "four")
    ]
    with fallbacks() as reasons, SimpleNet(NetDef(name="n", op=operators), workspace) as net:
        net.run()
    assert not reasons
    assert [workspace.fetch_blob(f"y {zero}")[0, 0] for zero in ("two", "four")] == [9 * 3 * -1, 9 * 3 * -3]


def test_sums_that_float32_might_round_are_left_to_numpy() -> None:
    a, b = np.full((1, 520), 255, np.uint8), np.full((520, 8), 127, np.int8)
    with fallbacks() as reasons:
        [found] = computed("MatMulInteger", {"a": a, "b": b}, ["y"], "b")
    assert reasons
    assert found.tolist() == [[520 * 255 * 127] * 8]
