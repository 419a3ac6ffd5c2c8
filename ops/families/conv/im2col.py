"""im2col and a matrix product: every window becomes a column, and the filters are multiplied with the columns.

Chellapilla, Puri, Simard, "High performance convolutional neural networks for document processing", 2006. A small block
of columns stays in the cache, but every block makes the BLAS pack the filters again, so blocks are larger for many
filters. The two gradients: dW = dY columns^T, and dX = the sum of the columns W^T dY back into the image (col2im).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.families.conv.column_blocks import Block, ColumnBlocks, column_bytes, outputs_are_staged
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem, add_bias, wide_weights
from dagexec.ops.families.conv.product import product

_FEW_FILTERS = 256  # of a group: packing these again for a block costs less than a buffer that leaves the cache
_FEW_BYTES = 2 << 20
_MANY_BYTES = 8 << 20


def _refusal(problem: ConvProblem) -> str:
    least = column_bytes(problem)
    if least > problem.limit:
        return f"one window takes {least:,} bytes, more than ws_nbytes_limit {problem.limit:,}"
    return ""


def forward(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """Block by block: unroll the windows, multiply, add the bias."""
    weights, calls = wide_weights(problem, allocate)
    matrix = _filter_matrix(problem, weights)
    columns = ColumnBlocks(problem, allocate, _MANY_BYTES if len(matrix[0]) > _FEW_FILTERS else _FEW_BYTES)
    outputs = _Outputs(problem, columns, allocate)
    for block in columns.blocks:
        target, store = outputs.target(block)
        left, right = (columns.matrix(block), matrix) if problem.channels_last else (matrix, columns.matrix(block))
        if problem.channels_last:
            right = right.swapaxes(1, 2)
        calls += [*columns.unroll(block), product(left, right, target)]
        if problem.bias is not None:
            bias = problem.bias.reshape(problem.group, -1)
            calls += [partial(np.add, target, bias[:, None] if problem.channels_last else bias[..., None], out=target)]
        calls += store
    return calls


IM2COL = Algorithm("DEFAULT", _refusal, forward)


def data_gradient(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """x = the sum of the columns W^T y, block by block; then the bias of a transposed convolution."""
    weights, calls = wide_weights(problem, allocate)
    matrix = _filter_matrix(problem, weights)
    columns = ColumnBlocks(problem, allocate, _FEW_BYTES, unrolled=False)
    outputs = _Outputs(problem, columns, allocate)
    staged = problem.work != problem.x.dtype
    most = max(block.count for block in columns.blocks)
    wide = allocate((most, *problem.x.shape[1:]), problem.work) if staged else None
    for number, block in enumerate(columns.blocks):
        images = problem.x[block.images] if wide is None else wide[: block.count]
        before = columns.blocks[number - 1].images if number else None
        after = columns.blocks[number + 1].images if number + 1 < len(columns.blocks) else None
        if block.images != before:
            calls.append(partial(images.fill, 0))
        source, load = outputs.source(block)
        left, right = (source, matrix) if problem.channels_last else (matrix.swapaxes(1, 2), source)
        calls += [*load, product(left, right, columns.matrix(block)), *columns.sum_back(block, images)]
        if block.images != after:
            calls += add_bias(_rows(images, problem.channels_last), problem.bias, problem.channels_last)
            if staged:
                calls.append(partial(np.copyto, problem.x[block.images], images, casting="same_kind"))
    return calls


def filter_gradient(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """weights = the sum of y columns^T over all blocks, in order."""
    wide = allocate(problem.weights.shape, problem.work) if problem.work != problem.weights.dtype else problem.weights
    matrix = _filter_matrix(problem, wide)
    columns = ColumnBlocks(problem, allocate, _MANY_BYTES)
    outputs = _Outputs(problem, columns, allocate)
    part = allocate(matrix.shape, problem.work) if len(columns.blocks) > 1 else matrix
    calls: list[Step] = []
    for number, block in enumerate(columns.blocks):
        source, load = outputs.source(block)
        unrolled = columns.matrix(block)
        left, right = (source.swapaxes(1, 2), unrolled) if problem.channels_last else (source, unrolled.swapaxes(1, 2))
        calls += [*load, *columns.unroll(block), product(left, right, part if number else matrix)]
        if number:
            calls.append(partial(np.add, matrix, part, out=matrix))
    if wide is not problem.weights:
        calls.append(partial(np.copyto, problem.weights, wide, casting="same_kind"))
    return calls


def _filter_matrix(problem: ConvProblem, weights: Array) -> Array:
    """The filters as (G, M/G, depth)."""
    return weights.reshape(problem.group, problem.filters // problem.group, -1)


def _rows(images: Array, channels_last: bool) -> Array:
    """Images as (n, C, pixels), or (n * pixels, C) for NHWC."""
    if channels_last:
        return images.reshape(-1, images.shape[-1])
    return images.reshape(*images.shape[:2], math.prod(images.shape[2:]))


class _Outputs:
    """The output y, block by block, as the matrices of the product: (G, M/G, pixels), or (G, pixels, M/G) for NHWC.

    A view of y where the BLAS can use one; otherwise an array that is copied from or to it.
    """

    def __init__(self, problem: ConvProblem, columns: ColumnBlocks, allocate: Allocate) -> None:
        self._problem = problem
        self._per_group = problem.filters // problem.group
        self._buffer: Array | None = None
        staged = [block.pixels for block in columns.blocks if outputs_are_staged(problem, block.count)]
        if staged:
            self._buffer = allocate((problem.filters * max(staged),), problem.work)

    def target(self, block: Block) -> tuple[Array, list[Step]]:
        """Where a product writes, and the steps that bring it to y."""
        view = self._view(block)
        if not outputs_are_staged(self._problem, block.count):
            return self._as_matrix(view), []
        stage = self._stage(block, view)
        return self._as_matrix(stage), [partial(np.copyto, view, stage, casting="same_kind")]

    def source(self, block: Block) -> tuple[Array, list[Step]]:
        """Where a product reads, and the steps that bring y there before."""
        view = self._view(block)
        if not outputs_are_staged(self._problem, block.count):
            return self._as_matrix(view), []
        stage = self._stage(block, view)
        return self._as_matrix(stage), [partial(np.copyto, stage, view)]

    def _view(self, block: Block) -> Array:
        """y as (G, M/G, n, pixels), or (n * pixels, G, M/G) for NHWC."""
        problem, groups = self._problem, self._problem.group
        size, start = math.prod(problem.out), block.start(problem.out)
        if problem.channels_last:
            first = block.images.start * size + start
            rows: Array = problem.y.reshape(-1, groups, self._per_group)
            return rows[first : first + block.pixels]
        images = problem.y.reshape(problem.batch, groups, self._per_group, size)[block.images]
        return np.moveaxis(images[..., start : start + block.pixels // block.count], 0, 2)

    def _stage(self, block: Block, view: Array) -> Array:
        assert self._buffer is not None
        return self._buffer[: self._problem.filters * block.pixels].reshape(view.shape)

    def _as_matrix(self, view: Array) -> Array:
        if self._problem.channels_last:
            return view.swapaxes(0, 1)
        return view[:, :, 0] if view.shape[2] == 1 else view.reshape(*view.shape[:2], -1)
