"""Adam."""

from __future__ import annotations

import math

import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.expressions import Expression, select, sqrt, square
from dagexec.ops.families.optimize.update import Changed, DenseUpdate, Parts, Rule, update_operator

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
        self.betas = [self.argument(name, default, 0, 1, open_ends="high") for name, default in _BETAS]
        self.epsilon = self.argument("epsilon", 1e-5, 0, math.inf)
        self._decay = self.argument("decoupled_weight_decay", 0.0, 0, math.inf)
        self._kept, self._correction = self.number("kept"), self.number("correction")

    def begin(self, rate: float, iteration: int) -> None:
        """The correction of the moments' bias."""
        super().begin(rate, iteration)
        self.of_run["kept"][...] = 1.0 + rate * self._decay
        beta1, beta2 = self.betas
        self.correct(iteration + 1, 1.0 - beta1 ** (iteration + 1), 1.0 - beta2 ** (iteration + 1))

    def correct(self, step: int, bias1: float, bias2: float) -> None:
        """Set the factors of step number `step` (from 1), given what the moments are short by: 1 - beta^step."""
        self.of_run["correction"][...] = math.sqrt(bias2) / bias1

    def divisor(self, root: Expression) -> Expression:
        """What the first moment is divided by."""
        return root + self.epsilon

    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        (first, second), (beta1, beta2) = state, self.betas
        first = first * beta1 + grad * (1.0 - beta1)
        second = second * beta2 + square(grad) * (1.0 - beta2)
        step = first / self.divisor(sqrt(second)) * self._correction
        kept = param * self._kept if self._decay else param
        return Changed(kept + step * self.rate, (first, second), (step,))


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
        if self._rectifies:
            self.argument("beta2", 0.999, 0.6, 1, open_ends="low high")
            self._plain = self.number("plain")

    def correct(self, step: int, bias1: float, bias2: float) -> None:
        """The factor of the rectified step."""
        super().correct(step, bias1, bias2)
        if not self._rectifies:
            return
        limit = 2.0 / (1.0 - self.betas[1]) - 1.0
        length = limit - 2.0 * step * (1.0 - bias2) / bias2
        plain, correction = self.of_run["plain"], self.of_run["correction"]
        plain[...] = length < 5.0
        if plain:
            correction[...] = 1.0 / bias1
            return
        kept = (length - 4.0) * (length - 2.0) * limit
        correction[...] = math.sqrt(bias2) / bias1 * math.sqrt(kept / ((limit - 4.0) * (limit - 2.0) * length))

    def divisor(self, root: Expression) -> Expression:
        """Adam's, or 1."""
        divisor = super().divisor(root)
        return select(self._plain > 0, 1.0, divisor) if self._rectifies else divisor


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
