"""CumSum and CumProd: sums and products of the elements up to each place along an axis."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares
from dagexec.core.rows import apart_from
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.base.blocks import compute_dtype, convert, is_narrow


def cumulated_axis(call: OperatorCall) -> int:
    """The axis, an argument or the value of input 1. Raises ShapeError unless it is one of X's."""
    rank = len(call.inputs[0].shape)
    if ("axis" in call.arguments) == (len(call.inputs) == 2):
        raise call.fail("the axis must be given once, as argument 'axis' or as input 1")
    if len(call.inputs) == 1:
        return call.axis("axis", 0, rank)
    call.require_types(1, INT32, INT64)
    if call.inputs[1].elements != 1:
        raise call.fail("the axis must be one number")
    axis = int(call.known_value(1).reshape(-1)[0])
    if not -rank <= axis < rank:
        raise call.fail(f"the axis must be in [{-rank}, {rank - 1}], found {axis}")
    return axis % rank


def infer_cumulative(call: OperatorCall) -> list[TensorType]:
    """The type of X, whatever the axis."""
    call.require_types(0, *NUMBER_TYPES)
    for name in ("exclusive", "reverse"):
        call.arguments.bool(name)
    if len(call.inputs) == 1 or call.values[1] is not None:
        cumulated_axis(call)
    return [call.inputs[0]]


@declares
def _cumulative_operator(name: str, what: str, version: int) -> OpSchema:
    flags = {name: name for name in ("exclusive", "reverse")}
    return OpSchema(
        name,
        inputs=(1, 2),
        infer=infer_cumulative,
        doc=f"The {what} of the elements up to each along an axis, an argument or an input. 16-bit floats are "
        "accumulated in float32. (dagexec's own, for ONNX.)",
        input_names=("X", "axis"),
        output_names=("Y",),
        args={
            "axis": "the axis, when there is no input for it; negative counts from the end",
            "exclusive": "1: without the element itself (default 0)",
            "reverse": "1: from the end (default 0)",
        },
        value_inputs=(1,),
        onnx=(OnnxName(name, version, flags),),
        rows=apart_from(lambda call: [cumulated_axis(call)]),
    )


class Cumulative(Operator):
    """Base of these operators.

    Attributes:
        ufunc: joins two elements.
        start: the result of no elements.
    """

    ufunc: ClassVar[np.ufunc]
    start: ClassVar[int]

    def prepare(self) -> Step:
        """One pass over views that run in the direction, and without the last element where it does not count."""
        x, y = self.x(0), self.y(0)
        if not x.size:
            return nothing_to_do
        axis = cumulated_axis(self.call())
        total = self.scratch(y.shape, compute_dtype(y.dtype)) if is_narrow(y.dtype) else y
        direction = -1 if self.arguments.bool("reverse") else 1
        source, target = (np.moveaxis(array, axis, 0)[::direction] for array in (x, total))
        steps: list[Step] = []
        if self.arguments.bool("exclusive"):
            steps.append(partial(np.copyto, target[:1], total.dtype.type(self.start)))
            source, target = source[:-1], target[1:]
        if len(source):
            steps.append(partial(type(self).ufunc.accumulate, source, axis=0, dtype=total.dtype, out=target))
        return in_sequence(steps if total is y else [*steps, convert(total, y)])


@_cumulative_operator("CumSum", "sum", 14)
class CumSum(Cumulative):
    """Sums up to each place."""

    ufunc, start = np.add, 0


@_cumulative_operator("CumProd", "product", 26)
class CumProd(Cumulative):
    """Products up to each place."""

    ufunc, start = np.multiply, 1


@gradient_of("CumSum")
def cum_sum_gradient(request: GradientRequest) -> GradientOperators:
    """The sum in the other direction: an element is in all sums from its place on."""
    if 0 not in request.wanted:
        return request.result([], {})
    inputs = [request.dy(0), *([request.x(1)] if request.has_x(1) else [])]
    return request.single("CumSum", inputs, [0], reverse=int(not request.arguments.bool("reverse")))


not_differentiable("nothing in dagexec trains through it", "CumProd")
