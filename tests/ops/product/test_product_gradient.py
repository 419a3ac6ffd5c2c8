"""The gradients of matrix products: against central differences, and formulas by einsum in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, ShapeError
from tests.ops.gradient_checks import check_gradient
from tests.ops.onednn.engine import ENGINES
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape)


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


def test_matmul_gradients_of_one_blob_twice_have_names_of_their_own() -> None:
    made = gradient(operator_def("MatMul", ["x", "x"], ["y"]), ["y_grad"])
    assert made.inputs == ("x_grad", "_x_grad_input_1")
    assert [operator.type for operator in made.operators] == ["MatMul", "MatMul"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_stretched_gradients_of_16_bits_are_summed_in_float32(dtype: Any) -> None:
    a, b, dy = (normal(*shape).astype(dtype) for shape in ((50, 2, 3), (3, 4), (50, 2, 4)))
    da, db = run_operator("BatchMatMulGradient", [a, b, dy], 2, broadcast=1)
    a, b, dy = (array.astype(np.float64) for array in (a, b, dy))
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    for found, expected in ((da, np.einsum("brn,kn->brk", dy, b)), (db, np.einsum("brk,brn->kn", a, dy))):
        np.testing.assert_allclose(found.astype(np.float64), expected, tolerance, tolerance * np.abs(expected).max())


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
