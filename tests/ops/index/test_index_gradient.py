"""The gradients of operators that pick by index: sparse and dense, with indices that repeat."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.gradient import SparseGradient, gradient
from dagexec.errors import OperatorError, ShapeError
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]


def normal(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape)


def test_the_gradient_of_gather_is_a_vector_of_indices_and_a_row_for_each() -> None:
    made = gradient(operator_def("Gather", ["w", "ids"], ["y"]), ["y_grad"])
    assert made.inputs == (SparseGradient("w_grad_indices", "w_grad_values"), None)
    indices, dy = np.array([[2, 0], [2, 1]]), normal(2, 2, 4)
    found = analytic_gradients(operator_def("Gather", ["x0", "x1"], ["y0"]), [np.zeros((3, 4)), indices], {0: dy}, [0])
    np.testing.assert_allclose(found[0], [dy[0, 1], dy[1, 1], dy[0, 0] + dy[1, 0]])


def test_repeated_indices_add_up_and_the_order_is_fixed() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 7, 500)
    values = rng.standard_normal((500, 3)).astype(np.float32)
    first, again = (run_operator("SparseToDense", [indices, values, np.ones((9, 1))])[0] for _ in range(2))
    assert first.tobytes() == again.tobytes()
    expected = np.stack([values[indices == row].astype(np.float64).sum(0) for row in range(9)])
    np.testing.assert_allclose(first, expected, 1e-5, 1e-5)
    assert not first[7:].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_repeated_indices_of_16_bits_are_summed_in_float32(dtype: Any) -> None:
    values = np.ones((3000, 2), dtype)
    found = run_operator("SparseToDense", [np.zeros(3000, np.int32), values, np.ones(2)])[0]
    np.testing.assert_array_equal(found, np.array([[3000, 3000], [0, 0]], dtype))
    found = run_operator("GatherGradient", [np.ones((2, 2), dtype), np.ones(3000, np.int64), values])[0]
    np.testing.assert_array_equal(found, np.array([[0, 0], [3000, 3000]], dtype))


def test_index_rows_fold_the_axes_of_the_indices() -> None:
    check_gradient("IndexRows", [normal(2, 3, 4), np.zeros((2, 3), np.int64)])
    (found,) = run_operator("IndexRows", [normal(5), np.zeros((), np.int64)])
    np.testing.assert_array_equal(found, normal(5)[None])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_tensors_without_elements_have_gradients(shape: tuple[int, int]) -> None:
    indices = np.array([], np.int64)
    for arguments in ({}, {"dense_gradient": 1}, {"wrap_indices": 1}):
        definition = operator_def("Gather", ["x0", "x1"], ["y0"], **arguments)
        found = analytic_gradients(definition, [np.ones(shape), indices], {0: np.ones((0, shape[1]))}, [0])
        np.testing.assert_array_equal(found[0], np.zeros(shape))


def test_of_equal_elements_the_one_that_was_picked_gets_the_gradient() -> None:
    definition = operator_def("TopK", ["x0"], ["y0", "y1"], k=2)
    found = analytic_gradients(definition, [np.array([1.0, 3.0, 3.0, 3.0])], {0: np.array([5.0, 7.0])}, [0])
    assert found[0].tolist() == [0, 5, 7, 0]


def test_indices_have_no_gradient() -> None:
    assert gradient(operator_def("OneHot", ["x", "n"], ["y"]), ["g"]).inputs == (None, None)
    assert gradient(operator_def("Gather", ["x", "i"], ["y"]), ["g"], wanted=[1]).inputs == (None, None)
    assert gradient(operator_def("TopK", ["x"], ["v", "i"]), [None, "g"]).inputs == (None,)


def test_integers_are_added_up_by_index_too() -> None:
    values = np.array([[1], [2], [2**62]])
    [y] = run_operator("SparseToDense", [np.array([1, 1, 0]), values, np.zeros(3)])
    np.testing.assert_array_equal(y, np.array([[2**62], [3], [0]]), strict=True)


@pytest.mark.parametrize("axis", [1, 2])
def test_with_match_outer_each_place_has_the_gradients_of_its_own_picks(axis: int) -> None:
    data, indices = np.ones((2, 3, 4, 2)), np.random.default_rng(0).integers(0, 3, size=(2, 3, 2)[: axis + 1])
    check_gradient("Gather", [data, indices], wanted=[0], axis=axis, match_outer=1)
    dy = np.random.default_rng(1).standard_normal((*indices.shape, *data.shape[axis + 1 :])).astype(np.float32)
    arguments = {"axis": axis, "match_outer": 1}
    of_gather, of_batch = (
        run_operator(f"{name}GatherGradient", [data.astype(np.float32), indices, dy], **arguments)[0]
        for name in ("", "Batch")
    )
    np.testing.assert_array_equal(of_gather, of_batch)


def test_bad_indices_are_refused_before_anything_is_written() -> None:
    with pytest.raises(OperatorError, match=r"index 3 at place 1 must be in \[0, 3\)"):
        run_operator("SparseToDense", [np.array([0, 3]), np.ones((2, 1)), np.ones(3)])
    with pytest.raises(OperatorError, match=r"index -4 at place 0 must be in \[-3, 3\)"):
        run_operator("GatherGradient", [np.ones((3, 1)), np.array([-4]), np.ones((1, 1))], wrap_indices=1)
    with pytest.raises(OperatorError, match=r"index 2 at place 0 must be in \[0, 2\)"):
        run_operator("TopKGradient", [np.ones(1), np.array([2]), np.ones(2)])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"a row for each of 2 indices, found shape \(3, 1\)"):
        run_operator("SparseToDense", [np.array([0, 1]), np.ones((3, 1)), np.ones(3)])
    with pytest.raises(ShapeError, match=r"must have shape \(2, 4\).*found \(2, 5\)"):
        run_operator("GatherGradient", [np.ones((3, 4)), np.array([0, 1]), np.ones((2, 5))])
    with pytest.raises(ShapeError, match=r"dValues must have X's shape \(2, 3\) with 0 to 3 on axis 1"):
        run_operator("TopKGradient", [np.ones((2, 4)), np.zeros((2, 4), np.int64), np.ones((2, 3))])
    with pytest.raises(ShapeError, match=r"begin with the axes \(3,\) of the indices"):
        run_operator("IndexRows", [np.ones((2, 4)), np.zeros(3, np.int64)])
