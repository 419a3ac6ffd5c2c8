"""Gradients of the unary operators on CUDA: a table of expressions."""

from __future__ import annotations

from dagexec.ops.cuda.base.pointwise import register_pointwise_gradients
from dagexec.ops.elementwise import unary_gradient as host

register_pointwise_gradients(
    host,
    {
        "SqrGradient": "dy * (x * A(2))",
        "CubeGradient": "dy * (x * x * A(3))",
        "AbsGradient": "dy * sign_of(x)",
        "SinGradient": "dy * cos(x)",
        "CosGradient": "dy * -sin(x)",
        "TanGradient": "dy / (cos(x) * cos(x))",
        "AsinGradient": "dy / sqrt((A(1) - x) * (A(1) + x))",
        "AcosGradient": "dy / -sqrt((A(1) - x) * (A(1) + x))",
        "AtanGradient": "dy / (A(1) + x * x)",
        "SinhGradient": "dy * cosh(x)",
        "CoshGradient": "dy * sinh(x)",
        "ErfGradient": "dy * (exp(-(x * x)) * A(1.12837916709551257390))",
        "SqrtGradient": "dy / (y * A(2))",
        "CbrtGradient": "dy / (y * y * A(3))",
        "ReciprocalGradient": "dy * -(y * y)",
        "RsqrtGradient": "dy * (y * y * y * A(-0.5))",
    },
)
