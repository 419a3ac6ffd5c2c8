"""Gradient descent with momentum: MomentumSGD, and MomentumSGDUpdate, which also changes the parameter."""

from __future__ import annotations

import math

import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.expressions import Expression
from dagexec.ops.families.optimize.update import Changed, DenseUpdate, Parts, Rule, update_operator

MOMENTUM_ARGS = {
    "momentum": "factor of the momentum from step to step (default 0)",
    "nesterov": "1: Nesterov's look-ahead (default 0)",
}


class MomentumRule(Rule):
    """m' = rate * g + momentum * m; the step is m', with Nesterov (1 + momentum) * m' - momentum * m.

    The step goes to the extra output and is taken off the parameter. Sutskever et al., 2013, give Nesterov's form.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a momentum that is negative or infinite."""
        super().__init__(arguments, dtype, label)
        self._momentum = self.argument("momentum", 0.0, 0.0, math.inf, open_ends="high")
        self._nesterov = arguments.bool("nesterov")

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        kept = state[0] * self._momentum
        step = momentum = grad * self.rate + kept
        if self._nesterov:
            step = momentum * (1.0 + self._momentum) - kept
        return Changed(param - step, (momentum,), (step,))


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
