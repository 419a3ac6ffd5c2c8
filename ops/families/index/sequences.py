"""ReverseSequence and TensorScatter: slices along a time axis whose order, or place, each element of a batch names."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.shape.reshaping import copy_cost


def _time_and_batch(call: OperatorCall) -> tuple[int, int]:
    """The two axes. Raises ShapeError when they are one, or there is no such axis."""
    rank = len(call.inputs[0].shape)
    time, batch = call.axis("time_axis", 0, rank), call.axis("batch_axis", 1, rank)
    if time == batch:
        raise call.fail(f"'time_axis' and 'batch_axis' must be two axes, found {time} for both")
    return time, batch


def infer_reverse_sequence(call: OperatorCall) -> list[TensorType]:
    """The type of X; there is a length for each element of the batch."""
    _, batch = _time_and_batch(call)
    call.require_types(1, INT32, INT64)
    call.require_shape(1, (call.inputs[0].shape[batch],), "a length for each element of the batch")
    return [call.inputs[0]]


def _rows(asked: RowsCall) -> list[Rows | None]:
    """On any axis of X but that of the steps; lengths have them with the axis of the batch."""
    asked.require_uncounted()
    time, batch = _time_and_batch(asked.call)
    x, lengths = asked.rows
    if x is not None and (x.axis == time or (x.axis == batch and lengths is None)):
        raise asked.mixes(x.axis)
    places = {0: x, 1: None if lengths is None else lengths.at(batch)}
    return [asked.common({index: rows for index, rows in places.items() if rows is not None})]


@new_operator(
    "ReverseSequence",
    infer=infer_reverse_sequence,
    doc="X with the first lengths[b] steps of each element b of the batch in reversed order. "
    "(dagexec's own, for ONNX.)",
    input_names=("X", "lengths"),
    output_names=("Y",),
    args={
        "time_axis": "the axis of the steps; negative counts from the end (default 0)",
        "batch_axis": "the axis of the batch; negative counts from the end (default 1)",
    },
    cost=copy_cost,
    onnx=(OnnxName("ReverseSequence", 28, {"time_axis": "time_axis", "batch_axis": "batch_axis"}),),
    rows=_rows,
)
class ReverseSequence(Operator):
    """Sequences of several lengths, reversed."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        """Two copies for each element of the batch: the steps that turn, and those that stay."""
        time, batch = _time_and_batch(self.call())
        x, y = (np.moveaxis(array, (batch, time), (0, 1)) for array in (self.x(0), self.y(0)))
        lengths, label = self.x(1), self.label
        if not x.size:
            return nothing_to_do

        def reverse() -> None:
            check_indices(lengths, 0, x.shape[1] + 1, label)
            for source, target, length in zip(x, y, lengths.tolist(), strict=True):
                np.copyto(target[:length], source[:length][::-1])
                np.copyto(target[length:], source[length:])

        return reverse


@gradient_of("ReverseSequence")
def reverse_sequence_gradient(request: GradientRequest) -> GradientOperators:
    """dY in reversed order."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("ReverseSequence", [request.dy(0), request.x(1)], [0])


def _written_axis(call: OperatorCall) -> int:
    """The axis of the steps. Raises ShapeError unless update and cache differ in its size alone."""
    cache, update = call.inputs[0].shape, call.inputs[1].shape
    axis = call.axis("axis", -2, len(cache))
    if axis == 0:
        raise call.fail("the first axis is the batch, expected another one as 'axis'")
    sizes = update[axis] if len(update) == len(cache) else -1
    call.require_shape(1, (*cache[:axis], sizes, *cache[axis + 1 :]), f"that of the cache but for axis {axis}")
    if sizes > cache[axis]:
        raise call.fail(f"the update has {sizes} steps, and the cache {cache[axis]}")
    return axis


def infer_tensor_scatter(call: OperatorCall) -> list[TensorType]:
    """The type of the cache."""
    _written_axis(call)
    call.require_same_type(0, 1)
    if len(call.inputs) == 3:
        call.require_types(2, INT32, INT64)
        call.require_shape(2, call.inputs[0].shape[:1], "where each element of the batch is written")
    if call.arguments.string("mode", "linear") not in ("linear", "circular"):
        found = call.arguments.string("mode", "")
        raise ArgumentError(f"{call.label}: argument 'mode' must be linear or circular, found {found!r}")
    return [call.inputs[0]]


@new_operator(
    "TensorScatter",
    inputs=(2, 3),
    infer=infer_tensor_scatter,
    doc="The cache with the steps of the update written over its own, for each element b of the batch from step "
    "write_indices[b] on (default 0). With mode=circular what is behind the end goes to the beginning; else it is "
    "an error. (dagexec's own, for ONNX.)",
    input_names=("past_cache", "update", "write_indices"),
    output_names=("present_cache",),
    args={"axis": "the axis of the steps (default -2)", "mode": "linear (the default) or circular"},
    inplace=first_to_first,
    cost=copy_cost,
    onnx=(OnnxName("TensorScatter", 24, {"axis": "axis", "mode": "mode"}),),
)
class TensorScatter(Operator):
    """Steps written to a cache."""

    def prepare(self) -> Step:
        """A copy of the cache, unless it works in place, and one or two of each element of the batch."""
        axis = _written_axis(self.call())
        past, present = self.x(0), self.y(0)
        cache, update = np.moveaxis(present, axis, 1), np.moveaxis(self.x(1), axis, 1)
        size, count, label = cache.shape[1], update.shape[1], self.label
        copy: Step = nothing_to_do if np.may_share_memory(past, present) else partial(np.copyto, present, past)
        starts = self.x(2) if len(self.input_blobs) == 3 else np.zeros(len(cache), np.int64)
        circular = self.arguments.string("mode", "linear") == "circular"

        def write() -> None:
            if not circular:
                check_indices(starts, 0, size - count + 1, label)
            for target, source, start in zip(cache, update, starts.tolist(), strict=True):
                first = start % size if size else 0
                before = min(count, size - first)
                np.copyto(target[first : first + before], source[:before])
                np.copyto(target[: count - before], source[before:])

        return in_sequence([copy, write])


not_differentiable("a cache is for inference", "TensorScatter")
