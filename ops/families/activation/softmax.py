"""Softmax and LogSoftmax over groups of elements: the axes from `axis` on (Caffe2), or one axis (ONNX 13 and later).

The maximum is subtracted first, so nothing overflows. Gradients are written with Y (Goodfellow et al., "Deep Learning",
2016, section 6.2.2).
"""

from __future__ import annotations

import math

from dagexec.core.expressions import Expression, constant, exp, log, row_max, row_sum
from dagexec.core.schema import OperatorCall, no_inplace
from dagexec.ops.base.row_operator import row_operator

SOFTMAX_ARGS = {
    "axis": "first axis of those that are normalized together; negative counts from the end (default 1)",
    "single_axis": "1: normalize over that axis alone (default 0)",
}


def grouping(call: OperatorCall) -> tuple[int, int, int]:
    """X seen as outer x group x inner, normalized over the middle. Raises ShapeError for a bad axis."""
    shape = call.inputs[0].shape
    axes = normalized_axes(call, len(shape))
    return math.prod(shape[: axes.start]), math.prod(shape[axes.start : axes.stop]), math.prod(shape[axes.stop :])


def normalized_axes(call: OperatorCall, rank: int) -> range:
    """The axes that are normalized together, of tensors of so many. Raises ShapeError for a bad axis."""
    alone = call.arguments.bool("single_axis")
    axis = call.axis("axis", 1, rank, end=not alone)
    return range(axis, axis + 1 if alone else rank)


def _softmax_gradient(y: Expression, dy: Expression) -> Expression:
    return (dy - row_sum(y * dy)) * y


def _log_softmax_gradient(y: Expression, dy: Expression) -> Expression:
    return dy - exp(y) * row_sum(dy)


@row_operator(
    "Softmax",
    SOFTMAX_ARGS,
    members=normalized_axes,
    gradient=("Y", "dY"),
    slope=_softmax_gradient,
    inplace=no_inplace,
)
def softmax(x: Expression) -> Expression:
    """Y = exp(X) / sum of exp(X). The sum is over the axes from `axis` on, or with single_axis over `axis` alone."""
    powers = exp(x - constant(row_max(x)))
    return powers / row_sum(powers)


@row_operator(
    "LogSoftmax",
    SOFTMAX_ARGS,
    members=normalized_axes,
    gradient=("Y", "dY"),
    slope=_log_softmax_gradient,
    inplace=no_inplace,
)
def log_softmax(x: Expression) -> Expression:
    """Y = X - ln(sum of exp(X)), more accurate than Log of Softmax. The sum is over the axes from `axis` on, or with
    single_axis over `axis` alone."""
    below = x - constant(row_max(x))
    return below - log(row_sum(exp(below)))
