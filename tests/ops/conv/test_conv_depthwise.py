"""The depthwise convolution: sums of shifted images for any geometry, within the limit of working memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from dagexec.ops.families.conv.choice import default_algorithm
from dagexec.ops.families.conv.depthwise import DEPTHWISE
from dagexec.ops.families.conv.im2col import IM2COL
from dagexec.ops.families.conv.problem import ConvProblem
from tests.ops.drawing import drawn
from tests.ops.problems import Case, Memory, cases, run_algorithm, run_steps
from tests.ops.windows import Geometry

depthwise_cases = cases().map(lambda case: replace(case, group=case.group + 1, per_group=1))
PHOTO = Case(Geometry((64, 64), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), 2, 8, 1, 1)


@pytest.mark.slow
@given(depthwise_cases)
@drawn(150)
def test_it_asks_for_no_more_memory_than_it_says_and_gives_the_sums(case: Case) -> None:
    reproduction = f"reproduce with: {case}"
    problem, memory = case.problem(), Memory()
    steps = DEPTHWISE.steps(problem, memory.allocate)
    found = run_steps(problem, steps, Memory())  # its memory is its own: nobody spoils it between two runs
    np.testing.assert_array_equal(found, case.expected().astype(case.dtype), err_msg=reproduction)
    filters = problem.work.itemsize * problem.weights.size * 2  # widened, and with channels last in another order
    least = least_limit(problem)
    assert least <= memory.nbytes <= least + filters, reproduction


def least_limit(problem: ConvProblem) -> int:
    """The least limit of working memory with which the algorithm does not refuse."""
    low, high = 0, problem.limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if DEPTHWISE.refusal(replace(problem, limit=middle)) else (low, middle)
    return high


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_image_beyond_the_limit_is_unrolled_in_blocks_instead(order: str, dtype: str) -> None:
    case = replace(PHOTO, order=order, dtype=dtype, constant=True)
    assert default_algorithm(case.problem(), "Conv") is DEPTHWISE
    small = replace(case, limit=50_000)
    assert "bytes, more than ws_nbytes_limit 50,000" in DEPTHWISE.refusal(small.problem())
    assert default_algorithm(small.problem(), "Conv") is IM2COL
    np.testing.assert_array_equal(run_algorithm(IM2COL, small.problem()), case.expected())
