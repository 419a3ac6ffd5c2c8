"""Sums over taps without a column buffer: every geometry bit by bit, on integers that float32 holds; and its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given

from dagexec.ops.families.conv import direct
from dagexec.ops.families.conv.direct import DIRECT
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.problems import Case, Memory, cases, epsilon, norm_bound, run_algorithm
from tests.ops.windows import Array, Geometry

SQUARE = Geometry((30, 41), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
SMALL = Geometry((7, 6), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
STRIDED = Geometry((31, 40), (5, 4), (2, 3), (1, 2), (2, 1, 0, 3))
CUBE = Geometry((6, 7, 9), (3, 2, 3), (1, 2, 1), (1, 1, 2), (1, 0, 2, 0, 1, 2))
LINE = Geometry((300,), (9,), (1,), (3,), (8, 20))
DOT = Geometry((1, 3), (1, 1), (1, 1), (1, 1), (1, 0, 2, 1))
FAR = Geometry((3, 2), (9, 7), (1, 2), (1, 1), (8, 7, 9, 6))
WIDE = [SQUARE, SMALL, STRIDED, CUBE, LINE, FAR, DOT]


def check(case: Case) -> None:
    """Compare with the loops in float64; all sums are exact."""
    y = run_algorithm(DIRECT, case.problem())
    expected = case.expected().astype(case.dtype)
    np.testing.assert_array_equal(y, expected, err_msg=f"reproduce with: check({case})")


@pytest.mark.slow
@given(cases())
@drawn(500)
def test_every_geometry_gives_the_sum_over_its_taps(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(cases())
@drawn(150)
def test_parts_of_any_size_give_the_same(case: Case) -> None:
    with patch.object(direct, "_BLOCK", 256):
        check(case)


@pytest.mark.slow
@given(cases())
@drawn(60)
def test_steps_made_in_every_run_give_the_same(case: Case) -> None:
    with patch.object(direct, "_MAX_PRODUCTS", 0):
        check(case)


def test_a_large_kernel_over_a_large_image_prepares_few_steps() -> None:
    geometry = Geometry((2048, 2048), (31, 31), (1, 1), (1, 1), (15, 15, 15, 15))
    problem = Case(geometry, 1, 1, 1, 1).problem()
    with patch.object(direct, "_BLOCK", 1 << 13):  # as many parts as 32 filters have
        assert len(DIRECT.steps(problem, Memory().allocate)) < 2 * direct._MAX_PRODUCTS


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "filters"), [(1, 8, 16), (2, 5, 3), (6, 1, 1), (3, 1, 4)])
@pytest.mark.parametrize("geometry", WIDE)
def test_rows_long_and_short_are_summed_in_either_order(
    geometry: Geometry, group: int, per_group: int, filters: int, order: str
) -> None:
    check(Case(geometry, 3, group, per_group, filters, order=order))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("per_group", [1, 3])
@pytest.mark.parametrize("geometry", [SMALL, STRIDED, LINE])
def test_float16_arithmetic_is_exact_where_integers_are(geometry: Geometry, per_group: int, order: str) -> None:
    check(Case(geometry, 2, 2, per_group, 2, order=order, dtype="float16", half=True))


def test_float16_arithmetic_rounds_every_sum() -> None:
    """2048 + 1 is 2048 in float16, however often 1 is added; float32 would give 2052."""
    line = Geometry((5,), (5,), (1,), (1,), (0, 0))
    problem = Case(line, per_group=1, filters_per_group=1, bias=False, dtype="float16", half=True).problem()
    x, weights = np.float16([[[2048, 1, 1, 1, 1]]]), np.ones((1, 1, 5), np.float16)
    assert run_algorithm(DIRECT, replace(problem, x=x, weights=weights)).item() == 2048
    wide = replace(problem, x=x, weights=weights, work=np.dtype(np.float32))
    assert run_algorithm(DIRECT, wide).item() == 2052


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_errors_on_normal_numbers_are_those_of_a_sum_of_so_many_products(dtype: str) -> None:
    """A sum of n products in any order is off by at most n u times the sum of their magnitudes (Higham 2002, 3.1)."""
    case = Case(SQUARE, 2, 2, 24, 8, dtype=dtype, normal=True)
    products = case.per_group * 9 + 1
    error = np.abs(run_algorithm(DIRECT, case.problem()) - case.expected()).max()
    assert 0 < error < products * epsilon(dtype) * (norm_bound(case) + 4)


def test_memory_does_not_grow_with_the_image() -> None:
    sizes = []
    for size in (64, 128, 256):
        geometry = replace(SQUARE, size=(size, size))
        memory = Memory()
        DIRECT.steps(Case(geometry, 2, 1, 8, 16).problem(), memory.allocate)
        sizes.append(memory.nbytes)
    assert max(sizes) <= 2 * direct._BLOCK + 16 * 8 * 9 * 4


def test_a_limit_below_the_filter_and_the_blocks_is_refused_with_the_numbers() -> None:
    problem = Case(SMALL, per_group=64, filters_per_group=64).problem()
    memory = Memory()
    DIRECT.steps(problem, memory.allocate)
    assert DIRECT.refusal(replace(problem, limit=memory.nbytes)) == ""
    refusal = DIRECT.refusal(replace(problem, limit=memory.nbytes - 1))
    assert f"take {memory.nbytes} bytes, more than the limit of {memory.nbytes - 1}" in refusal


def test_a_constant_filter_is_arranged_once() -> None:
    problem = Case(SQUARE, constant=True).problem()
    assert problem.constant is not None
    first = run_algorithm(DIRECT, problem)
    with patch.object(np, "ascontiguousarray", side_effect=AssertionError("arranged again")):
        second = run_algorithm(DIRECT, problem)
    np.testing.assert_array_equal(first, second)


def is_blas_matrix(array: Array) -> bool:
    """True when the BLAS takes a matrix as it lies: one axis without gaps, the other with steps of at least a row."""
    rows, columns = array.shape[-2:]
    down, right = (stride // array.itemsize for stride in array.strides[-2:])
    return (right == 1 and (rows == 1 or down >= columns)) or (down == 1 and (columns == 1 or right >= rows))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("geometry", WIDE)
def test_the_blas_gets_matrices_that_it_can_read(geometry: Geometry, dtype: str, order: str) -> None:
    """Others NumPy would multiply without it, an order of magnitude slower, and convert other types in every call."""
    problem = Case(geometry, 2, 2, 8, 4, order=order, dtype=dtype).problem()
    steps = DIRECT.steps(problem, Memory().allocate)
    products = [step for step in steps if isinstance(step, partial) and step.func is np.matmul]
    assert products
    for step in products:
        arrays = (*step.args, step.keywords["out"])
        assert all(is_blas_matrix(array) for array in arrays)
        assert {array.dtype for array in arrays} == {problem.work}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("geometry", [SQUARE, SMALL, STRIDED, CUBE])
def test_a_run_allocates_nothing(geometry: Geometry, dtype: str, order: str) -> None:
    scale = 30 if geometry.rank == 1 else 60 // geometry.size[-1]
    sizes = tuple(size * scale for size in geometry.size)
    case = Case(replace(geometry, size=sizes), 2, 2, 8, 64, order=order, dtype=dtype)
    problem = case.problem()
    steps = DIRECT.steps(problem, Memory().allocate)
    for step in steps:
        step()
    peak = min(peak_memory(*steps) for _ in range(3))  # threads that other tests left may take some meanwhile
    assert problem.y.nbytes * problem.work.itemsize // problem.y.itemsize > 150_000
    assert peak < 100_000, f"{peak} bytes"


def test_values_fed_in_place_are_read_anew() -> None:
    case, other = Case(SQUARE, seed=1), Case(SQUARE, seed=2)
    problem, fresh = case.problem(), other.problem()
    steps = DIRECT.steps(problem, Memory().allocate)
    for array, values in ((problem.x, fresh.x), (problem.weights, fresh.weights), (problem.bias, fresh.bias)):
        assert array is not None
        array.flags.writeable = True
        array[...] = values
    for step in steps:
        step()
    np.testing.assert_array_equal(problem.y, other.expected().astype(np.float32))
