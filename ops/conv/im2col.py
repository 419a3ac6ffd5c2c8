"""im2col and a matrix product: every window becomes a column, and the filters are multiplied with the columns.

Chellapilla, Puri, Simard, "High performance convolutional neural networks for document processing", 2006. The column
buffer holds the windows of some rows of one image: all of them when they fit the limit. A small buffer stays in the
cache, but every block of columns makes the BLAS pack the filters again, so blocks are larger for many filters.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.conv.problem import Array, ConvProblem
from dagexec.ops.geometry import tap_count

_FEW_FILTERS = 256  # of a group: packing these again for a block costs less than a buffer that leaves the cache
_FEW_BYTES = 2 << 20
_MANY_BYTES = 8 << 20


def steps(problem: ConvProblem) -> list[Step]:
    """Image by image: load (if padded), and for each block of rows copy the windows and multiply; then the bias."""
    weights, calls = problem.staged(problem.weights)
    bias, load_bias = (None, []) if problem.bias is None else problem.staged(problem.bias)
    calls = [*calls, *load_bias]
    groups = problem.group
    matrix = weights.reshape(groups, problem.filters // groups, -1)
    output = problem.allocate(problem.y.shape[1:], problem.work) if problem.narrow else None
    source, load = problem.image_source() if problem.needs_source else (None, None)
    buffer = problem.allocate((_buffer_elements(problem),), problem.work)
    for image in range(problem.batch):
        if load is not None:
            calls += load(image)
        y = problem.y[image] if output is None else output
        windows = problem.windows(problem.x[image] if source is None else source)
        calls += _products(problem, windows, matrix, buffer, y)
        flat = y.reshape(-1, problem.filters) if problem.channels_last else y.reshape(problem.filters, -1)
        calls += problem.add_bias(flat, bias)
        if output is not None:
            calls.append(partial(np.copyto, problem.y[image], output, casting="same_kind"))
    return calls


def _depth(problem: ConvProblem) -> int:
    """Rows of the column matrix, over all groups."""
    return problem.channels * tap_count(problem.axes)


def _block_rows(problem: ConvProblem) -> int:
    """Output rows (along the first spatial axis) whose columns fit the limit; at least one."""
    depth = _depth(problem)
    limit = _FEW_BYTES if problem.filters // problem.group <= _FEW_FILTERS else _MANY_BYTES
    row = depth * math.prod(problem.out[1:]) * problem.work.itemsize
    return max(1, min(problem.out[0], limit // max(1, row)))


def _buffer_elements(problem: ConvProblem) -> int:
    return _depth(problem) * _block_rows(problem) * math.prod(problem.out[1:])


def _products(problem: ConvProblem, windows: Array, matrix: Array, buffer: Array, y: Array) -> list[Step]:
    """Steps for one image: blocks of rows of the output."""
    rows, inner = _block_rows(problem), math.prod(problem.out[1:])
    calls: list[Step] = []
    for start in range(0, problem.out[0], rows):
        stop = min(start + rows, problem.out[0])
        block = _block_nhwc if problem.channels_last else _block_nchw
        calls += block(problem, windows, matrix, buffer, y, start, stop, inner)
    return calls


def _block_nchw(
    problem: ConvProblem, windows: Array, matrix: Array, buffer: Array, y: Array, start: int, stop: int, inner: int
) -> list[Step]:
    groups, spatial = problem.group, len(problem.axes)
    pixels = (stop - start) * inner
    view = windows[(slice(None),) * (1 + spatial) + (slice(start, stop),)]
    columns = buffer[: _depth(problem) * pixels]
    output = y.reshape(groups, problem.filters // groups, -1)[:, :, start * inner : stop * inner]
    stacked = columns.reshape(groups, -1, pixels)
    product = partial(np.matmul, matrix, stacked, out=output)
    if groups == 1:
        product = partial(np.matmul, matrix[0], stacked[0], out=output[0])
    return [partial(np.copyto, columns.reshape(view.shape), view), product]


def _block_nhwc(
    problem: ConvProblem, windows: Array, matrix: Array, buffer: Array, y: Array, start: int, stop: int, inner: int
) -> list[Step]:
    groups = problem.group
    pixels, per_group = (stop - start) * inner, problem.channels // groups
    view = windows[start:stop]
    columns = buffer[: _depth(problem) * pixels]
    by_group = view if groups == 1 else _split_channels(view, groups)
    output = y.reshape(-1, groups, problem.filters // groups)[start * inner : stop * inner].transpose(1, 0, 2)
    rows = columns.reshape(groups, pixels, -1)
    product = partial(np.matmul, rows, matrix.transpose(0, 2, 1), out=output)
    if groups == 1:
        product = partial(np.matmul, rows[0], matrix[0].T, out=output[0])
        return [partial(np.copyto, columns.reshape(view.shape), by_group), product]
    return [partial(np.copyto, columns.reshape(groups, *view.shape[:-1], per_group), by_group), product]


def _split_channels(view: Array, groups: int) -> Array:
    """A view (out, kernel, C) as (groups, out, kernel, C / groups), still a view."""
    per_group = view.shape[-1] // groups
    return np.lib.stride_tricks.as_strided(
        view,
        (groups, *view.shape[:-1], per_group),
        (per_group * view.strides[-1], *view.strides[:-1], view.strides[-1]),
        writeable=False,
    )
