"""Gradient descent with momentum: MomentumSGD, and MomentumSGDUpdate, which also changes the parameter."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.ops.families.optimize.update import Array, DenseUpdate, Parts, Piece, Rule, update_operator

MOMENTUM_ARGS = {
    "momentum": "factor of the momentum from step to step (default 0)",
    "nesterov": "1: Nesterov's look-ahead (default 0)",
}


class MomentumRule(Rule):
    """m' = rate * g + momentum * m; the step is m', with Nesterov (1 + momentum) * m' - momentum * m.

    The step goes to the extra output and is taken off the parameter. Sutskever et al., 2013, give Nesterov's form.

    Attributes:
        nesterov: it looks ahead.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a momentum that is negative or infinite."""
        super().__init__(arguments, dtype, label)
        momentum = self.argument("momentum", 0.0, 0.0, math.inf, open_ends="high")
        self._momentum, self._ahead = self.number(momentum), self.number(1.0 + momentum)
        self.nesterov = arguments.bool("nesterov")

    @property
    def numbers(self) -> tuple[Array, ...]:
        """The rate, the factor of the momentum and 1 + that, an array of no axes each."""
        return self.rate, self._momentum, self._ahead

    def apply(self, piece: Piece) -> None:
        """The formulas of the class."""
        (momentum,), (step,) = piece.state, piece.extras
        assert step is not None
        if self.nesterov:
            (kept,) = piece.scratch
            np.multiply(momentum, self._momentum, out=kept)
            np.multiply(piece.grad, self.rate, out=momentum)
            np.add(momentum, kept, out=momentum)
            np.multiply(momentum, self._ahead, out=step)
            np.subtract(step, kept, out=step)
        else:
            np.multiply(momentum, self._momentum, out=momentum)
            np.multiply(piece.grad, self.rate, out=step)
            np.add(step, momentum, out=step)
            np.copyto(momentum, step)
        if piece.param is not None:
            np.subtract(piece.param, step, out=piece.param)


@update_operator(
    "MomentumSGD",
    "The step of gradient descent with momentum, in place of the gradient, for a positive rate: "
    "m' = rate * g + momentum * m; the step is m', with nesterov (1 + momentum) * m' - momentum * m.",
    inputs=("grad", "momentum", "rate"),
    outputs=("step", "momentum"),
    args=MOMENTUM_ARGS,
)
class MomentumSGD(DenseUpdate):
    """The step; the parameter is left to another operator."""

    parts = Parts(grad=0, param=None, state=(1,), rate=2, updated={1: 1}, extras=(0,), overwrites_grad=True)
    rule = MomentumRule


@update_operator(
    "MomentumSGDUpdate",
    "Gradient descent with momentum, for a positive rate: m' = rate * g + momentum * m; the step is m', with nesterov "
    "(1 + momentum) * m' - momentum * m, and param' = param - step.",
    inputs=("grad", "momentum", "rate", "param"),
    outputs=("step", "momentum", "param"),
    args=MOMENTUM_ARGS,
    flops=5,
)
class MomentumSGDUpdate(DenseUpdate):
    """The step, taken."""

    parts = Parts(grad=0, param=3, state=(1,), rate=2, updated={1: 1, 2: 3}, extras=(0,), overwrites_grad=True)
    rule = MomentumRule
