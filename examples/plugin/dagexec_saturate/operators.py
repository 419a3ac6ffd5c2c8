"""Saturate, with its gradient, for all engines, and as a node of ONNX's domain `com.example`."""

from __future__ import annotations

from dagexec.errors import ArgumentError
from dagexec.operators import Expression, OnnxName, OperatorCall, elementwise_operator, tanh


def above_zero(call: OperatorCall) -> None:
    """Raise ArgumentError unless limit is above 0."""
    if call.arguments.float("limit", 1.0) <= 0:
        raise ArgumentError(f"{call.label}: argument 'limit' must be above 0")


@elementwise_operator(
    "Saturate",
    {"limit": "what Y comes near to, above 0 (default 1)"},
    gradient=("X", "dY"),
    check=above_zero,
    onnx=OnnxName("Saturate", 1, {"bound": "limit"}, domain="com.example"),
)
def saturate(x: Expression, *, limit: float = 1.0) -> Expression:
    """Y = limit * tanh(X / limit)."""
    return tanh(x / limit) * limit
