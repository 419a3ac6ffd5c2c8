"""Logit and ThresholdedRelu on CUDA, and their gradients."""

from __future__ import annotations

from dagexec.ops.activation import logit as host
from dagexec.ops.cuda.base.pointwise import register_pointwise, register_pointwise_gradients

register_pointwise(
    host,
    {
        "Logit": "log(clipped(x, eps, A(1) - eps) / (A(1) - clipped(x, eps, A(1) - eps)))",
        "ThresholdedRelu": "x <= alpha ? A(0) : x",
    },
)
register_pointwise_gradients(
    host,
    {
        "LogitGradient": "x >= eps && x <= A(1) - eps ? dy / (x * (A(1) - x)) : A(0)",
        "ThresholdedReluGradient": "y > A(0) ? dy : A(0)",
    },
)
