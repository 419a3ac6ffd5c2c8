"""Gradient makers of the poolings. The gradient operators are in `maximum`, `maximum_index`, `average` and `norm`."""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.ops.pool.window import RANKS


@gradient_of(*(f"{kind}Pool{rank}" for kind in ("Max", "Average", "Lp") for rank in RANKS))
def pooling_gradient(request: GradientRequest) -> GradientOperators:
    """(X, Y, dY) -> dX, as Caffe2's."""
    inputs = [request.x(0), request.y(0), request.dy(0)]
    return request.single(f"{request.definition.type}Gradient", inputs, [0])


@gradient_of(*(f"MaxPoolWithIndex{rank}" for rank in RANKS))
def indexed_pooling_gradient(request: GradientRequest) -> GradientOperators:
    """(X, dY, mask) -> dX; the mask has no gradient."""
    if not request.has_dy(0):
        return request.result([], {})
    inputs = [request.x(0), request.dy(0), request.y(1)]
    return request.single(f"{request.definition.type}Gradient", inputs, [0])
