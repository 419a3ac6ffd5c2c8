"""The gradients of a convolution, and ConvGradient, the operator that gives them.

A transposed convolution is the data gradient of a convolution, and its own gradients are that convolution forward and
its filter gradient with the roles of input and output exchanged: so the functions here serve both.

With dY the gradient of the output (Dumoulin and Visin 2016, arXiv:1603.07285, chapter 4):
dX[n, c, i] = sum of W[m, c, k] dY[n, m, o] and dW[m, c, k] = sum of dY[n, m, o] X[n, c, i], over the outputs o and taps
k that read pixel i; db[m] = sum of dY[n, m, o].
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.constant import Constant
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.rows import along_axis, gradients
from dagexec.core.schema import Cost, CostFunction, OperatorCall, OpSchema, TensorType
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.families.conv import im2col, one_by_one
from dagexec.ops.families.conv.choice import pass_over, require_columns
from dagexec.ops.families.conv.convolution import (
    CONV_ARGS,
    SPATIAL_AXES,
    ConvOperator,
    conv_flops,
    conv_output,
    conv_window,
    register_engines,
)
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, GRADIENT_ARGS, INPUT, wanted_gradients
from dagexec.ops.families.conv.images import image_by_image
from dagexec.ops.families.conv.problem import Array, ConvProblem


def data_gradient(owner: ConvOperator, problem: ConvProblem, *, apart: bool = False) -> Step:
    """The step that computes x from y and the filter, and adds the bias: each image `apart`, or all together.

    With strides of 1 it is a convolution of y with the filter turned round, by the algorithm of the operator's engine;
    otherwise the columns W^T y are summed back into the image.
    """
    if not problem.y.size:
        return _fill_with_bias(problem)
    some = problem.image(0) if apart else problem
    if not one_by_one.refusal(some):
        pass_over(owner.engine, "the columns of a 1x1 filter are the image itself", owner.label)
        steps = one_by_one.data_gradient
    elif problem.unit_strides:
        return _turned(owner, problem, apart)
    else:
        strides = [axis.stride for axis in problem.axes]
        pass_over(owner.engine, f"with strides {strides} the columns are summed back into the image", owner.label)
        require_columns(some, owner.label)
        steps = im2col.data_gradient
    made = image_by_image(steps) if apart else steps
    return owner.with_memory(lambda allocate: in_sequence(made(problem, allocate)))


def filter_gradient(owner: ConvOperator, problem: ConvProblem) -> Step:
    """The step that computes the filter's gradient, `problem.weights`, from x and y."""
    if not (problem.x.size and problem.y.size):
        return partial(problem.weights.fill, 0)
    pass_over(owner.engine, "the gradient of a filter is the product of dY and the columns of X", owner.label)
    if not one_by_one.refusal(problem):
        return owner.with_memory(lambda allocate: in_sequence(one_by_one.filter_gradient(problem, allocate)))
    require_columns(problem, owner.label)
    return owner.with_memory(lambda allocate: in_sequence(im2col.filter_gradient(problem, allocate)))


def bias_gradient(owner: ConvOperator, gradient: Array, result: Array, channels_last: bool) -> Step:
    """The step that sums dY over images and pixels: M numbers."""
    work = compute_dtype(gradient.dtype)
    if channels_last:
        rows, axes = gradient.reshape(-1, 1, gradient.shape[-1]), (0, 1)
    else:
        rows, axes = gradient.reshape(*gradient.shape[:2], math.prod(gradient.shape[2:])), (0, 2)
    if work == result.dtype:
        return partial(np.add.reduce, rows, axis=axes, out=result)
    wide = owner.scratch(result.shape, work)
    total = partial(np.add.reduce, rows, axis=axes, dtype=work, out=wide)
    return in_sequence([total, partial(np.copyto, result, wide, casting="same_kind")])


def _turned(owner: ConvOperator, problem: ConvProblem, apart: bool) -> Step:
    """The convolution of y with the filter turned round, which is kept when the filter is constant."""
    shape, dtype = problem.turned_shape, problem.weights.dtype
    turn: list[Step] = []
    if problem.constant is not None:
        key = ("turned", problem.group, problem.channels_last)
        weights, constant = problem.constant.derived(key, lambda: _turned_constant(problem))
    else:
        weights, constant = owner.scratch(shape, dtype), None
        turn.append(problem.turn_weights(weights))
    turned = replace(problem.of_data_gradient(weights), constant=constant)
    return in_sequence([*turn, owner.forward(turned, apart=apart)])


def _turned_constant(problem: ConvProblem) -> tuple[Array, Constant]:
    weights = np.empty(problem.turned_shape, problem.weights.dtype)
    problem.turn_weights(weights)()
    return weights, Constant()


def _fill_with_bias(problem: ConvProblem) -> Step:
    """The step for an output of an input without elements."""
    x, bias = problem.x, problem.bias
    if bias is None:
        return partial(x.fill, 0)
    return partial(np.copyto, x, bias if problem.channels_last else bias.reshape(-1, *(1,) * len(problem.axes)))


ROWS_OF_GRADIENTS = gradients(along_axis(0, 0, 2), wanted_gradients, INPUT)
"""Images on axis 0 of X and dY, and of dX."""


def gradient_types(call: OperatorCall, bias: int) -> list[TensorType]:
    """The types of the outputs of a gradient operator whose inputs are X, filter and dY; `bias` is its length."""
    x, weights = call.inputs[:2]
    types = {FILTER: weights, BIAS: TensorType((bias,), x.meta), INPUT: x}
    return [types[name] for name in wanted_gradients(call)]


def _infer(call: OperatorCall) -> list[TensorType]:
    y = conv_output(call)
    call.require_shape(2, y.shape, "the shape of the convolution's output")
    return gradient_types(call, call.inputs[1].shape[0])


def gradient_cost(output: int) -> CostFunction:
    """The cost of a gradient operator: as many operations as forward for the filter, and as many for the input.

    `output` is the number of the input that is the output of the convolution. For the bias it is one a pixel of dY.
    """

    def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
        wanted = wanted_gradients(call)
        products = conv_flops(call.inputs[output], call.inputs[1]) * ((FILTER in wanted) + (INPUT in wanted))
        flops = products + (call.inputs[2].elements if BIAS in wanted else 0)
        return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))

    return cost


class GradientOperator(ConvOperator):
    """dfilter, dbias and dX of X, filter and dY, as far as they are wanted."""

    def prepare(self) -> Step:
        """One gradient after the other."""
        call = self.call()
        steps: list[Step] = []
        for index, name in enumerate(wanted_gradients(call)):
            result = self.y(index)
            if not result.size:
                steps.append(nothing_to_do)
            elif name == FILTER:
                steps.append(self.filter_step(call, result))
            elif name == INPUT:
                steps.append(self.input_step(call, result))
            else:
                steps.append(bias_gradient(self, self.x(2), result, self.channels_last))
        return in_sequence(steps)

    @abstractmethod
    def filter_step(self, call: OperatorCall, result: Array) -> Step:
        """The step that computes dfilter."""

    @abstractmethod
    def input_step(self, call: OperatorCall, result: Array) -> Step:
        """The step that computes dX."""


class ConvolutionGradient(GradientOperator):
    """The gradients of a convolution."""

    def filter_step(self, call: OperatorCall, result: Array) -> Step:
        """The filter gradient for output dY."""
        problem = self.problem(self.x(0), result, None, self.x(2), conv_window(call)[1])
        return filter_gradient(self, replace(problem, constant=None))

    def input_step(self, call: OperatorCall, result: Array) -> Step:
        """The data gradient for output dY."""
        problem = self.problem(result, self.x(1), None, self.x(2), conv_window(call)[1])
        return data_gradient(self, problem, apart=self.is_batch_invariant)


for _suffix in SPATIAL_AXES:
    register_engines(
        OpSchema(
            f"Conv{_suffix}Gradient",
            outputs=(1, 3),
            infer=_infer,
            doc="The gradients of a convolution for the gradient dY of its output. The outputs are dfilter, dbias and "
            "dX (which may be left out), or with no_bias=1 dfilter and dX; wanted names others.",
            input_names=("X", "filter", "dY"),
            output_names=("dfilter", "dbias", "dX"),
            args=CONV_ARGS | GRADIENT_ARGS,
            cost=gradient_cost(2),
            has_weights=True,
            rows=ROWS_OF_GRADIENTS,
        ),
        ConvolutionGradient,
    )
