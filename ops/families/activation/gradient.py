"""Gradients of the activations. Those that may work in place read Y; names and order of inputs are Caffe2's.

At a border the derivative is that of the side where the activation is constant; LeakyRelu's at 0 is 1, as Caffe2's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis, gradients
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import mask, reduced, select_passes
from dagexec.ops.base.broadcasting import forward_call
from dagexec.ops.base.error_function import erf_passes
from dagexec.ops.base.gradient_selection import WANTED_ARGS, one_operator, wanted_inputs
from dagexec.ops.base.layout import ORDER_HELP, channel_axis
from dagexec.ops.base.pointwise import clip_pass, logistic_denominator, logistic_floor, scalar_pass
from dagexec.ops.base.pointwise_gradient import PointwiseGradient, pointwise_gradient
from dagexec.ops.families.activation.functions import LeakyRelu, Selu, at_least_zero, clip_limits, slope_view
from dagexec.ops.families.activation.passes import hard_sigmoid_passes, sigmoid_passes


def between_passes(value: Array, low: float, high: float, chosen: Array, other: Array) -> list[Step]:
    """The passes `chosen = low < value < high`; `other` is scratch, of booleans too."""
    above: list[Step] = [scalar_pass(np.greater, value, low, chosen)]
    if high == math.inf:
        return above
    return [
        *above,
        scalar_pass(np.less, value, high, other),
        partial(np.logical_and, chosen, other, out=chosen),
    ]


class IntervalGradient(PointwiseGradient):
    """Base of dX = dY where Y is between two limits, else 0."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """A comparison, and a selection. Y was rounded to its type, so the limits are, too."""
        meta = self.input(0).meta
        with np.errstate(over="ignore"):
            low, high = (float(np.float64(limit).astype(meta.numpy)) for limit in self.limits())
        chosen, other = (mask(scratch, number, value.shape) for number in (0, 1))
        return [
            *between_passes(value, low, high, chosen, other),
            *select_passes(chosen, dy, dx, scratch(1, value.shape)),
        ]

    def limits(self) -> tuple[float, float]:
        """The limits, themselves not between."""
        return 0.0, math.inf


@pointwise_gradient("Relu", ("Y", "dY"), "dX = dY where Y > 0, else 0.")
class ReluGradient(IntervalGradient):
    """Gradient of Relu."""


@pointwise_gradient("ReluN", ("Y", "dY"), "dX = dY where 0 < Y < n, else 0.")
class ReluNGradient(IntervalGradient):
    """Gradient of ReluN."""

    def limits(self) -> tuple[float, float]:
        return 0.0, self.constant("n")


@pointwise_gradient("Clip", ("Y", "dY"), "dX = dY where min < Y < max, else 0.")
class ClipGradient(IntervalGradient):
    """Gradient of Clip."""

    def limits(self) -> tuple[float, float]:
        """The limits of Clip; those of the type count as none."""
        low, high = clip_limits(self.arguments, self.label, self.input(0).meta)
        return low if "min" in self.arguments else -math.inf, high if "max" in self.arguments else math.inf


@pointwise_gradient("HardSigmoid", ("Y", "dY"), "dX = alpha * dY where 0 < Y < 1, else 0.")
class HardSigmoidGradient(IntervalGradient):
    """Gradient of HardSigmoid."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        return [*super().passes(value, dy, dx, scratch), scalar_pass(np.multiply, dx, self.constant("alpha"), dx)]

    def limits(self) -> tuple[float, float]:
        return 0.0, 1.0


@pointwise_gradient(
    "LeakyRelu",
    ("Y", "dY"),
    "dX = dY where Y >= 0, else alpha * dY. X may stand for Y; for alpha of 0 or less it must.",
    flops=3,
    has_maker=False,
)
class LeakyReluGradient(PointwiseGradient):
    """Gradient of LeakyRelu."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The factor is alpha + (1 - alpha) * (Y >= 0), for NaN alpha."""
        alpha, factor = self.constant("alpha"), scratch(0, value.shape)
        return [
            scalar_pass(np.greater_equal, value, 0.0, factor),
            scalar_pass(np.multiply, factor, 1 - alpha, factor),
            scalar_pass(np.add, factor, alpha, factor),
            partial(np.multiply, factor, dy, out=dx),
        ]


@gradient_of("LeakyRelu")
def leaky_relu_maker(request: GradientRequest) -> GradientOperators:
    """Y has the sign of X if alpha is above 0; otherwise X is read."""
    invertible = request.arguments.float("alpha", LeakyRelu.constants["alpha"]) > 0
    value = request.y(0) if invertible else request.x(0)
    return request.single("LeakyReluGradient", [value, request.dy(0)], [0])


def exponential_passes(
    value: Array, dy: Array, dx: Array, scratch: Scratch, positive: float, shift: float
) -> list[Step]:
    """dX = dY * positive where Y > 0, else dY * (Y + shift)."""
    factor, chosen = scratch(0, value.shape), scratch(1, value.shape)
    steps = [clip_pass(value, -math.inf, 0.0, factor), scalar_pass(np.add, factor, shift, factor)]
    if shift != positive:
        steps += [
            scalar_pass(np.greater, value, 0.0, chosen),
            scalar_pass(np.multiply, chosen, positive - shift, chosen),
            partial(np.add, factor, chosen, out=factor),
        ]
    return [*steps, partial(np.multiply, factor, dy, out=dx)]


@pointwise_gradient("Elu", ("Y", "dY"), "dX = dY where Y > 0, else dY * (Y + alpha).", flops=5)
class EluGradient(PointwiseGradient):
    """Gradient of Elu: alpha * exp(X) is Y + alpha."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        return exponential_passes(value, dy, dx, scratch, 1.0, self.constant("alpha"))


def check_selu(call: OperatorCall) -> None:
    """Raise ArgumentError unless the sign of Y is that of X."""
    at_least_zero("alpha", Selu.constants["alpha"])(call)
    scale = call.arguments.float("scale", Selu.constants["scale"])
    if scale <= 0:
        raise ArgumentError(f"{call.label}: argument 'scale' must be above 0 for a gradient, found {scale:g}")


@pointwise_gradient(
    "Selu",
    ("Y", "dY"),
    "dX = dY * scale where Y > 0, else dY * (Y + scale * alpha); alpha is at least 0, scale above.",
    flops=5,
    check=check_selu,
)
class SeluGradient(PointwiseGradient):
    """Gradient of Selu."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        scale = self.constant("scale")
        return exponential_passes(value, dy, dx, scratch, scale, scale * self.constant("alpha"))


@pointwise_gradient("Sigmoid", ("Y", "dY"), "dX = dY * Y * (1 - Y).", flops=3)
class SigmoidGradient(PointwiseGradient):
    """Gradient of Sigmoid."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        factor = scratch(0, value.shape)
        return [
            partial(np.subtract, np.ones((), value.dtype), value, out=factor),
            partial(np.multiply, factor, value, out=factor),
            partial(np.multiply, factor, dy, out=dx),
        ]


@pointwise_gradient("Tanh", ("Y", "dY"), "dX = dY * (1 - Y^2).", flops=3)
class TanhGradient(PointwiseGradient):
    """Gradient of Tanh."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        factor = scratch(0, value.shape)
        return [
            partial(np.square, value, out=factor),
            partial(np.subtract, np.ones((), value.dtype), factor, out=factor),
            partial(np.multiply, factor, dy, out=dx),
        ]


@pointwise_gradient("Softplus", ("Y", "dY"), "dX = dY * (1 - exp(-Y)).", flops=20)
class SoftplusGradient(PointwiseGradient):
    """Gradient of Softplus: the logistic function of X."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The formula, exact for small Y."""
        factor = scratch(0, value.shape)
        return [
            partial(np.negative, value, out=factor),
            partial(np.expm1, factor, out=factor),
            partial(np.negative, factor, out=factor),
            partial(np.multiply, factor, dy, out=dx),
        ]


@pointwise_gradient("Softsign", ("X", "dY"), "dX = dY / (1 + |X|)^2.", flops=4)
class SoftsignGradient(PointwiseGradient):
    """Gradient of Softsign."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """Two divisions, so that no square overflows."""
        denominator = scratch(0, value.shape)
        return [
            partial(np.absolute, value, out=denominator),
            scalar_pass(np.add, denominator, 1.0, denominator),
            partial(np.divide, dy, denominator, out=dx),
            partial(np.divide, dx, denominator, out=dx),
        ]


@pointwise_gradient(
    "Swish", ("X", "Y", "dY"), "dX = dY * s * (1 + alpha * X * (1 - s)) with s = Sigmoid(alpha * X).", flops=16
)
class SwishGradient(PointwiseGradient):
    """Gradient of Swish; Y is not read."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The formula on alpha * X clipped to where it is neither 0 nor 1."""
        x, s, work = (scratch(number, value.shape) for number in range(3))
        floor, one = logistic_floor(value.dtype), np.ones((), value.dtype)
        alpha = self.constant("alpha")
        scaled = [] if alpha == 1 else [scalar_pass(np.multiply, value, alpha, x)]
        return [
            *scaled,
            clip_pass(x if scaled else value, floor, -floor, x),
            *sigmoid_passes(x, s),
            partial(np.subtract, one, s, out=work),
            partial(np.multiply, work, x, out=work),
            scalar_pass(np.add, work, 1.0, work),
            partial(np.multiply, work, s, out=work),
            partial(np.multiply, work, dy, out=dx),
        ]


@pointwise_gradient(
    "HardSwish", ("X", "dY"), "dX = dY * (min(max(X / 6 + 1/2, 0), 1) + (X / 6 where -3 < X < 3, else 0)).", flops=8
)
class HardSwishGradient(PointwiseGradient):
    """Gradient of HardSwish."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The gate, and X times the derivative of the gate."""
        gate, slope = scratch(0, value.shape), scratch(1, value.shape)
        inside, other = (mask(scratch, number, value.shape) for number in (2, 3))
        return [
            *between_passes(value, -3.0, 3.0, inside, other),
            scalar_pass(np.multiply, value, 1 / 6, slope),
            *select_passes(inside, slope, slope, scratch(3, value.shape)),
            *hard_sigmoid_passes(value, gate, 1 / 6, 0.5),
            partial(np.add, gate, slope, out=gate),
            partial(np.multiply, gate, dy, out=dx),
        ]


@pointwise_gradient(
    "Gelu",
    ("dY", "X"),
    "dX = dY * (P(Z < X) + X * exp(-X^2/2) / sqrt(2 pi)); with fast_gelu, the derivative of that approximation.",
    flops=50,
)
class GeluGradient(PointwiseGradient):
    """Gradient of Gelu."""

    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The exact form, or that of the approximation; X is clipped to where the factor is neither 0 nor 1."""
        x, factor, work = (scratch(number, value.shape) for number in range(3))
        if self.arguments.bool("fast_gelu"):
            limit = 12.0 if value.dtype == np.float64 else 8.5
            steps = self._fast(x, factor, work, scratch(3, value.shape))
        else:
            limit = 40.0 if value.dtype == np.float64 else 15.0
            steps = self._exact(x, factor, work, scratch(3, value.shape), scratch(4, value.shape))
        return [clip_pass(value, -limit, limit, x), *steps, partial(np.multiply, factor, dy, out=dx)]

    def _exact(self, x: Array, factor: Array, t: Array, work: Array, magnitude: Array) -> list[Step]:
        """(1 + erf(x / sqrt(2))) / 2 + x * exp(-x^2 / 2) / sqrt(2 pi)."""
        return [
            scalar_pass(np.multiply, x, math.sqrt(0.5), factor),
            *erf_passes(factor, factor, magnitude, t, work),
            scalar_pass(np.add, factor, 1.0, factor),
            scalar_pass(np.multiply, factor, 0.5, factor),
            partial(np.square, x, out=t),
            scalar_pass(np.multiply, t, -0.5, t),
            partial(np.exp, t, out=t),
            partial(np.multiply, t, x, out=t),
            scalar_pass(np.multiply, t, 1 / math.sqrt(2 * math.pi), t),
            partial(np.add, factor, t, out=factor),
        ]

    def _fast(self, x: Array, s: Array, square: Array, slope: Array) -> list[Step]:
        """s + x * s * (1 - s) * u' with s = 1 / (1 + exp(-u)), u = 2 sqrt(2/pi) (x + 0.044715 x^3)."""
        scale = 2 * math.sqrt(2 / math.pi)
        one = np.ones((), x.dtype)
        return [
            partial(np.square, x, out=square),
            scalar_pass(np.multiply, square, scale * 0.044715, s),
            scalar_pass(np.add, s, scale, s),
            partial(np.multiply, s, x, out=s),
            *logistic_denominator(s, s),
            partial(np.divide, one, s, out=s),
            scalar_pass(np.multiply, square, scale * 3 * 0.044715, slope),
            scalar_pass(np.add, slope, scale, slope),
            partial(np.multiply, slope, x, out=slope),
            partial(np.subtract, one, s, out=square),
            partial(np.multiply, slope, square, out=slope),
            scalar_pass(np.add, slope, 1.0, slope),
            partial(np.multiply, s, slope, out=s),
        ]


PRELU_INPUTS = ("X", "slope")


def infer_prelu_gradient(call: OperatorCall) -> list[TensorType]:
    """The gradients have the types of X and of the slope."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    x, slope = call.inputs[2], call.inputs[3]
    for index in (0, 1):
        call.require_shape(index, x.shape, "that of X")
    forward = forward_call(call, (2, 3))
    slope_view(x.shape, slope.shape, channel_axis(forward), forward)
    types = {"X": x, "slope": slope}
    return [types[name] for name in wanted_inputs(call, PRELU_INPUTS)]


@new_operator(
    "PReluGradient",
    outputs=(1, 2),
    infer=infer_prelu_gradient,
    doc="dX = dY where X > 0, else slope * dY; dslope = the sum of X * dY where X <= 0, over what shares a slope. "
    "Y is not read.",
    input_names=("Y", "dY", "X", "slope"),
    output_names=("dX", "dslope"),
    args={"order": ORDER_HELP, **WANTED_ARGS},
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
    rows=gradients(along_axis(0, 0, 1, 2), lambda call: wanted_inputs(call, PRELU_INPUTS), "X"),
)
class PReluGradient(Operator):
    """Gradients of PRelu."""

    def prepare(self) -> Step:
        """One computation for each gradient that is requested."""
        call = self.call()
        forward = forward_call(call, (2, 3))
        dy, x, slope = self.x(1), self.x(2), self.x(3)
        view = slope_view(x.shape, slope.shape, channel_axis(forward), forward)
        steps = []
        for index, name in enumerate(wanted_inputs(call, PRELU_INPUTS)):
            target = self.y(index)
            if name == "X":
                steps.append(reduced(self, x.shape, [x, dy, slope.reshape(view)], target, _prelu_input_passes))
            else:
                steps.append(reduced(self, x.shape, [x, dy], target.reshape(view), _prelu_slope_passes))
        return in_sequence(steps)


def _prelu_input_passes(pieces: Sequence[Array], dx: Array, scratch: Scratch) -> list[Step]:
    """The factor is slope + (1 - slope) * (X > 0)."""
    x, dy, slope = pieces
    factor, rest = scratch(0, dx.shape), scratch(1, slope.shape)
    return [
        partial(np.subtract, np.ones((), dx.dtype), slope, out=rest),
        scalar_pass(np.greater, x, 0.0, factor),
        partial(np.multiply, factor, rest, out=factor),
        partial(np.add, factor, slope, out=factor),
        partial(np.multiply, factor, dy, out=dx),
    ]


def _prelu_slope_passes(pieces: Sequence[Array], out: Array, scratch: Scratch) -> list[Step]:
    x, dy = pieces
    return [clip_pass(x, -math.inf, 0.0, out), partial(np.multiply, out, dy, out=out)]


@gradient_of("PRelu")
def prelu_maker(request: GradientRequest) -> GradientOperators:
    """Caffe2's order; X is needed, so PRelu in place has no gradient."""
    inputs = [request.y(0), request.dy(0), request.x(0), request.x(1)]
    return one_operator(request, "PReluGradient", inputs, PRELU_INPUTS)
