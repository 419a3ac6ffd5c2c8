"""Range and LengthsRangeFill: numbers that count up."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT16, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow

_RANGE_TYPES = (INT32, INT64, FLOAT32, FLOAT64, INT16, FLOAT16, BFLOAT16)


def range_length(call: OperatorCall) -> int:
    """How many numbers there are from start to stop. Raises ShapeError for a step of 0 and bounds that are none."""
    numbers: list[Any] = []
    for index, kind in enumerate(call.inputs):
        if kind.elements != 1:
            raise call.fail(f"input {call.definition.input[index]!r} must have one element")
        numbers.append(call.known_value(index).reshape(-1)[0].item())
    start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    if step == 0 or not all(map(math.isfinite, (start, stop, step))):
        raise call.fail(f"expected finite bounds and a step other than 0; found {start}, {stop} and {step}")
    if isinstance(step, int):
        return max(0, -int((start - stop) // step))
    count = float((stop - start) / step)
    if not math.isfinite(count):
        raise call.fail(f"from {start} to {stop} in steps of {step} are too many numbers")
    return max(0, math.ceil(count))


def infer_range(call: OperatorCall) -> list[TensorType]:
    """A vector of the type of the inputs."""
    meta = call.require_types(0, *_RANGE_TYPES)
    call.require_same_type()
    found = TensorType((range_length(call),), meta)
    return [found]


@new_operator(
    "Range",
    inputs=(1, 3),
    infer=infer_range,
    doc=(
        "start, start + step, start + 2 step and so on, up to stop, which is not one of them. One input is the "
        "stop, from 0; two are start and stop; the step is 1 unless it is the third. 16-bit floats are computed in "
        "float32."
    ),
    input_names=("start", "stop", "step"),
    output_names=("Y",),
    value_inputs=(0, 1, 2),
    onnx=(OnnxName("Range", 27),),
)
class Range(Operator):
    """An arithmetic progression."""

    def prepare(self) -> Step:
        """The numbers 0, 1, 2, made now, times the step and plus the start."""
        y = self.y(0)
        work = compute_dtype(y.dtype)
        numbers = np.arange(y.size).astype(work)
        if len(self.input_blobs) == 1:
            return convert(numbers, y)
        found = self.scratch(y.shape, work) if is_narrow(y.dtype) else y
        steps: list[Step] = []
        if len(self.input_blobs) == 3:
            steps.append(partial(np.multiply, numbers, self.x(2).reshape(1), out=found, dtype=work))
            numbers = found
        steps.append(partial(np.add, numbers, self.x(0).reshape(1), out=found, dtype=work))
        return in_sequence(steps if found is y else [*steps, convert(found, y)])


def infer_lengths_range(call: OperatorCall) -> list[TensorType]:
    """An int32 vector of as many elements as the lengths add up to."""
    call.require_rank(0, 1)
    call.require_types(0, INT32)
    lengths = call.known_value(0)
    if (lengths < 0).any():
        raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
    found = TensorType((int(lengths.sum(dtype=np.int64)),), INT32)
    return [found]


@new_operator(
    "LengthsRangeFill",
    infer=infer_lengths_range,
    doc="0, 1, ... up to each length less one, for all lengths one after another: [2, 3] gives [0, 1, 0, 1, 2].",
    input_names=("lengths",),
    output_names=("range_sequence",),
    value_inputs=(0,),
)
class LengthsRangeFill(Operator):
    """Positions within segments."""

    def prepare(self) -> Step:
        """The lengths are known now; the step copies what follows from them."""
        positions = segment_positions(self.host_value(0))
        return partial(np.copyto, self.y(0), positions) if positions.size else nothing_to_do


def segment_positions(lengths: Array) -> Array:
    """The position of each element within its segment, int32."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if lengths.size else 0
    return (np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32)


no_gradient("Range", "LengthsRangeFill")
