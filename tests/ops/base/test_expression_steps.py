"""Several results of expressions by NumPy's calls, into arrays that they are computed from."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagexec.core.expressions import Expression, apply, element, evaluated, exp, logistic, select, tanh
from dagexec.ops.base.blocks import Scratch
from dagexec.ops.base.expression_steps import expression_steps

SHAPE = (3, 4)
A, B, C = element(0), element(1), element(2)


def scratch() -> Scratch:
    """Memory that is full of NaN, so that what is read before it is written shows."""
    owner: Any = SimpleNamespace(working_memory=lambda size: np.full(size // 8, np.nan).view(np.uint8))
    return Scratch(owner, 12, np.dtype(np.float64))


def check(results: list[Expression], places: tuple[int, ...]) -> None:
    """Compute the results into sources, or into an array of its own where a place is none of theirs."""
    rng = np.random.default_rng(1)
    arrays = [rng.uniform(0.5, 2, SHAPE) for _ in range(3 + len(results))]
    sources = {number: arrays[number] for number in range(3)}
    expected = evaluated(results, [array.copy() for array in arrays[:3]])
    for step in expression_steps(results, sources, [arrays[place] for place in places], scratch()):
        step()
    for place, one in zip(places, expected, strict=True):
        np.testing.assert_array_equal(arrays[place], np.broadcast_to(one, SHAPE), str((results, places)))
    untouched = np.random.default_rng(1)
    for number in range(3):
        before = untouched.uniform(0.5, 2, SHAPE)
        assert number in places or np.array_equal(arrays[number], before)


@pytest.mark.parametrize(
    "results",
    [
        [A + B, A * 2],
        [B, A],
        [C, A, A * B],
        [A + B, A + B, (A + B) * C],
        [A * B + C, A * B, A - C],
        [select(A > B, A, C), A + 1, select(B > 1, A * C, B)],
        [(A + B) * (A - B), (A - B) * C, C],
    ],
    ids=str,
)
def test_results_may_overwrite_any_input(results: list[Expression]) -> None:
    for places in itertools.permutations(range(3 + len(results)), len(results)):
        check(results, places)


def test_random_results_may_overwrite_any_input() -> None:
    draw = random.Random(0)
    for _ in range(300):
        nodes = [A, B, C]
        for _ in range(draw.randrange(2, 9)):
            kind = draw.choice(("add", "multiply", "maximum", "sqrt", "square", "select"))
            one, other, third = (draw.choice(nodes) for _ in range(3))
            if kind == "select":
                nodes.append(select(one > other, other, third))
            else:
                nodes.append(apply(kind, *(one, other)[: 1 if kind in ("sqrt", "square") else 2]))
        results = [draw.choice(nodes) for _ in range(3)]
        check(results, tuple(draw.sample(range(6), 3)))


def test_a_function_of_one_array_needs_no_memory_but_the_result() -> None:
    """Results are computed where they belong: nothing is copied at the end, and no scratch is asked for."""
    x, y = np.linspace(-3, 3, 50), np.empty(50)

    def no_scratch(index: int, shape: tuple[int, ...]) -> Any:
        raise AssertionError("scratch")

    for result, calls in ((logistic(element(0)), 4), (tanh(element(0)), 1), (exp(-element(0)) + 1, 3)):
        steps = expression_steps([result], {0: x}, [y], no_scratch)  # type: ignore[arg-type]
        assert len(steps) == calls
