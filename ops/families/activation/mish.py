"""Mish, a product with the tanh of a softplus, and its gradient. Misra, 2019, arXiv:1908.08681."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.pointwise import clip_pass, logistic_floor, pointwise
from dagexec.ops.base.pointwise_gradient import PointwiseGradient, pointwise_gradient
from dagexec.ops.families.activation.passes import sigmoid_passes, softplus_passes
from dagexec.ops.families.activation.post_ops import PostOpFunction


@pointwise(
    "Mish",
    "Y = X * tanh(ln(1 + exp(X))). Misra, 2019, arXiv:1908.08681.",
    flops=30,
    onnx=OnnxName("Mish", 22),
    formula=lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    post_ops=["mish"],
    narrows=True,
)
class Mish(PostOpFunction):
    """Self-gated activation."""


@pointwise_gradient(
    "Mish", ("X", "dY"), "dX = dY * (t + X * (1 - t^2) * Sigmoid(X)) with t = tanh(ln(1 + exp(X))).", flops=45
)
class MishGradient(PointwiseGradient):
    """Gradient of Mish."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The formula on X clipped to where the slope is neither 0 nor 1."""
        x, gate, logistic, work = (scratch(number, value.shape) for number in range(4))
        floor = logistic_floor(value.dtype)
        return [
            clip_pass(value, floor, -floor, x),
            *softplus_passes(x, gate, work),
            partial(np.tanh, gate, out=gate),
            *sigmoid_passes(x, logistic),
            partial(np.multiply, logistic, x, out=logistic),
            partial(np.square, gate, out=work),
            partial(np.subtract, np.ones((), value.dtype), work, out=work),
            partial(np.multiply, work, logistic, out=work),
            partial(np.add, work, gate, out=work),
            partial(np.multiply, work, dy, out=dx),
        ]
