"""1x1 convolution with stride 1 and no padding: the image is the column buffer already, so it is one matrix product."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.conv.problem import Array, ConvProblem


def applies(problem: ConvProblem) -> bool:
    """True when every window is one pixel and the windows are the pixels."""
    return all(axis.kernel == 1 and axis.stride == 1 and not axis.reads_padding for axis in problem.axes)


def steps(problem: ConvProblem) -> list[Step]:
    """One batched product over images and groups: Y = W X, or Y = X W^T for NHWC."""
    x, calls = problem.staged(problem.x)
    weights, load_weights = problem.staged(problem.weights)
    bias, load_bias = (None, []) if problem.bias is None else problem.staged(problem.bias)
    y = problem.allocate(problem.y.shape, problem.work) if problem.narrow else problem.y
    calls = [*calls, *load_weights, *load_bias]
    groups, batch = problem.group, problem.batch
    per_group, filters = problem.channels // groups, problem.filters // groups
    matrix = weights.reshape(groups, filters, per_group)
    if problem.channels_last:
        pixels = x.size // problem.channels
        rows = x.reshape(pixels, groups, per_group).transpose(1, 0, 2)
        output: Array = y.reshape(pixels, problem.filters)
        grouped = output.reshape(pixels, groups, filters).transpose(1, 0, 2)
        columns = matrix.transpose(0, 2, 1)
        product: Step = partial(np.matmul, rows, columns, out=grouped)
        if groups == 1:
            product = partial(np.matmul, rows[0], columns[0], out=output)  # two axes: one call of the BLAS
    else:
        pixels = x.size // (batch * problem.channels)
        output = y.reshape(batch, problem.filters, pixels)
        images = x.reshape(batch, groups, per_group, pixels)
        product = partial(np.matmul, matrix, images, out=y.reshape(batch, groups, filters, pixels))
        if groups == 1:
            product = partial(np.matmul, matrix[0], images[:, 0], out=output)
    calls += [product, *problem.add_bias(output, bias)]
    if problem.narrow:
        calls.append(partial(np.copyto, problem.y, y, casting="same_kind"))
    return calls
