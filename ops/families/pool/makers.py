"""Gradient makers of the poolings. The gradient operators are in `maximum`, `maximum_index`, `average` and `norm`."""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.ops.families.pool.window import RANKS

for _forward in (f"{kind}Pool{rank}" for kind in ("Max", "Average", "Lp") for rank in RANKS):
    gradient_by(_forward, f"{_forward}Gradient", ("X", "Y", "dY"))


@gradient_of(*(f"MaxPoolWithIndex{rank}" for rank in RANKS))
def indexed_pooling_gradient(request: GradientRequest) -> GradientOperators:
    """(X, dY, mask) -> dX; the mask has no gradient."""
    if not request.has_dy(0):
        return request.result([], {})
    inputs = [request.x(0), request.dy(0), request.y(1)]
    return request.single(f"{request.definition.type}Gradient", inputs, [0])
