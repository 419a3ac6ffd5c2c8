"""SplitByLengths: a tensor cut along an axis into parts whose sizes lengths add up to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths


def infer_split(call: OperatorCall) -> list[TensorType]:
    """The axis in parts. Raises ShapeError unless the lengths add up to it, and are as many for each output."""
    shape, parts = call.inputs[0].shape, len(call.definition.output)
    axis = call.axis("axis", 0, len(shape))
    checked_lengths(call, 1, shape[axis])
    lengths = call.known_value(1)
    if lengths.size % parts:
        raise call.fail(f"expected as many lengths for each of {parts} outputs, found {lengths.size}")
    sizes = lengths.reshape(parts, -1).sum(axis=1)
    return [TensorType((*shape[:axis], int(size), *shape[axis + 1 :]), call.inputs[0].meta) for size in sizes]


@array_function(
    "SplitByLengths",
    inputs=(2, 2),
    outputs=(1, UNBOUNDED),
    infer=infer_split,
    doc="X cut along an axis into as many parts as there are outputs; a part is as long as its share of the lengths "
    "adds up to.",
    input_names=("X", "lengths"),
    output_names=("Y_0", "Y_1", "..."),
    args={"axis": "that is cut; negative counts from the end (default 0)"},
    value_inputs=(1,),
)
def split(call: OperatorCall, x: Array, lengths: Array) -> Sequence[Array]:
    """One slice an output."""
    ends = np.cumsum(lengths.reshape(len(call.definition.output), -1).sum(axis=1))
    return np.split(x, ends[:-1], axis=call.axis("axis", 0, x.ndim))


@gradient_of("SplitByLengths")
def split_gradient(request: GradientRequest) -> GradientOperators:
    """The gradients of the parts in one."""
    parts = [request.dy(index) for index in range(len(request.definition.output))]
    axis, names = request.arguments.int("axis", 0), [request.dx(0), f"_{request.dx(0)}_dims"]
    return request.result([request.plain_operator("Concat", parts, names, axis=axis)], {0: request.dx(0)})
