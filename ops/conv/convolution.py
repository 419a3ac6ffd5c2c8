"""The Conv operators: schema, shape and cost inference, and the choice of how to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.blocks import compute_dtype
from dagexec.ops.conv import depthwise, im2col, one_by_one
from dagexec.ops.conv.problem import ConvProblem
from dagexec.ops.geometry import WINDOW_ARGS, Axis, Window, output_sizes, read_window

_SPATIAL_AXES = {"Conv": (1, 2, 3), "Conv1D": (1,), "Conv2D": (2,), "Conv3D": (3,)}


def conv_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a convolution, and its axes over the input's size. Raises ArgumentError or ShapeError."""
    ranks = [rank + 2 for rank in _SPATIAL_AXES[call.definition.type]]
    shape = call.require_rank(0, *ranks)
    window = read_window(call, len(shape) - 2)
    if window.global_pooling or window.ceil_mode:
        raise ArgumentError(f"{call.label}: global_pooling and ceil_mode are for pooling")
    return window, window.over(window.spatial(shape))


def infer_conv(call: OperatorCall) -> list[TensorType]:
    """Y is N, M, out. Checks filter and bias against the input, the kernel and the groups."""
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type()
    window, axes = conv_window(call)
    shape = call.inputs[0].shape
    channels, group = window.channels(shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} input channels, found {group}")
    filter_shape = call.require_rank(1, len(shape))
    filters = filter_shape[0]
    if filters % group:
        raise ArgumentError(f"{call.label}: group {group} must divide the {filters} filters")
    expected = window.image_shape(filters, channels // group, window.kernel)
    layout = "M, kernel, C/group" if window.channels_last else "M, C/group, kernel"
    call.require_shape(1, expected, f"{layout} for {channels} channels in {group} group(s) and kernel {window.kernel}")
    if len(call.inputs) == 3:
        call.require_shape(2, (filters,), "one entry for each filter")
    return [TensorType(window.image_shape(shape[0], filters, output_sizes(axes)), meta)]


def conv_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """Two operations for each tap, input channel of the group and output element; one for each bias."""
    weights, y = call.inputs[1], outputs[0]
    taps = weights.elements // max(1, weights.shape[0])  # C/G * kernel
    flops = 2 * y.elements * taps + (y.elements if len(call.inputs) == 3 else 0)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), y.nbytes)


def conv_schema(name: str) -> OpSchema:
    """The schema of `Conv` and its fixed-rank forms."""
    return OpSchema(
        name,
        inputs=(2, 3),
        outputs=(1, 1),
        infer=infer_conv,
        doc="Convolution (cross-correlation, without flipping the filter) over 1, 2 or 3 spatial axes: X is N, C, "
        "spatial, filter M, C/group, kernel, bias M, Y is N, M, out. With order NHWC channels come last, in the filter "
        "too. Dumoulin and Visin 2016, arXiv:1603.07285.",
        input_names=("X", "filter", "bias"),
        output_names=("Y",),
        args=WINDOW_ARGS | {"group": "groups that input channels and filters are divided into (default 1)"},
        cost=conv_cost,
    )


class Convolution(Operator):
    """Chooses by geometry, which fixes the order of summation: results never depend on the values."""

    def prepare(self) -> Step:
        """The steps of the way that fits."""
        call = self.call()
        window, axes = conv_window(call)
        x, y = self.x(0), self.y(0)
        if not math.prod(y.shape):
            return nothing_to_do
        problem = ConvProblem(
            x=x,
            weights=self.x(1),
            bias=self.x(2) if len(call.inputs) == 3 else None,
            y=y,
            axes=axes,
            group=self.arguments.int("group", 1),
            channels_last=window.channels_last,
            work=compute_dtype(x.dtype),
            allocate=self.scratch,
        )
        if not math.prod(x.shape):
            return _only_bias(problem)
        if one_by_one.applies(problem):
            return in_sequence(one_by_one.steps(problem))
        if depthwise.applies(problem):
            return in_sequence(depthwise.steps(problem))
        return in_sequence(im2col.steps(problem))


def _only_bias(problem: ConvProblem) -> Step:
    """The output of an input without elements (no channels): zeros, plus the bias."""
    y = problem.y
    flat_shape = (-1, problem.filters) if problem.channels_last else (problem.filters, -1)
    flat = y.reshape(problem.batch, *flat_shape)
    return in_sequence([lambda: y.fill(0), *problem.add_bias(flat, problem.bias)])


for _name in _SPATIAL_AXES:
    operator(conv_schema(_name))(type(_name, (Convolution,), {"__doc__": f"{_name} on the CPU."}))
