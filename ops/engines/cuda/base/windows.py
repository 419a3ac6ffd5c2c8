"""Sliding windows as kernels see them: up to 3 spatial axes, any strides, in a struct that is passed by value.

An image is given as a view N, C, spatial, whatever its order in memory: the strides say the rest. Fewer than 3 spatial
axes are led by axes of one pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import ORDERS
from dagexec.ops.engines.cuda.base.indices import (
    INDICES,
    Integers,
    by_value,
    divider,
    element_strides,
    index_type,
    reach,
)
from dagexec.ops.engines.cuda.base.operator import CudaOperator

MAX_AXES = 3

WINDOWS = (
    INDICES
    + r"""
struct axis_t { i64 size, kernel, stride, dilation, head, out; divider by_size, by_stride, by_dilation, by_out; };
struct windows_t { axis_t axis[3]; divider channels; i64 channels_last; };
struct image_t { i64 batch, channel, step[3]; };
struct place_t { I batch, channel, at[3]; };

__device__ inline place_t window_at(i64 number, const windows_t& w) {
    I rest = (I)number;
    place_t p;
    if (w.channels_last) p.channel = split(rest, w.channels);
    for (int d = 2; d >= 0; --d) p.at[d] = split(rest, w.axis[d].by_out);
    if (!w.channels_last) p.channel = split(rest, w.channels);
    p.batch = rest;
    return p;
}
__device__ inline place_t pixel_at(i64 number, const windows_t& w) {
    I rest = (I)number;
    place_t p;
    if (w.channels_last) p.channel = split(rest, w.channels);
    for (int d = 2; d >= 0; --d) p.at[d] = split(rest, w.axis[d].by_size);
    if (!w.channels_last) p.channel = split(rest, w.channels);
    p.batch = rest;
    return p;
}
__device__ inline I plane_of(const place_t& p, const image_t& s) {
    return p.batch * (I)s.batch + p.channel * (I)s.channel;
}
__device__ inline I offset_of(const place_t& p, const image_t& s) {
    return plane_of(p, s) + p.at[0] * (I)s.step[0] + p.at[1] * (I)s.step[1] + p.at[2] * (I)s.step[2];
}
__device__ inline I pixel_of(I window, I tap, const axis_t& a) {
    return window * (I)a.stride - (I)a.head + tap * (I)a.dilation;
}
__device__ inline bool is_inside(I pixel, const axis_t& a) { return pixel >= 0 && pixel < (I)a.size; }
// The taps of a window that are inside the image are those from .first to before .stop.
struct range_t { I first, stop; };
__device__ inline range_t taps_inside(I window, const axis_t& a) {
    I start = window * (I)a.stride - (I)a.head, room = (I)a.size - 1 - start;
    range_t taps;
    taps.first = start < 0 ? quotient((I)a.dilation - 1 - start, a.by_dilation) : (I)0;
    taps.stop = room < 0 ? (I)0 : quotient(room, a.by_dilation) + 1;
    if (taps.stop > (I)a.kernel) taps.stop = (I)a.kernel;
    return taps;
}
// The windows that reach over a pixel; those that read it have a tap there, see tap_of.
__device__ inline range_t windows_over(I pixel, const axis_t& a) {
    I last = pixel + (I)a.head, before = last - (I)a.dilation * ((I)a.kernel - 1);
    range_t windows;
    windows.first = before > 0 ? quotient(before + (I)a.stride - 1, a.by_stride) : (I)0;
    windows.stop = last < 0 ? (I)0 : quotient(last, a.by_stride) + 1;
    if (windows.stop > (I)a.out) windows.stop = (I)a.out;
    return windows;
}
// The tap with which a window that reaches over a pixel reads it, or -1.
__device__ inline I tap_of(I pixel, I window, const axis_t& a) {
    I distance = pixel + (I)a.head - window * (I)a.stride;
    if (a.dilation == 1) return distance;
    I tap = quotient(distance, a.by_dilation);
    return tap * (I)a.dilation == distance ? tap : (I)-1;
}
"""
)
"""C++ that stands before a kernel over windows, with I the type of its indices: `window_at` and `pixel_at` say which
window of which channel and image, or which pixel, a thread's number means: those that follow one another in memory."""


class ImagesOperator(CudaOperator):
    """An operator on image tensors in any order."""

    orders = ORDERS


def windows_argument(axes: Sequence[Axis], channels: int, channels_last: bool) -> Integers:
    """The argument windows_t. Channels are the fastest in the order of threads with `channels_last`."""
    ones = [Axis(1, 1, 1, 1, 0, 0, 1)] * (MAX_AXES - len(axes))
    fields: list[int] = []
    for axis in [*ones, *axes]:
        fields += [axis.size, axis.kernel, axis.stride, axis.dilation, axis.head, axis.out]
        fields += [number for size in (axis.size, axis.stride, axis.dilation, axis.out) for number in divider(size)]
    return by_value([*fields, *divider(channels), int(channels_last)])


def image_argument(image: Any) -> Integers:
    """The argument image_t of a view N, C, spatial (or windows)."""
    batch, channel, *steps = element_strides(image)
    return by_value([batch, channel, *[0] * (MAX_AXES - len(steps)), *steps])


def window_index_type(axes: Sequence[Axis], *images: Any) -> str:
    """The type I for these windows and views."""
    spans = [axis.covered + abs(axis.head) + axis.size + axis.extent + axis.stride + axis.dilation for axis in axes]
    sizes = [max(image.size, reach(image.shape, element_strides(image))) for image in images]
    return index_type(*spans, *sizes)


def channels_first_view(image: Any, channels_last: bool) -> Any:
    """A view N, C, spatial of an image tensor."""
    if not channels_last:
        return image
    return image.transpose(0, image.ndim - 1, *range(1, image.ndim - 1))
