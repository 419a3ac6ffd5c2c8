"""ConcatGradient, and the gradient makers of Concat and Split, each of which undoes the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.ops.families.shape.concat import AXIS_ARGS, cut_in_place, infer_concat, joined_pieces, joint_axis
from dagexec.ops.families.shape.reshaping import copy_cost


def _forward(call: OperatorCall) -> OperatorCall:
    """The call as the Concat has it: its inputs are those behind dY."""
    return replace(call, inputs=call.inputs[1:], values=call.values[1:])


def _infer(call: OperatorCall) -> list[TensorType]:
    """The types of the inputs of the Concat, which must give the shape of dY."""
    forward = _forward(call)
    joined = infer_concat(forward)[0]
    call.require_shape(0, joined.shape, "dY: what joining the inputs gives")
    call.require_types(0, joined.meta)
    if len(call.definition.output) != len(forward.inputs):
        raise call.fail(f"expected {len(forward.inputs)} outputs, one per input, found {len(call.definition.output)}")
    return list(forward.inputs)


def _cut(call: OperatorCall, _types: Sequence[TensorType]) -> Mapping[int, int]:
    return joined_pieces(_forward(call), call.inputs[:1])


@new_operator(
    "ConcatGradient",
    inputs=(2, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=_infer,
    doc="dY cut into parts of the shapes of the inputs of a Concat, whose values are not read. (dagexec's "
    "own; unlike those of a Split by split_info its shapes are known before a run.)",
    input_names=("dY", "X1, X2, ..."),
    output_names=("dX1, dX2, ...",),
    args=AXIS_ARGS | {"add_axis": "1: the inputs were joined along a new axis (default 0)"},
    cost=copy_cost,
    cut=_cut,
)
class ConcatGradient(Operator):
    """One tensor cut along an axis."""

    def prepare(self) -> Step:
        """A copy for each part that is not a view of dY."""
        call, add_axis = self.call(), self.arguments.bool("add_axis")
        dy = self.x(0)
        axis = joint_axis(call, dy.ndim)
        targets = [self.y(index) for index in range(len(self.output_blobs))]
        if add_axis:
            targets = [np.expand_dims(target, axis) for target in targets]
        ends = np.cumsum([target.shape[axis] for target in targets])
        pairs = list(zip(targets, np.split(dy, [int(end) for end in ends[:-1]], axis), strict=True))
        return cut_in_place(pairs, axis)


@gradient_of("Concat", "DepthConcat")
def concat_gradient(request: GradientRequest) -> GradientOperators:
    """dY cut again, by the shapes of the inputs.

    Caffe2 has Split and the sizes in split_info; with sizes that a run computes, the shapes of all that follows are
    known only then, and each operator looks at its inputs in every run.
    """
    if not request.has_dy(0):
        return request.result([], {})
    every = range(len(request.definition.input))
    return request.single("ConcatGradient", [request.dy(0), *request.definition.input], every)


@gradient_of("Split")
def split_gradient(request: GradientRequest) -> GradientOperators:
    """The gradients of the parts joined; zeros where a part has none."""
    if 0 not in request.wanted:
        return request.result([], {})
    parts = [request.dy(index) for index in range(len(request.definition.output))]
    return request.single("Concat", parts, [0])
