"""1x1 convolution with stride 1 and no padding: the image is the column matrix already, so it is one matrix product."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem, add_bias, wide_weights
from dagexec.ops.families.conv.product import product

_FEW_PIXELS = 128  # products this narrow cost more than to copy several images into one matrix, as im2col does


def refusal(problem: ConvProblem) -> str:
    """Why some window is not just its pixel, or a matrix product for each image does not pay, or 16-bit images are too
    large to be widened within the limit; "" when none of these is so.
    """
    if any(axis.kernel > 1 or axis.stride > 1 or axis.head or axis.out != axis.size for axis in problem.axes):
        return "the windows are not the pixels"
    if problem.batch > 1 and not problem.channels_last and math.prod(problem.out) < _FEW_PIXELS:
        return "the images are too small for matrix products of their own"
    widened = sum(array.size for array in (problem.x, problem.y) if array.dtype != problem.work) * problem.work.itemsize
    if widened > problem.limit:
        return f"x and y in {problem.work} take {widened:,} bytes, more than ws_nbytes_limit {problem.limit:,}"
    return ""


def forward(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """Y = W X for all images and groups, or Y = X W^T for NHWC. The bias is added while an image is in the cache."""
    weights, calls = wide_weights(problem, allocate)
    x, load = _wide(problem.x, problem.work, allocate)
    y, store = _wide_result(problem.y, problem.work, allocate)
    images, outputs, matrix = _images(problem, x), _images(problem, y), _matrix(problem, weights)
    rows = _rows(problem, y)
    calls += load
    if problem.channels_last:
        calls += [product(images, matrix.swapaxes(1, 2), outputs), *add_bias(rows, problem.bias, channels_last=True)]
    elif problem.bias is None:
        calls.append(product(matrix, images, outputs))
    else:
        for image, output, row in zip(images, outputs, rows, strict=True):
            calls += [product(matrix, image, output), *add_bias(row, problem.bias, channels_last=False)]
    return [*calls, *store]


ONE_BY_ONE = Algorithm("DEFAULT", refusal, forward, keeps_apart=lambda problem: not problem.channels_last)


def data_gradient(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """X = W^T Y, or X = Y W for NHWC; then the bias of a transposed convolution."""
    weights, calls = wide_weights(problem, allocate)
    y, load = _wide(problem.y, problem.work, allocate)
    x, store = _wide_result(problem.x, problem.work, allocate)
    images, outputs, matrix = _images(problem, x), _images(problem, y), _matrix(problem, weights)
    left, right = (outputs, matrix) if problem.channels_last else (matrix.swapaxes(1, 2), outputs)
    biased = add_bias(_rows(problem, x), problem.bias, problem.channels_last)
    return [*calls, *load, product(left, right, images), *biased, *store]


def filter_gradient(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """W = Y^T X over all pixels for NHWC; otherwise the sum of Y X^T over the images, in order."""
    x, load = _wide(problem.x, problem.work, allocate)
    y, load_y = _wide(problem.y, problem.work, allocate)
    weights, store = _wide_result(problem.weights, problem.work, allocate)
    images, outputs, matrix = _images(problem, x), _images(problem, y), _matrix(problem, weights)
    calls = [*load, *load_y]
    if problem.channels_last:
        return [*calls, product(outputs.swapaxes(1, 2), images, matrix), *store]
    part = allocate(matrix.shape, problem.work) if problem.batch > 1 else matrix
    for number, (image, output) in enumerate(zip(images, outputs, strict=True)):
        calls.append(product(output, image.swapaxes(1, 2), part if number else matrix))
        if number:
            calls.append(partial(np.add, matrix, part, out=matrix))
    return [*calls, *store]


def _images(problem: ConvProblem, array: Array) -> Array:
    """N, G, C/G, pixels; or G, N * pixels, C/G for NHWC."""
    groups = problem.group
    if problem.channels_last:
        return array.reshape(-1, groups, array.shape[-1] // groups).swapaxes(0, 1)
    return array.reshape(len(array), groups, array.shape[1] // groups, -1)


def _rows(problem: ConvProblem, array: Array) -> Array:
    """N, C, pixels; or N * pixels, C for NHWC."""
    if problem.channels_last:
        return array.reshape(-1, array.shape[-1])
    return array.reshape(*array.shape[:2], -1)


def _matrix(problem: ConvProblem, weights: Array) -> Array:
    """G, M/G, C/G."""
    return weights.reshape(problem.group, problem.filters // problem.group, -1)


def _wide(array: Array, work: np.dtype[np.generic], allocate: Allocate) -> tuple[Array, list[Step]]:
    """An array to read in the work dtype, and the steps that fill it."""
    if array.dtype == work:
        return array, []
    wide = allocate(array.shape, work)
    return wide, [partial(np.copyto, wide, array)]


def _wide_result(array: Array, work: np.dtype[np.generic], allocate: Allocate) -> tuple[Array, list[Step]]:
    """An array to write in the work dtype, and the steps that bring it to `array`."""
    if array.dtype == work:
        return array, []
    wide = allocate(array.shape, work)
    return wide, [partial(np.copyto, array, wide, casting="same_kind")]
