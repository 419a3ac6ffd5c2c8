"""FTRL-Proximal: updates with L1 regularization, which leave parameters at exactly 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.expressions import Expression, clip, maximum, sqrt, square
from dagexec.ops.families.optimize.update import Changed, DenseUpdate, Parts, Rule, Shape, update_operator

FTRL_ARGS = {
    "alpha": "the learning rate, above 0 (default 0.005)",
    "beta": "smooths the learning rate at first (default 1)",
    "lambda1": "strength of L1 regularization (default 0.001)",
    "lambda2": "strength of L2 regularization (default 0.001)",
}
FTRL_DOC = (
    "FTRL-Proximal: n' = n + g^2; z' = z + g - (sqrt(n') - sqrt(n)) / alpha * param; param' = 0 where |z'| <= lambda1, "
    "else (lambda1 sign(z') - z') / ((beta + sqrt(n')) / alpha + lambda2). n_z holds n and z side by side, as a last "
    'axis of 2. McMahan et al., 2013, "Ad click prediction", algorithm 1.'
)


class FtrlRule(Rule):
    """The formulas of operator Ftrl."""

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for an alpha that is not above 0, and another argument that is negative."""
        super().__init__(arguments, dtype, label)
        self.default_rate = self.argument("alpha", 0.005, 0, math.inf, open_ends="low high")
        self._beta = self.argument("beta", 1.0, 0, math.inf)
        self._strength1 = self.argument("lambda1", 0.001, 0, math.inf)
        self._strength2 = self.argument("lambda2", 0.001, 0, math.inf)

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        """z is clipped to [-lambda1, lambda1] and taken off itself, which is 0 where the parameter must be.

        The divisor is 0 only where no gradient came yet and beta and lambda2 are 0; there z is 0, too.
        """
        before, z = state
        squares = before + square(grad)
        root = sqrt(squares)
        z = z + grad - (root - sqrt(before)) / self.rate * param
        divisor = maximum((root + self._beta) / self.rate + self._strength2, float(np.finfo(self.dtype).tiny))
        return Changed((clip(z, -self._strength1, self._strength1) - z) / divisor, (squares, z))


def ftrl_state(param: Shape) -> Sequence[Shape]:
    """The shape of n_z: a pair for each element of the parameter."""
    return [(*param, 2)]


@update_operator(
    "Ftrl",
    FTRL_DOC,
    inputs=("param", "n_z", "grad", "alpha"),
    outputs=("param", "n_z"),
    least_inputs=3,
    args=FTRL_ARGS,
    flops=8,
)
class Ftrl(DenseUpdate):
    """FTRL on a dense gradient."""

    parts = Parts(grad=2, param=0, state=(1,), rate=3, updated={0: 0, 1: 1})
    rule = FtrlRule

    @classmethod
    def state_shapes(cls, param: Shape) -> Sequence[Shape]:
        return ftrl_state(param)
