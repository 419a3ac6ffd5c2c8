"""SequenceMask: scores of an attention that do not count, because of a sequence's length, a window or a triangle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

_TRIANGLES: dict[str, Callable[[Array, Array], Array]] = {
    "upper": lambda row, column: column < row,
    "lower": lambda row, column: column > row,
    "upperdiag": lambda row, column: column <= row,
    "lowerdiag": lambda row, column: column >= row,
}
"""Which places are filled."""

_OF_ROWS = ("sequence", "window")
"""Modes in which input 1 has a number for each row."""


def _mode(call: OperatorCall) -> str:
    mode = call.arguments.string("mode", "")
    if mode not in (*_OF_ROWS, *_TRIANGLES):
        raise ArgumentError(
            f"{call.label}: 'mode' must be one of {', '.join((*_OF_ROWS, *_TRIANGLES))}, found {mode!r}"
        )
    if "repeat_from_axis" in call.arguments and (mode != "sequence" or "batch" in call.arguments):
        raise ArgumentError(f"{call.label}: 'repeat_from_axis' is for mode 'sequence' without 'batch'")
    return mode


def _matrices(call: OperatorCall) -> tuple[int, int, int, int]:
    """X as matrices: how many, their rows and columns, and how many columns in turn are masked alike.

    Raises ShapeError for axes that are none of X, or out of order.
    """
    shape = call.inputs[0].shape
    axis = call.axis("axis", 1, len(shape))
    first = call.axis("batch", 0, len(shape)) + 1 if "batch" in call.arguments else 0
    if first > axis:
        raise call.fail(f"argument 'batch' must be an axis before {axis}, found {first - 1}")
    alike = 1
    if "repeat_from_axis" in call.arguments:
        alike = math.prod(shape[max(axis, call.axis("repeat_from_axis", -1, len(shape))) :])
    return math.prod(shape[:first]), math.prod(shape[first:axis]), math.prod(shape[axis:]), alike


def infer_sequence_mask(call: OperatorCall) -> list[TensorType]:
    """That of X."""
    call.require_types(0, *FLOAT_TYPES)
    rows = _matrices(call)[1]
    if (_mode(call) in _OF_ROWS) != (len(call.inputs) == 2):
        raise call.fail("input 1, a number for each row, is for the modes sequence and window, which need it")
    if len(call.inputs) == 2:
        call.require_types(1, INT32)
        if call.require_rank(1, 1)[0] < rows:
            raise call.fail(f"expected a number for each of {rows} rows, found {call.inputs[1].elements}")
    call.arguments.float("fill_val", 0.0), call.arguments.int("radius", 0), call.arguments.bool("grad")
    return [call.inputs[0]]


@array_function(
    "SequenceMask",
    inputs=(1, 2),
    infer=infer_sequence_mask,
    doc="X with fill_val where it is masked. Its axes before `axis` are rows, the others columns. Mode sequence: column"
    " j of row i is masked if j >= lengths[i]; window: if |j - centers[i]| > radius; upper: if j < i, lower: if j > i, "
    "upperdiag and lowerdiag: on the diagonal, too.",
    input_names=("X", "lengths"),
    output_names=("Y",),
    args={
        "mode": "sequence, window, upper, lower, upperdiag or lowerdiag",
        "axis": "the first axis of columns (default 1)",
        "batch": "the axes up to this one are of matrices apart, each of which is masked alike (default: none)",
        "repeat_from_axis": "columns are counted without the axes from this one on (default: with them)",
        "radius": "of the windows (default 10)",
        "fill_val": "what the masked places hold (default -infinity)",
        "grad": "1: they hold 0, as its gradient has it (default 0)",
    },
    required_args=("mode",),
)
def sequence_mask(call: OperatorCall, x: Array, *numbers: Array) -> Sequence[Array]:
    """The same mask for all matrices."""
    matrices, rows, columns, alike = _matrices(call)
    row, column = np.arange(rows)[:, np.newaxis], np.arange(columns) // max(1, alike)
    mode = call.arguments.string("mode", "")
    if mode in _OF_ROWS:
        of_row = numbers[0][:rows, np.newaxis].astype(np.int64)
        radius = call.arguments.int("radius", 10)
        masked = column >= of_row if mode == "sequence" else np.abs(column - of_row) > radius
    else:
        masked = _TRIANGLES[mode](row, column)
    fill = 0.0 if call.arguments.bool("grad") else call.arguments.float("fill_val", -math.inf)
    return [np.where(masked, x.dtype.type(fill), x.reshape(matrices, rows, columns))]


@gradient_of("SequenceMask")
def mask_gradient(request: GradientRequest) -> GradientOperators:
    """0 where it is masked, dY elsewhere."""
    numbers = [request.x(1)] if request.has_x(1) else []
    return request.single("SequenceMask", [request.dy(0), *numbers], [0], grad=1)
