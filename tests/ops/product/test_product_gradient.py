"""The gradients of matrix products: against central differences, and formulas by einsum in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, ShapeError
from tests.ops.gradient_checks import check_gradient
from tests.ops.onednn.engine import ENGINES
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]

sizes = st.integers(1, 4)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, st.booleans())
def test_fully_connected_gradients_equal_differences(rows: int, inner: int, units: int, transposed: bool) -> None:
    weights = normal(inner, units) if transposed else normal(units, inner)
    check_gradient("FCTransposed" if transposed else "FC", [normal(rows, inner), weights, normal(units)])


@pytest.mark.parametrize(
    ("x", "w", "arguments"),
    [
        ((2, 3, 4), (5, 12), {}),
        ((2, 3, 4), (5, 4), {"axis": 2}),
        ((2, 3, 4), (5, 4), {"axis": -1}),
        ((2, 6), (2, 2, 6), {"axis_w": 2}),
        ((2, 6), (2, 2, 6), {"axis_w": -1}),
        ((6,), (3, 6), {"axis": 0}),
    ],
)
def test_layers_fold_x_at_axis_and_w_at_axis_w(
    x: tuple[int, ...], w: tuple[int, ...], arguments: dict[str, int]
) -> None:
    units = int(np.prod(w[: arguments.get("axis_w", 1)]))
    check_gradient("FC", [normal(*x), normal(*w), normal(units)], **arguments)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("op_type", ["FC", "FCTransposed"])
@pytest.mark.parametrize("rows", [3, 70])
def test_layer_gradients_in_every_type_are_near_einsum(op_type: str, dtype: Any, rows: int, engine: str) -> None:
    turned = op_type == "FCTransposed"
    x, w, dy = (normal(*shape).astype(dtype) for shape in ((rows, 40), (40, 24) if turned else (24, 40), (rows, 24)))
    found = run_operator(f"{op_type}Gradient", [x, w, dy], 3, engine=engine)
    x, w, dy = (array.astype(np.float64) for array in (x, w, dy))
    dw = np.einsum("rk,rn->kn" if turned else "rk,rn->nk", x, dy)
    dx = np.einsum("rn,kn->rk" if turned else "rn,nk->rk", dy, w)
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    for result, expected in zip(found, (dw, np.einsum("rn->n", dy), dx), strict=True):
        assert result.dtype == dtype
        np.testing.assert_allclose(result.astype(np.float64), expected, tolerance, tolerance * np.abs(expected).max())


def test_a_layer_computes_only_the_gradients_that_are_wanted() -> None:
    definition = operator_def("FC", ["x", "w", "b"], ["y"])
    outputs = {
        (0, 1, 2): (["w_grad", "b_grad", "x_grad"], None),
        (1, 2): (["w_grad", "b_grad"], None),
        (0,): (["x_grad"], [b"input"]),
        (1,): (["w_grad"], [b"weights"]),
        (0, 1): (["w_grad", "x_grad"], [b"weights", b"input"]),
    }
    for wanted, (names, argument) in outputs.items():
        (made,) = gradient(definition, ["y_grad"], wanted=wanted).operators
        assert (made.type, list(made.input), list(made.output)) == ("FCGradient", ["x", "w", "y_grad"], names)
        assert [list(arg.strings) for arg in made.arg if arg.name == "wanted"] == (
            [] if argument is None else [argument]
        )
        found = check_gradient("FC", [normal(2, 3), normal(4, 3), normal(4)], wanted=wanted)
        assert sorted(found) == list(wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_without_rows_units_or_columns_have_gradients_of_zeros(engine: str) -> None:
    for rows, inner, units in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        inputs = [np.ones((rows, inner), np.float32), np.ones((units, inner), np.float32)]
        found = run_operator("FCGradient", [*inputs, np.ones((rows, units), np.float32)], 3, engine=engine)
        assert [array.shape for array in found] == [(units, inner), (units,), (rows, inner)]
        assert not found[0].any()
        assert not found[2].any()
        assert (found[1] == rows).all()


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("like", [(), (6,), (1, 3, 2)])
def test_matmul_gradients_equal_differences(trans_a: int, trans_b: int, like: tuple[int, ...]) -> None:
    a = normal(2, 2, 3) if trans_a else normal(3, 4)
    b = normal(2, 2, 2) if trans_b else normal(4, 2)
    folds = {"axis_a": 2} if trans_a else {}
    a = a if trans_a else a.reshape(3, 2, 2)
    extra = [np.zeros(like, np.float32)] if like else []
    check_gradient("MatMul", [a, b, *extra], trans_a=trans_a, trans_b=trans_b, **folds)


def test_matmul_gradients_of_one_blob_twice_have_names_of_their_own() -> None:
    made = gradient(operator_def("MatMul", ["x", "x"], ["y"]), ["y_grad"])
    assert made.inputs == ("x_grad", "_x_grad_input_1")
    assert [operator.type for operator in made.operators] == ["MatMul", "MatMul"]


@settings(max_examples=15, deadline=None)
@given(st.lists(sizes, max_size=2), sizes, sizes, sizes, st.booleans(), st.booleans())
def test_batch_matmul_gradients_equal_differences(
    batch: list[int], rows: int, inner: int, columns: int, trans_a: bool, trans_b: bool
) -> None:
    a = normal(*batch, inner, rows) if trans_a else normal(*batch, rows, inner)
    b = normal(*batch, columns, inner) if trans_b else normal(*batch, inner, columns)
    check_gradient("BatchMatMul", [a, b], trans_a=int(trans_a), trans_b=int(trans_b))


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((2, 3), ()), ((), (2, 3)), ((2, 1), (3,)), ((3,), (2, 3)), ((1,), (2,)), ((2,), (2,))]
)
def test_the_gradient_of_a_stretched_stack_is_a_sum(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], trans_a: int, trans_b: int
) -> None:
    a = normal(*batch_a, *((3, 2) if trans_a else (2, 3)))
    b = normal(*batch_b, *((4, 3) if trans_b else (3, 4)))
    check_gradient("BatchMatMul", [a, b], broadcast=1, trans_a=trans_a, trans_b=trans_b)


@pytest.mark.parametrize(
    ("a", "b"), [((3,), (3,)), ((3,), (3, 2)), ((3,), (2, 3, 2)), ((2, 3), (3,)), ((2, 4, 3), (3,))]
)
def test_vectors_in_batch_matmul_have_gradients(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check_gradient("BatchMatMul", [normal(*a), normal(*b)], broadcast=1)
    check_gradient("BatchMatMul", [normal(*a), normal(*b)], broadcast=1, wanted=[1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_stretched_gradients_of_16_bits_are_summed_in_float32(dtype: Any) -> None:
    a, b, dy = (normal(*shape).astype(dtype) for shape in ((50, 2, 3), (3, 4), (50, 2, 4)))
    da, db = run_operator("BatchMatMulGradient", [a, b, dy], 2, broadcast=1)
    a, b, dy = (array.astype(np.float64) for array in (a, b, dy))
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    for found, expected in ((da, np.einsum("brn,kn->brk", dy, b)), (db, np.einsum("brk,brn->kn", a, dy))):
        np.testing.assert_allclose(found.astype(np.float64), expected, tolerance, tolerance * np.abs(expected).max())


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [(), (2,), (3, 1), (1, 2), (3, 2)])
def test_gemm_gradients_equal_differences(trans_a: int, trans_b: int, c: tuple[int, ...]) -> None:
    a, b = normal(*((4, 3) if trans_a else (3, 4))), normal(*((2, 4) if trans_b else (4, 2)))
    check_gradient("Gemm", [a, b, normal(*c)], alpha=0.5, beta=1.5, trans_a=trans_a, trans_b=trans_b)
    check_gradient("Gemm", [a, b], alpha=0.5, trans_a=trans_a, trans_b=trans_b)


def test_a_c_that_gemm_does_not_read_has_no_gradient() -> None:
    made = gradient(operator_def("Gemm", ["a", "b", "c"], ["y"], beta=0.0), ["y_grad"])
    assert made.inputs == ("a_grad", "b_grad", None)


def test_errors_of_product_gradients_say_what_was_expected() -> None:
    x, w, dy = np.ones((2, 3)), np.ones((4, 3)), np.ones((2, 4))
    with pytest.raises(ShapeError, match=r"must have shape \(2, 4\).*found \(2, 5\)"):
        run_operator("FCGradient", [x, w, np.ones((2, 5))], 3)
    with pytest.raises(ShapeError, match="needs a W of 3 columns, found 4 x 5"):
        run_operator("FCGradient", [x, np.ones((4, 5)), dy], 3)
    with pytest.raises(ShapeError, match="share one element type"):
        run_operator("FCGradient", [x, w, dy.astype(np.float32)], 3)
    with pytest.raises(ArgumentError, match="weights, bias, input; found 'filter'"):
        run_operator("FCGradient", [x, w, dy], 1, wanted=["filter"])
    with pytest.raises(ArgumentError, match="found 1 output"):
        run_operator("FCGradient", [x, w, dy], 1)
    with pytest.raises(ShapeError, match="8 elements of the product"):
        run_operator("MatMulGradient", [x, w, np.ones((2, 5))], 2, trans_b=1)
    with pytest.raises(ShapeError, match=r"dY: the shape of the product"):
        run_operator("BatchMatMulGradient", [x, w, np.ones((2, 5))], 2, trans_b=1)
    with pytest.raises(ArgumentError, match="must only contain A, B; found 'C'"):
        run_operator("BatchMatMulGradient", [x, w, dy], 1, trans_b=1, wanted=["C"])
