"""Limiting gradients by their norm: GlobalNorm and ClipTensorByScaling, and the layer-wise rates of Lars."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType, first_to_first
from dagexec.errors import ArgumentError
from dagexec.ops.families.optimize.scalars import require_rate
from dagexec.ops.families.optimize.update import PIECE


def at_least(call: OperatorCall, name: str, default: float) -> float:
    """Float argument `name`, which must be finite and at least 0. Raises ArgumentError."""
    value = call.arguments.float(name, default)
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{call.label}: argument {name!r} must be at least 0 and finite, found {value:g}")
    return value


def infer_global_norm(call: OperatorCall) -> list[TensorType]:
    """One float32 of no axes."""
    for index in range(len(call.inputs)):
        require_rate(call, index, "a sum of squares")
    return [TensorType((), FLOAT32)]


@new_operator(
    "GlobalNorm",
    inputs=(1, UNBOUNDED),
    infer=infer_global_norm,
    doc="The root of the sum of its inputs, added in that order in float64. Of the sums of squares of several "
    "tensors (SumSqrElements) that is the norm of all of them together.",
    input_names=("squares",),
    output_names=("norm",),
)
class GlobalNorm(Operator):
    """The norm of several tensors from the sums of their squares."""

    def prepare(self) -> Step:
        squares = [self.x(index).reshape(-1) for index in range(len(self.input_blobs))]
        norm = self.y(0)

        def compute() -> None:
            total = sum(float(square[0]) for square in squares)
            norm[...] = math.sqrt(total) if total >= 0 else math.nan

        return compute


def infer_clip_tensor(call: OperatorCall) -> list[TensorType]:
    """The type of the tensor."""
    call.require_types(0, FLOAT32, FLOAT64)
    for index in range(1, len(call.inputs)):
        require_rate(call, index, "the norm" if index == 1 else "the factor of the threshold")
    if not 0 < call.arguments.float("threshold", 0.0) < math.inf:
        found = call.arguments.float("threshold", 0.0)
        raise ArgumentError(f"{call.label}: argument 'threshold' must be above 0 and finite, found {found:g}")
    return [call.inputs[0]]


@new_operator(
    "ClipTensorByScaling",
    inputs=(2, 3),
    infer=infer_clip_tensor,
    doc="Y = X * limit / norm where norm exceeds the limit, else X; the limit is the threshold, times the third "
    "input if there is one. May be in place, and costs nothing then while nothing is clipped.",
    input_names=("X", "norm", "factor"),
    output_names=("Y",),
    args={"threshold": "the maximum norm, above 0"},
    required_args=("threshold",),
    inplace=first_to_first,
)
class ClipTensorByScaling(Operator):
    """A tensor scaled down when a norm is too large."""

    def prepare(self) -> Step:
        """A product, or a copy, or nothing."""
        x, y, norm = self.x(0), self.y(0), self.x(1).reshape(-1)
        factor = self.x(2).reshape(-1) if len(self.input_blobs) > 2 else np.ones(1, np.float32)
        threshold = self.arguments.float("threshold", 0.0)
        inplace = self.definition.input[0] == self.definition.output[0]
        ratio = np.zeros((), y.dtype)

        def clip() -> None:
            limit, found = threshold * factor.item(), norm.item()
            if found > limit:
                ratio[...] = limit / found
                np.multiply(x, ratio, out=y)
            elif not inplace:
                np.copyto(y, x)

        return clip


def infer_lars(call: OperatorCall) -> list[TensorType]:
    """One float32."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type(0, 1)
    call.require_shape(1, call.inputs[0].shape, "that of the parameter")
    if len(call.inputs) not in (2, 3, 5):
        raise call.fail("expected 2, 3 or 5 inputs")
    for index, what in zip(range(2, len(call.inputs)), ("the weight decay", "the trust", "lr_max"), strict=False):
        require_rate(call, index, what)
    at_least(call, "offset", 0.5)
    at_least(call, "lr_min", 0.02)
    return [TensorType((1,), FLOAT32)]


def norm_of(array: Array, work: Array) -> Callable[[], float]:
    """What computes the norm of a 1-D array, in the memory `work`, with pairwise sums in float64."""
    size = work.size
    pieces = [array[start : start + size] for start in range(0, array.size, size)] if size else []

    def norm() -> float:
        total = 0.0
        for piece in pieces:
            squares = work[: piece.size]
            np.copyto(squares, piece)
            np.multiply(squares, squares, out=squares)
            total += float(squares.sum())
        return math.sqrt(total)

    return norm


@new_operator(
    "Lars",
    inputs=(2, 5),
    infer=infer_lars,
    doc="A factor of the learning rate of one parameter: trust / (norm(dX) / norm(X) + wd + offset), and 1 where X "
    "is 0; within [lr_min, lr_max]. Without the last two inputs trust is 1 and there are no limits, without the "
    "last three wd is 0. You et al., 2017, arXiv:1708.03888.",
    input_names=("X", "dX", "wd", "trust", "lr_max"),
    output_names=("factor",),
    args={
        "offset": "keeps the divisor away from 0 (default 0.5)",
        "lr_min": "the minimum factor, of the form with five inputs (default 0.02)",
    },
)
class Lars(Operator):
    """Layer-wise adaptive rate scaling."""

    def prepare(self) -> Step:
        """Two norms and the formula."""
        x, dx, target = self.x(0).reshape(-1), self.x(1).reshape(-1), self.y(0)
        work = self.scratch((min(x.size, PIECE),), np.float64)
        norm, slope = norm_of(x, work), norm_of(dx, work)
        scalars = [self.x(index).reshape(-1) for index in range(2, len(self.input_blobs))]
        defaults = (0.0, 1.0, math.inf)[len(scalars) :]
        offset, least = self.arguments.float("offset", 0.5), self.arguments.float("lr_min", 0.02)

        def compute() -> None:
            decay, trust, most = (*(float(scalar[0]) for scalar in scalars), *defaults)
            size, factor = norm(), 1.0
            if size > 0:
                divisor = slope() / size + decay + offset
                factor = trust / divisor if divisor else math.inf
            target[0] = max(min(factor, most), least) if len(scalars) == 3 else factor

        return compute


not_differentiable("it adjusts gradients that are known already", "GlobalNorm", "ClipTensorByScaling", "Lars")
