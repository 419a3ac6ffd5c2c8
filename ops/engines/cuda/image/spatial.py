"""ResizeNearest and ChannelShuffle on CUDA, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.schema import OperatorCall
from dagexec.devices.cuda.arrays import address
from dagexec.ops.base.layout import NHWC, channel_axis, image_order
from dagexec.ops.engines.cuda.base.constants import uploaded, zero_step
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.strided_copy import item_type, strided_copy
from dagexec.ops.engines.cuda.base.windows import ImagesOperator
from dagexec.ops.families.image.spatial import ChannelShuffle, ResizeNearest, nearest_pixels, resize_scales
from dagexec.ops.families.image.spatial_gradient import ChannelShuffleGradient, ResizeNearestGradient

_RESIZE = (
    INDICES
    + r"""
struct resize_t { i64 height, width; divider rows, columns, inner; };
extern "C" __global__ void resize_nearest(
    const T* x, const int* row_of, const int* column_of, T* y, resize_t r, i64 n
) {
    FOR_EACH(i, n) {
        I rest = (I)i, within = split(rest, r.inner), column = split(rest, r.columns), row = split(rest, r.rows);
        I pixel = (rest * (I)r.height + row_of[row]) * (I)r.width + column_of[column];
        y[i] = x[pixel * (I)r.inner.size + within];
    }
}
"""
)

_RESIZE_GRADIENT = (
    INDICES
    + r"""
struct resize_t { i64 height, width; divider rows, columns, inner; };
extern "C" __global__ void resize_nearest_gradient(
    const T* dy, const int* row_ends, const int* column_ends, T* dx, resize_t r, i64 n
) {
    FOR_EACH(i, n) {
        I rest = (I)i, within = split(rest, r.inner), column = split(rest, r.columns), row = split(rest, r.rows);
        int first = column ? column_ends[column - 1] : 0, stop = column_ends[column];
        typename computed<T>::type total = 0;
        for (int at = row ? row_ends[row - 1] : 0; at < row_ends[row]; ++at) {
            typename computed<T>::type sum = 0;
            I line = (rest * (I)r.height + at) * (I)r.width;
            for (int k = first; k < stop; ++k) sum += get(dy, (line + k) * (I)r.inner.size + within);
            total += sum;
        }
        put(dx, i, total);
    }
}
"""
)


def _first_spatial(call: OperatorCall) -> int:
    return 1 if image_order(call) == NHWC else 2


def shown_pixels(out: int, size: int, scale: float) -> npt.NDArray[np.int32]:
    """The pixel, of `size`, that each of `out` pixels of a resized axis shows."""
    found = np.arange(out) // int(scale) if scale.is_integer() else nearest_pixels(out, scale)
    return np.minimum(found, size - 1).astype(np.int32)


@on_cuda(ResizeNearest)
class _CudaResizeNearest(ImagesOperator):
    """Rows and columns repeated or left out, by a table for each axis."""

    def prepare(self) -> Step:
        """A thread for every item of the output."""
        call, x, y = self.call(), self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        first = _first_spatial(call)
        scales = resize_scales(call)
        tables = [uploaded(self, shown_pixels(y.shape[first + k], x.shape[first + k], scales[k])) for k in range(2)]
        inner, item = prod(x.shape[first + 2 :]), int(x.itemsize)
        while item < 16 and inner % 2 == 0 and not any(address(array) % (2 * item) for array in (x, y)):
            item, inner = 2 * item, inner // 2
        rows, columns = y.shape[first : first + 2]
        layout = by_value([*x.shape[first : first + 2], *divider(rows), *divider(columns), *divider(inner)])
        n = prod(y.shape[: first + 2]) * inner
        arguments = [x, *tables, y, layout, np.int64(n)]
        kind = index_type(n, x.size)
        return self.launch("resize_nearest", _RESIZE, arguments, elements=n, T=item_type(item), I=kind)


@on_cuda(ResizeNearestGradient)
class _CudaResizeNearestGradient(ImagesOperator):
    """Sums over the pixels that show one, along the columns first; 16-bit floats are summed in float."""

    def prepare(self) -> Step:
        """A thread for every element of dX."""
        found = self.call()
        call = replace(found, inputs=found.inputs[1:], values=found.values[1:])
        dy, dx = self.x(0), self.y(0)
        if not dx.size:
            return nothing_to_do
        if not dy.size:
            return zero_step(dx)
        first, scales = _first_spatial(call), resize_scales(call)
        ends = []
        for k in range(2):
            size = dx.shape[first + k]
            shown = shown_pixels(dy.shape[first + k], size, scales[k])
            ends.append(uploaded(self, np.searchsorted(shown, np.arange(size), side="right").astype(np.int32)))
        rows, columns = dx.shape[first : first + 2]
        inner = prod(dx.shape[first + 2 :])
        layout = by_value([*dy.shape[first : first + 2], *divider(rows), *divider(columns), *divider(inner)])
        arguments = [dy, *ends, dx, layout, np.int64(dx.size)]
        kind = index_type(dx.size, dy.size)
        return self.launch(
            "resize_nearest_gradient", _RESIZE_GRADIENT, arguments, elements=dx.size, T=c_type_of(dx), I=kind
        )


@on_cuda(ChannelShuffle)
class _CudaChannelShuffle(CudaOperator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Channels seen as (group, C / group) are written as (C / group, group)."""
        group = self.arguments.int("group", 1)
        return shuffling(self, self.x(0), self.y(0), channel_axis(self.call()), group)


@on_cuda(ChannelShuffleGradient)
class _CudaChannelShuffleGradient(CudaOperator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Channels seen as (C / group, group) are written as (group, C / group)."""
        axis, x = channel_axis(self.call()), self.x(0)
        return shuffling(self, x, self.y(0), axis, x.shape[axis] // self.arguments.int("group", 1))


def shuffling(op: CudaOperator, x: Array, y: Array, axis: int, rows: int) -> Step:
    """The step that writes axis `axis`, seen as a matrix of so many rows, as its transpose."""
    if not x.size:
        return nothing_to_do
    outer, inner, columns = prod(x.shape[:axis]), prod(x.shape[axis + 1 :]), x.shape[axis] // rows
    source = x.reshape(outer, rows, columns, inner).transpose(0, 2, 1, 3)
    return strided_copy(op, y.reshape(outer, columns, rows, inner), source)
