"""Activations on CUDA: a table of expressions, and those that need more than their arguments as they are."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops import activation as host
from dagexec.ops.activation import PRelu, clip_limits, slope_view
from dagexec.ops.cuda.expression import elementwise
from dagexec.ops.cuda.operator import CudaOperator
from dagexec.ops.cuda.pointwise import PointwiseExpression, register, register_pointwise
from dagexec.ops.layout import channel_axis

EXPRESSIONS = {
    host.Relu: "larger(x, A(0))",
    host.LeakyRelu: "leaky_relu(x, alpha)",
    host.Elu: "elu(x, alpha)",
    host.Selu: "scale * elu(x, alpha)",
    host.Sigmoid: "logistic(x)",
    host.Swish: "swish(x, A(1))",
    host.Softplus: "softplus(x)",
    host.Softsign: "x / (A(1) + fabs(x))",
    host.Tanh: "tanh(x)",
    host.HardSigmoid: "hard_sigmoid(x, alpha, beta)",
    host.HardSwish: "hard_swish(x)",
}

for _cpu, _code in EXPRESSIONS.items():
    register_pointwise(_cpu, _code)


class ReluN(PointwiseExpression):
    """ReluN; the argument `n` is called `limit`, as `n` is the number of elements."""

    code = "y = clipped(x, A(0), limit);"

    def scalars(self) -> dict[str, float]:
        """The limit."""
        return {"limit": self.arguments.float("n", host.ReluN.constants["n"])}


class Clip(PointwiseExpression):
    """Clip; the limits are within what the type holds."""

    code = "y = clipped(x, low, high);"

    def scalars(self) -> dict[str, float]:
        """The limits."""
        low, high = clip_limits(self.arguments, self.label, self.input(0).meta)
        return {"low": low, "high": high}


class Gelu(PointwiseExpression):
    """Gelu, exact or by tanh."""

    code = ""

    def expression(self) -> str:
        """As `fast_gelu` says."""
        return f"y = {'gelu_tanh' if self.arguments.bool('fast_gelu') else 'gelu_erf'}(x);"


class CudaPRelu(CudaOperator):
    """PRelu; the slope is broadcast."""

    def prepare(self) -> Step:
        """One kernel."""
        x, call = self.x(0), self.call()
        view = slope_view(x.shape, self.x(1).shape, channel_axis(call), call)
        inputs = {"x": x, "slope": self.x(1).reshape(view)}
        return elementwise(self, "prelu", inputs, {"y": self.y(0)}, "y = leaky_relu(x, slope);")


register(host.ReluN, ReluN)
register(host.Clip, Clip)
register(host.Gelu, Gelu)
register(PRelu, CudaPRelu)
