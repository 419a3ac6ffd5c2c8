"""Convolutions on CUDA by the default engine: im2col or col2im kernels and cuBLAS, in the three directions.

The columns of a part of the batch lie in working memory: C/G * taps rows of windows for each image and group, or for
NHWC windows of taps * C/G for each group. One strided batched product multiplies all of them with the filters. 1x1
convolutions need no columns, depthwise ones are computed directly. The batch, and the windows of an image that is too
large, are cut so that the columns keep to the operator's limit.

Chellapilla, Puri, Simard: "High performance convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import Axis, output_sizes, tap_count
from dagexec.ops.engines.cuda.base.columns import col2im, columns_view, im2col
from dagexec.ops.engines.cuda.base.expression import converted
from dagexec.ops.engines.cuda.base.matrices import product_of
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.windows import channels_first_view
from dagexec.ops.engines.cuda.conv.direct import DirectConvolution
from dagexec.ops.families.conv.problem import Allocate, Array, ConvProblem
from dagexec.platform.records import dataclass

DEFAULT_LIMIT = 256 << 20
"""Bytes that columns may take unless `ws_nbytes_limit` says another number."""


@dataclass(frozen=True)
class Part:
    """Images `first` to before `last` of a batch, and of their windows those from `start` to before `stop`, counted
    along the first spatial axis.
    """

    first: int
    last: int
    start: int
    stop: int
    axes: tuple[Axis, ...]

    @property
    def images(self) -> int:
        """Number of images."""
        return self.last - self.first

    @property
    def windows(self) -> int:
        """Number of windows of an image."""
        return math.prod(output_sizes(self.axes))


class CudaConvolution:
    """One convolution, whose arrays are device arrays: the steps of the three directions, without a bias.

    The step for X, or for the filter, computes that array of the problem.
    """

    def __init__(self, owner: CudaOperator, problem: ConvProblem, limit: int = DEFAULT_LIMIT) -> None:
        self._owner = owner
        self._problem = problem
        self._limit = limit
        self._groups = problem.group
        self._inner = problem.channels // problem.group * tap_count(problem.axes)
        self._matrix = problem.weights.reshape(problem.group, problem.filters // problem.group, self._inner)

    @property
    def is_depthwise(self) -> bool:
        """True when every group has one channel."""
        return self._groups > 1 and self._groups == self._problem.channels

    @property
    def is_pointwise(self) -> bool:
        """True when a window is its pixel, so that images are columns."""
        axes = self._problem.axes
        return all(axis.kernel == axis.stride == 1 and not axis.head and axis.out == axis.size for axis in axes)

    def forward(self, allocate: Allocate) -> list[Step]:
        """Y from X and the filter."""
        if self.is_depthwise:
            return [self._direct().forward()]
        if self.is_pointwise:
            return [self._multiply(self._whole(self._problem.x), self._whole(self._problem.y))]
        parts = list(self._parts())
        columns = self._buffer(parts, self._problem.x.dtype, allocate)
        steps: list[Step] = []
        for part in parts:
            matrix, fill = self._unrolled(part, columns)
            steps += [*fill, self._multiply(matrix, self._outputs(part))]
        return steps

    def data_gradient(self, allocate: Allocate) -> list[Step]:
        """X from Y and the filter."""
        if self.is_depthwise:
            return [self._direct().data_gradient()]
        if self.is_pointwise:
            return [self._multiply_back(self._whole(self._problem.y), self._whole(self._problem.x))]
        parts = list(self._parts(cut_images=False))
        columns = self._buffer(parts, compute_dtype(self._problem.x.dtype), allocate)
        steps: list[Step] = []
        for part in parts:
            matrix, views = self._columns(part, columns)
            steps.append(self._multiply_back(self._outputs(part), matrix))
            steps += [
                col2im(self._owner, column, image, part.axes, channels_last=self._last) for image, column in views
            ]
        return steps

    def filter_gradient(self, allocate: Allocate) -> list[Step]:
        """The filter from X and Y: one product for every part, added up in order."""
        if self.is_depthwise:
            return [self._direct().filter_gradient()]
        weights, dtype = self._problem.weights, compute_dtype(self._problem.weights.dtype)
        direct = self.is_pointwise and (self._last or self._problem.batch == 1)
        parts = [self._all()] if direct else list(self._parts())
        target, narrow = self._matrix, len(parts) > 1 and dtype != weights.dtype
        if narrow:
            target = allocate(self._matrix.shape, dtype)
        columns = None if direct else self._buffer(parts, self._problem.x.dtype, allocate)
        staging = None
        if not self._last and parts[0].images > 1:
            staging = allocate((self._problem.filters * parts[0].images * parts[0].windows,), self._problem.y.dtype)
        steps: list[Step] = []
        for number, part in enumerate(parts):
            if self._last:
                gradient = self._outputs(part).swapaxes(-1, -2)
            else:
                gradient, collect = self._rows(part, staging)
                steps += collect
            if columns is None:
                matrix = self._whole(self._problem.x)
                matrix = matrix if self._last else matrix[0].swapaxes(-1, -2)
            elif self._last:
                matrix, fill = self._unrolled(part, columns)
                steps += fill
            else:
                matrix, fill = self._joined(part, columns)
                steps += fill
            steps.append(product_of(self._owner, gradient, matrix, target, beta=float(number > 0)))
        return [*steps, converted(self._owner, target, self._matrix)] if narrow else steps

    @property
    def _last(self) -> bool:
        return self._problem.channels_last

    def _direct(self) -> DirectConvolution:
        problem = self._problem
        return DirectConvolution(
            self._owner, problem.x, problem.weights, problem.y, problem.axes, self._groups, self._last
        )

    def _multiply(self, columns: Array, outputs: Array) -> Step:
        """Y = W X of N, G matrices of C/G rows; for NHWC Y = X W^T of G matrices of C/G columns."""
        if self._last:
            return product_of(self._owner, columns, self._matrix.swapaxes(1, 2), outputs)
        return product_of(self._owner, self._matrix, columns, outputs)

    def _multiply_back(self, outputs: Array, columns: Array) -> Step:
        """X = W^T Y; for NHWC X = Y W."""
        if self._last:
            return product_of(self._owner, outputs, self._matrix, columns)
        return product_of(self._owner, self._matrix.swapaxes(1, 2), outputs, columns)

    def _whole(self, image: Array) -> Array:
        """An image tensor as N, G, channels of a group, pixels; for NHWC as G, N * pixels, channels of a group."""
        if self._last:
            return image.reshape(-1, self._groups, image.shape[-1] // self._groups).transpose(1, 0, 2)
        return image.reshape(image.shape[0], self._groups, image.shape[1] // self._groups, -1)

    def _all(self) -> Part:
        axes = self._problem.axes
        return Part(0, self._problem.batch, 0, axes[0].out, axes)

    def _parts(self, *, cut_images: bool = True) -> Iterator[Part]:
        """All of the batch; every part's columns keep to the limit where they can."""
        problem, axes = self._problem, self._problem.axes
        nbytes = problem.channels * tap_count(axes) * compute_dtype(problem.x.dtype).itemsize
        line = max(1, nbytes * math.prod(axis.out for axis in axes[1:]))
        images = self._limit // max(1, line * axes[0].out)
        lines = max(1, self._limit // line)
        if images or not cut_images or lines >= axes[0].out:
            count = -(-problem.batch // max(1, images))
            step = -(-problem.batch // count)
            for first in range(0, problem.batch, step):
                yield Part(first, min(first + step, problem.batch), 0, axes[0].out, axes)
            return
        for first in range(problem.batch):
            for start in range(0, axes[0].out, lines):
                stop = min(start + lines, axes[0].out)
                yield Part(first, first + 1, start, stop, (axes[0].part(start, stop), *axes[1:]))

    def _buffer(self, parts: list[Part], dtype: npt.DTypeLike, allocate: Allocate) -> Array:
        """Memory for the columns of the largest part, which is the first."""
        elements = self._problem.channels * tap_count(self._problem.axes) * parts[0].images * parts[0].windows
        return allocate((elements,), dtype)

    def _outputs(self, part: Part) -> Array:
        """That part of Y as images, G, M/G, windows; for NHWC as G, images * windows, M/G."""
        y, out = self._problem.y, self._problem.out
        lines, rest, per_group = out[0], math.prod(out[1:]), self._problem.filters // self._groups
        chosen = slice(part.first, part.last), slice(part.start, part.stop)
        if self._last:
            split = y.reshape(y.shape[0], lines, rest * self._groups * per_group)[chosen]
            return split.reshape(-1, self._groups, per_group).transpose(1, 0, 2)
        split = y.reshape(y.shape[0], self._groups, per_group, lines, rest)[chosen[0], :, :, chosen[1]]
        return split.reshape(part.images, self._groups, per_group, part.windows)

    def _columns(self, part: Part, buffer: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        """The columns of a part as a stack of matrices, and pairs of views: of images and of their columns.

        The matrices are images, G, C/G * taps, windows; for NHWC G, images * windows, taps * C/G.
        """
        problem, groups, out = self._problem, self._groups, output_sizes(part.axes)
        image = channels_first_view(problem.x[part.first : part.last], self._last)
        used = buffer[: part.images * part.windows * groups * self._inner]
        if not self._last:
            views = columns_view(used.reshape(part.images, groups * self._inner, *out), part.axes, False)
            return used.reshape(part.images, groups, self._inner, part.windows), [(image, views)]
        stack = used.reshape(groups, part.images, *out, self._inner)
        width = problem.channels // groups
        pairs = [
            (image[:, number * width : (number + 1) * width], columns_view(stack[number], part.axes, True))
            for number in range(groups)
        ]
        return used.reshape(groups, part.images * part.windows, self._inner), pairs

    def _unrolled(self, part: Part, buffer: Array) -> tuple[Array, list[Step]]:
        """The columns of a part as a stack of matrices, and the steps that fill them."""
        matrix, views = self._columns(part, buffer)
        return matrix, [
            im2col(self._owner, image, columns, part.axes, channels_last=self._last) for image, columns in views
        ]

    def _joined(self, part: Part, buffer: Array) -> tuple[Array, list[Step]]:
        """For NCHW: the windows of all images side by side, as G, images * windows, C/G * taps; what fills them."""
        problem, rank = self._problem, len(part.axes)
        used = buffer[: part.images * part.windows * self._groups * self._inner]
        kernel, out = problem.kernel, output_sizes(part.axes)
        split = used.reshape(problem.channels, *kernel, part.images, *out)
        view = split.transpose(1 + rank, 0, *range(1, 1 + rank), *range(2 + rank, 2 + 2 * rank))
        fill = im2col(self._owner, problem.x[part.first : part.last], view, part.axes)
        return used.reshape(self._groups, self._inner, part.images * part.windows).swapaxes(1, 2), [fill]

    def _rows(self, part: Part, staging: Array | None) -> tuple[Array, list[Step]]:
        """For NCHW: that part of Y as G, M/G, images * windows, and the steps that bring it there."""
        outputs = self._outputs(part)
        if staging is None or part.images == 1:
            return outputs[0], []
        view = outputs.transpose(1, 2, 0, 3)
        rows = staging[: view.size].reshape(view.shape)
        return rows.reshape(*view.shape[:2], -1), [converted(self._owner, view, rows)]
