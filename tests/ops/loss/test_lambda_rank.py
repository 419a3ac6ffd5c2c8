"""LambdaRankNdcg against loops over pairs in float64; its slopes against differences of a loss with fixed weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import GradientError, OperatorError
from tests.ops.running import operator_def, run_operator

RNG = np.random.default_rng(31)
LENGTHS = np.array([7, 0, 1, 5], np.int32)
Y = RNG.normal(size=13).astype(np.float32)
R = RNG.integers(0, 4, 13).astype(np.float32)
R[8:] = [3, 2, 0, 1, 2]


def places(values: list[float]) -> list[int]:
    """The place of each value, from 1 for the greatest."""
    order = sorted(range(len(values)), key=lambda number: (-values[number], -number))
    return [order.index(number) + 1 for number in range(len(values))]


def pairs(y: list[float], r: list[float], linear: bool) -> tuple[dict[tuple[int, int], float], float, float]:
    """What an exchange of two items that ratings order changes, the best gain, and the gain that there is."""
    gains = [value if linear else 2.0**value for value in r]
    found, best = ([1 / math.log2(1 + place) for place in places(values)] for values in (y, r))
    weights = {
        (i, j): (gains[i] - gains[j]) * abs(found[i] - found[j])
        for i in range(len(y))
        for j in range(len(y))
        if r[i] > r[j]
    }
    return weights, float(np.dot(gains, best)), float(np.dot(gains, found))


@pytest.mark.parametrize("by_gain", [0, 1])
@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("exponential", [0, 1])
def test_losses_and_slopes_are_those_of_pairs(by_gain: int, normalized: int, exponential: int) -> None:
    losses, slopes = run_operator(
        "LambdaRankNdcg", [Y, R, LENGTHS], 2, use_ndcg_as_loss=by_gain, use_idcg_normalization=normalized,
        use_exp_gain=exponential,
    )  # fmt: skip
    start = 0
    for session, count in enumerate(LENGTHS):
        y, r = (values[start : start + count].astype(float).tolist() for values in (Y, R))
        own = slopes[start : start + count]
        start += count
        if count < 2:
            assert losses[session] == 0
            assert (own == 0).all()
            continue
        weights, best, gain = pairs(y, r, bool(by_gain and not exponential))
        scale = best if normalized else 1.0

        def loss(y: list[float], weights: dict[tuple[int, int], float] = weights, scale: float = scale) -> float:
            return sum(w * math.log1p(math.exp(y[j] - y[i])) for (i, j), w in weights.items()) / scale

        expected = (best - gain) / scale if by_gain else 2 * loss(y)
        np.testing.assert_allclose(losses[session], expected, rtol=1e-5)
        for number in range(count):
            above, below = ([v + s * (n == number) for n, v in enumerate(y)] for s in (1e-5, -1e-5))
            np.testing.assert_allclose(own[number], (loss(above) - loss(below)) / 2e-5, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_slopes_times_that_of_their_session() -> None:
    dloss = np.array([2, 7, 5, -1], np.float32)
    [found] = run_operator("LambdaRankNdcgGradient", [Y, LENGTHS, Y * 3, dloss])
    np.testing.assert_array_equal(found, Y * 3 * np.repeat(dloss, LENGTHS))
    definition = operator_def("LambdaRankNdcg", ["y", "r", "lengths"], ["loss", "dy"])
    [made] = gradient(definition, ["loss_grad", None], wanted=[0]).operators
    assert list(made.input) == ["y", "lengths", "dy", "loss_grad"]
    with pytest.raises(GradientError):
        gradient(definition, ["loss_grad", "dy_grad"], wanted=[0])


def test_sessions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OperatorError, match="a rating for each score"):
        run_operator("LambdaRankNdcg", [Y, R[:-1], LENGTHS], 2)
