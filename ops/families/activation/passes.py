"""The formulas of activations as passes: NumPy calls that compute `y` from `x`, which may be the same array.

Arrays are float32 or float64, of one shape and dtype; `work` and the like are scratch of that shape and overlap
neither. The operators are in `activation`; `post_ops` applies the same formulas behind another operator.

x times a gate that goes to 0 is NaN at -infinity, as IEEE's product is, and as it is by oneDNN, by kernels, and in
nets that spell the product out: the gate must become 0, so it is not clipped from below.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.error_function import LIMIT, log_erfc_passes
from dagexec.ops.base.pointwise import clip_pass, logistic_denominator, scalar_pass


def leaky_relu_passes(x: Array, y: Array, negative: Array, alpha: float) -> list[Step]:
    """x where x > 0, else alpha * x."""
    return _rectified(x, y, negative, [scalar_pass(np.multiply, negative, alpha, negative)])


def elu_passes(x: Array, y: Array, negative: Array, alpha: float) -> list[Step]:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    scaled = [] if alpha == 1 else [scalar_pass(np.multiply, negative, alpha, negative)]
    return _rectified(x, y, negative, [partial(np.expm1, negative, out=negative), *scaled])


def _rectified(x: Array, y: Array, negative: Array, middle: list[Step]) -> list[Step]:
    """max(x, 0) + f(min(x, 0)), where `middle` computes f in place: two clips instead of a selection, which is slow."""
    return [
        clip_pass(x, -math.inf, 0.0, negative),
        *middle,
        clip_pass(x, 0.0, math.inf, y),
        partial(np.add, y, negative, out=y),
    ]


def sigmoid_passes(x: Array, y: Array) -> list[Step]:
    """1 / (1 + exp(-x)): 0 where the power is infinite."""
    return [
        *logistic_denominator(x, y),
        partial(np.divide, np.ones((), x.dtype), y, out=y),
    ]


def swish_passes(x: Array, y: Array, work: Array, alpha: float = 1.0) -> list[Step]:
    """x / (1 + exp(-alpha x)): 0 where the power is infinite and x is not."""
    if alpha == 0:
        return [scalar_pass(np.multiply, x, 0.5, y)]
    scaled = [] if alpha == 1 else [scalar_pass(np.multiply, x, alpha, work)]
    return [*scaled, *logistic_denominator(work if scaled else x, work), partial(np.divide, x, work, out=y)]


def softplus_passes(x: Array, y: Array, decay: Array) -> list[Step]:
    """ln(1 + exp(x)) = max(x, 0) + ln(1 + exp(-|x|)), which does not overflow."""
    return [
        partial(np.absolute, x, out=decay),
        partial(np.negative, decay, out=decay),
        partial(np.exp, decay, out=decay),
        partial(np.log1p, decay, out=decay),
        clip_pass(x, 0.0, math.inf, y),
        partial(np.add, y, decay, out=y),
    ]


def mish_passes(x: Array, y: Array, gate: Array, decay: Array) -> list[Step]:
    """x * tanh(ln(1 + exp(x))). Misra 2019, arXiv:1908.08681."""
    softplus = softplus_passes(x, gate, decay)
    return [*softplus, partial(np.tanh, gate, out=gate), partial(np.multiply, x, gate, out=y)]


def hard_sigmoid_passes(x: Array, y: Array, alpha: float, beta: float) -> list[Step]:
    """min(max(alpha * x + beta, 0), 1)."""
    return [
        scalar_pass(np.multiply, x, alpha, y),
        scalar_pass(np.add, y, beta, y),
        clip_pass(y, 0.0, 1.0, y),
    ]


def hard_swish_passes(x: Array, y: Array, gate: Array) -> list[Step]:
    """x * min(max(x / 6 + 1/2, 0), 1): the gate, then the product."""
    return [*hard_sigmoid_passes(x, gate, 1 / 6, 0.5), partial(np.multiply, x, gate, out=y)]


def tanh_gelu_passes(x: Array, y: Array, work: Array) -> list[Step]:
    """0.5 x (1 + tanh(x (a + b x^2))), which is x / (1 + exp(-2 x (a + b x^2))): 0 where the power is infinite."""
    slope = 2 * math.sqrt(2 / math.pi)
    return [
        partial(np.square, x, out=work),
        scalar_pass(np.multiply, work, slope * 0.044715, work),
        scalar_pass(np.add, work, slope, work),
        partial(np.multiply, work, x, out=work),
        *logistic_denominator(work, work),
        partial(np.divide, x, work, out=y),
    ]


def exact_gelu_passes(x: Array, y: Array, magnitude: Array, t: Array, work: Array) -> list[Step]:
    """max(x, 0) - |x|/2 * erfc(|x|/sqrt(2)), with |x| clipped where the second term has become nothing.

    The maximum is computed as x/2 + |x|/2, which is NaN at -infinity.
    """
    root = math.sqrt(0.5)
    return [
        partial(np.absolute, x, out=magnitude),
        scalar_pass(np.multiply, magnitude, 0.5, magnitude),
        scalar_pass(np.multiply, x, 0.5, y),
        partial(np.add, y, magnitude, out=y),
        scalar_pass(np.multiply, magnitude, 2 * root, magnitude),
        clip_pass(magnitude, 0.0, LIMIT, magnitude),
        *log_erfc_passes(magnitude, t, work),
        partial(np.exp, work, out=work),
        partial(np.multiply, work, magnitude, out=work),
        scalar_pass(np.multiply, work, root, work),
        partial(np.subtract, y, work, out=y),
    ]
