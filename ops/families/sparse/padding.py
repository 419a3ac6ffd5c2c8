"""Padding of sequences that stand one after another: AddPadding, RemovePadding, and GatherPadding for their gradients.

Each sequence gets `padding_width` rows before it and `end_padding_width` rows behind it (by default as many). Without
lengths all rows are one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.families.sparse.segments import places_in_segments

_ARGS = {
    "padding_width": "rows before each sequence (default 1)",
    "end_padding_width": "rows behind each (default: as many as before it)",
}


def _widths(call: OperatorCall) -> tuple[int, int]:
    """Rows before and behind each sequence. Raises ArgumentError for numbers below 0."""
    start, end = call.arguments.int("padding_width", 1), call.arguments.int("end_padding_width", -1)
    if start < 0 or end < -1:
        raise ArgumentError(f"{call.label}: padding widths must be at least 0, found {start} and {end}")
    return start, start if end == -1 else end


def _sequences(call: OperatorCall) -> int:
    """How many there are. Raises ShapeError for an input that is not a row for each row, or not lengths."""
    call.require_types(0, *NUMBER_TYPES, BOOL)
    if not call.inputs[0].shape:
        raise call.fail("the data must have at least 1 axis")
    if len(call.inputs) == 1:
        return 1
    call.require_types(1, INT32, INT64)
    return call.require_rank(1, 1)[0]


def _lengths(call: OperatorCall, data: Array, others: Sequence[Array], least: int) -> npt.NDArray[Any]:
    """The rows of each sequence. Raises ShapeError unless they are at least `least` and add up to those of the data."""
    lengths = others[0].astype(np.int64) if others else np.array([len(data)])
    if (lengths < least).any() or int(lengths.sum()) != len(data):
        raise call.fail(f"lengths must be at least {least} and add up to {len(data)} rows, found {lengths.tolist()}")
    return lengths


def _places(lengths: npt.NDArray[Any], before: int, behind: int) -> npt.NDArray[np.int64]:
    """Where the rows of sequences are when each has so many rows before and behind it."""
    starts = np.cumsum(lengths + before + behind) - lengths - behind
    found: npt.NDArray[np.int64] = np.repeat(starts, lengths) + places_in_segments(lengths)
    return found


def _padded(call: OperatorCall, sign: int) -> list[TensorType]:
    data, count, added = call.inputs[0], _sequences(call), sign * sum(_widths(call))
    rows = data.shape[0] + added * count
    if rows < 0:
        raise call.fail(f"{count} sequences with paddings of {-added} rows do not fit in {data.shape[0]} rows")
    found = [TensorType((rows, *data.shape[1:]), data.meta), TensorType((count,), INT32)]
    return found[: len(call.definition.output)]


def infer_add(call: OperatorCall) -> list[TensorType]:
    """The paddings more, and the new lengths. Raises ShapeError for a padding that is not one row."""
    for index in range(2, len(call.inputs)):
        call.require_same_type(0, index)
        call.require_shape(index, call.inputs[0].shape[1:], "a row of the data")
    return _padded(call, 1)


@array_function(
    "AddPadding",
    inputs=(1, 4),
    outputs=(1, 2),
    infer=infer_add,
    doc="Each sequence with rows `start_padding` before and `end_padding` behind it (by default as before, or zeros).",
    input_names=("data", "lengths", "start_padding", "end_padding"),
    output_names=("Y", "lengths_out"),
    args=_ARGS,
)
def add(call: OperatorCall, data: Array, *others: Array) -> Sequence[Array]:
    """Rows of paddings first, then those of the sequences and their ends to their places."""
    (before, behind), lengths, paddings = _widths(call), _lengths(call, data, others, 0), others[1:]
    longer = lengths + before + behind
    found = np.zeros((int(longer.sum()), *data.shape[1:]), data.dtype)
    if paddings:
        found[:] = paddings[0]
        found[_ends(longer, behind)] = paddings[-1]
    found[_places(lengths, before, behind)] = data
    return [found, longer][: len(call.definition.output)]


def _ends(lengths: npt.NDArray[Any], width: int) -> npt.NDArray[np.int64]:
    """The last `width` rows of each sequence."""
    found: npt.NDArray[np.int64] = (np.cumsum(lengths)[:, np.newaxis] - np.arange(width, 0, -1)).reshape(-1)
    return found


def infer_remove(call: OperatorCall) -> list[TensorType]:
    """The paddings less, and the new lengths."""
    return _padded(call, -1)


@array_function(
    "RemovePadding",
    inputs=(1, 2),
    outputs=(1, 2),
    infer=infer_remove,
    doc="Each sequence without its paddings; undoes AddPadding.",
    input_names=("data", "lengths"),
    output_names=("Y", "lengths_out"),
    args=_ARGS,
)
def remove(call: OperatorCall, data: Array, *others: Array) -> Sequence[Array]:
    """The rows between the paddings."""
    before, behind = _widths(call)
    shorter = _lengths(call, data, others, before + behind) - before - behind
    return [data[_places(shorter, before, behind)], shorter][: len(call.definition.output)]


def infer_gather(call: OperatorCall) -> list[TensorType]:
    """A row for each output; of no paddings the number 0 of int64, as Caffe2 has it."""
    data, _ = call.inputs[0], _sequences(call)
    found = TensorType(data.shape[1:], data.meta) if any(_widths(call)) else TensorType((), INT64)
    return [found] * len(call.definition.output)


@array_function(
    "GatherPadding",
    inputs=(1, 2),
    outputs=(1, 2),
    infer=infer_gather,
    doc="The sums of the paddings before and behind all sequences, or of both together.",
    input_names=("data", "lengths"),
    output_names=("start_sum", "end_sum"),
    args=_ARGS,
)
def gather(call: OperatorCall, data: Array, *others: Array) -> Sequence[Any]:
    """Sums over the rows that RemovePadding takes away."""
    (before, behind), outputs = _widths(call), len(call.definition.output)
    if not before + behind:
        return [0] * outputs
    lengths = _lengths(call, data, others, before + behind)
    starts = (np.cumsum(lengths) - lengths)[:, np.newaxis] + np.arange(before)
    wide = data.astype(compute_dtype(data.dtype), copy=False)
    sums = [wide[places].sum(axis=0) for places in (starts.reshape(-1), _ends(lengths, behind))]
    return sums if outputs == 2 else [sums[0] + sums[1]]


def _of_output(request: GradientRequest) -> list[str]:
    """dY, and the lengths that belong to it."""
    return [request.dy(0), *([request.y(1)] if request.has_x(1) else [])]


@gradient_of("AddPadding")
def add_gradient(request: GradientRequest) -> GradientOperators:
    """Of the data by RemovePadding, of the paddings by GatherPadding."""
    inputs = _of_output(request)
    operators = [request.operator("RemovePadding", inputs, [request.dx(0)])]
    paddings = list(range(2, len(request.definition.input)))
    if paddings:
        operators.append(request.operator("GatherPadding", inputs, [request.dx(index) for index in paddings]))
    return request.result(operators, {index: request.dx(index) for index in (0, *paddings)})


@gradient_of("RemovePadding")
def remove_gradient(request: GradientRequest) -> GradientOperators:
    """By AddPadding, of zeros."""
    return request.single("AddPadding", _of_output(request), [0])


not_differentiable("Caffe2 has none", "GatherPadding")
