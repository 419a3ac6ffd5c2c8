"""Adam."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.ops.families.optimize.update import Array, DenseUpdate, Parts, Piece, Rule, update_operator

_BETAS = (("beta1", 0.9), ("beta2", 0.999))

ADAM_ARGS = {
    "beta1": "decay of the first moment (default 0.9)",
    "beta2": "decay of the second moment (default 0.999)",
    "epsilon": "added to the root of the second moment (default 1e-5)",
}


class AdamRule(Rule):
    """m' = beta1 m + (1 - beta1) g; v' = beta2 v + (1 - beta2) g^2; step = c m' / (sqrt(v') + epsilon).

    With t = iteration + 1, c = sqrt(1 - beta2^t) / (1 - beta1^t); the step goes to the extra output, and rate * step is
    added to the parameter. Kingma and Ba, 2015, arXiv:1412.6980, section 2, in its form with one correction. With
    `decoupled_weight_decay` d, the parameter is first multiplied by 1 + rate * d (the rate is negative): Loshchilov and
    Hutter, 2019, arXiv:1711.05101.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a beta outside [0, 1), and for a negative epsilon or decay."""
        super().__init__(arguments, dtype, label)
        self._betas = [self.argument(name, default, 0, 1, open_ends="high") for name, default in _BETAS]
        (self._beta1, self._rest1), (self._beta2, self._rest2) = [
            (self.number(beta), self.number(1.0 - beta)) for beta in self._betas
        ]
        self._epsilon = self.number(self.argument("epsilon", 1e-5, 0, math.inf))
        self._decay = self.argument("decoupled_weight_decay", 0.0, 0, math.inf)
        self._kept = self.number(1.0)
        self._correction = self.number(1.0)

    @property
    def numbers(self) -> tuple[Array, ...]:
        """beta1, 1 - beta1, beta2, 1 - beta2, epsilon, c, rate, and the factor of the parameter, as `begin` sets them.

        An array of no axes each.
        """
        moments = (self._beta1, self._rest1, self._beta2, self._rest2)
        return (*moments, self._epsilon, self._correction, self.rate, self._kept)

    def begin(self, rate: float, iteration: int) -> None:
        """The correction of the moments' bias."""
        super().begin(rate, iteration)
        self._kept[...] = 1.0 + rate * self._decay
        beta1, beta2 = self._betas
        self.correct(iteration + 1, 1.0 - beta1 ** (iteration + 1), 1.0 - beta2 ** (iteration + 1))

    def correct(self, step: int, bias1: float, bias2: float) -> None:
        """Set the factors of step number `step` (from 1), given what the moments are short by: 1 - beta^step."""
        self._correction[...] = math.sqrt(bias2) / bias1

    def moments(self, piece: Piece) -> None:
        """Change the two moments."""
        (first, second), (work, *_) = piece.state, piece.scratch
        np.multiply(first, self._beta1, out=first)
        np.multiply(piece.grad, self._rest1, out=work)
        np.add(first, work, out=first)
        np.multiply(second, self._beta2, out=second)
        np.multiply(piece.grad, piece.grad, out=work)
        np.multiply(work, self._rest2, out=work)
        np.add(second, work, out=second)

    def step(self, piece: Piece) -> None:
        """Put the step into scratch 0."""
        (first, second), (work, *_) = piece.state, piece.scratch
        np.sqrt(second, out=work)
        np.add(work, self._epsilon, out=work)
        np.divide(first, work, out=work)
        np.multiply(work, self._correction, out=work)

    def apply(self, piece: Piece) -> None:
        """The formulas of the class."""
        assert piece.param is not None
        param, work = piece.param, piece.scratch[0]
        self.moments(piece)
        self.step(piece)
        piece.give(0, work)
        np.multiply(work, self.rate, out=work)
        if self._decay:
            np.multiply(param, self._kept, out=param)
        np.add(param, work, out=param)


ADAM_DOC = (
    "Adam, for a negative rate: m' = beta1 m + (1 - beta1) g; v' = beta2 v + (1 - beta2) g^2; step = c m' / "
    "(sqrt(v') + epsilon) with c = sqrt(1 - beta2^t) / (1 - beta1^t), t = iteration + 1; param' = param + rate * step. "
    "Kingma and Ba, 2015, arXiv:1412.6980."
)


class RectifiedAdamRule(AdamRule):
    """With argument `enableRAdam`, the variance of the step is rectified; else Adam.

    Step number t with r = 2 / (1 - beta2) - 1 and q = r - 2 t beta2^t / (1 - beta2^t): where q < 5 the step is
    m' / (1 - beta1^t); else Adam's times sqrt((q - 4) (q - 2) r / ((r - 4) (r - 2) q)). Liu et al., 2020,
    arXiv:1908.03265, algorithm 2, with the limit 5 of its authors' program, which Caffe2 has, too.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a beta2 whose variance cannot be rectified: 0.6 or less."""
        super().__init__(arguments, dtype, label)
        self._rectifies = arguments.bool("enableRAdam")
        self._plain = False
        if self._rectifies:
            self.argument("beta2", 0.999, 0.6, 1, open_ends="low high")

    def correct(self, step: int, bias1: float, bias2: float) -> None:
        """The factor of the rectified step."""
        self._plain = False
        super().correct(step, bias1, bias2)
        if not self._rectifies:
            return
        beta2 = self._betas[1]
        limit = 2.0 / (1.0 - beta2) - 1.0
        length = limit - 2.0 * step * (1.0 - bias2) / bias2
        self._plain = length < 5.0
        if self._plain:
            self._correction[...] = 1.0 / bias1
            return
        kept = (length - 4.0) * (length - 2.0) * limit
        self._correction[...] = math.sqrt(bias2) / bias1 * math.sqrt(kept / ((limit - 4.0) * (limit - 2.0) * length))

    def step(self, piece: Piece) -> None:
        """Adam's step, or the first moment's."""
        if self._plain:
            np.multiply(piece.state[0], self._correction, out=piece.scratch[0])
        else:
            super().step(piece)


@update_operator(
    "Adam",
    ADAM_DOC,
    inputs=("param", "moment_1", "moment_2", "grad", "rate", "iteration"),
    outputs=("param", "moment_1", "moment_2", "step"),
    least_outputs=3,
    args=ADAM_ARGS
    | {"decoupled_weight_decay": "d: param is multiplied by 1 + rate * d first, as in AdamW (default 0)"},
    flops=5,
)
class Adam(DenseUpdate):
    """Adam on a dense gradient."""

    parts = Parts(grad=3, param=0, state=(1, 2), rate=4, iteration=5, updated={0: 0, 1: 1, 2: 2}, extras=(3,))
    rule = AdamRule
