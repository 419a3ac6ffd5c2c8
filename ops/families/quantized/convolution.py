"""QuantConv: convolution of 8-bit integers, with what follows it fused; by exact sums in floating point."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import INT8, INT32, TypeMeta
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.geometry import WINDOW_ARGS, Axis, Window, output_sizes, read_window
from dagexec.ops.base.layout import NHWC, ImageOperator
from dagexec.ops.families.conv.choice import default_algorithm
from dagexec.ops.families.conv.problem import DEFAULT_LIMIT, ConvProblem
from dagexec.ops.families.quantized.accumulation import centered, exact_dtype
from dagexec.ops.families.quantized.requantization import (
    INPUT_ARGS,
    OUTPUT_ARGS,
    POST_OPS_ARGS,
    Requantization,
    check_bias,
    multiplier_steps,
    output_steps,
    read_requantization,
    scaled_sum_steps,
)
from dagexec.ops.families.quantized.scales import (
    BYTES,
    Array,
    along,
    checked_scales,
    require_scales,
    scale_argument,
    zero_point_argument,
)

FILTER, FILTER_SCALE, BIAS = 1, 2, 3
"""Where the inputs are."""


def quant_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    """The window over input 0 and its axes. Raises ArgumentError or ShapeError."""
    shape = call.require_rank(0, 3, 4, 5)
    window = read_window(call, len(shape) - 2)
    if window.global_pooling or window.ceil_mode:
        raise ArgumentError(f"{call.label}: global_pooling and ceil_mode only apply to pooling")
    return window, window.over(window.spatial(shape))


def integer_conv_shape(call: OperatorCall, metas: tuple[TypeMeta, ...]) -> tuple[int, ...]:
    """The shape of Y for an X of bytes and a filter of one of `metas`. Raises ArgumentError or ShapeError."""
    call.require_types(0, *BYTES)
    call.require_types(FILTER, *metas)
    window, axes = quant_window(call)
    shape = call.inputs[0].shape
    channels, group = window.channels(shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} input channels, found {group}")
    filters = call.require_rank(FILTER, len(shape))[0]
    if filters % group:
        raise ArgumentError(f"{call.label}: group {group} must divide the {filters} filters")
    layout = "M, kernel, C/group" if window.channels_last else "M, C/group, kernel"
    call.require_shape(FILTER, window.filter_shape(filters, channels // group), layout)
    return window.image_shape(shape[0], filters, output_sizes(axes))


def read_conv(call: OperatorCall) -> tuple[TensorType, Requantization]:
    """The type of QuantConv's Y and how it is made. Raises ArgumentError or ShapeError."""
    scale_argument(call, "x_scale")
    zero_point_argument(call, "x_zero_point", call.inputs[0].meta)
    shape = integer_conv_shape(call, (INT8,))
    filters = call.inputs[FILTER].shape[0]
    require_scales(call, FILTER_SCALE, filters, "filter")
    biased = call.arguments.bool("bias")
    if biased and len(call.inputs) > BIAS:
        check_bias(call, BIAS, filters, (INT32,))
    elif biased:
        raise call.fail("with bias=1 the fourth input must be the bias")
    what = read_requantization(call, shape, BIAS + 1 if biased else BIAS)
    return TensorType(shape, what.y), what


def _conv_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    filters = call.inputs[FILTER]
    taps = filters.elements // max(1, filters.shape[0])
    return Cost(2 * outputs[0].elements * taps, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


QUANT_CONV = OpSchema(
    "QuantConv",
    inputs=(3, 5),
    infer=lambda call: [read_conv(call)[0]],
    doc="Convolution of integers: sum = bias + (X - x_zero_point) * filter, exactly, where padding counts as "
    "x_zero_point; v = float32(sum) * ((x_scale * filter_scale) / y_scale) in float32; post_ops on v; Y = "
    "saturate(round(v) + y_zero_point), ties to even, or v itself as float32. X is uint8 or int8, N, C, spatial (N, "
    "spatial, C with order NHWC), filter int8, M, C/group, kernel (M, kernel, C/group), filter_scale float32 of one "
    "entry or M, bias int32 of M (in units of x_scale * filter_scale).",
    input_names=("X", "filter", "filter_scale", "bias, with bias=1", "what post_ops add"),
    output_names=("Y",),
    args=WINDOW_ARGS
    | {"group": "groups that input channels and filters are divided into (default 1)", "bias": "1: there is a bias"}
    | INPUT_ARGS
    | OUTPUT_ARGS
    | POST_OPS_ARGS,
    cost=_conv_cost,
    image_role=ImageRole.QUANTIZED_CONVOLUTION,
    has_weights=True,
    is_quantized=True,
)


def convolution_sums(owner: ImageOperator, zero_point: int, axes: tuple[Axis, ...], nhwc: bool) -> tuple[Array, Step]:
    """The exact sums of (X - zero_point) * filter as floats, in the output's shape, and the step for them."""
    y, filters = owner.y(0), owner.x(FILTER)
    terms = filters[0].size
    work = exact_dtype(terms, owner.input(0).meta, zero_point, owner.input(FILTER).meta)
    sums = owner.scratch(y.shape, work)
    if not terms:
        return sums, partial(sums.fill, 0)
    x, center = centered(owner, owner.x(0), zero_point, work)
    problem = ConvProblem(
        x=x,
        weights=filters,
        bias=None,
        y=sums,
        axes=axes,
        group=owner.arguments.int("group", 1),
        channels_last=nhwc,
        work=work,
        limit=DEFAULT_LIMIT,
        constant=owner.input(FILTER).constant,
    )
    algorithm = default_algorithm(problem, owner.label)  # one that only multiplies and adds, so that sums are exact
    return sums, in_sequence([center, *algorithm.steps(problem, owner.scratch)])


@operator(QUANT_CONV)
class QuantConv(ImageOperator):
    """Convolution of 8-bit integers; bit for bit what a 32-bit accumulator gives."""

    def prepare(self) -> Step:
        """The sums, then what makes them the output."""
        call = self.call()
        _, what = read_conv(call)
        window, axes = quant_window(call)
        y = self.y(0)
        if not y.size:
            return nothing_to_do
        steps = checked_scales(self, FILTER_SCALE)
        sums, add_up = convolution_sums(self, call.arguments.int("x_zero_point", 0), axes, window.order == NHWC)
        steps.append(add_up)
        multiplier = self.scratch(self.x(FILTER_SCALE).shape, np.float32)
        steps += multiplier_steps(multiplier, scale_argument(call, "x_scale"), self.x(FILTER_SCALE), what.y_scale)
        channels = along(y.ndim - 1 if window.channels_last else 1, y.ndim)
        bias = channels(self.x(BIAS)) if self.arguments.bool("bias") else None
        values = next((array for array in (y, sums) if array.dtype == np.float32), None)
        if values is None:
            values = self.scratch(y.shape, np.float32)
        steps += scaled_sum_steps(sums, bias, channels(multiplier), values)
        return in_sequence([*steps, *output_steps(self, what, values, y)])
