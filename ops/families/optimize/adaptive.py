"""Updates that divide the gradient by a running size of it: Adagrad, Adadelta, RmsProp."""

from __future__ import annotations

import math

import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.expressions import Expression, sqrt, square
from dagexec.ops.families.optimize.update import Changed, DenseUpdate, Parts, Rule, update_operator

EPSILON_ARGS = {"epsilon": "keeps the divisor away from 0 (default 1e-5)"}
ADAGRAD_ARGS = EPSILON_ARGS | {"decay": "factor of the sum of squares from step to step (default 1)"}
ADADELTA_ARGS = EPSILON_ARGS | {"decay": "decay of the two means, above 0 and below 1 (default 0.95)"}


class AdagradRule(Rule):
    """h' = decay h + g^2; param' = param + rate / (sqrt(h') + epsilon) * g. Duchi et al., 2011.

    The extra outputs get the effective rate and the step.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a negative epsilon or decay."""
        super().__init__(arguments, dtype, label)
        self._epsilon = self.argument("epsilon", 1e-5, 0, math.inf)
        self._decay = self.argument("decay", 1.0, 0, math.inf, open_ends="high")

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        squares = state[0] * self._decay + square(grad)
        rate = self.rate / (sqrt(squares) + self._epsilon)
        step = rate * grad
        return Changed(param + step, (squares,), (rate, step))


@update_operator(
    "Adagrad",
    "Adagrad, for a negative rate: h' = decay h + g^2; effective_rate = rate / (sqrt(h') + epsilon); "
    "step = effective_rate * g; param' = param + step. Duchi et al., 2011, JMLR 12.",
    inputs=("param", "moment", "grad", "rate"),
    outputs=("param", "moment", "effective_rate", "step"),
    least_outputs=2,
    args=ADAGRAD_ARGS,
)
class Adagrad(DenseUpdate):
    """Adagrad on a dense gradient."""

    parts = Parts(grad=2, param=0, state=(1,), rate=3, updated={0: 0, 1: 1}, extras=(2, 3))
    rule = AdagradRule


class AdadeltaRule(Rule):
    """h' = decay h + (1 - decay) g^2; s = sqrt(d + epsilon) / sqrt(h' + epsilon) * g; param' = param + rate * s;
    d' = decay d + (1 - decay) s^2. Zeiler, 2012, arXiv:1212.5701, algorithm 1.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a negative epsilon, and a decay outside (0, 1)."""
        super().__init__(arguments, dtype, label)
        self._decay = self.argument("decay", 0.95, 0, 1, open_ends="low high")
        self._epsilon = self.argument("epsilon", 1e-5, 0, math.inf)

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        squares, steps = state
        squares = self._mean(squares, grad)
        step = sqrt(steps + self._epsilon) / sqrt(squares + self._epsilon) * grad
        return Changed(param + step * self.rate, (squares, self._mean(steps, step)))

    def _mean(self, mean: Expression, value: Expression) -> Expression:
        return mean * self._decay + square(value) * (1.0 - self._decay)


@update_operator(
    "Adadelta",
    "Adadelta, for a negative rate: h' = decay h + (1 - decay) g^2; s = sqrt(d + epsilon) / sqrt(h' + epsilon) * g; "
    "param' = param + rate * s; d' = decay d + (1 - decay) s^2. Zeiler, 2012, arXiv:1212.5701.",
    inputs=("param", "moment", "moment_delta", "grad", "rate"),
    outputs=("param", "moment", "moment_delta"),
    args=ADADELTA_ARGS,
    flops=6,
)
class Adadelta(DenseUpdate):
    """Adadelta on a dense gradient."""

    parts = Parts(grad=3, param=0, state=(1, 2), rate=4, updated={0: 0, 1: 1, 2: 2})
    rule = AdadeltaRule


class RmsPropRule(Rule):
    """s' = s + (1 - decay) (g^2 - s); m' = momentum m + rate * g / sqrt(epsilon + s'); the step is m'.

    Tieleman and Hinton, 2012, lecture 6.5 of "Neural networks for machine learning".
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a decay outside [0, 1], and a negative momentum or epsilon."""
        super().__init__(arguments, dtype, label)
        self._rest = 1.0 - self.argument("decay", 0.9, 0, 1)
        self._momentum = self.argument("momentum", 0.0, 0, math.inf, open_ends="high")
        self._epsilon = self.argument("epsilon", 1e-5, 0, math.inf)

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        squares, momentum = state
        squares = squares + (square(grad) - squares) * self._rest
        momentum = momentum * self._momentum + grad / sqrt(squares + self._epsilon) * self.rate
        return Changed(param, (squares, momentum), (momentum,))


@update_operator(
    "RmsProp",
    "The step of RMSProp, in place of the gradient: s' = s + (1 - decay) (g^2 - s); m' = momentum m + rate * g / "
    "sqrt(epsilon + s'); step = m'. Tieleman and Hinton, 2012.",
    inputs=("grad", "mean_squares", "momentum", "rate"),
    outputs=("step", "mean_squares", "momentum"),
    args=EPSILON_ARGS
    | {"decay": "decay of the mean of squares (default 0.9)", "momentum": "factor of the momentum (default 0)"},
    flops=5,
)
class RmsProp(DenseUpdate):
    """The step of RMSProp; the parameter is left to another operator."""

    parts = Parts(
        grad=0, param=None, state=(1, 2), rate=3, updated={1: 1, 2: 2}, extras=(0,), overwrites_grad=True
    )  # fmt: skip
    rule = RmsPropRule
