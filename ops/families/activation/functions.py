"""Activations: pointwise operators, and PRelu, whose slope is an input. Softmax is in `softmax`.

Most are post-ops; how NumPy computes those is in `post_ops` and `passes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, NUMBER_TYPES, TypeMeta
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType, first_to_first, no_inplace
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise
from dagexec.ops.base.error_function import erf
from dagexec.ops.base.layout import BLOCKS, ORDER_HELP, channel_axis, channel_count, check_blocks, image_order
from dagexec.ops.base.pointwise import Pointwise, UfuncOperator, clip_pass, pointwise, scalar_pass
from dagexec.ops.families.activation.post_ops import PostOpFunction


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), for formulas."""
    return np.exp(-np.logaddexp(0.0, -x))


@pointwise(
    "Relu",
    "Y = max(X, 0).",
    onnx=OnnxName("Relu", 14),
    formula=lambda x: np.where(x < 0, 0.0, x),
    post_ops=["relu"],
    narrows=True,
)
class Relu(PostOpFunction):
    """Rectified linear unit."""


def at_least_zero(name: str, default: float) -> Callable[[OperatorCall], None]:
    """A check that float argument `name` is not negative."""

    def check(call: OperatorCall) -> None:
        value = call.arguments.float(name, default)
        if value < 0:
            raise ArgumentError(f"{call.label}: argument {name!r} must be at least 0, found {value:g}")

    return check


@pointwise(
    "ReluN",
    "Y = min(max(X, 0), n).",
    {"n": "upper limit, at least 0 (default 6)"},
    check=at_least_zero("n", 6),
    formula=lambda x, n=6.0: np.clip(x, 0.0, n),
    post_ops=["clip:0.0:{n}"],
    narrows=True,
)
class ReluN(PostOpFunction):
    """Relu with an upper limit."""

    constants = {"n": 6.0}


@pointwise(
    "LeakyRelu",
    "Y = X where X > 0, else alpha * X.",
    {"alpha": "slope for negative X (default 0.01)"},
    flops=2,
    onnx=OnnxName("LeakyRelu", 16, {"alpha": "alpha"}),
    formula=lambda x, alpha=0.01: np.where(x > 0, x, alpha * x),
    post_ops=["leaky_relu:{alpha}"],
    narrows=True,
)
class LeakyRelu(PostOpFunction):
    """Relu with a slope for negative values."""

    constants = {"alpha": 0.01}


@pointwise(
    "Elu",
    "Y = X where X > 0, else alpha * (exp(X) - 1). Clevert et al., 2015, arXiv:1511.07289.",
    {"alpha": "factor, at least 0 (default 1)"},
    flops=10,
    check=at_least_zero("alpha", 1.0),
    onnx=OnnxName("Elu", 22, {"alpha": "alpha"}),
    formula=lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
    post_ops=["elu:{alpha}"],
    narrows=True,
)
class Elu(PostOpFunction):
    """Exponential linear unit."""

    constants = {"alpha": 1.0}


@pointwise(
    "Selu",
    "Y = scale * (X where X > 0, else alpha * (exp(X) - 1)). Klambauer et al., 2017, arXiv:1706.02515.",
    {"alpha": "factor of the exponential (default 1.67326...)", "scale": "factor of all (default 1.0507...)"},
    flops=11,
    onnx=OnnxName("Selu", 22, {"alpha": "alpha", "gamma": "scale"}),
    formula=lambda x, alpha=1.6732632423543772, scale=1.0507009873554805: (
        scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0)))
    ),
    post_ops=["elu:{alpha}", "linear:{scale}:0.0"],
    narrows=True,
)
class Selu(PostOpFunction):
    """Scaled exponential linear unit."""

    constants = {"alpha": 1.6732632423543772, "scale": 1.0507009873554805}


@pointwise(
    "Sigmoid",
    "Y = 1 / (1 + exp(-X)).",
    flops=10,
    onnx=OnnxName("Sigmoid", 13),
    formula=logistic,
    post_ops=["sigmoid"],
    narrows=True,
)
class Sigmoid(PostOpFunction):
    """Logistic function; does not overflow, and keeps its relative accuracy where Y is small."""


@pointwise(
    "Swish",
    "Y = X * Sigmoid(alpha * X).",
    {"alpha": "how steep the gate is (default 1)"},
    flops=11,
    inplace=no_inplace,
    onnx=OnnxName("Swish", 24, {"alpha": "alpha"}),
    formula=lambda x, alpha=1.0: x * logistic(alpha * x),
    post_ops=["swish:{alpha}"],
    narrows=True,
)
class Swish(PostOpFunction):
    """Sigmoid-weighted linear unit; zero at minus infinity."""

    constants = {"alpha": 1.0}


@pointwise(
    "Softplus",
    "Y = ln(1 + exp(X)).",
    flops=20,
    onnx=OnnxName("Softplus", 22),
    formula=lambda x: np.logaddexp(0.0, x),
    post_ops=["softplus"],
    narrows=True,
)
class Softplus(PostOpFunction):
    """Smooth Relu; does not overflow."""


@pointwise(
    "Softsign",
    "Y = X / (1 + |X|).",
    flops=3,
    onnx=OnnxName("Softsign", 22),
    formula=lambda x: x / (1 + np.abs(x)),
    narrows=True,
)
class Softsign(Pointwise):
    """Softsign."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        denominator = scratch(0, x.shape)
        return [
            partial(np.absolute, x, out=denominator),
            scalar_pass(np.add, denominator, 1.0, denominator),
            partial(np.divide, x, denominator, out=y),
        ]


@pointwise(
    "Tanh", "Y = tanh(X).", flops=10, onnx=OnnxName("Tanh", 13), formula=np.tanh, post_ops=["tanh"], narrows=True
)
class Tanh(UfuncOperator):
    """Hyperbolic tangent."""

    ufunc = np.tanh


@pointwise(
    "HardSigmoid",
    "Y = min(max(alpha * X + beta, 0), 1).",
    {"alpha": "slope (default 0.2)", "beta": "value at 0 (default 0.5)"},
    flops=3,
    onnx=OnnxName("HardSigmoid", 22, {"alpha": "alpha", "beta": "beta"}),
    formula=lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0.0, 1.0),
    post_ops=["hardsigmoid:{alpha}:{beta}"],
    narrows=True,
)
class HardSigmoid(PostOpFunction):
    """Piecewise linear Sigmoid."""

    constants = {"alpha": 0.2, "beta": 0.5}


@pointwise(
    "HardSwish",
    "Y = X * min(max(X / 6 + 1/2, 0), 1). Howard et al., 2019, arXiv:1905.02244.",
    flops=4,
    onnx=OnnxName("HardSwish", 22),
    formula=lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
    post_ops=["hardswish"],
    narrows=True,
)
class HardSwish(PostOpFunction):
    """Piecewise quadratic Swish."""


def gelu(x: Array, fast_gelu: int = 0) -> Array:
    """Gelu in float64."""
    if fast_gelu:
        gate: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        gate = erf(x * math.sqrt(0.5))
    found: Array = x / 2 * (1 + gate)
    return found


@pointwise(
    "Gelu",
    "Y = X * P(Z < X) for a standard normal Z; with fast_gelu, 0.5 X (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3))). "
    "Hendrycks and Gimpel, 2016, arXiv:1606.08415.",
    {"fast_gelu": "1: the tanh approximation (default 0)"},
    flops=40,
    check=lambda call: call.arguments.bool("fast_gelu"),
    onnx=OnnxName("Gelu", 20, {"approximate": "fast_gelu"}, values={"approximate": {"none": 0, "tanh": 1}}),
    formula=gelu,
    post_ops=lambda arguments, _meta, _count: ["gelu_tanh" if arguments.bool("fast_gelu") else "gelu_erf"],
    narrows=True,
)
class Gelu(PostOpFunction):
    """Gaussian error linear unit."""


def clip_limits(arguments: Arguments, label: str, meta: TypeMeta) -> tuple[float, float]:
    """Arguments min and max within what `meta` holds; by default its limits. Raises ArgumentError."""
    limits = np.iinfo(meta.numpy) if meta.is_integer else ml_dtypes.finfo(meta.numpy)  # type: ignore[no-untyped-call]
    low, high = arguments.float("min", -math.inf), arguments.float("max", math.inf)
    if low > high:
        raise ArgumentError(f"{label}: argument 'min' must not be greater than 'max', found {low:g} > {high:g}")
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


@pointwise(
    "Clip",
    "Y = min(max(X, min), max).",
    {"min": "lower limit (default: the type's)", "max": "upper limit (default: the type's)"},
    metas=NUMBER_TYPES,
    check=lambda call: clip_limits(call.arguments, call.label, call.inputs[0].meta),
    formula=lambda x, min=-math.inf, max=math.inf: np.clip(x, min, max),
    post_ops=_clip_post_ops,
    narrows=True,
)
class Clip(Pointwise):
    """Clip to an interval."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        low, high = clip_limits(self.arguments, self.label, self.input(0).meta)
        return [clip_pass(x, low, high, y)]


def infer_prelu(call: OperatorCall) -> list[TensorType]:
    """The output has the type of X, which `slope` must fit."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    slope_view(call.inputs[0].shape, call.inputs[1].shape, channel_axis(call), call)
    return [call.inputs[0]]


def slope_view(x: tuple[int, ...], slope: tuple[int, ...], channels: int, call: OperatorCall) -> tuple[int, ...]:
    """The shape, of as many axes as X, under which the slope broadcasts to X. Raises ShapeError when it does not."""
    if math.prod(slope) == 1:
        return (1,) * len(x)
    order = image_order(call)
    if order in BLOCKS:
        check_blocks(call, 0)
        if slope == (channel_count(order, x),):
            return (1, x[1], *(1,) * (len(x) - 3), BLOCKS[order])
    if len(slope) == 1 and x and slope[0] == x[channels] and order not in BLOCKS:
        return (*(1,) * channels, slope[0], *(1,) * (len(x) - channels - 1))
    padded = (*(1,) * (len(x) - len(slope)), *slope)
    if len(slope) > 1 and len(padded) == len(x) and all(s in (1, d) for s, d in zip(padded, x, strict=True)):
        return padded
    each = channel_count(order, x) if len(x) > 1 else x[channels] if x else 0
    expected = f"one element, {each} (a channel each)" if x else "one element"
    raise call.fail(f"the slope must have {expected}, or a shape that broadcasts to X; found shape {slope}")


@new_operator(
    "PRelu",
    infer=infer_prelu,
    doc="Y = X where X > 0, else slope * X; the slope is shared, or one a channel, or any shape of several axes "
    "that broadcasts to X. He et al., 2015, arXiv:1502.01852.",
    input_names=("X", "slope"),
    output_names=("Y",),
    args={"order": ORDER_HELP},
    unread_args=("alpha",),
    inplace=first_to_first,
    image_role=ImageRole.PER_CHANNEL,
    rows=first_axis,
)
class PRelu(Operator):
    """Relu with a learned slope for negative values."""

    def prepare(self) -> Step:
        """max(X, 0) + slope * min(X, 0)."""
        x, call = self.x(0), self.call()
        view = slope_view(x.shape, self.x(1).shape, channel_axis(call), call)
        slope = np.broadcast_to(self.x(1).reshape(view), x.shape)

        def passes(index: Index, source: Array, target: Array, scratch: Scratch) -> list[Step]:
            negative = scratch(0, source.shape)
            return [
                clip_pass(source, -math.inf, 0.0, negative),
                partial(np.multiply, negative, slope[index], out=negative),
                clip_pass(source, 0.0, math.inf, target),
                partial(np.add, target, negative, out=target),
            ]

        return blockwise(self, x, self.y(0), passes)
