"""Convolutions without columns on CUDA: a thread for every output element, which adds up its taps.

For depthwise convolutions, whose products are too thin for a matrix product, and for integers, whose sums are exact in
64 bits. The filter's gradient has a block for every element of the filter, which adds up in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis, tap_count
from dagexec.ops.engines.cuda.base.indices import Integers, by_value, element_strides
from dagexec.ops.engines.cuda.base.matrices import c_type_of_work
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.windows import (
    MAX_AXES,
    WINDOWS,
    channels_first_view,
    image_argument,
    window_index_type,
    windows_argument,
)

_PARTS = r"""
struct filter_t { i64 filter, channel, step[3]; };
struct groups_t { i64 inputs, outputs, zero_point; };  // channels and filters of a group
"""

_FORWARD = (
    WINDOWS
    + _PARTS
    + r"""
extern "C" __global__ void direct_convolution(
    const TX* x, const TW* weights, TY* y, windows_t w, image_t in, image_t to, filter_t f, groups_t g, i64 n) {
    FOR_EACH(i, n) {
        place_t p = window_at(i, w);
        const TX* image = x + p.batch * (I)in.batch + p.channel / (I)g.outputs * (I)g.inputs * (I)in.channel;
        const TW* filter = weights + p.channel * (I)f.filter;
        range_t r0 = taps_inside(p.at[0], w.axis[0]), r1 = taps_inside(p.at[1], w.axis[1]);
        range_t r2 = taps_inside(p.at[2], w.axis[2]);
        SUM sum = 0;
        for (I t0 = r0.first; t0 < r0.stop; ++t0) {
            I p0 = pixel_of(p.at[0], t0, w.axis[0]);
            for (I t1 = r1.first; t1 < r1.stop; ++t1) {
                I p1 = pixel_of(p.at[1], t1, w.axis[1]);
                for (I t2 = r2.first; t2 < r2.stop; ++t2) {
                    I p2 = pixel_of(p.at[2], t2, w.axis[2]);
                    I pixel = p0 * (I)in.step[0] + p1 * (I)in.step[1] + p2 * (I)in.step[2];
                    I tap = t0 * (I)f.step[0] + t1 * (I)f.step[1] + t2 * (I)f.step[2];
                    for (I c = 0; c < (I)g.inputs; ++c) {
                        SUM value = (SUM)get(image, pixel + c * (I)in.channel) - (SUM)g.zero_point;
                        sum += value * (SUM)get(filter, tap + c * (I)f.channel);
                    }
                }
            }
        }
        put(y, offset_of(p, to), sum);
    }
}
"""
)

_DATA = (
    WINDOWS
    + _PARTS
    + r"""
extern "C" __global__ void direct_data_gradient(
    const TY* y, const TW* weights, TX* x, windows_t w, image_t in, image_t to, filter_t f, groups_t g, i64 n) {
    FOR_EACH(i, n) {
        place_t p = pixel_at(i, w);
        I group = p.channel / (I)g.inputs, first = group * (I)g.outputs;
        const TY* image = y + p.batch * (I)in.batch + first * (I)in.channel;
        const TW* filter = weights + first * (I)f.filter + (p.channel - group * (I)g.inputs) * (I)f.channel;
        range_t r0 = windows_over(p.at[0], w.axis[0]), r1 = windows_over(p.at[1], w.axis[1]);
        range_t r2 = windows_over(p.at[2], w.axis[2]);
        SUM sum = 0;
        for (I o0 = r0.stop - 1; o0 >= r0.first; --o0) {
            I t0 = tap_of(p.at[0], o0, w.axis[0]);
            if (t0 < 0) continue;
            for (I o1 = r1.stop - 1; o1 >= r1.first; --o1) {
                I t1 = tap_of(p.at[1], o1, w.axis[1]);
                if (t1 < 0) continue;
                for (I o2 = r2.stop - 1; o2 >= r2.first; --o2) {
                    I t2 = tap_of(p.at[2], o2, w.axis[2]);
                    if (t2 < 0) continue;
                    I window = o0 * (I)in.step[0] + o1 * (I)in.step[1] + o2 * (I)in.step[2];
                    I tap = t0 * (I)f.step[0] + t1 * (I)f.step[1] + t2 * (I)f.step[2];
                    for (I m = 0; m < (I)g.outputs; ++m)
                        sum += get(image, window + m * (I)in.channel) * get(filter, tap + m * (I)f.filter);
                }
            }
        }
        put(x, offset_of(p, to), sum);
    }
}
"""
)

_FILTER = (
    WINDOWS
    + _PARTS
    + r"""
extern "C" __global__ void direct_filter_gradient(
    const TX* x, const TY* y, TW* weights, windows_t w, image_t in, image_t of, filter_t f, groups_t g, i64 windows,
    i64 n) {
    __shared__ SUM part[256];
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        I rest = (I)number, tap[3];
        for (int d = 2; d >= 0; --d) {
            tap[d] = rest % (I)w.axis[d].kernel;
            rest /= (I)w.axis[d].kernel;
        }
        I c = rest % (I)g.inputs, m = rest / (I)g.inputs;
        const TX* image = x + (m / (I)g.outputs * (I)g.inputs + c) * (I)in.channel;
        const TY* gradient = y + m * (I)of.channel;
        SUM sum = 0;
        for (i64 j = threadIdx.x; j < windows; j += 256) {
            place_t p = window_at(j, w);
            I p0 = pixel_of(p.at[0], tap[0], w.axis[0]), p1 = pixel_of(p.at[1], tap[1], w.axis[1]);
            I p2 = pixel_of(p.at[2], tap[2], w.axis[2]);
            if (is_inside(p0, w.axis[0]) && is_inside(p1, w.axis[1]) && is_inside(p2, w.axis[2])) {
                I pixel = p0 * (I)in.step[0] + p1 * (I)in.step[1] + p2 * (I)in.step[2];
                sum += get(image, p.batch * (I)in.batch + pixel) * get(gradient, offset_of(p, of));
            }
        }
        part[threadIdx.x] = sum;
        __syncthreads();
        for (int half = 128; half; half >>= 1) {
            if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
            __syncthreads();
        }
        if (!threadIdx.x) {
            I at = m * (I)f.filter + c * (I)f.channel;
            put(weights, at + tap[0] * (I)f.step[0] + tap[1] * (I)f.step[1] + tap[2] * (I)f.step[2], part[0]);
        }
        __syncthreads();
    }
}
"""
)

_MAX_BLOCKS = 1 << 20


class DirectConvolution:
    """The launches of one convolution; X, filter and Y as tensors in one order, whichever of them is computed.

    A zero point is subtracted from the integers of X; padding counts as it.
    """

    def __init__(
        self,
        owner: CudaOperator,
        x: Array,
        weights: Array,
        y: Array,
        axes: Sequence[Axis],
        group: int,
        channels_last: bool,
        zero_point: int = 0,
    ) -> None:
        self._owner = owner
        self._axes = axes
        self._last = channels_last
        self._x, self._weights, self._y = (channels_first_view(array, channels_last) for array in (x, weights, y))
        filters, per_group = self._weights.shape[:2]
        self._groups = by_value([per_group, filters // group, zero_point])
        outer, channel, *steps = element_strides(self._weights)
        self._filter = by_value([outer, channel, *[0] * (MAX_AXES - len(steps)), *steps])
        work = "i64" if y.dtype.kind in "iu" else c_type_of_work(y)
        self._types = {
            "TX": c_type_of(x),
            "TW": c_type_of(weights),
            "TY": c_type_of(y),
            "SUM": work,
            "I": window_index_type(axes, self._x, self._weights, self._y),
        }

    def forward(self) -> Step:
        """Y, without a bias."""
        geometry = self._geometry(self._weights.shape[0], self._x, self._y)
        arguments = [self._x, self._weights, self._y, *geometry, np.int64(self._y.size)]
        return self._launch("direct_convolution", _FORWARD, arguments, elements=self._y.size)

    def data_gradient(self) -> Step:
        """X from Y and the filter."""
        geometry = self._geometry(self._x.shape[1], self._y, self._x)
        arguments = [self._y, self._weights, self._x, *geometry, np.int64(self._x.size)]
        return self._launch("direct_data_gradient", _DATA, arguments, elements=self._x.size)

    def filter_gradient(self) -> Step:
        """The filter from X and Y."""
        windows = self._y.shape[0] * math.prod(axis.out for axis in self._axes)
        geometry = self._geometry(1, self._x, self._y)
        elements = self._weights.shape[0] * self._weights.shape[1] * tap_count(self._axes)
        arguments = [self._x, self._y, self._weights, *geometry, np.int64(windows), np.int64(elements)]
        return self._launch("direct_filter_gradient", _FILTER, arguments, blocks=min(elements, _MAX_BLOCKS))

    def _geometry(self, channels: int, read: Any, written: Any) -> list[Integers]:
        windows = windows_argument(self._axes, channels, self._last)
        return [windows, image_argument(read), image_argument(written), self._filter, self._groups]

    def _launch(self, name: str, source: str, arguments: list[Any], **size: int) -> Step:
        return self._owner.launch(name, source, arguments, **size, **self._types)  # type: ignore[arg-type]
