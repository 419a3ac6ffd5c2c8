"""PRelu on CUDA, and its gradients."""

from __future__ import annotations

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.broadcasting import forward_call
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.base.layout import channel_axis
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expressed import register
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.activation.prelu import PRELU_INPUTS, slope_view


class CudaPRelu(CudaOperator):
    """PRelu; the slope is broadcast."""

    def prepare(self) -> Step:
        x, call = self.x(0), self.call()
        view = slope_view(x.shape, self.x(1).shape, channel_axis(call), call)
        inputs = {"x": x, "slope": self.x(1).reshape(view)}
        return elementwise(self, "prelu", inputs, {"y": self.y(0)}, "y = x > A(0) ? x : slope * x;")


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


register("PRelu", CudaPRelu)
register("PReluGradient", PReluGradient)
