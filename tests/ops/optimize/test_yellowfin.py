"""YellowFin against the paper's algorithms written for single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, DagexecError, ShapeError
from tests.ops.optimize.updating import DEVICES, Array, counter, run_steps

NAMES = ["param", "moment", "lr", "mu", "window", "mean", "mean2", "scalars"]


class Reference:
    """One parameter, its statistics as in arXiv:1706.03471, all in Python's floats."""

    def __init__(self, param: Array, rate: float, factor: float, beta: float, width: int, least: float) -> None:
        self.param = [float(value) for value in param.reshape(-1)]
        count = len(self.param)
        self.moment, self.mean, self.mean2 = [0.0] * count, [0.0] * count, [0.0] * count
        self.rate, self.factor, self.beta, self.width, self.least = rate, factor, beta, width, least
        self.logs: list[float] = []
        self.kept = dict.fromkeys(["norm", "square", "low", "high", "distance"], 0.0)
        self.time = 0

    def step(self, grad: Array, nesterov: bool, debias: bool) -> None:
        """One run."""
        self.time += 1
        slopes = [float(value) for value in grad.reshape(-1)]
        for k, slope in enumerate(slopes):
            old = self.moment[k]
            self.moment[k] = self.factor * old + self.rate * slope
            self.param[k] -= self.moment[k] + (self.factor * (self.moment[k] - old) if nesterov else 0)
            self.mean[k] = self.blend(self.mean[k], slope)
            self.mean2[k] = self.blend(self.mean2[k], slope * slope)
        right = 1 / (1 - self.beta**self.time) if debias else 1.0
        square = max(self.least, sum(slope * slope for slope in slopes))
        self.logs = [*self.logs, math.log(square)][-self.width :]
        for name, value in {
            "norm": square**0.5, "square": square, "low": min(self.logs), "high": max(self.logs)
        }.items():  # fmt: skip
            self.kept[name] = self.blend(self.kept[name], value)
        self.kept["distance"] = self.blend(self.kept["distance"], self.kept["norm"] / self.kept["square"])
        if self.time == 1:
            return
        low = max(math.exp(self.kept["low"] * right), self.least)
        high = max(math.exp(self.kept["high"] * right), self.least)
        noise = self.kept["square"] * right - sum((mean * right) ** 2 for mean in self.mean)
        best = self.solve(low, high, max(noise, self.least), self.kept["distance"] * right)
        self.factor = self.blend(self.factor, best)
        self.rate = self.blend(self.rate, (1 - math.sqrt(best)) ** 2 / low)

    def blend(self, old: float, new: float) -> float:
        """A running mean."""
        return self.beta * old + (1 - self.beta) * new

    @staticmethod
    def solve(low: float, high: float, noise: float, distance: float) -> float:
        """The root x in [0, 1) of p x = (1 - x)^3, squared, by bisection."""
        p = (distance * low) ** 2 / (2 * noise)
        left, right = 0.0, 1.0
        for _ in range(200):
            middle = (left + right) / 2
            left, right = (middle, right) if p * middle < (1 - middle) ** 3 else (left, middle)
        ratio = math.sqrt(high / low)
        return max(left**2, ((ratio - 1) / (ratio + 1)) ** 2)


def blobs(param: Array, rate: float, factor: float, width: int) -> dict[str, Array]:
    """The first values of all inputs but the gradient and the iteration."""
    dtype = param.dtype
    return {
        "param": param, "moment": np.zeros_like(param), "lr": np.array([rate], dtype), "mu": np.array([factor], dtype),
        "window": np.zeros(width, dtype), "mean": np.zeros_like(param), "mean2": np.zeros_like(param),
        "scalars": np.zeros(5, dtype),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("debias", [0, 1])
@pytest.mark.parametrize("apart", [False, True])
def test_it_tunes_rate_and_momentum_as_the_paper_says(nesterov: int, debias: int, device: str, apart: bool) -> None:
    rng = np.random.default_rng(3)
    param, steps, width = rng.standard_normal((2, 3)), 1 if apart else 9, 4
    grads = [rng.standard_normal((2, 3)) * (1 + k) for k in range(steps)]
    reference = Reference(param, 0.125, 0.25, 0.75, width, 2.0**-20)
    for grad in grads:
        reference.step(grad, bool(nesterov), bool(debias))
    fed = [{"grad": grad, "iteration": counter(k)} for k, grad in enumerate(grads, 1)]
    outputs = [f"new_{name}" for name in NAMES] if apart else NAMES
    found = run_steps(
        "YellowFin", [*NAMES, "grad", "iteration"], outputs, {**blobs(param, 0.125, 0.25, width), **fed[0]}, fed,
        device=device, beta=0.75, curv_win_width=width, epsilon=2.0**-20, nesterov=nesterov, zero_debias=debias,
    )  # fmt: skip
    result = dict(zip(NAMES, found.values(), strict=True))
    for name, expected in {
        "param": reference.param, "moment": reference.moment, "mean": reference.mean, "mean2": reference.mean2,
        "lr": [reference.rate], "mu": [reference.factor],
        "scalars": [reference.kept[key] for key in ("norm", "square", "low", "high", "distance")],
    }.items():  # fmt: skip
        np.testing.assert_allclose(result[name].reshape(-1), expected, rtol=1e-8, atol=1e-8, err_msg=name)
    assert sorted(result["window"][: len(reference.logs)]) == pytest.approx(sorted(reference.logs))


def test_float32_follows_float64() -> None:
    rng = np.random.default_rng(4)
    grads = [rng.standard_normal(40_000) for _ in range(3)]
    results = []
    for dtype in (np.float32, np.float64):
        fed = [{"grad": grad.astype(dtype), "iteration": counter(k)} for k, grad in enumerate(grads, 1)]
        first = {**blobs(np.ones(40_000, dtype), 0.1, 0.0, 20), **fed[0]}
        results.append(run_steps("YellowFin", [*NAMES, "grad", "iteration"], NAMES, first, fed))
    for name in NAMES:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_what_does_not_fit_is_refused() -> None:
    param = np.ones(3, np.float32)
    first = {**blobs(param, 0.1, 0.0, 20), "grad": param, "iteration": counter(0)}
    names = [*NAMES, "grad", "iteration"]
    with pytest.raises(DagexecError, match="the iteration must be at least 1, found 0"):
        run_steps("YellowFin", names, NAMES, first, [{}])
    with pytest.raises(ShapeError, match=r"must have shape \(7,\) \(the window\), found \(20,\)"):
        run_steps("YellowFin", names, NAMES, first, [{}], curv_win_width=7)
    with pytest.raises(ArgumentError, match="'curv_win_width' must be at least 1, found 0"):
        run_steps("YellowFin", names, NAMES, first, [{}], curv_win_width=0)
    with pytest.raises(ArgumentError, match=r"'beta' must be in \[0, 1\), found 1"):
        run_steps("YellowFin", names, NAMES, first, [{}], beta=1.0)
    with pytest.raises(ShapeError, match="that of the parameter"):
        run_steps("YellowFin", names, NAMES, {**first, "grad": np.ones(4, np.float32)}, [{}])
