"""Convolution by transforms against sums over taps in float64, with any division into blocks; and its memory.

The tolerance is the a priori bound: a transform of N elements is off by at most about 7 u log2 N of the 2-norm of what
it transforms (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, theorem 24.2, with the twiddle factors of
NumPy), there are three on the way, and each frequency sums C/G products. Blocks add their shares.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.ops.families.conv import fft
from dagexec.ops.families.conv.direct import DIRECT
from dagexec.ops.families.conv.fft import FFT
from dagexec.ops.families.conv.overlap_add import OverlapAddPlan, Sizes, axis_cuts, choose_plan, fast_size, plan_with
from dagexec.ops.families.conv.problem import ConvProblem
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.problems import Case, Memory, cases, epsilon, norm_bound, run_algorithm, run_steps
from tests.ops.windows import NOTSET, Array, Geometry

WIDE = Geometry((45, 39), (5, 4), (1, 1), (1, 1), (2, 1, 2, 2))
STRIDED = Geometry((31, 40), (5, 4), (2, 3), (1, 2), (2, 1, 0, 3))
CUBE = Geometry((6, 7, 9), (3, 2, 3), (1, 2, 1), (1, 1, 2), (1, 0, 2, 0, 1, 2))
LINE = Geometry((300,), (9,), (1,), (3,), (8, 20))
FAR = Geometry((3, 2), (9, 7), (1, 2), (1, 1), (8, 7, 9, 6))
SPARSE = Geometry((23, 30), (2, 3), (7, 9), (1, 1), (1, 0, 2, 3))


def tolerance(case: Case) -> float:
    """The largest error of an output: of the transforms and products, of the bias, and of storing it in 16 bits."""
    work = case.dtype if case.dtype == "float64" else "float32"
    plan = choose_plan(Sizes.of(case.problem()))
    lengths = 1 if plan is None else math.prod(cut.size for cut in plan.cuts)
    shares = 1 if plan is None else math.prod(min(cut.blocks, cut.axis.extent) for cut in plan.cuts)
    steps = 3 * 7 * math.log2(max(2, lengths)) + case.per_group + 4
    bound = norm_bound(case)
    stored = epsilon(case.dtype) * (np.abs(case.expected()).max(initial=0) + bound * steps * epsilon(work))
    return epsilon(work) * (steps * math.sqrt(shares) * bound + 8) + (stored if case.dtype != work else 0)


def check(case: Case) -> None:
    """Compare with the loops in float64."""
    compare(case, run_algorithm(FFT, case.problem()))


def compare(case: Case, y: Array, how: str = "") -> None:
    expected = case.expected()
    assert y.shape == expected.shape
    error = np.abs(y.astype(np.float64) - expected).max(initial=0)
    assert error <= tolerance(case), f"off by {error}, more than {tolerance(case)}; reproduce with: check({case}) {how}"


@pytest.mark.slow
@given(cases(normal=True))
@drawn(300)
def test_every_geometry_gives_the_sum_over_its_taps(case: Case) -> None:
    check(case)


@st.composite
def long_windows(draw: st.DrawFn) -> Geometry:
    """Kernels of up to 20 taps, over images smaller or larger than these."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        kernel, stride, dilation = draw(st.integers(1, 20)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        head, tail = draw(st.integers(0, 25)), draw(st.integers(0, 25))
        least = max(1, dilation * (kernel - 1) + 1 - head - tail)
        rows.append((draw(st.integers(least, least + 15)), kernel, stride, dilation, head, tail))
    sizes, kernels, strides, dilations, heads, tails = zip(*rows, strict=True)
    return Geometry(sizes, kernels, strides, dilations, (*heads, *tails), NOTSET)


@pytest.mark.slow
@given(long_windows(), st.sampled_from(["float32", "float64"]), st.sampled_from(["NCHW", "NHWC"]), st.integers(0, 99))
@drawn(150)
def test_long_kernels_over_long_and_short_images(geometry: Geometry, dtype: str, order: str, seed: int) -> None:
    check(Case(geometry, 2, order=order, dtype=dtype, normal=True, seed=seed))


def run_plan(problem: ConvProblem, plan: OverlapAddPlan) -> Array:
    """Y of this plan, which must take the memory that it says."""
    memory = Memory()
    steps = fft.planned_steps(problem, plan, memory.allocate)
    kept = 0
    if problem.constant is not None:
        kept = math.prod(plan.frequencies) * problem.weights.size // math.prod(problem.kernel)
    itemsize = 2 * problem.work.itemsize
    assert memory.nbytes <= (plan.elements - kept) * itemsize
    return run_steps(problem, steps, memory)


@pytest.mark.slow
@given(cases(normal=True), st.data())
@drawn(300)
def test_any_blocks_give_the_same(case: Case, data: st.DataObject) -> None:
    problem = case.problem()
    choices = [axis_cuts(axis) for axis in problem.axes]
    if all(choices):
        cuts = tuple(data.draw(st.sampled_from(found)) for found in choices)
        images, rows = data.draw(st.integers(1, case.batch)), data.draw(st.integers(1, cuts[0].blocks))
        plan = plan_with(Sizes.of(problem), cuts, images, rows)
        compare(case, run_plan(problem, plan), f"with {plan}")


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("geometry", [WIDE, LINE, STRIDED, CUBE, SPARSE])
def test_many_blocks_added_where_they_overlap_give_what_one_block_gives(geometry: Geometry, order: str) -> None:
    case = Case(geometry, 2, 1, 3, 4, order=order, normal=True)
    problem = case.problem()
    choices = [sorted(axis_cuts(axis), key=lambda cut: cut.blocks) for axis in problem.axes]
    few, many = (tuple(found[end] for found in choices) for end in (0, -1))
    assert all(cut.blocks == 1 for cut in few)
    assert all(cut.blocks > 1 for cut in many)
    one = run_plan(problem, plan_with(Sizes.of(problem), few, 2, 1))
    compare(case, one)
    for images, rows in product((1, 2), (1, 2, many[0].blocks)):
        found = run_plan(problem, plan_with(Sizes.of(problem), many, images, rows))
        compare(case, found)
        np.testing.assert_allclose(found, one, rtol=0, atol=2 * tolerance(case))


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("geometry", [WIDE, STRIDED, CUBE, LINE, FAR, SPARSE])
def test_every_type_and_rank(geometry: Geometry, dtype: str, constant: bool) -> None:
    check(Case(geometry, 3, 2, 2, 3, dtype=dtype, constant=constant, normal=True))


@pytest.mark.slow
def test_large_images_are_cut_into_blocks() -> None:
    case = Case(Geometry((1024, 1000), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)), 1, 1, 4, 4)
    plan = choose_plan(Sizes.of(case.problem()))
    assert plan is not None
    assert all(cut.blocks > 1 for cut in plan.cuts)


def test_a_window_that_reads_nothing_but_padding_gives_the_bias() -> None:
    """Negative padding moves the first window past the input; the geometry of SAME has such windows."""
    problem = Case(Geometry((4,), (1,), (1,), (1,), (0, 0)), bias=True).problem()
    axis = replace(problem.axes[0], head=-9)
    problem = replace(problem, axes=(axis,))
    assert problem.bias is not None
    np.testing.assert_array_equal(run_algorithm(FFT, problem)[0, :, 0], problem.bias)


@pytest.mark.parametrize("head", [-3, -1, 0, 2, 6])
def test_padding_may_be_negative_and_longer_than_the_window(head: int) -> None:
    """As in the data gradient, against the sums over taps."""
    problem = Case(Geometry((9, 8), (3, 2), (1, 1), (1, 1), (0, 0, 0, 0)), 2, normal=True).problem()
    axes = tuple(replace(axis, head=head) for axis in problem.axes)
    problem = replace(problem, axes=axes)
    np.testing.assert_allclose(run_algorithm(FFT, problem), run_algorithm(DIRECT, problem), rtol=0, atol=1e-5)


@pytest.mark.slow
@given(cases(normal=True), st.floats(0.05, 1))
@drawn(150)
def test_memory_keeps_to_the_limit_or_the_problem_is_refused(case: Case, share: float) -> None:
    problem = case.problem()
    free = Memory()
    FFT.steps(problem, free.allocate)
    limited = replace(case, limit=int(free.nbytes * share))
    refusal = FFT.refusal(limited.problem())
    if refusal:
        assert f"more than the limit of {limited.limit}" in refusal
    else:
        check(limited)


@pytest.mark.slow
def test_a_limit_is_kept_by_smaller_blocks() -> None:
    case = Case(WIDE, 4, 1, 8, 8, normal=True)
    free = Memory()
    FFT.steps(case.problem(), free.allocate)
    check(replace(case, limit=free.nbytes // 8))


def test_kept_spectra_count_for_the_limit() -> None:
    case = Case(SPARSE, per_group=32, filters_per_group=32, constant=True, limit=30_000)
    refusal = FFT.refusal(case.problem())
    assert refusal.startswith("the spectra of filters and of a row of blocks take ")
    assert refusal.endswith(" bytes, more than the limit of 30000")


def test_float16_arithmetic_is_refused() -> None:
    problem = Case(WIDE, dtype="float16", half=True).problem()
    refusal = "transforms are computed in float32 or float64, not with every result rounded to float16"
    assert FFT.refusal(problem) == refusal


@pytest.mark.slow
def test_spectra_of_constant_filters_are_computed_once_and_give_the_same_bytes() -> None:
    case = Case(WIDE, normal=True)
    fresh = run_algorithm(FFT, case.problem())
    problem = replace(case, constant=True).problem()
    kept = run_algorithm(FFT, problem)
    with patch.object(fft, "_filter_steps", side_effect=AssertionError("computed again")):
        again = run_algorithm(FFT, problem)
    assert kept.tobytes() == again.tobytes()
    np.testing.assert_allclose(kept, fresh, rtol=0, atol=2 * tolerance(case))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_run_allocates_no_tensor(order: str, dtype: str, constant: bool) -> None:
    """NumPy's iterators use up to 8192 elements an operand, its transforms one transform (not seen by tracemalloc)."""
    geometry = Geometry((160, 128), (7, 5), (1, 1), (1, 2), (3, 2, 3, 2))
    problem = Case(geometry, 2, 2, 6, 6, order=order, dtype=dtype, constant=constant).problem()
    memory = Memory()
    steps = FFT.steps(problem, memory.allocate)
    for step in steps:
        step()
    peak = peak_memory(*steps)
    most = 4 * 8192 * 2 * problem.work.itemsize
    assert memory.nbytes > 10 * most
    assert peak < most, f"{peak} bytes"


def test_values_fed_in_place_are_read_anew() -> None:
    case, other = Case(WIDE, normal=True, seed=1), Case(WIDE, normal=True, seed=2)
    problem, fresh = case.problem(), other.problem()
    steps = FFT.steps(problem, Memory().allocate)
    for array, values in ((problem.x, fresh.x), (problem.weights, fresh.weights), (problem.bias, fresh.bias)):
        assert array is not None
        array.flags.writeable = True
        array[...] = values
    compare(other, run_steps(problem, steps, Memory()))


def test_fast_sizes_are_the_least_with_factors_2_3_and_5() -> None:
    def is_fast(size: int) -> bool:
        for prime in (2, 3, 5):
            while size % prime == 0:
                size //= prime
        return size == 1

    for least in range(1, 800):
        assert fast_size(least) == next(size for size in range(least, 2 * least + 1) if is_fast(size))


@pytest.mark.parametrize("size", [30, 60, 125])
def test_transforms_do_not_make_results_larger_or_smaller_on_the_whole(size: int) -> None:
    """NumPy rounds 1 / size, for these sizes by 5e-8, and three transforms multiply with it: that must be undone.

    About 6e-8 is left, of the rounded roots of unity.
    """
    case = Case(Geometry((size,), (9,), (1,), (1,), (0, 0)), 40, 1, 8, 40, bias=False, normal=True)
    x, weights = (array.astype(np.float64) for array in case.arrays())
    expected = np.einsum("ncok,mck->nmo", np.lib.stride_tricks.sliding_window_view(x, 9, 2), weights)
    problem = case.problem()
    plan = plan_with(Sizes.of(problem), (axis_cuts(problem.axes[0])[0],), 40, 1)
    assert plan.cuts[0].size == size
    gain = float((run_plan(problem, plan) * expected).sum() / (expected * expected).sum()) - 1
    assert abs(gain) < 1e-7
