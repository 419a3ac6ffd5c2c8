"""Logit, the inverse of the logistic function, and ThresholdedRelu, with their gradients."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import mask, select_passes
from dagexec.ops.base.pointwise import Pointwise, clip_pass, pointwise, scalar_pass
from dagexec.ops.base.pointwise_gradient import PointwiseGradient, pointwise_gradient
from dagexec.ops.families.activation.gradient import IntervalGradient

EPSILON = 1e-6
_EPS_ARGS = {"eps": "how near to 0 and 1 X counts, at least 0 and below 0.5 (default 1e-6)"}


def check_eps(call: OperatorCall) -> None:
    """Raise ArgumentError unless 0 <= eps < 0.5."""
    eps = call.arguments.float("eps", EPSILON)
    if not 0 <= eps < 0.5:
        raise ArgumentError(f"{call.label}: argument 'eps' must be in [0, 0.5), found {eps:g}")


@pointwise("Logit", "Y = ln(X / (1 - X)), X clipped to [eps, 1 - eps].", _EPS_ARGS, flops=14, check=check_eps)
class Logit(Pointwise):
    """The x of which the logistic function is X."""

    constants = {"eps": EPSILON}

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """The clipped value over what it lacks of 1, and the logarithm."""
        eps, rest = self.constant("eps"), scratch(0, x.shape)
        return [
            clip_pass(x, eps, 1 - eps, y),
            partial(np.subtract, np.ones((), x.dtype), y, out=rest),
            partial(np.divide, y, rest, out=y),
            partial(np.log, y, out=y),
        ]


@pointwise_gradient("Logit", ("X", "dY"), "dX = dY / (X (1 - X)) where X is in [eps, 1 - eps], else 0.")
class LogitGradient(PointwiseGradient):
    """Gradient of Logit."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The quotient, and a selection."""
        eps, product = self.constant("eps"), scratch(0, value.shape)
        inside, other = mask(scratch, 1, value.shape), mask(scratch, 2, value.shape)
        return [
            partial(np.subtract, np.ones((), value.dtype), value, out=product),
            partial(np.multiply, product, value, out=product),
            partial(np.divide, dy, product, out=dx),
            scalar_pass(np.greater_equal, value, eps, inside),
            scalar_pass(np.less_equal, value, 1 - eps, other),
            partial(np.logical_and, inside, other, out=inside),
            *select_passes(inside, dx, dx, product),
        ]


_ALPHA_ARGS = {"alpha": "the threshold (default 1)"}


@pointwise(
    "ThresholdedRelu",
    "Y = X where X > alpha, else 0; NaN stays.",
    _ALPHA_ARGS,
    onnx=OnnxName("ThresholdedRelu", 22, {"alpha": "alpha"}),
    formula=lambda x, alpha=1.0: np.where(x <= alpha, 0.0, x),
)
class ThresholdedRelu(Pointwise):
    """Values above a threshold."""

    constants = {"alpha": 1.0}

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """A comparison, and a selection of what is not at or below the threshold."""
        below = mask(scratch, 0, x.shape)
        kept = partial(np.logical_not, below, out=below)
        return [
            scalar_pass(np.less_equal, x, self.constant("alpha"), below),
            kept,
            *select_passes(below, x, y, scratch(1, x.shape)),
        ]


@pointwise_gradient("ThresholdedRelu", ("Y", "dY"), "dX = dY where Y > 0, else 0.")
class ThresholdedReluGradient(IntervalGradient):
    """Gradient of ThresholdedRelu."""
