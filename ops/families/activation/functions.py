"""Activations: element-wise operators, each an expression. PRelu, whose slope is an input, is in `prelu`.

Those with `post_ops` are fused behind convolutions and products; how each engine computes such a chain is in
`post_ops`.

At a border the derivative is that of the side where the activation is constant; LeakyRelu's at 0 is 1, as Caffe2's.
x times a gate that goes to 0 is NaN at -infinity, as IEEE's product is, and as it is by oneDNN, by kernels, and in nets
that spell the product out: the gate must become 0, so it is not clipped from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, NUMBER_TYPES, TypeMeta
from dagexec.core.expressions import (
    Expression,
    absolute,
    between,
    clip,
    erf,
    erfc,
    exp,
    expm1,
    log,
    logistic,
    maximum,
    minimum,
    select,
    softplus,
    square,
    tanh,
)
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.onnx_name import OnnxName
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, no_inplace
from dagexec.errors import ArgumentError
from dagexec.ops.base.elementwise_operator import elementwise_operator

Y = ("Y", "dY")
X = ("X", "dY")


@elementwise_operator("Relu", gradient=Y, onnx=OnnxName("Relu", 14), post_ops=["relu"], narrows=True)
def relu(x: Expression) -> Expression:
    """Y = max(X, 0)."""
    return maximum(x, 0)


def at_least_zero(name: str, default: float) -> Callable[[OperatorCall], None]:
    """A check that float argument `name` is not negative."""

    def check(call: OperatorCall) -> None:
        value = call.arguments.float(name, default)
        if value < 0:
            raise ArgumentError(f"{call.label}: argument {name!r} must be at least 0, found {value:g}")

    return check


@elementwise_operator(
    "ReluN",
    {"n": "upper limit, at least 0 (default 6)"},
    gradient=Y,
    check=at_least_zero("n", 6),
    post_ops=["clip:0.0:{n}"],
    narrows=True,
)
def relu_n(x: Expression, *, n: float = 6.0) -> Expression:
    """Y = min(max(X, 0), n)."""
    return clip(x, 0, n)


def _leaky_slope(y: Expression, *, alpha: float = 0.01) -> Expression:
    """That of negative Y where it is no number, as Caffe2's."""
    return select(y >= 0, 1, alpha)


@elementwise_operator(
    "LeakyRelu",
    {"alpha": "slope for negative X (default 0.01)"},
    gradient=Y,
    slope=_leaky_slope,
    has_maker=False,
    onnx=OnnxName("LeakyRelu", 16, {"alpha": "alpha"}),
    post_ops=["leaky_relu:{alpha}"],
    narrows=True,
)
def leaky_relu(x: Expression, *, alpha: float = 0.01) -> Expression:
    """Y = X where X > 0, else alpha * X."""
    return select(x < 0, x * alpha, x)


@gradient_of("LeakyRelu")
def leaky_relu_maker(request: GradientRequest) -> GradientOperators:
    """Y has the sign of X if alpha is above 0; otherwise X is read."""
    invertible = request.arguments.float("alpha", 0.01) > 0
    value = request.y(0) if invertible else request.x(0)
    return request.single("LeakyReluGradient", [value, request.dy(0)], [0])


@elementwise_operator(
    "Elu",
    {"alpha": "factor, at least 0 (default 1)"},
    gradient=Y,
    check=at_least_zero("alpha", 1.0),
    onnx=OnnxName("Elu", 22, {"alpha": "alpha"}),
    post_ops=["elu:{alpha}"],
    narrows=True,
)
def elu(x: Expression, *, alpha: float = 1.0) -> Expression:
    """Y = X where X > 0, else alpha * (exp(X) - 1). Clevert et al., 2015, arXiv:1511.07289."""
    return select(x > 0, x, expm1(x) * alpha)


def check_selu(call: OperatorCall) -> None:
    """Raise ArgumentError unless the sign of Y is that of X."""
    at_least_zero("alpha", 1.6732632423543772)(call)
    scale = call.arguments.float("scale", 1.0507009873554805)
    if scale <= 0:
        raise ArgumentError(f"{call.label}: argument 'scale' must be above 0 for a gradient, found {scale:g}")


@elementwise_operator(
    "Selu",
    {"alpha": "factor of the exponential (default 1.67326...)", "scale": "factor of all (default 1.0507...)"},
    gradient=Y,
    check_gradient=check_selu,
    onnx=OnnxName("Selu", 22, {"alpha": "alpha", "gamma": "scale"}),
    post_ops=["elu:{alpha}", "linear:{scale}:0.0"],
    narrows=True,
)
def selu(x: Expression, *, alpha: float = 1.6732632423543772, scale: float = 1.0507009873554805) -> Expression:
    """Y = scale * (X where X > 0, else alpha * (exp(X) - 1)). Klambauer et al., 2017, arXiv:1706.02515."""
    return elu(x, alpha=alpha) * scale


@elementwise_operator("Sigmoid", gradient=Y, onnx=OnnxName("Sigmoid", 13), post_ops=["sigmoid"], narrows=True)
def sigmoid(x: Expression) -> Expression:
    """Y = 1 / (1 + exp(-X)). It does not overflow, and keeps its relative accuracy where Y is small."""
    return logistic(x)


_FAR = 700.0
"""Of numbers further from 0, the logistic function is 0 or 1 and its slope 0, in any type."""


def _swish_slope(x: Expression, *, alpha: float) -> Expression:
    near = clip(x * alpha, -_FAR, _FAR)
    gate = logistic(near)
    return ((1 - gate) * near + 1) * gate


@elementwise_operator(
    "Swish",
    {"alpha": "how steep the gate is (default 1)"},
    gradient=("X", "Y", "dY"),
    slope=_swish_slope,
    inplace=no_inplace,
    onnx=OnnxName("Swish", 24, {"alpha": "alpha"}),
    post_ops=["swish:{alpha}"],
    narrows=True,
)
def swish(x: Expression, *, alpha: float = 1.0) -> Expression:
    """Y = X * Sigmoid(alpha * X)."""
    return x * logistic(x * alpha) if alpha else x * 0.5


@elementwise_operator("Softplus", gradient=Y, onnx=OnnxName("Softplus", 22), post_ops=["softplus"], narrows=True)
def smooth_relu(x: Expression) -> Expression:
    """Y = ln(1 + exp(X)), which does not overflow."""
    return softplus(x)


def _mish_slope(x: Expression) -> Expression:
    near = clip(x, -_FAR, _FAR)
    gate = tanh(softplus(near))
    return (1 - square(gate)) * (logistic(near) * near) + gate


@elementwise_operator("Mish", gradient=X, slope=_mish_slope, onnx=OnnxName("Mish", 22), post_ops=["mish"], narrows=True)
def mish(x: Expression) -> Expression:
    """Y = X * tanh(ln(1 + exp(X))). Misra, 2019, arXiv:1908.08681."""
    return x * tanh(softplus(x))


def _softsign_slope(x: Expression) -> Expression:
    return 1 / (absolute(x) + 1) / (absolute(x) + 1)  # no square overflows


@elementwise_operator("Softsign", gradient=X, slope=_softsign_slope, onnx=OnnxName("Softsign", 22), narrows=True)
def softsign(x: Expression) -> Expression:
    """Y = X / (1 + |X|)."""
    return x / (absolute(x) + 1)


@elementwise_operator("Tanh", gradient=Y, onnx=OnnxName("Tanh", 13), post_ops=["tanh"], narrows=True)
def hyperbolic_tangent(x: Expression) -> Expression:
    """Y = tanh(X)."""
    return tanh(x)


@elementwise_operator(
    "HardSigmoid",
    {"alpha": "slope (default 0.2)", "beta": "value at 0 (default 0.5)"},
    gradient=Y,
    onnx=OnnxName("HardSigmoid", 22, {"alpha": "alpha", "beta": "beta"}),
    post_ops=["hardsigmoid:{alpha}:{beta}"],
    narrows=True,
)
def hard_sigmoid(x: Expression, *, alpha: float = 0.2, beta: float = 0.5) -> Expression:
    """Y = min(max(alpha * X + beta, 0), 1)."""
    return clip(x * alpha + beta, 0, 1)


@elementwise_operator("HardSwish", gradient=X, onnx=OnnxName("HardSwish", 22), post_ops=["hardswish"], narrows=True)
def hard_swish(x: Expression) -> Expression:
    """Y = X * min(max(X / 6 + 1/2, 0), 1). Howard et al., 2019, arXiv:1905.02244."""
    return x * hard_sigmoid(x, alpha=1 / 6, beta=0.5)


_ROOT = math.sqrt(0.5)
_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715


def exact_gelu(x: Expression) -> Expression:
    """max(x, 0) - |x|/2 * erfc(|x|/sqrt(2)), with |x| clipped where the second term has become nothing.

    The maximum is computed as x/2 + |x|/2, which is NaN at -infinity.
    """
    half = absolute(x) * 0.5
    near = minimum(half * (2 * _ROOT), 6)
    return x * 0.5 + half - erfc(near) * near * _ROOT


def tanh_gelu(x: Expression) -> Expression:
    """0.5 x (1 + tanh(x (a + b x^2))), which is x / (1 + exp(-2 x (a + b x^2))): 0 where the power is infinite."""
    return x * logistic((square(x) * (_TANH_SLOPE * _CUBE) + _TANH_SLOPE) * x)


def _gelu_slope(x: Expression, *, fast_gelu: bool) -> Expression:
    """X is clipped to where the slope is neither 0 nor 1."""
    if fast_gelu:
        near = clip(x, -12, 12)
        gate = logistic((square(near) * (_TANH_SLOPE * _CUBE) + _TANH_SLOPE) * near)
        inner = (square(near) * (3 * _TANH_SLOPE * _CUBE) + _TANH_SLOPE) * near
        return ((1 - gate) * inner + 1) * gate
    near = clip(x, -40, 40)
    return (erf(near * _ROOT) + 1) * 0.5 + exp(square(near) * -0.5) * near * (1 / math.sqrt(2 * math.pi))


@elementwise_operator(
    "Gelu",
    {"fast_gelu": "1: the tanh approximation (default 0)"},
    gradient=("dY", "X"),
    slope=_gelu_slope,
    onnx=OnnxName("Gelu", 20, {"approximate": "fast_gelu"}, values={"approximate": {"none": 0, "tanh": 1}}),
    post_ops=lambda arguments, _meta, _count: ["gelu_tanh" if arguments.bool("fast_gelu") else "gelu_erf"],
    narrows=True,
)
def gelu(x: Expression, *, fast_gelu: bool = False) -> Expression:
    """Y = X * P(Z < X) for a standard normal Z; with fast_gelu, 0.5 X (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3))).
    Hendrycks and Gimpel, 2016, arXiv:1606.08415."""
    return tanh_gelu(x) if fast_gelu else exact_gelu(x)


def clip_limits(arguments: Arguments, label: str, meta: TypeMeta) -> tuple[float, float]:
    """Arguments min and max within what `meta` holds; by default its limits. Raises ArgumentError."""
    low, high = arguments.float("min", -math.inf), arguments.float("max", math.inf)
    if low > high:
        raise ArgumentError(f"{label}: argument 'min' must not be greater than 'max', found {low:g} > {high:g}")
    return _within_type(low, high, meta)


def _within_type(low: float, high: float, meta: TypeMeta) -> tuple[float, float]:
    limits = np.iinfo(meta.numpy) if meta.is_integer else ml_dtypes.finfo(meta.numpy)  # type: ignore[no-untyped-call]
    if not meta.is_integer:
        lowest, highest = float(limits.min), float(limits.max)
        return min(max(low, lowest), highest), max(min(high, highest), lowest)
    first, last = int(limits.min), int(limits.max)
    least = first if low <= first else last if low >= last else math.ceil(low)
    most = last if high >= last else first if high <= first else math.floor(high)
    return least, most


def _clip_post_ops(arguments: Arguments, meta: TypeMeta, _count: int) -> list[str]:
    """One clip, within the limits of the type."""
    low, high = clip_limits(arguments, "Clip", meta)
    return [f"clip:{float(low)!r}:{float(high)!r}"]


def _clip_slope(y: Expression, *, min: float, max: float) -> Expression:
    """The limits of the type count as none."""
    return select(between(y, min, max), 1, 0)


@elementwise_operator(
    "Clip",
    {"min": "lower limit (default: the type's)", "max": "upper limit (default: the type's)"},
    gradient=Y,
    slope=_clip_slope,
    metas=NUMBER_TYPES,
    check=lambda call: clip_limits(call.arguments, call.label, call.inputs[0].meta),
    post_ops=_clip_post_ops,
    narrows=True,
)
def limited(x: Expression, *, min: float = -math.inf, max: float = math.inf, meta: TypeMeta = FLOAT32) -> Expression:
    """Y = min(max(X, min), max)."""
    return clip(x, *_within_type(min, max, meta))


def check_eps(call: OperatorCall) -> None:
    """Raise ArgumentError unless 0 <= eps < 0.5."""
    eps = call.arguments.float("eps", 1e-6)
    if not 0 <= eps < 0.5:
        raise ArgumentError(f"{call.label}: argument 'eps' must be in [0, 0.5), found {eps:g}")


def _logit_slope(x: Expression, *, eps: float) -> Expression:
    inside = (x >= eps) & (x <= 1 - eps)
    return select(inside, 1 / ((1 - x) * x), 0)


@elementwise_operator(
    "Logit",
    {"eps": "how near to 0 and 1 X counts, at least 0 and below 0.5 (default 1e-6)"},
    gradient=X,
    slope=_logit_slope,
    check=check_eps,
    formula=None,  # near eps a rounded X is another one
    rows=elementwise,
)
def logit(x: Expression, *, eps: float = 1e-6) -> Expression:
    """Y = ln(X / (1 - X)), X clipped to [eps, 1 - eps]: the inverse of the logistic function."""
    inside = clip(x, eps, 1 - eps)
    return log(inside / (1 - inside))


@elementwise_operator(
    "ThresholdedRelu",
    {"alpha": "the threshold (default 1)"},
    gradient=Y,
    slope=lambda y, *, alpha: select(y > 0, 1, 0),
    onnx=OnnxName("ThresholdedRelu", 22, {"alpha": "alpha"}),
)
def thresholded_relu(x: Expression, *, alpha: float = 1.0) -> Expression:
    """Y = X where X > alpha, else 0; NaN stays."""
    return select(x <= alpha, 0, x)
