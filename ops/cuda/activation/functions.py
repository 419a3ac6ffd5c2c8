"""Activations on CUDA: a table of expressions, and those that need more than their arguments as they are."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.activation import functions as host
from dagexec.ops.activation.functions import clip_limits, slope_view
from dagexec.ops.base.layout import channel_axis
from dagexec.ops.cuda.base.expression import elementwise
from dagexec.ops.cuda.base.operator import CudaOperator
from dagexec.ops.cuda.base.pointwise import PointwiseExpression, register, register_pointwise

register_pointwise(
    host,
    {
        "Relu": "nan_max(x, A(0))",
        "ReluN": "clipped(x, A(0), n)",
        "LeakyRelu": "leaky_relu(x, alpha)",
        "Elu": "elu(x, alpha)",
        "Selu": "scale * elu(x, alpha)",
        "Sigmoid": "logistic(x)",
        "Swish": "swish(x, A(1))",
        "Softplus": "softplus(x)",
        "Softsign": "x / (A(1) + fabs(x))",
        "Tanh": "tanh(x)",
        "HardSigmoid": "hard_sigmoid(x, alpha, beta)",
        "HardSwish": "hard_swish(x)",
    },
)


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


register("Clip", Clip)
register("Gelu", Gelu)
register("PRelu", CudaPRelu)
