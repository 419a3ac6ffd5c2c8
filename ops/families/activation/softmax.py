"""Softmax and LogSoftmax over groups of elements: the axes from `axis` on (Caffe2), or one axis (ONNX 13 and later)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import apart_from, summing
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, block_indices, compute_dtype, convert, is_narrow

SOFTMAX_ARGS = {
    "axis": "first axis of those that are normalized together; negative counts from the end (default 1)",
    "single_axis": "1: normalize over that axis alone (default 0)",
}


def grouping(call: OperatorCall) -> tuple[int, int, int]:
    """X seen as outer x group x inner, normalized over the middle. Raises ShapeError for a bad axis."""
    shape = call.inputs[0].shape
    if call.arguments.bool("single_axis"):
        axis = call.axis("axis", 1, len(shape))
        return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    axis = call.axis("axis", 1, len(shape), end=True)
    return math.prod(shape[:axis]), math.prod(shape[axis:]), 1


def normalized_axes(call: OperatorCall) -> range:
    """The axes that are normalized together."""
    rank = len(call.inputs[0].shape)
    alone = call.arguments.bool("single_axis")
    axis = call.axis("axis", 1, rank, end=not alone)
    return range(axis, axis + 1 if alone else rank)


def infer_softmax(call: OperatorCall) -> list[TensorType]:
    """The output has the input's type, which must be a float type."""
    call.require_types(0, *FLOAT_TYPES)
    grouping(call)
    return [call.inputs[0]]


@declares
def softmax_operator(name: str, formula: str) -> OpSchema:
    """The schema that Softmax and LogSoftmax share."""
    return OpSchema(
        name,
        infer=infer_softmax,
        doc=f"{formula} The sum is over the axes from `axis` on, or with single_axis over `axis` alone. "
        "The maximum is subtracted first, so nothing overflows.",
        input_names=("X",),
        output_names=("Y",),
        args=SOFTMAX_ARGS,
        cost=lambda call, outputs: memory_cost(call, outputs, 15),
        rows=summing(apart_from(normalized_axes), normalized_axes),
    )


RowPasses = Callable[[Array, Array, Array], list[Step]]


def _prepare(owner: Operator, row_passes: RowPasses) -> Step:
    """A step that runs `row_passes(x, y, rows)` on pieces of whole groups; `rows` is scratch with the middle axis 1."""
    outer, group, inner = grouping(owner.call())
    x, y = owner.x(0).reshape(outer, group, inner), owner.y(0).reshape(outer, group, inner)
    if x.size == 0:
        return in_sequence([])
    work = compute_dtype(x.dtype)
    count = min(outer, max(1, BLOCK // (group * inner)))
    rows = owner.scratch((count, 1, inner), work)
    wide = owner.scratch((count, group, inner), work) if is_narrow(x.dtype) else None
    steps: list[Step] = []
    for (piece,) in block_indices((outer,), count):
        source, target = x[piece], y[piece]
        if wide is None:
            steps += row_passes(source, target, rows[: len(source)])
        else:
            part = wide[: len(source)]
            steps += [convert(source, part), *row_passes(part, part, rows[: len(source)]), convert(part, target)]
    return in_sequence(steps)


@softmax_operator("Softmax", "Y = exp(X) / sum of exp(X).")
class Softmax(Operator):
    """Softmax."""

    def prepare(self) -> Step:
        """Subtract the maximum, exponentiate, divide by the sum."""

        def row_passes(x: Array, y: Array, rows: Array) -> list[Step]:
            return [
                partial(np.maximum.reduce, x, axis=1, keepdims=True, out=rows),
                partial(np.subtract, x, rows, out=y),
                partial(np.exp, y, out=y),
                partial(np.add.reduce, y, axis=1, keepdims=True, out=rows),
                partial(np.divide, y, rows, out=y),
            ]

        return _prepare(self, row_passes)


@softmax_operator("LogSoftmax", "Y = X - ln(sum of exp(X)).")
class LogSoftmax(Operator):
    """Logarithm of Softmax, without the loss of accuracy of taking it afterwards."""

    def prepare(self) -> Step:
        """Subtract the maximum, then the logarithm of the sum of exponentials."""
        outer, group, inner = grouping(self.call())
        count = min(outer, max(1, BLOCK // max(1, group * inner)))
        powers = self.scratch((count, group, inner), compute_dtype(self.x(0).dtype))

        def row_passes(x: Array, y: Array, rows: Array) -> list[Step]:
            exponentials = powers[: len(x)]
            return [
                partial(np.maximum.reduce, x, axis=1, keepdims=True, out=rows),
                partial(np.subtract, x, rows, out=y),
                partial(np.exp, y, out=exponentials),
                partial(np.add.reduce, exponentials, axis=1, keepdims=True, out=rows),
                partial(np.log, rows, out=rows),
                partial(np.subtract, y, rows, out=y),
            ]

        return _prepare(self, row_passes)
