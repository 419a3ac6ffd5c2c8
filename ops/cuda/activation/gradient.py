"""Gradients of the activations on CUDA: a table of expressions, and those that need more than their arguments."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.activation import gradient as host
from dagexec.ops.activation.functions import clip_limits, slope_view
from dagexec.ops.activation.gradient import PRELU_INPUTS
from dagexec.ops.base.broadcasting import forward_call
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.base.layout import channel_axis
from dagexec.ops.cuda.base.broadcast_reduction import reduced
from dagexec.ops.cuda.base.operator import CudaOperator
from dagexec.ops.cuda.base.pointwise import (
    GradientExpression,
    register,
    register_gradient,
    register_pointwise_gradients,
)

register_pointwise_gradients(
    host,
    {
        "ReluGradient": "y > A(0) ? dy : A(0)",
        "HardSigmoidGradient": "alpha * (y > A(0) && y < A(1) ? dy : A(0))",
        "LeakyReluGradient": "y >= A(0) ? dy : alpha * dy",
        "EluGradient": "dy * (y > A(0) ? A(1) : y + alpha)",
        "SeluGradient": "dy * (y > A(0) ? scale : y + scale * alpha)",
        "SigmoidGradient": "(A(1) - y) * y * dy",
        "TanhGradient": "(A(1) - y * y) * dy",
        "SoftplusGradient": "-expm1(-y) * dy",
        "SoftsignGradient": "dy / (A(1) + fabs(x)) / (A(1) + fabs(x))",
        "SwishGradient": "swish_slope(x) * dy",
        "HardSwishGradient": "(hard_sigmoid(x, A(1.0 / 6), A(0.5)) + (x > A(-3) && x < A(3) ? x * A(1.0 / 6) : A(0)))"
        " * dy",
    },
)


class IntervalGradient(GradientExpression):
    """dY where Y is between two limits, rounded to the type of Y, as Y was."""

    code = "dx = y > low && y < high ? dy : A(0);"

    def scalars(self) -> dict[str, float]:
        """The limits, themselves not between."""
        meta = self.input(0).meta
        with np.errstate(over="ignore"):
            low, high = (float(np.float64(limit).astype(meta.numpy)) for limit in self.limits())
        return {"low": low, "high": high}

    def limits(self) -> tuple[float, float]:
        """Those of ReluN."""
        return 0.0, self.arguments.float("n", self.constants["n"])


class ClipIntervalGradient(IntervalGradient):
    """The window of Clip."""

    def limits(self) -> tuple[float, float]:
        """The limits of Clip; those of the type count as none."""
        low, high = clip_limits(self.arguments, self.label, self.input(0).meta)
        return low if "min" in self.arguments else -math.inf, high if "max" in self.arguments else math.inf


class GeluGradient(GradientExpression):
    """Gradient of Gelu, exact or of the approximation."""

    code = ""

    def expression(self) -> str:
        """As `fast_gelu` says."""
        return f"dx = {'gelu_tanh_slope' if self.arguments.bool('fast_gelu') else 'gelu_erf_slope'}(x) * dy;"


register_gradient(host, "ReluNGradient", IntervalGradient)
register_gradient(host, "ClipGradient", ClipIntervalGradient)
register_gradient(host, "GeluGradient", GeluGradient)


class PReluGradient(CudaOperator):
    """Gradients of PRelu."""

    def prepare(self) -> Step:
        """A kernel for each gradient that is asked for."""
        call = self.call()
        forward = forward_call(call, (2, 3))
        x, slope = self.x(2), self.x(3)
        view = slope_view(x.shape, slope.shape, channel_axis(forward), forward)
        inputs = {"dy": self.x(1), "x": x}
        steps = []
        for index, name in enumerate(wanted_inputs(call, PRELU_INPUTS)):
            target = self.y(index)
            if name == "X":
                code = "value = x > A(0) ? dy : slope * dy;"
                step = reduced(self, "prelu_input", x.shape, {**inputs, "slope": slope.reshape(view)}, target, code)
            else:
                code = "value = nan_min(x, A(0)) * dy;"
                step = reduced(self, "prelu_slope", x.shape, inputs, target.reshape(view), code)
            steps.append(step)
        return in_sequence(steps)


register("PReluGradient", PReluGradient)
