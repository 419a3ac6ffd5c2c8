"""The 1x1 convolution that is only matrix products, in three directions and for any number of images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.operator import Step
from dagexec.ops.families.conv import im2col, one_by_one
from dagexec.ops.families.conv.choice import default_algorithm
from dagexec.ops.families.conv.problem import ConvProblem
from tests.ops.drawing import drawn
from tests.ops.problems import Case, Memory, cases, run_algorithm, run_steps
from tests.ops.windows import Array, Geometry


def of_one_pixel(case: Case) -> Case:
    """The case with a 1x1 kernel, strides of 1 and no padding."""
    rank = case.geometry.rank
    return replace(case, geometry=Geometry(case.geometry.size, (1,) * rank, (1,) * rank, (1,) * rank, (0,) * 2 * rank))


@given(cases().map(of_one_pixel))
@drawn(80)
def test_forward_is_the_sum_over_the_channels(case: Case) -> None:
    problem, memory = case.problem(), Memory()
    found = run_steps(problem, one_by_one.forward(problem, memory.allocate), memory)
    np.testing.assert_array_equal(found, case.expected().astype(case.dtype), err_msg=f"reproduce with: {case}")


def computed(problem: ConvProblem, steps: list[Step], result: Array) -> Array:
    result.fill(np.nan)
    for step in steps:
        step()
    return result


@given(cases().map(of_one_pixel), st.integers(0, 99))
@drawn(60)
def test_its_gradients_are_those_of_im2col(case: Case, seed: int) -> None:
    problem = case.problem()
    y = np.random.default_rng(seed).integers(-3, 4, problem.y.shape).astype(problem.y.dtype)
    for name in ("x", "weights"):
        found = []
        for module in (one_by_one, im2col):
            result = np.empty_like(getattr(problem, name))
            wanted = replace(problem, y=y, bias=None, **{name: result})
            way = module.data_gradient if name == "x" else module.filter_gradient
            found.append(computed(wanted, way(wanted, np.empty), result))
        np.testing.assert_array_equal(found[0], found[1], err_msg=f"{name}; reproduce with: {case}, {seed}")


ONES = ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(Geometry((20, 20), *ONES), batch=2), ""),
        (Case(Geometry((5, 5), *ONES)), ""),
        (Case(Geometry((5, 5), *ONES), batch=2, order="NHWC"), ""),
        (Case(Geometry((5, 5), *ONES), batch=2), "the images are too small for matrix products of their own"),
        (Case(Geometry((5, 5), (1, 2), (1, 1), (1, 1), (0, 0, 0, 0))), "the windows are not the pixels"),
        (Case(Geometry((5, 5), (1, 1), (1, 2), (1, 1), (0, 0, 0, 0))), "the windows are not the pixels"),
        (Case(Geometry((5, 5), (1, 1), (1, 1), (1, 1), (0, 0, 0, 1))), "the windows are not the pixels"),
        (Case(Geometry((5, 5), (1, 1), (1, 1), (1, 1), (1, 0, 0, 0))), "the windows are not the pixels"),
    ],
)
def test_it_says_why_it_does_not_apply(case: Case, why: str) -> None:
    assert one_by_one.ONE_BY_ONE.refusal(case.problem()) == why


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_16_bit_images_that_would_be_widened_beyond_the_limit_are_computed_in_blocks(order: str) -> None:
    case = Case(Geometry((20, 20), *ONES), batch=3, order=order, dtype="float16", constant=True)
    need = 3 * (2 + 3) * 400 * 4
    assert one_by_one.refusal(replace(case, limit=need).problem()) == ""
    problem = replace(case, limit=need - 1).problem()
    assert one_by_one.refusal(problem) == "x and y in float32 take 24,000 bytes, more than ws_nbytes_limit 23,999"
    assert default_algorithm(problem, "Conv") is im2col.IM2COL
    np.testing.assert_array_equal(run_algorithm(im2col.IM2COL, problem), case.expected())
    half = replace(case, half=True, limit=1).problem()
    assert one_by_one.refusal(half) == "", "nothing is widened"
