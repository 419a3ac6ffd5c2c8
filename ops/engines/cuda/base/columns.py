"""im2col and col2im on CUDA: kernels, the steps that launch them, and the operators Im2Col and Col2Im.

im2col has a thread for every channel and window, which writes all taps of it: threads next to one another write columns
next to one another. col2im has a thread for every channel and pixel, which adds what the windows have that read it, in
the order of the taps (from the last window on): no atomics, so the same bytes in every run. Convolutions use both
through `im2col` and `col2im`, on views, so that a group of channels or some images of a batch are views, too.

Chellapilla, Puri, Simard: "High performance convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis, tap_count
from dagexec.ops.engines.cuda.base.indices import Integers, by_value, element_strides
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.windows import (
    MAX_AXES,
    WINDOWS,
    channels_first_view,
    image_argument,
    window_index_type,
    windows_argument,
)
from dagexec.ops.families.conv.unrolled import Col2Im, Im2Col, columns_window

_IM2COL = (
    WINDOWS
    + r"""
struct taps_t { i64 step[3]; };
extern "C" __global__ void im2col(const T* image, S* columns, windows_t w, image_t in, image_t to, taps_t taps, i64 n) {
    FOR_EACH(i, n) {
        place_t p = window_at(i, w);
        const T* pixels = image + plane_of(p, in);
        S* column = columns + offset_of(p, to);
        for (I t0 = 0; t0 < (I)w.axis[0].kernel; ++t0) {
            I p0 = pixel_of(p.at[0], t0, w.axis[0]);
            for (I t1 = 0; t1 < (I)w.axis[1].kernel; ++t1) {
                I p1 = pixel_of(p.at[1], t1, w.axis[1]);
                bool row = is_inside(p0, w.axis[0]) && is_inside(p1, w.axis[1]);
                for (I t2 = 0; t2 < (I)w.axis[2].kernel; ++t2) {
                    I p2 = pixel_of(p.at[2], t2, w.axis[2]);
                    typename computed<T>::type value = 0;
                    if (row && is_inside(p2, w.axis[2]))
                        value = get(pixels, p0 * (I)in.step[0] + p1 * (I)in.step[1] + p2 * (I)in.step[2]);
                    put(column, t0 * (I)taps.step[0] + t1 * (I)taps.step[1] + t2 * (I)taps.step[2], value);
                }
            }
        }
    }
}
"""
)

_COL2IM = (
    WINDOWS
    + r"""
struct taps_t { i64 step[3]; };
template <class A> struct summed { typedef A type; };
template <> struct summed<int> { typedef u32 type; };
template <> struct summed<i64> { typedef u64 type; };
extern "C" __global__ void col2im(const S* columns, T* image, windows_t w, image_t in, image_t to, taps_t taps, i64 n) {
    FOR_EACH(i, n) {
        place_t p = pixel_at(i, w);
        const S* column = columns + plane_of(p, in);
        typename summed<typename computed<T>::type>::type sum = 0;
        range_t r0 = windows_over(p.at[0], w.axis[0]), r1 = windows_over(p.at[1], w.axis[1]);
        range_t r2 = windows_over(p.at[2], w.axis[2]);
        for (I o0 = r0.stop - 1; o0 >= r0.first; --o0) {
            I t0 = tap_of(p.at[0], o0, w.axis[0]);
            if (t0 < 0) continue;
            for (I o1 = r1.stop - 1; o1 >= r1.first; --o1) {
                I t1 = tap_of(p.at[1], o1, w.axis[1]);
                if (t1 < 0) continue;
                I row = o0 * (I)in.step[0] + o1 * (I)in.step[1] + t0 * (I)taps.step[0] + t1 * (I)taps.step[1];
                for (I o2 = r2.stop - 1; o2 >= r2.first; --o2) {
                    I t2 = tap_of(p.at[2], o2, w.axis[2]);
                    if (t2 >= 0) sum += get(column, row + o2 * (I)in.step[2] + t2 * (I)taps.step[2]);
                }
            }
        }
        put(image, offset_of(p, to), sum);
    }
}
"""
)


def columns_view(columns: Array, axes: Sequence[Axis], channels_last: bool) -> Array:
    """A view N, C, kernel, out of packed columns: N, C * kernel, out; with `channels_last` N, out, kernel * C.

    `out` may be one axis or several; so may `columns` be of one image, with N left out, as 1, C * kernel, out.
    """
    kernel, out, rank = [axis.kernel for axis in axes], [axis.out for axis in axes], len(axes)
    taps, batch = tap_count(axes), columns.shape[0]
    if channels_last:
        split = columns.reshape(batch, *out, *kernel, columns.shape[-1] // taps)
        return split.transpose(0, 1 + 2 * rank, *range(1 + rank, 1 + 2 * rank), *range(1, 1 + rank))
    return columns.reshape(batch, columns.shape[1] // taps, *kernel, *out)


def im2col(
    operator: CudaOperator, image: Array, columns: Array, axes: Sequence[Axis], *, channels_last: bool = False
) -> Step:
    """A step that gives every tap of every window the pixel it reads, or 0 for padding.

    `image` is a view N, C, spatial and `columns` a view N, C, kernel, out, with the sizes of `axes`: 1 to 3 spatial
    axes, any strides (see `channels_first_view` and `columns_view`). Their types may differ. `channels_last` says that
    channels follow one another in memory, which decides only how threads walk.
    """
    n = prod((*columns.shape[:2], *(axis.out for axis in axes)))
    arguments = [image, columns, *_geometry(image, columns, axes, channels_last, image_first=True), np.int64(n)]
    kind = window_index_type(axes, image, columns)
    return operator.launch("im2col", _IM2COL, arguments, elements=n, T=c_type_of(image), S=c_type_of(columns), I=kind)


def col2im(
    operator: CudaOperator, columns: Array, image: Array, axes: Sequence[Axis], *, channels_last: bool = False
) -> Step:
    """A step that gives every pixel the sum of the columns that read it, 0 if there is none; views as for `im2col`.

    Sums are in float for 16-bit elements, in the order of the taps; integers wrap around.
    """
    n = prod(image.shape)
    arguments = [columns, image, *_geometry(image, columns, axes, channels_last, image_first=False), np.int64(n)]
    kind = window_index_type(axes, image, columns)
    return operator.launch("col2im", _COL2IM, arguments, elements=n, T=c_type_of(image), S=c_type_of(columns), I=kind)


def _geometry(
    image: Array, columns: Array, axes: Sequence[Axis], channels_last: bool, *, image_first: bool
) -> list[Integers]:
    """The arguments w, in, to and taps."""
    rank = len(axes)
    whole = (*image.shape[:2], *(axis.kernel for axis in axes), *(axis.out for axis in axes))
    if image.shape[2:] != tuple(axis.size for axis in axes) or columns.shape != whole:
        raise ValueError(f"an image of shape {image.shape} and columns of {columns.shape} for windows {list(axes)}")
    windows = windows_argument(axes, image.shape[1], channels_last)
    batch, channel, *steps = element_strides(columns)
    missing = [0] * (MAX_AXES - rank)
    taps = by_value([*missing, *steps[:rank]])
    own, other = image_argument(image), by_value([batch, channel, *missing, *steps[rank:]])
    return [windows, *((own, other) if image_first else (other, own)), taps]


@on_cuda(Im2Col)
class _CudaIm2Col(CudaOperator):
    """A thread for every channel and window."""

    def prepare(self) -> Step:
        window, axes = columns_window(self.call(), 0)
        last = window.channels_last
        columns: Any = columns_view(self.y(0), axes, last)
        return im2col(self, channels_first_view(self.x(0), last), columns, axes, channels_last=last)


@on_cuda(Col2Im)
class _CudaCol2Im(CudaOperator):
    """A thread for every channel and pixel, which gathers."""

    def prepare(self) -> Step:
        window, axes = columns_window(self.call(), 1)
        last = window.channels_last
        columns: Any = columns_view(self.x(0), axes, last)
        return col2im(self, columns, channels_first_view(self.y(0), last), axes, channels_last=last)
