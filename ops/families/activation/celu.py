"""Celu, an exponential unit whose slope is continuous for every alpha, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import TypeMeta
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.pointwise import Pointwise, clip_pass, pointwise, scalar_pass
from dagexec.ops.base.pointwise_gradient import PointwiseGradient, pointwise_gradient


def check_alpha(call: OperatorCall) -> None:
    """Raise ArgumentError unless alpha is above 0."""
    if call.arguments.float("alpha", 1.0) <= 0:
        raise ArgumentError(f"{call.label}: argument 'alpha' must be above 0")


def as_post_ops(arguments: Arguments, _meta: TypeMeta, _count: int) -> Sequence[str]:
    """Elu of X / alpha, times alpha."""
    alpha = arguments.float("alpha", 1.0)
    return ["elu:1.0"] if alpha == 1 else [f"linear:{1 / alpha!r}:0.0", "elu:1.0", f"linear:{alpha!r}:0.0"]


@pointwise(
    "Celu",
    "Y = X where X > 0, else alpha * (exp(X / alpha) - 1). Barron, 2017, arXiv:1704.07483.",
    {"alpha": "where the exponential begins, above 0 (default 1)"},
    flops=12,
    check=check_alpha,
    formula=lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0) / alpha)),
    onnx=OnnxName("Celu", 28, {"alpha": "alpha"}),
    post_ops=as_post_ops,
    narrows=True,
)
class Celu(Pointwise):
    """Continuously differentiable exponential linear unit."""

    constants = {"alpha": 1.0}

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1)."""
        alpha, negative = self.constant("alpha"), scratch(0, x.shape)
        return [
            clip_pass(x, -math.inf, 0.0, negative),
            scalar_pass(np.divide, negative, alpha, negative),
            partial(np.expm1, negative, out=negative),
            scalar_pass(np.multiply, negative, alpha, negative),
            clip_pass(x, 0.0, math.inf, y),
            partial(np.add, y, negative, out=y),
        ]


@pointwise_gradient("Celu", ("Y", "dY"), "dX = dY where Y > 0, else dY * (Y / alpha + 1).", flops=4)
class CeluGradient(PointwiseGradient):
    """Gradient of Celu: exp(X / alpha) is Y / alpha + 1."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """dY * (min(Y, 0) / alpha + 1)."""
        factor = scratch(0, value.shape)
        return [
            clip_pass(value, -math.inf, 0.0, factor),
            scalar_pass(np.divide, factor, self.constant("alpha"), factor),
            scalar_pass(np.add, factor, 1.0, factor),
            partial(np.multiply, factor, dy, out=dx),
        ]
