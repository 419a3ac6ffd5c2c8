"""Updates that divide the gradient by a running size of it: Adagrad, Adadelta, RmsProp."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.ops.families.optimize.update import DenseUpdate, Parts, Piece, Rule, update_operator

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
        self._epsilon = self.number(self.argument("epsilon", 1e-5, 0, math.inf))
        self._decays = arguments.float("decay", 1.0) != 1.0
        self._decay = self.number(self.argument("decay", 1.0, 0, math.inf, open_ends="high"))

    def apply(self, piece: Piece) -> None:
        """The formulas of the class."""
        assert piece.param is not None
        (squares,), (work,) = piece.state, piece.scratch
        if self._decays:
            np.multiply(squares, self._decay, out=squares)
        np.multiply(piece.grad, piece.grad, out=work)
        np.add(squares, work, out=squares)
        np.sqrt(squares, out=work)
        np.add(work, self._epsilon, out=work)
        np.divide(self.rate, work, out=work)
        piece.give(0, work)
        np.multiply(work, piece.grad, out=work)
        piece.give(1, work)
        np.add(piece.param, work, out=piece.param)


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

    scratch = 2

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a negative epsilon, and a decay outside (0, 1)."""
        super().__init__(arguments, dtype, label)
        decay = self.argument("decay", 0.95, 0, 1, open_ends="low high")
        self._epsilon = self.number(self.argument("epsilon", 1e-5, 0, math.inf))
        self._decay, self._rest = self.number(decay), self.number(1.0 - decay)

    def apply(self, piece: Piece) -> None:
        """The formulas of the class."""
        assert piece.param is not None
        (squares, steps), (work, step) = piece.state, piece.scratch
        self._mean(squares, piece.grad, work)
        np.add(squares, self._epsilon, out=work)
        np.sqrt(work, out=work)
        np.add(steps, self._epsilon, out=step)
        np.sqrt(step, out=step)
        np.divide(step, work, out=step)
        np.multiply(step, piece.grad, out=step)
        self._mean(steps, step, work)
        np.multiply(step, self.rate, out=step)
        np.add(piece.param, step, out=piece.param)

    def _mean(
        self, mean: npt.NDArray[np.float64], value: npt.NDArray[np.float64], work: npt.NDArray[np.float64]
    ) -> None:
        np.multiply(mean, self._decay, out=mean)
        np.multiply(value, value, out=work)
        np.multiply(work, self._rest, out=work)
        np.add(mean, work, out=mean)


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
        self._rest = self.number(1.0 - self.argument("decay", 0.9, 0, 1))
        self._momentum = self.number(self.argument("momentum", 0.0, 0, math.inf, open_ends="high"))
        self._epsilon = self.number(self.argument("epsilon", 1e-5, 0, math.inf))

    def apply(self, piece: Piece) -> None:
        """The formulas of the class."""
        (squares, momentum), (work,) = piece.state, piece.scratch
        np.multiply(piece.grad, piece.grad, out=work)
        np.subtract(work, squares, out=work)
        np.multiply(work, self._rest, out=work)
        np.add(squares, work, out=squares)
        np.add(squares, self._epsilon, out=work)
        np.sqrt(work, out=work)
        np.divide(piece.grad, work, out=work)
        np.multiply(work, self.rate, out=work)
        np.multiply(momentum, self._momentum, out=momentum)
        np.add(momentum, work, out=momentum)
        piece.give(0, momentum)


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
