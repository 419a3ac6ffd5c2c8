"""Winograd convolution: the matrices in exact arithmetic, every geometry against sums over taps, memory and refusals.

Results may differ from the sums by rounding. `rounding_bound` is what it can be at most: see there.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.constant import Constant
from dagexec.ops.families.conv.im2col import IM2COL
from dagexec.ops.families.conv.problem import Algorithm, ConvProblem
from dagexec.ops.families.conv.tiles import Tiling, needs_staging
from dagexec.ops.families.conv.toom_cook import kronecker, minimal_filter
from dagexec.ops.families.conv.winograd import WINOGRAD, _part, _tiling, winograd
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.problems import DTYPES, Case, Memory, epsilon, run_algorithm, run_steps
from tests.ops.running import run_operator
from tests.ops.windows import Array, Geometry, convolve, to_channels_first, to_channels_last

FILTERS = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3)]


def apply(matrix: Sequence[Sequence[Fraction]], vector: Sequence[Fraction | int]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


def unit(length: int, place: int) -> list[int]:
    return [int(index == place) for index in range(length)]


@pytest.mark.parametrize(("outputs", "taps"), FILTERS)
def test_matrices_filter_exactly(outputs: int, taps: int) -> None:
    """y is linear in g and in d, so it is right when it is right for every pair of unit vectors."""
    one = minimal_filter(outputs, taps)
    for j, k in product(range(taps), range(one.tile)):
        products = zip(apply(one.filter, unit(taps, j)), apply(one.data, unit(one.tile, k)), strict=True)
        y = apply(one.output, [a * b for a, b in products])
        assert y == [int(i + j == k) for i in range(outputs)], f"tap {j}, number {k}"


def test_multiplications_are_those_of_the_document() -> None:
    two, four = minimal_filter(2, 3), minimal_filter(4, 3)
    assert [(one.outputs * 3, one.tile) for one in (two, four)] == [(6, 4), (12, 6)]
    assert [((one.outputs * 3) ** 2, one.tile**2) for one in (two, four)] == [(36, 16), (144, 36)]
    assert len(two.data) == len(two.filter) == 4
    assert len(four.data) == len(four.filter) == 6


def test_f23_has_the_four_products_of_the_document() -> None:
    d0, d1, d2, d3, g0, g1, g2 = map(Fraction, (3, -5, 7, 11, 13, -17, 19))
    one = minimal_filter(2, 3)
    assert apply(one.data, [d0, d1, d2, d3]) == [d0 - d2, d1 + d2, d2 - d1, d3 - d1]
    assert apply(one.filter, [g0, g1, g2]) == [g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2]
    m1, m2, m3, m4 = map(Fraction, (2, 3, 5, 7))
    assert apply(one.output, [m1, m2, m3, m4]) == [m1 + m2 + m3, m2 - m3 + m4]


@pytest.mark.parametrize(("outputs", "taps"), FILTERS)
def test_data_and_output_matrices_are_exact_in_float32(outputs: int, taps: int) -> None:
    one = minimal_filter(outputs, taps)
    for entry in (entry for matrix in (one.data, one.output) for row in matrix for entry in row):
        assert Fraction(float(np.float32(float(entry)))) == entry


def test_kronecker_transforms_all_axes_of_a_tile() -> None:
    two, four = minimal_filter(2, 3), minimal_filter(4, 3)
    tile = np.random.default_rng(0).integers(-9, 10, (4, 6)).astype(np.float64)
    rows, columns = (np.array(one.data, np.float64) for one in (two, four))
    both = kronecker([two.data, four.data], np.float64)
    np.testing.assert_array_equal(both @ tile.reshape(-1), (rows @ tile @ columns.T).reshape(-1))


def test_more_points_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"F\(5, 3\) needs 6 finite points, but there are 5"):
        minimal_filter(5, 3)


def growth(outputs: int, taps: int) -> float:
    """The largest sum over d, for one tap and output, of |A^T| (|G| * |B^T|): 1 where nothing cancels."""
    one = minimal_filter(outputs, taps)
    a, g, b = (np.abs(np.array(matrix, np.float64)) for matrix in (one.output, one.filter, one.data))
    return float(np.einsum("if,fj,fk->ij", a, g, b).max())


def rounding_bound(case: Case) -> float:
    """The most that rounding can change an output, whatever the order of summation.

    With |B^T d| and all other products replaced by those of absolute values, each of n roundings on the way from inputs
    to an output changes it by u of that (Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1):
    n u / (1 - n u) times the growth of the matrices along every axis, times the largest pixel and sum of weights. The
    roundings are those of sums of t terms along each axis, twice, of the taps and the rounded entries of G, of the
    channels, and the bias.
    """
    x, weights, *bias = (np.abs(array.astype(np.float64)) for array in case.arrays())
    u = epsilon("float64" if case.dtype == "float64" else "float32")
    kernel = case.geometry.kernel
    roundings = 2 * sum(taps + 3 for taps in kernel) + math.prod(kernel) + 1 + case.per_group + 1
    largest = math.prod(growth(4 if taps == 3 else 1, taps) for taps in kernel)
    total = largest * x.max() * weights.sum(axis=tuple(range(1, weights.ndim))).max()
    total += bias[0].max() if bias else 0
    return float(roundings * u / (1 - roundings * u) * total)


def check(case: Case) -> None:
    """Compare with the loops in float64."""
    y = run_algorithm(WINOGRAD, case.problem())
    compare(case, y)


def compare(case: Case, y: Array) -> None:
    expected, bound = case.expected(), rounding_bound(case)
    assert y.dtype == case.dtype
    assert y.shape == expected.shape
    if case.dtype in ("float16", "bfloat16"):  # the result is rounded once more
        finfo = ml_dtypes.finfo(np.dtype(case.dtype))
        bound = bound + epsilon(case.dtype) * (np.abs(expected) + bound) + float(finfo.smallest_subnormal)
    wrong = ~(np.abs(y.astype(np.float64) - expected) <= bound)  # a NaN is wrong
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} outputs are wrong; reproduce with: check({case})"


def geometry(size: Sequence[int], pads: Sequence[int], kernel: Sequence[int] = ()) -> Geometry:
    ones = (1,) * len(size)
    return Geometry(tuple(size), tuple(kernel) or (3,) * len(size), ones, ones, tuple(pads))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))
    kernel = draw(st.lists(st.sampled_from([3, 3, 3, 1]), min_size=rank, max_size=rank).filter(lambda k: max(k) == 3))
    heads, tails = (draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)) for _ in range(2))
    most = {1: 30, 2: 12, 3: 4}[rank]
    sizes = [
        draw(st.integers(max(1, taps - head - tail), most))
        for taps, head, tail in zip(kernel, heads, tails, strict=True)
    ]
    return Case(
        geometry(sizes, (*heads, *tails), kernel),
        batch=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        per_group=draw(st.integers(2, 5)),
        filters_per_group=draw(st.sampled_from([1, 2, 3, 9, 16])),
        bias=draw(st.booleans()),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=draw(st.sampled_from(DTYPES)),
        normal=draw(st.booleans()),
        constant=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@given(cases())
@drawn(500)
def test_every_geometry_gives_the_sum_over_its_taps(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(cases(), st.floats(0, 1))
@drawn(150)
def test_any_limit_that_is_enough_is_kept_and_gives_the_same(case: Case, part: float) -> None:
    least = smallest_limit(case)
    memory = Memory()
    WINOGRAD.steps(case.problem(), memory.allocate)
    check(replace(case, limit=least + int(part * max(0, memory.nbytes - least))))


def smallest_limit(case: Case) -> int:
    """The bytes that the refusal for a limit of 0 names."""
    found = WINOGRAD.refusal(replace(case, limit=0).problem())
    assert found.startswith("it needs "), found
    return int(found.split()[2])


LINE = geometry((50,), (1, 1))
SQUARE = geometry((14, 11), (1, 1, 1, 1))
PADDED = geometry((9, 6), (4, 0, 0, 3))
ROWS = geometry((7, 9), (0, 1, 0, 1), (1, 3))
COLUMNS = geometry((7, 9), (1, 0, 1, 0), (3, 1))
CUBE = geometry((4, 5, 6), (1, 1, 1, 0, 1, 1))
ALIASED = geometry((32, 32), (1, 1, 1, 1))
GEOMETRIES = {
    "line": LINE,
    "square": SQUARE,
    "padded": PADDED,
    "rows": ROWS,
    "columns": COLUMNS,
    "cube": CUBE,
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_rank_order_type_and_group(window: Geometry, group: int, order: str, dtype: str) -> None:
    check(Case(window, 2, group, 3, 4, order=order, dtype=dtype, normal=True))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "filters"), [(1, 24, 96), (1, 150, 128), (2, 9, 22), (1, 2, 67)])
def test_filters_are_multiplied_in_parts(group: int, per_group: int, filters: int, order: str) -> None:
    check(Case(geometry((9, 10), (1, 1, 1, 1)), 1, group, per_group, filters, order=order, dtype="float64"))


def test_parts_divide_the_filters_and_are_neither_few_nor_many() -> None:
    sizes = [(24, 96), (150, 128), (512, 512), (2, 67), (4000, 64)]
    found = [_part(Case(SQUARE, 1, 1, channels, filters).problem()) for channels, filters in sizes]
    assert found == [48, 64, 32, 67, 64]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_channels_a_power_of_two_apart_are_staged(dtype: str) -> None:
    case = Case(ALIASED, 2, 1, 16, 2, dtype=dtype)
    assert needs_staging(case.problem())
    check(case)


def test_a_head_that_cuts_pixels_off_is_followed() -> None:
    """A negative head comes from SAME and from gradients; the loops have no spelling of it, so the image is cut."""
    case = Case(geometry((9, 8), (0, 0, 0, 0)), dtype="float64")
    whole = case.problem()
    axes = tuple(replace(axis, head=-2, tail=1, out=axis.out - 1) for axis in whole.axes)
    y = np.full((1, 3, *(axis.out for axis in axes)), np.nan)
    found = run_algorithm(WINOGRAD, replace(whole, axes=axes, y=y))
    x, weights, bias = case.arrays()
    expected = convolve(x[:, :, 2:, 2:], weights, bias, geometry((7, 6), (0, 0, 1, 1)), 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding_bound(case))


def tiling_of(size: int, batch: int = 1, channels: int = 64) -> Tiling:
    case = Case(geometry((size, size), (1, 1, 1, 1)), batch, 1, channels, channels)
    found = _tiling(case.problem(), (2, 4))
    assert found is not None
    return found


def test_tiles_are_small_for_small_images() -> None:
    assert [tiling_of(size).outputs for size in (2, 6, 7, 28)] == [(2, 2), (2, 2), (4, 4), (4, 4)]
    assert tiling_of(6, batch=64).outputs == (2, 2)


def test_tiles_are_smaller_where_only_these_are_within_the_limit() -> None:
    case = Case(geometry((28, 28), (1, 1, 1, 1)), 1, 1, 64, 64)
    two = replace(case, limit=smallest_limit(case))
    found = _tiling(two.problem(), (2, 4))
    assert found is not None
    assert found.outputs == (2, 2)
    check(two)


def steps_of(problem: ConvProblem) -> tuple[list[Any], Memory]:
    memory = Memory()
    return WINOGRAD.steps(problem, memory.allocate), memory


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("window", [LINE, SQUARE], ids=["line", "square"])
def test_the_transform_of_constant_weights_is_kept(window: Geometry, order: str) -> None:
    case = Case(window, 1, 2, 3, 4, order=order, normal=True)
    plain = run_algorithm(WINOGRAD, case.problem())
    kept = replace(case.problem(), constant=Constant())
    assert run_algorithm(WINOGRAD, kept).tobytes() == plain.tobytes()
    other = replace(kept, weights=np.full_like(kept.weights, np.nan), y=kept.y.copy())
    steps, memory = steps_of(other)
    assert run_steps(other, steps, memory).tobytes() == plain.tobytes()
    assert memory.nbytes < steps_of(case.problem())[1].nbytes


def test_a_constant_serves_several_sizes_and_both_orders() -> None:
    constant, weights = Constant(), np.random.default_rng(0).standard_normal((4, 3, 3, 3))
    for size, order in [(6, "NCHW"), (28, "NCHW"), (28, "NHWC"), (6, "NCHW"), (6, "NHWC")]:
        case = Case(geometry((size, size), (1, 1, 1, 1)), 1, 1, 3, 4, order=order, dtype="float64", bias=False)
        y = run_algorithm(WINOGRAD, replace(case.problem(), weights=weights, constant=constant))
        first = weights if order == "NCHW" else to_channels_first(weights)
        expected = convolve(case.arrays()[0], first, None, case.geometry, 1)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


def test_weights_that_are_not_constant_are_read_in_every_run() -> None:
    case = Case(SQUARE, normal=True)
    problem = case.problem()
    problem = replace(problem, weights=problem.weights.copy())
    steps, memory = steps_of(problem)
    run_steps(problem, steps, memory)
    problem.weights[...] = replace(case, seed=7).problem().weights
    second = run_steps(problem, steps, memory)
    fresh = replace(problem, y=problem.y.copy())
    assert second.tobytes() == run_algorithm(WINOGRAD, fresh).tobytes()


REFUSED = {
    "stride": (
        Geometry((9, 9), (3, 3), (2, 1), (1, 1), (0,) * 4),
        {},
        r"found strides \[2, 1\] and dilations \[1, 1\]",
    ),
    "dilation": (Geometry((9, 9), (3, 3), (1, 1), (1, 2), (0,) * 4), {}, r"strides \[1, 1\] and dilations \[1, 2\]"),
    "kernel": (geometry((9, 9), (0,) * 4, (3, 5)), {}, r"needs 3 taps along an axis.*found kernel \[3, 5\]"),
    "one tap": (geometry((9, 9), (0,) * 4, (1, 1)), {}, r"needs 3 taps along an axis.*found kernel \[1, 1\]"),
    "half": (SQUARE, {"dtype": "float16", "half": True}, "lose too much in float16"),
    "depthwise": (SQUARE, {"group": 4, "per_group": 1}, "each of the 4 groups has one channel"),
    "empty": (SQUARE, {"batch": 0}, r"nothing to compute from \(0, 2, 14, 11\) to \(0, 3, 14, 11\)"),
    "limit": (SQUARE, {"limit": 1000}, r"it needs \d\d\d\d+ bytes of workspace, the limit is 1000"),
}


@pytest.mark.parametrize(("window", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_compute_is_refused(window: Geometry, changes: dict[str, Any], message: str) -> None:
    assert WINOGRAD.refusal(Case(SQUARE, 1, 1, 2, 3).problem()) == ""
    refusal = WINOGRAD.refusal(Case(window, **changes).problem())
    assert re.search(message, refusal), refusal


def test_the_limit_that_the_refusal_names_is_enough() -> None:
    case = Case(SQUARE, 1, 1, 8, 8)
    least = smallest_limit(case)
    assert WINOGRAD.refusal(replace(case, limit=least - 1).problem()) != ""
    check(replace(case, limit=least))


def test_a_nan_reaches_the_windows_that_read_it_and_no_further_than_their_tiles() -> None:
    case = Case(geometry((20, 20), (1, 1, 1, 1)), bias=False)
    problem = case.problem()
    x = problem.x.copy()
    x[0, 0, 9, 9] = np.nan
    found = np.isnan(run_algorithm(WINOGRAD, replace(problem, x=x)))
    assert found[:, :, 8:11, 8:11].all()
    assert not found[:, :, :4].any()
    assert not found[:, :, 16:].any()


def test_pixels_that_no_window_reads_are_not_read() -> None:
    case = Case(geometry((9, 9), (0, 0, 0, 0)))
    problem = case.problem()
    x = problem.x.copy()
    x[..., 7:] = np.nan
    axes = (problem.axes[0], replace(problem.axes[1], out=5, tail=-2))
    y = np.full((1, 3, 7, 5), np.nan, np.float32)
    found = run_algorithm(WINOGRAD, replace(problem, x=x, axes=axes, y=y))
    np.testing.assert_allclose(found, case.expected()[..., :5], rtol=0, atol=rounding_bound(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_a_run_allocates_nothing(order: str, dtype: str) -> None:
    case = Case(geometry((60, 60), (1, 1, 1, 1)), 2, 1, 16, 16, order=order, dtype=dtype)
    steps, _ = steps_of(case.problem())
    for step in steps:
        step()
    peak = peak_memory(*steps)
    assert peak < 50_000, f"{peak} bytes"  # the image has 115200 elements


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_an_operator_uses_it(order: str, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(SQUARE, 2, 2, 3, 4, order=order, normal=True)
    x, weights, bias = case.arrays()
    if order == "NHWC":
        x, weights = to_channels_last(x), to_channels_last(weights)
    arguments = {**case.geometry.arguments(), "group": 2, "order": order}
    with caplog.at_level(logging.INFO, "dagexec"):
        [y] = run_operator("Conv", [x, weights, bias], engine="WINOGRAD", **arguments)
    assert not caplog.records
    y = to_channels_first(y) if order == "NHWC" else y
    compare(case, y)
    assert y.tobytes() == run_algorithm(WINOGRAD, case.problem()).tobytes()


def test_an_operator_that_it_cannot_compute_says_why(caplog: pytest.LogCaptureFixture) -> None:
    x, weights = np.ones((1, 2, 9, 9), np.float32), np.ones((1, 2, 5, 5), np.float32)
    with caplog.at_level(logging.INFO, "dagexec"):
        [y] = run_operator("Conv", [x, weights], engine="WINOGRAD", kernel=5)
    np.testing.assert_array_equal(y, np.full((1, 1, 5, 5), 50))
    assert "engine WINOGRAD skipped: it needs 3 taps along an axis" in caplog.text


def relative_error(case: Case, algorithm: Algorithm, y64: Array) -> float:
    y = run_algorithm(algorithm, case.problem()).astype(np.float64)
    return float(np.sqrt(np.mean((y - y64) ** 2) / np.mean(y64**2)))


@pytest.mark.parametrize(("rank", "outputs", "most"), [(1, 2, 3e-7), (1, 4, 5e-7), (2, 2, 4e-7), (2, 4, 1.3e-6)])
def test_errors_are_those_of_the_document(rank: int, outputs: int, most: float) -> None:
    """Root mean square of the error over that of the outputs, with 64 channels: about 1.5 times what was measured."""
    size = (200,) if rank == 1 else (20, 20)
    case = Case(geometry(size, (1,) * 2 * rank), 1, 1, 64, 16, bias=False, normal=True)
    y64 = case.expected()
    found = relative_error(case, winograd((outputs,)), y64)
    assert found < most
    assert found > relative_error(case, IM2COL, y64) / 4  # it is measured in float32
