"""im2col in blocks: whatever the limit of working memory, the same sums, and never more memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.operator import Step
from dagexec.ops.families.conv import im2col
from dagexec.ops.families.conv.column_blocks import ColumnBlocks, column_bytes
from dagexec.ops.families.conv.problem import Allocate, ConvProblem
from tests.ops.drawing import drawn
from tests.ops.problems import Case, Memory, cases, run_steps
from tests.ops.windows import Array, Geometry

SQUARE = Geometry((9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))


def limited(case: Case, share: float) -> ConvProblem:
    """The problem with a limit between the least that works and all its columns at once."""
    problem = case.problem()
    least = column_bytes(problem)
    most = max(least, case.batch * int(np.prod(problem.out)) * least)
    return replace(problem, limit=least + int(share * (most - least)))


def check_memory(memory: Memory, problem: ConvProblem) -> None:
    """Beside the limit, 16-bit filters are widened once, and so is one image that is summed into."""
    wide = problem.work.itemsize * (problem.weights.size + problem.x[0].size) if problem.work != problem.x.dtype else 0
    assert memory.nbytes <= problem.limit + wide


@pytest.mark.slow
@given(cases(), st.floats(0, 0.3))
@drawn(150)
def test_blocks_of_any_size_give_the_sum_over_the_taps(case: Case, share: float) -> None:
    problem, memory = limited(case, share), Memory()
    reproduction = f"reproduce with: {case}, limit {problem.limit}"
    assert not im2col.IM2COL.refusal(problem)
    found = run_steps(problem, im2col.forward(problem, memory.allocate), memory)
    np.testing.assert_array_equal(found, case.expected().astype(case.dtype), err_msg=reproduction)
    check_memory(memory, problem)


def gradients(problem: ConvProblem) -> tuple[Array, Array]:
    """dX and dfilter for a y of small integers."""
    rng = np.random.default_rng(5)
    y = rng.integers(-3, 4, problem.y.shape).astype(problem.y.dtype)
    results = []
    ways = {"x": im2col.data_gradient, "weights": im2col.filter_gradient}
    for name, way in ways.items():
        result = np.full(getattr(problem, name).shape, np.nan, problem.x.dtype)
        wanted = replace(problem, y=y, bias=None, constant=None, **{name: result})
        memory = Memory()
        steps: list[Step] = way(wanted, memory.allocate)
        memory.spoil()
        for step in steps:
            step()
        if name == "x":
            check_memory(memory, wanted)
        results.append(result)
    return results[0], results[1]


@pytest.mark.slow
@given(cases(), st.floats(0, 0.3))
@drawn(80)
def test_gradients_do_not_depend_on_the_blocks(case: Case, share: float) -> None:
    small, large = gradients(limited(case, share)), gradients(case.problem())
    for one, other in zip(small, large, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=f"reproduce with: {case}, share {share}")


@pytest.mark.slow
def test_an_image_of_any_size_takes_no_more_than_the_limit() -> None:
    for side in (32, 256, 1024):
        case = Case(replace(SQUARE, size=(side, side)), per_group=4, limit=1 << 16)
        memory = Memory()
        im2col.forward(case.problem(), memory.allocate)
        assert memory.nbytes <= 1 << 16


def test_16_bit_images_that_few_windows_read_are_not_widened_all_at_once() -> None:
    """Their columns are much smaller than they are."""
    case = Case(Geometry((40, 40), (1, 1), (20, 20), (1, 1), (0, 0, 0, 0)), batch=8, dtype="float16", limit=20_000)
    problem, memory = case.problem(), Memory()
    problem.y.fill(1)
    steps = im2col.data_gradient(replace(problem, x=np.empty_like(problem.x), bias=None), memory.allocate)
    assert len(steps) > 1
    check_memory(memory, problem)


def blocks_of(case: Case, wanted: int) -> list[tuple[int, int]]:
    """Images and windows of each block."""
    allocate: Allocate = np.empty
    return [(block.count, block.pixels) for block in ColumnBlocks(case.problem(), allocate, wanted).blocks]


def test_small_images_are_unrolled_together_and_large_ones_are_cut() -> None:
    small, large = Case(SQUARE, batch=4), Case(replace(SQUARE, size=(30, 30)), batch=2)
    assert blocks_of(small, 1 << 20) == [(4, 4 * 72)]
    assert blocks_of(large, 1 << 20) == [(1, 900), (1, 900)]
    assert blocks_of(large, 450 * 2 * 9 * 4) == [(1, 450)] * 4
    assert blocks_of(small, 20 * 2 * 9 * 4) == [(1, 16), (1, 16), (1, 16), (1, 16), (1, 8)] * 4


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_windows_inside_the_image_are_read_without_a_tile(order: str) -> None:
    inside, padded = (Case(replace(SQUARE, pads=(pad,) * 4), order=order) for pad in (0, 1))
    columns = {case: 2 * 9 * 4 * int(np.prod(case.problem().out)) for case in (inside, padded)}
    for case, tile in ((inside, 0), (padded, 2 * 11 * 10 * 4)):
        memory = Memory()
        im2col.forward(case.problem(), memory.allocate)
        assert memory.nbytes == columns[case] + tile
