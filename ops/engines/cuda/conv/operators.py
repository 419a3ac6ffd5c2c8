"""Conv, ConvTranspose, FusedConv and their gradients on CUDA, for 1 to 3 spatial axes, NCHW and NHWC.

`conv` has the products; a bias, post-ops and another order of the output are one kernel behind them. Working memory is
the operator's own, or with `shared_buffer=1` the workspace's shared buffer of the device. The default engine sums
16-bit floats in float32 (`float16_compute` too) and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator, schema_of
from dagexec.core.schema import OperatorCall
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import image_order
from dagexec.ops.engines.cuda.activation.post_ops import epilogue
from dagexec.ops.engines.cuda.base.expression import zeroed
from dagexec.ops.engines.cuda.base.matrices import sums_of
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.conv.convolution import DEFAULT_LIMIT, CudaConvolution
from dagexec.ops.families.activation.post_ops import SUM, read_post_ops
from dagexec.ops.families.conv.convolution import SPATIAL_AXES, Convolution, ConvOperator, conv_output, conv_window
from dagexec.ops.families.conv.fused import FusedConvolution, first_operand, output_order
from dagexec.ops.families.conv.gradient import ConvolutionGradient, GradientOperator
from dagexec.ops.families.conv.gradient_outputs import FILTER, INPUT, wanted_gradients
from dagexec.ops.families.conv.problem import Allocate, Array, ConvProblem
from dagexec.ops.families.conv.transposed import TransposedConvolution, TransposedConvolutionGradient, transposed_window


class CudaConvOperator(CudaOperator, ConvOperator):
    """What the family shares on CUDA."""

    def arrays(self, x: Array, weights: Array, y: Array, axes: tuple[Axis, ...]) -> ConvProblem:
        """The arrays of a convolution with this operator's arguments."""
        return self.problem(x, weights, None, y, axes)

    def convolution(self, problem: ConvProblem, build: Callable[[CudaConvolution, Allocate], list[Step]]) -> Step:
        """The step that `build` makes of a convolution, over this operator's working memory."""
        limit = self.arguments.int("ws_nbytes_limit", DEFAULT_LIMIT)
        made = CudaConvolution(self, problem, limit)
        return self.with_memory(lambda allocate: in_sequence(build(made, allocate)))

    def output_of(self, problem: ConvProblem) -> Step:
        """The step that computes Y, without a bias; zeros where X has no elements."""
        if not problem.y.size:
            return nothing_to_do
        if not problem.x.size:
            return zeroed(self, problem.y)
        return self.convolution(problem, CudaConvolution.forward)

    def input_of(self, problem: ConvProblem) -> Step:
        """The step that computes X from Y and the filter; zeros where Y has no elements."""
        if not problem.x.size:
            return nothing_to_do
        if not problem.y.size:
            return zeroed(self, problem.x)
        return self.convolution(problem, CudaConvolution.data_gradient)

    def filter_of(self, problem: ConvProblem) -> Step:
        """The step that computes the filter from X and Y; zeros where one of these has no elements."""
        if not problem.weights.size:
            return nothing_to_do
        if not (problem.x.size and problem.y.size):
            return zeroed(self, problem.weights)
        return self.convolution(problem, CudaConvolution.filter_gradient)

    def bias_view(self, bias: Array, rank: int, channels_last: bool) -> Array:
        """A bias as it broadcasts to an image tensor of `rank` axes."""
        return bias if channels_last else bias.reshape(-1, *(1,) * (rank - 2))

    def with_bias(self, image: Array, bias: Array | None) -> Step:
        """The step that adds the bias to an image tensor, in place."""
        if bias is None or not image.size:
            return nothing_to_do
        return epilogue(self, image, image, bias=self.bias_view(bias, image.ndim, self.channels_last))


class CudaConv(CudaConvOperator, Convolution):
    """Convolution."""

    def convolve(self, call: OperatorCall, bias: Array | None, y: Array) -> Step:
        """The convolution, then the bias."""
        problem = self.arrays(self.x(0), self.x(1), y, conv_window(call)[1])
        return in_sequence([self.output_of(problem), self.with_bias(y, bias)])


class CudaFusedConv(CudaConv, FusedConvolution):
    """Convolution, and one kernel for the bias, post-ops and another order of the output."""

    def prepare(self) -> Step:
        """Into Y, or into memory of its own where Y has another order, or its old value is added."""
        call, y = self.call(), self.y(0)
        if not y.size:
            return nothing_to_do
        post_ops, own = read_post_ops(call), first_operand(call)
        last = self.channels_last
        turned = output_order(call) != image_order(call)
        result, product = y, y
        if turned:
            result = self.scratch(conv_output(call).shape, y.dtype)
            product = self._turned(result, last)
        elif any(post_op.kind == SUM for post_op in post_ops):
            result = product = self.scratch(y.shape, y.dtype)
        bias = self.x(2) if own == 3 else None
        if bias is not None:
            bias = self.bias_view(bias, y.ndim, last != turned)
        operands = {index: self.x(index) for index in range(own, len(call.inputs))}
        problem = self.arrays(self.x(0), self.x(1), result, conv_window(call)[1])
        rest = epilogue(self, product, y, bias=bias, post_ops=post_ops, operands=operands)
        return in_sequence([self.output_of(problem), rest])

    @staticmethod
    def _turned(image: Array, channels_last: bool) -> Array:
        """A view of an image tensor in the other order."""
        rank = image.ndim
        order: Sequence[int] = (0, rank - 1, *range(1, rank - 1)) if channels_last else (0, *range(2, rank), 1)
        return image.transpose(*order)


class CudaConvTranspose(CudaConvOperator, TransposedConvolution):
    """Transposed convolution."""

    def prepare(self) -> Step:
        """The data gradient of the convolution that it transposes, then the bias."""
        call, y = self.call(), self.y(0)
        if not y.size:
            return nothing_to_do
        bias = self.x(2) if len(call.inputs) == 3 else None
        problem = self.arrays(y, self.x(1), self.x(0), transposed_window(call)[1])
        return in_sequence([self.input_of(problem), self.with_bias(y, bias)])


class CudaGradientOperator(CudaConvOperator, GradientOperator):
    """dfilter, dbias and dX of X, filter and dY, as far as they are wanted."""

    def prepare(self) -> Step:
        call = self.call()
        steps: list[Step] = []
        for index, name in enumerate(wanted_gradients(call)):
            result = self.y(index)
            if name == FILTER:
                steps.append(self.filter_step(call, result))
            elif name == INPUT:
                steps.append(self.input_step(call, result))
            else:
                steps.append(self._bias_step(self.x(2), result))
        return in_sequence(steps)

    def _bias_step(self, gradient: Array, result: Array) -> Step:
        if self.channels_last:
            rows = gradient.reshape(math.prod(gradient.shape[:-1]), gradient.shape[-1], 1)
        else:
            rows = gradient.reshape(*gradient.shape[:2], math.prod(gradient.shape[2:]))
        return sums_of(self, rows, result)


class CudaConvGradient(CudaGradientOperator, ConvolutionGradient):
    """The gradients of a convolution."""

    def filter_step(self, call: OperatorCall, result: Array) -> Step:
        return self.filter_of(self.arrays(self.x(0), result, self.x(2), conv_window(call)[1]))

    def input_step(self, call: OperatorCall, result: Array) -> Step:
        return self.input_of(self.arrays(result, self.x(1), self.x(2), conv_window(call)[1]))


class CudaConvTransposeGradient(CudaGradientOperator, TransposedConvolutionGradient):
    """The gradients of a transposed convolution: of the convolution whose input is dY and whose output is X."""

    def filter_step(self, call: OperatorCall, result: Array) -> Step:
        return self.filter_of(self.arrays(self.x(2), result, self.x(0), transposed_window(call)[1]))

    def input_step(self, call: OperatorCall, result: Array) -> Step:
        return self.output_of(self.arrays(self.x(2), self.x(1), result, transposed_window(call)[1]))


def _register(op_type: str, base: type[CudaConvOperator]) -> None:
    operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (base,), {"__doc__": base.__doc__}))


_register("FusedConv", CudaFusedConv)
for _suffix in SPATIAL_AXES:
    _register(f"Conv{_suffix}", CudaConv)
    _register(f"Conv{_suffix}Gradient", CudaConvGradient)
    _register(f"ConvTranspose{_suffix}", CudaConvTranspose)
    _register(f"ConvTranspose{_suffix}Gradient", CudaConvTransposeGradient)
