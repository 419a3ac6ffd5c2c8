"""Cross entropy of logits under the logistic function: SigmoidCrossEntropyWithLogits, plain and weighted.

With s(x) = ln(1 + exp(x)), which is max(x, 0) + ln(1 + exp(-|x|)) and so neither overflows nor loses its small values,
the logarithms of the likelihood of target t are

    t x - s(x)                  as it is usual
    (2 t - 1) (x - s(x))        log_D_trick: Goodfellow et al., 2014, arXiv:1406.2661, section 3
    t x - (1 - t) s(x)          unjoined_lr_loss: an example with t = 1 has come with t = 0 before

and the loss of a row is minus their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.passes import scalar_pass, sigmoid_passes
from dagexec.ops.families.loss.rows import (
    RowGradient,
    RowLoss,
    Shape,
    all_but_last,
    row_gradient_operator,
    row_loss_operator,
)

ARGUMENTS = {
    "log_D_trick": "1: (2 t - 1) (x - ln(1 + exp(x))) (default 0)",
    "unjoined_lr_loss": "1: t x - (1 - t) ln(1 + exp(x)) (default 0)",
}


def check_form(call: OperatorCall) -> None:
    """Raise ArgumentError when both forms are requested."""
    if call.arguments.bool("log_D_trick") and call.arguments.bool("unjoined_lr_loss"):
        raise ArgumentError(f"{call.label}: 'log_D_trick' and 'unjoined_lr_loss' cannot both be 1")


def softplus_tail_passes(x: Array, out: Array) -> list[Step]:
    """The passes `out = ln(1 + exp(-|x|))`."""
    return [
        partial(np.absolute, x, out=out),
        partial(np.negative, out, out=out),
        partial(np.exp, out, out=out),
        partial(np.log1p, out, out=out),
    ]


class _SigmoidLoss(RowLoss):
    """Minus the mean over the last axis of the logarithm of the likelihood, times weights if there are any."""

    @staticmethod
    def rows(shape: Shape) -> Shape:
        """A row is along the last axis."""
        return all_but_last(shape)

    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        """The logarithms, then their mean."""
        x, target, *weights = sources
        logarithm, spare = scratch(0, x.shape), scratch(1, x.shape)
        steps = self.logarithm_passes(x, target, logarithm, spare)
        steps += [partial(np.multiply, logarithm, weight, out=logarithm) for weight in weights]
        return [
            *steps,
            partial(np.add.reduce, logarithm, axis=1, out=z),
            scalar_pass(np.divide, z, -max(1, x.shape[1]), z),
        ]

    def logarithm_passes(self, x: Array, target: Array, out: Array, spare: Array) -> list[Step]:
        """One of the three forms."""
        tail = softplus_tail_passes(x, out)
        if self.arguments.bool("log_D_trick"):
            return [
                *tail,
                scalar_pass(np.minimum, x, 0.0, spare),
                partial(np.subtract, spare, out, out=out),
                scalar_pass(np.multiply, target, 2.0, spare),
                scalar_pass(np.subtract, spare, 1.0, spare),
                partial(np.multiply, out, spare, out=out),
            ]
        if self.arguments.bool("unjoined_lr_loss"):
            return [
                *tail,
                scalar_pass(np.maximum, x, 0.0, spare),
                partial(np.add, out, spare, out=out),
                scalar_pass(np.subtract, target, 1.0, spare),
                partial(np.multiply, out, spare, out=out),
                partial(np.multiply, target, x, out=spare),
                partial(np.add, out, spare, out=out),
            ]
        return [
            *tail,
            scalar_pass(np.greater, x, 0.0, spare),
            partial(np.subtract, target, spare, out=spare),
            partial(np.multiply, spare, x, out=spare),
            partial(np.subtract, spare, out, out=out),
        ]


class _SigmoidGradient(RowGradient):
    """The gradient by the logits; targets and weights have none."""

    @staticmethod
    def rows(shape: Shape) -> Shape:
        """A row is along the last axis."""
        return all_but_last(shape)

    gradient = 0

    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        """-dZ / members * weight * the derivative of the logarithm."""
        x, target, *weights = sources
        [dx] = targets
        factor = scratch(1, dz.shape)
        return [
            *self.derivative_passes(x, target, dx, scratch(0, x.shape)),
            *(partial(np.multiply, dx, weight, out=dx) for weight in weights),
            scalar_pass(np.divide, dz, -max(1, x.shape[1]), factor),
            partial(np.multiply, dx, factor, out=dx),
        ]

    def derivative_passes(self, x: Array, target: Array, out: Array, spare: Array) -> list[Step]:
        """Of the three forms, with g the logistic function: (2 t - 1) g(-x), t - (1 - t) g(x), or t - g(x)."""
        if self.arguments.bool("log_D_trick"):
            return [
                partial(np.negative, x, out=spare),
                *sigmoid_passes(spare, out),
                scalar_pass(np.multiply, target, 2.0, spare),
                scalar_pass(np.subtract, spare, 1.0, spare),
                partial(np.multiply, out, spare, out=out),
            ]
        steps = sigmoid_passes(x, out)
        if self.arguments.bool("unjoined_lr_loss"):
            steps += [scalar_pass(np.subtract, target, 1.0, spare), partial(np.multiply, out, spare, out=out)]
            return [*steps, partial(np.add, out, target, out=out)]
        return [*steps, partial(np.subtract, target, out, out=out)]


@row_loss_operator(
    "SigmoidCrossEntropyWithLogits",
    ("logits", "targets"),
    "Minus the mean over the last axis of t ln g(x) + (1 - t) ln(1 - g(x)), g the logistic function; arguments "
    "choose other forms.",
    rows=all_but_last,
    args=ARGUMENTS,
    check=check_form,
)
class SigmoidCrossEntropyWithLogits(_SigmoidLoss):
    """Cross entropy of logits and targets."""


@row_gradient_operator(
    "SigmoidCrossEntropyWithLogitsGradient",
    ("dZ", "logits", "targets"),
    ("dlogits",),
    rows=all_but_last,
    gradient=0,
    args=ARGUMENTS,
    check=check_form,
)
class SigmoidCrossEntropyWithLogitsGradient(_SigmoidGradient):
    """The gradient of SigmoidCrossEntropyWithLogits."""


@row_loss_operator(
    "WeightedSigmoidCrossEntropyWithLogits",
    ("logits", "targets", "weights"),
    "SigmoidCrossEntropyWithLogits with a weight for each element.",
    rows=all_but_last,
)
class WeightedSigmoidCrossEntropyWithLogits(_SigmoidLoss):
    """Cross entropy of logits and targets, weighted."""


@row_gradient_operator(
    "WeightedSigmoidCrossEntropyWithLogitsGradient",
    ("dZ", "logits", "targets", "weights"),
    ("dlogits",),
    rows=all_but_last,
    gradient=0,
)
class WeightedSigmoidCrossEntropyWithLogitsGradient(_SigmoidGradient):
    """The gradient of WeightedSigmoidCrossEntropyWithLogits."""


@gradient_of("SigmoidCrossEntropyWithLogits", "WeightedSigmoidCrossEntropyWithLogits")
def sigmoid_cross_entropy_gradient(request: GradientRequest) -> GradientOperators:
    """<type>Gradient(dZ, logits, targets, [weights]) -> dlogits."""
    return request.single(f"{request.definition.type}Gradient", [request.dy(0), *request.definition.input], [0])
