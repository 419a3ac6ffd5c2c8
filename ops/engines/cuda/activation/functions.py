"""Activations on CUDA that need more than their arguments as they are, and their gradients."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.broadcasting import forward_call
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.base.layout import channel_axis
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.pointwise import GradientExpression, PointwiseExpression, register, register_gradient
from dagexec.ops.families.activation.functions import clip_limits, slope_view
from dagexec.ops.families.activation.gradient import PRELU_INPUTS


class Clip(PointwiseExpression):
    """Clip; the limits are within what the type holds."""

    code = "y = clipped(x, low, high);"

    def scalars(self) -> dict[str, float]:
        low, high = clip_limits(self.arguments, self.label, self.input(0).meta)
        return {"low": low, "high": high}


class Gelu(PointwiseExpression):
    """Gelu, exact or by tanh."""

    code = ""

    def expression(self) -> str:
        return f"y = {'gelu_tanh' if self.arguments.bool('fast_gelu') else 'gelu_erf'}(x);"


class CudaPRelu(CudaOperator):
    """PRelu; the slope is broadcast."""

    def prepare(self) -> Step:
        x, call = self.x(0), self.call()
        view = slope_view(x.shape, self.x(1).shape, channel_axis(call), call)
        inputs = {"x": x, "slope": self.x(1).reshape(view)}
        return elementwise(self, "prelu", inputs, {"y": self.y(0)}, "y = leaky_relu(x, slope);")


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
        return f"dx = {'gelu_tanh_slope' if self.arguments.bool('fast_gelu') else 'gelu_erf_slope'}(x) * dy;"


class PReluGradient(CudaOperator):
    """Gradients of PRelu."""

    def prepare(self) -> Step:
        """A kernel for each gradient that is requested."""
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


register("Clip", Clip)
register("Gelu", Gelu)
register("PRelu", CudaPRelu)
register("PReluGradient", PReluGradient)
register_gradient("ReluN", IntervalGradient)
register_gradient("Clip", ClipIntervalGradient)
register_gradient("Gelu", GeluGradient)
