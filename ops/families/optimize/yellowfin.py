"""YellowFin: momentum whose learning rate and factor follow from running statistics of the gradient.

Zhang and Mitliagkas, 2017, arXiv:1706.03471, algorithms 1 to 4, with what Caffe2's operator does where they are open:
each parameter has its own rate and factor, the window holds logarithms of squared norms, and the update of a run uses
the rate and the factor of the run before.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, memory_cost, one_to_one
from dagexec.errors import ArgumentError
from dagexec.ops.families.optimize.scalars import read_iteration, require_iteration
from dagexec.ops.families.optimize.update import PIECE

SCALARS = 5
"""Running means that are one number: of the norm, its square, the window's minimum and maximum, the distance."""


def infer_yellowfin(call: OperatorCall) -> list[TensorType]:
    """The types of the first eight inputs."""
    param = call.inputs[0].shape
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type(*range(9))
    width = call.arguments.int("curv_win_width", 20)
    if width < 1:
        raise ArgumentError(f"{call.label}: argument 'curv_win_width' must be at least 1, found {width}")
    for name, default in (("beta", 0.999), ("epsilon", 1e-6)):
        value = call.arguments.float(name, default)
        if not 0 <= value < 1:
            raise ArgumentError(f"{call.label}: argument {name!r} must be in [0, 1), found {value:g}")
    for index in (1, 5, 6, 8):
        call.require_shape(index, param, "that of the parameter")
    for index, size, why in ((2, 1, "one rate"), (3, 1, "one factor"), (4, width, "the window"), (7, SCALARS, "means")):
        call.require_shape(index, (size,), why)
    require_iteration(call, 9)
    return list(call.inputs[:8])


@new_operator(
    "YellowFin",
    infer=infer_yellowfin,
    doc="Momentum with a rate and a factor tuned for the parameter: m' = mu m + lr g; param' = param - m', "
    "with nesterov param - (1 + mu) m' + mu m; then lr and mu for the next run. The iteration counts from 1. "
    "Zhang and Mitliagkas, 2017, arXiv:1706.03471.",
    input_names=(
        "param",
        "moment",
        "lr",
        "mu",
        "curv_win",
        "g_avg",
        "g2_avg",
        "scalars_memory",
        "grad",
        "iteration",
    ),
    output_names=("param", "moment", "lr", "mu", "curv_win", "g_avg", "g2_avg", "scalars_memory"),
    args={
        "beta": "decay of the running means (default 0.999)",
        "curv_win_width": "steps over which the range of curvatures is taken (default 20)",
        "epsilon": "keeps divisors away from 0 (default 1e-6)",
        "nesterov": "1: Nesterov's look-ahead (default 0)",
        "zero_debias": "1: running means are corrected for starting at 0 (default 1)",
    },
    inplace=one_to_one,
    cost=lambda call, outputs: memory_cost(call, outputs, 6),
)
class YellowFin(Operator):
    """Self-tuning momentum."""

    def prepare(self) -> Step:
        """The update and the statistics of the tensors piece by piece, then those that are one number, in float64."""
        names = self.definition
        copies = [(self.y(k), self.x(k)) for k in range(8) if names.input[k] != names.output[k]]
        param, moment, mean, mean_square = (self.y(k).reshape(-1) for k in (0, 1, 5, 6))
        rate, factor, window, scalars = (self.y(k).reshape(-1) for k in (2, 3, 4, 7))
        grad, counter, label = self.x(8).reshape(-1), self.x(9).reshape(-1), self.label
        work = self.scratch((min(grad.size, PIECE),), grad.dtype)
        tuner = Tuner(
            self.arguments.float("beta", 0.999),
            self.arguments.float("epsilon", 1e-6),
            self.arguments.bool("zero_debias", True),
        )
        nesterov = self.arguments.bool("nesterov")
        cuts = [slice(start, min(start + PIECE, grad.size)) for start in range(0, grad.size, PIECE)]
        pieces = [
            Tensors(param[cut], moment[cut], mean[cut], mean_square[cut], grad[cut], work[: cut.stop - cut.start])
            for cut in cuts
        ]

        def update() -> None:
            iteration = first_iteration(counter, label)
            for target, source in copies:
                np.copyto(target, source)
            squares = debiased = 0.0
            for piece in pieces:
                piece.move(rate.item(), factor.item(), nesterov)
                squares += piece.average(tuner.beta)
                debiased += piece.mean_square_norm()
            tuner.tune(iteration, squares, debiased, window, scalars, rate, factor)

        return update


def first_iteration(counter: Array, label: str) -> int:
    """The value of a one-element counter. Raises ValueError, naming the operator, when it is below 1."""
    iteration = read_iteration(counter, label)
    if iteration == 0:
        raise ValueError(f"{label}: the iteration must be at least 1, found 0: increment the counter first")
    return iteration


class Tensors:
    """A piece of the parameter and of what is kept for it."""

    def __init__(self, param: Array, moment: Array, mean: Array, mean_square: Array, grad: Array, work: Array) -> None:
        """Views of one length."""
        self._param, self._moment, self._grad, self._work = param, moment, grad, work
        self._mean, self._mean_square = mean, mean_square

    def move(self, rate: float, factor: float, nesterov: bool) -> None:
        """Change the momentum and the parameter."""
        param, moment, work = self._param, self._moment, self._work
        if nesterov:
            np.multiply(moment, factor, out=work)
            np.add(param, work, out=param)
        np.multiply(moment, factor, out=moment)
        np.multiply(self._grad, rate, out=work)
        np.add(moment, work, out=moment)
        np.multiply(moment, 1.0 + factor if nesterov else 1.0, out=work)
        np.subtract(param, work, out=param)

    def average(self, beta: float) -> float:
        """Change the running means of the gradient and its square; the sum of its squares."""
        work = self._work
        np.multiply(self._mean, beta, out=self._mean)
        np.multiply(self._grad, 1.0 - beta, out=work)
        np.add(self._mean, work, out=self._mean)
        np.multiply(self._grad, self._grad, out=work)
        total = float(np.sum(work, dtype=np.float64))
        np.multiply(self._mean_square, beta, out=self._mean_square)
        np.multiply(work, 1.0 - beta, out=work)
        np.add(self._mean_square, work, out=self._mean_square)
        return total

    def mean_square_norm(self) -> float:
        """The squared norm of the running mean of the gradient."""
        np.multiply(self._mean, self._mean, out=self._work)
        return float(np.sum(self._work, dtype=np.float64))


class Tuner:
    """The statistics that are one number, and what follows from them."""

    def __init__(self, beta: float, epsilon: float, zero_debias: bool) -> None:
        """The operator's arguments."""
        self.beta = beta
        self._epsilon = epsilon
        self._zero_debias = zero_debias

    def tune(
        self,
        iteration: int,
        squares: float,
        mean_norm: float,
        window: Array,
        scalars: Array,
        rate: Array,
        factor: Array,
    ) -> None:
        """Change the window, the means, the rate and the factor.

        `squares` is the squared norm of the gradient, `mean_norm` that of its running mean, not corrected.
        """
        correction = 1.0 / (1.0 - self.beta**iteration) if self._zero_debias else 1.0
        least = self._epsilon
        square = max(squares, least)
        window[(iteration - 1) % window.size] = math.log(square)
        seen = window[: min(window.size, iteration)]
        square_mean = self._average(scalars, 1, square)
        norm_mean = self._average(scalars, 0, math.sqrt(square))
        low = max(math.exp(self._average(scalars, 2, float(seen.min())) * correction), least)
        high = max(math.exp(self._average(scalars, 3, float(seen.max())) * correction), least)
        variance = max(square_mean * correction - mean_norm * correction**2, least)
        distance = self._average(scalars, 4, norm_mean / square_mean) * correction
        if iteration > 1:
            momentum = best_momentum(low, high, variance, distance)
            self._average(factor, 0, momentum)
            self._average(rate, 0, (1.0 - math.sqrt(momentum)) ** 2 / low)

    def _average(self, means: Array, place: int, value: float) -> float:
        """Change one running mean; its new value, not corrected."""
        means[place] = self.beta * float(means[place]) + (1.0 - self.beta) * value
        return float(means[place])


def best_momentum(low: float, high: float, variance: float, distance: float) -> float:
    """The factor of momentum for curvatures in [low, high], the gradient's variance and the distance to the optimum.

    The root of the cubic of the paper's appendix D, by Vieta's substitution, but not below what the range of curvatures
    asks for.
    """
    ratio = math.sqrt(high / low)
    limit = (ratio - 1.0) / (ratio + 1.0)
    curvature = distance * low
    p = curvature * curvature / (2.0 * variance)
    cube = (-math.sqrt(p * p + 4.0 / 27.0 * p * p * p) - p) / 2.0
    w = math.copysign(abs(cube) ** (1.0 / 3.0), cube)
    root = (w - p / (3.0 * w) if w else 0.0) + 1.0
    return max(root * root, limit * limit)


not_differentiable("it changes parameters after the gradients are known", "YellowFin")
