"""ConvTranspose and its gradient: a convolution that runs backward, from its output to its input.

In the words of the convolution it transposes: X is that convolution's output and Y its input. So Y is its data
gradient, and of the gradients of a transposed convolution dX is that convolution of dY, dfilter its filter gradient.
Dumoulin and Visin 2016, arXiv:1603.07285, chapter 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole, LayerKind
from dagexec.errors import ArgumentError
from dagexec.ops.base.geometry import TRANSPOSED_ARGS, Axis, Window, read_transposed_window
from dagexec.ops.base.layout import require_image
from dagexec.ops.families.conv.convolution import (
    CONV_ARGS,
    SPATIAL_AXES,
    ConvOperator,
    check_compute_args,
    conv_flops,
    only_bias,
    register_engines,
)
from dagexec.ops.families.conv.gradient import (
    ROWS_OF_GRADIENTS,
    GradientOperator,
    data_gradient,
    filter_gradient,
    gradient_cost,
    gradient_types,
)
from dagexec.ops.families.conv.gradient_outputs import GRADIENT_ARGS
from dagexec.ops.families.conv.problem import Array

_ARGS = CONV_ARGS | TRANSPOSED_ARGS


def transposed_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a transposed convolution or its gradient, and the axes of the convolution that it transposes.

    Raises ArgumentError or ShapeError.
    """
    suffix = call.definition.type.removeprefix("ConvTranspose").removesuffix("Gradient")
    return read_transposed_window(call, require_image(call, 0, SPATIAL_AXES[suffix]))


def transposed_output(call: OperatorCall) -> TensorType:
    """The type of Y = N, M, out, from the types of X and the filter, which are checked against each other."""
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type()
    check_compute_args(call)
    window, axes = transposed_window(call)
    shape = call.inputs[0].shape
    channels, group = window.channels(shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} input channels, found {group}")
    per_group = call.require_rank(1, len(axes) + 2)[-1 if window.channels_last else 1]
    expected = window.filter_shape(channels, per_group)
    layout = "C, kernel, M/group" if window.channels_last else "C, M/group, kernel"
    call.require_shape(1, expected, f"{layout} for {channels} channels in {group} group(s) and kernel {window.kernel}")
    return TensorType(window.image_shape(shape[0], group * per_group, [axis.size for axis in axes]), meta)


def _infer(call: OperatorCall) -> list[TensorType]:
    y = transposed_output(call)
    if len(call.inputs) == 3:
        call.require_shape(2, (_filters(call),), "one entry for each output channel")
    return [y]


def _filters(call: OperatorCall) -> int:
    """M: the number of output channels."""
    window, _ = transposed_window(call)
    return call.inputs[1].shape[-1 if window.channels_last else 1] * call.arguments.int("group", 1)


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """The products and sums, two for each input element, tap and output channel of the group; one for each bias."""
    flops = conv_flops(call.inputs[0], call.inputs[1]) + (outputs[0].elements if len(call.inputs) == 3 else 0)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


class TransposedConvolution(ConvOperator):
    """Y = the data gradient of a convolution whose output is X, + bias."""

    def prepare(self) -> Step:
        call = self.call()
        _, axes = transposed_window(call)
        x, y = self.x(0), self.y(0)
        bias = self.x(2) if len(call.inputs) == 3 else None
        if not y.size:
            return nothing_to_do
        return data_gradient(self, self.problem(y, self.x(1), bias, x, axes), apart=self.is_batch_invariant)


def _infer_gradient(call: OperatorCall) -> list[TensorType]:
    y = transposed_output(call)
    call.require_shape(2, y.shape, "the shape of the transposed convolution's output")
    return gradient_types(call, _filters(call))


class TransposedConvolutionGradient(GradientOperator):
    """The gradients of a transposed convolution: of the convolution whose input is dY and whose output is X."""

    def filter_step(self, call: OperatorCall, result: Array) -> Step:
        """The filter gradient for input dY and output X."""
        problem = self.problem(self.x(2), result, None, self.x(0), transposed_window(call)[1])
        return filter_gradient(self, replace(problem, constant=None))

    def input_step(self, call: OperatorCall, result: Array) -> Step:
        gradient = self.x(2)
        if not gradient.size:
            return only_bias(result, None, self.channels_last)
        problem = self.problem(gradient, self.x(1), None, result, transposed_window(call)[1])
        return self.forward(problem, apart=self.is_batch_invariant)


for _suffix in SPATIAL_AXES:
    register_engines(
        OpSchema(
            f"ConvTranspose{_suffix}",
            inputs=(2, 3),
            infer=_infer,
            doc="Transposed convolution over 1, 2 or 3 spatial axes: X is N, C, spatial, filter C, M/group, kernel, "
            "bias M, Y is N, M, out with out = (in - 1) * stride + dilation * (kernel - 1) + 1 + adj - head - tail. "
            "With order NHWC channels come last, and the filter is C, kernel, M/group.",
            input_names=("X", "filter", "bias"),
            output_names=("Y",),
            args=_ARGS,
            cost=_cost,
            layer=LayerKind.TRANSPOSED_CONVOLUTION,
            image_role=ImageRole.TRANSPOSED_CONVOLUTION,
            has_weights=True,
        ),
        TransposedConvolution,
    )
    register_engines(
        OpSchema(
            f"ConvTranspose{_suffix}Gradient",
            outputs=(1, 3),
            infer=_infer_gradient,
            doc="The gradients of a transposed convolution for the gradient dY of its output. The outputs are "
            "dfilter, dbias and dX (which may be left out), or with no_bias=1 dfilter and dX; wanted names others.",
            input_names=("X", "filter", "dY"),
            output_names=("dfilter", "dbias", "dX"),
            args=_ARGS | GRADIENT_ARGS,
            cost=gradient_cost(0),
            has_weights=True,
            rows=ROWS_OF_GRADIENTS,
        ),
        TransposedConvolutionGradient,
    )
