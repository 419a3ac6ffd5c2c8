"""FTRL-Proximal: updates with L1 regularization, which leave parameters at exactly 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.ops.families.optimize.update import DenseUpdate, Parts, Piece, Rule, Shape, update_operator

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

    scratch = 2

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for an alpha that is not above 0, and another argument that is negative."""
        super().__init__(arguments, dtype, label)
        self.default_rate = self.argument("alpha", 0.005, 0, math.inf, open_ends="low high")
        self._beta = self.number(self.argument("beta", 1.0, 0, math.inf))
        self._strength1 = self.number(self.argument("lambda1", 0.001, 0, math.inf))
        self._negative1 = -self._strength1
        self._strength2 = self.number(self.argument("lambda2", 0.001, 0, math.inf))
        self._tiny = self.number(float(np.finfo(dtype).tiny))

    def apply(self, piece: Piece) -> None:
        """z is clipped to [-lambda1, lambda1] and taken off itself, which is 0 where the parameter must be.

        The divisor is 0 only where no gradient came yet and beta and lambda2 are 0; there z is 0, too.
        """
        assert piece.param is not None
        param, grad, (work, divisor) = piece.param, piece.grad, piece.scratch
        pairs = piece.state[0].reshape(*param.shape, 2)
        squares, z = pairs[..., 0], pairs[..., 1]
        np.sqrt(squares, out=work)
        np.multiply(grad, grad, out=divisor)
        np.add(squares, divisor, out=squares)
        np.sqrt(squares, out=divisor)
        np.subtract(divisor, work, out=work)
        np.divide(work, self.rate, out=work)
        np.multiply(work, param, out=work)
        np.add(z, grad, out=z)
        np.subtract(z, work, out=z)
        np.add(divisor, self._beta, out=divisor)
        np.divide(divisor, self.rate, out=divisor)
        np.add(divisor, self._strength2, out=divisor)
        np.maximum(divisor, self._tiny, out=divisor)
        np.clip(z, self._negative1, self._strength1, out=work)
        np.subtract(work, z, out=work)
        np.divide(work, divisor, out=param)


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
