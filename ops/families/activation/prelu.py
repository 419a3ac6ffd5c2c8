"""PRelu, a Relu whose slope for negative numbers is an input, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis, first_axis, gradients
from dagexec.core.schema import OperatorCall, TensorType, first_to_first, memory_cost
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.broadcasting import forward_call
from dagexec.ops.base.gradient_selection import WANTED_ARGS, one_operator, wanted_inputs
from dagexec.ops.base.layout import BLOCKS, ORDER_HELP, channel_axis, channel_count, check_blocks, image_order
from dagexec.ops.base.passes import clip_pass, scalar_pass


def infer_prelu(call: OperatorCall) -> list[TensorType]:
    """The output has the type of X, which `slope` must fit."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    slope_view(call.inputs[0].shape, call.inputs[1].shape, channel_axis(call), call)
    return [call.inputs[0]]


def slope_view(x: tuple[int, ...], slope: tuple[int, ...], channels: int, call: OperatorCall) -> tuple[int, ...]:
    """The shape, of as many axes as X, under which the slope broadcasts to X. Raises ShapeError when it does not."""
    if math.prod(slope) == 1:
        return (1,) * len(x)
    order = image_order(call)
    if order in BLOCKS:
        check_blocks(call, 0)
        if slope == (channel_count(order, x),):
            return (1, x[1], *(1,) * (len(x) - 3), BLOCKS[order])
    if len(slope) == 1 and x and slope[0] == x[channels] and order not in BLOCKS:
        return (*(1,) * channels, slope[0], *(1,) * (len(x) - channels - 1))
    padded = (*(1,) * (len(x) - len(slope)), *slope)
    if len(slope) > 1 and len(padded) == len(x) and all(s in (1, d) for s, d in zip(padded, x, strict=True)):
        return padded
    each = channel_count(order, x) if len(x) > 1 else x[channels] if x else 0
    expected = f"one element, {each} (a channel each)" if x else "one element"
    raise call.fail(f"the slope must have {expected}, or a shape that broadcasts to X; found shape {slope}")


@new_operator(
    "PRelu",
    infer=infer_prelu,
    doc="Y = X where X > 0, else slope * X; the slope is shared, or one a channel, or any shape of several axes "
    "that broadcasts to X. He et al., 2015, arXiv:1502.01852.",
    input_names=("X", "slope"),
    output_names=("Y",),
    args={"order": ORDER_HELP},
    unread_args=("alpha",),
    inplace=first_to_first,
    image_role=ImageRole.PER_CHANNEL,
    rows=first_axis,
)
class PRelu(Operator):
    """Relu with a learned slope for negative values."""

    def prepare(self) -> Step:
        """max(X, 0) + slope * min(X, 0)."""
        x, call = self.x(0), self.call()
        view = slope_view(x.shape, self.x(1).shape, channel_axis(call), call)
        slope = np.broadcast_to(self.x(1).reshape(view), x.shape)

        def passes(index: Index, source: Array, target: Array, scratch: Scratch) -> list[Step]:
            negative = scratch(0, source.shape)
            return [
                clip_pass(source, -math.inf, 0.0, negative),
                partial(np.multiply, negative, slope[index], out=negative),
                clip_pass(source, 0.0, math.inf, target),
                partial(np.add, target, negative, out=target),
            ]

        return blockwise(self, x, self.y(0), passes)


PRELU_INPUTS = ("X", "slope")


def infer_prelu_gradient(call: OperatorCall) -> list[TensorType]:
    """The gradients have the types of X and of the slope."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    x, slope = call.inputs[2], call.inputs[3]
    for index in (0, 1):
        call.require_shape(index, x.shape, "that of X")
    forward = forward_call(call, (2, 3))
    slope_view(x.shape, slope.shape, channel_axis(forward), forward)
    types = {"X": x, "slope": slope}
    return [types[name] for name in wanted_inputs(call, PRELU_INPUTS)]


@new_operator(
    "PReluGradient",
    outputs=(1, 2),
    infer=infer_prelu_gradient,
    doc="dX = dY where X > 0, else slope * dY; dslope = the sum of X * dY where X <= 0, over what shares a slope. "
    "Y is not read.",
    input_names=("Y", "dY", "X", "slope"),
    output_names=("dX", "dslope"),
    args={"order": ORDER_HELP, **WANTED_ARGS},
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
    rows=gradients(along_axis(0, 0, 1, 2), lambda call: wanted_inputs(call, PRELU_INPUTS), "X"),
)
class PReluGradient(Operator):
    """Gradients of PRelu."""

    def prepare(self) -> Step:
        """One computation for each gradient that is requested."""
        call = self.call()
        forward = forward_call(call, (2, 3))
        dy, x, slope = self.x(1), self.x(2), self.x(3)
        view = slope_view(x.shape, slope.shape, channel_axis(forward), forward)
        steps = []
        for index, name in enumerate(wanted_inputs(call, PRELU_INPUTS)):
            target = self.y(index)
            if name == "X":
                steps.append(reduced(self, x.shape, [x, dy, slope.reshape(view)], target, _prelu_input_passes))
            else:
                steps.append(reduced(self, x.shape, [x, dy], target.reshape(view), _prelu_slope_passes))
        return in_sequence(steps)


def _prelu_input_passes(pieces: Sequence[Array], dx: Array, scratch: Scratch) -> list[Step]:
    """The factor is slope + (1 - slope) * (X > 0)."""
    x, dy, slope = pieces
    factor, rest = scratch(0, dx.shape), scratch(1, slope.shape)
    return [
        partial(np.subtract, np.ones((), dx.dtype), slope, out=rest),
        scalar_pass(np.greater, x, 0.0, factor),
        partial(np.multiply, factor, rest, out=factor),
        partial(np.add, factor, slope, out=factor),
        partial(np.multiply, factor, dy, out=dx),
    ]


def _prelu_slope_passes(pieces: Sequence[Array], out: Array, scratch: Scratch) -> list[Step]:
    x, dy = pieces
    return [clip_pass(x, -math.inf, 0.0, out), partial(np.multiply, out, dy, out=out)]


@gradient_of("PRelu")
def prelu_maker(request: GradientRequest) -> GradientOperators:
    """Caffe2's order; X is needed, so PRelu in place has no gradient."""
    inputs = [request.y(0), request.dy(0), request.x(0), request.x(1)]
    return one_operator(request, "PReluGradient", inputs, PRELU_INPUTS)
