"""Pad and PadImage on CUDA, and their gradients: one kernel each, in all modes.

A thread of the gradient adds up dY over the places that show its pixel, the pixel's own first: the same bytes always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.schema import OperatorCall
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type, packed_strides, require_axes
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.strided_copy import item_type
from dagexec.ops.families.image.pad import (
    Padded,
    Padding,
    PadGradient,
    PadImageGradient,
    image_padding,
    pad_value,
    read_mode,
    tensor_padding,
)

MAX_AXES = 8

_AXES = (
    INDICES
    + r"""
// Of each axis: the pixels before and behind, the first pixel that is kept and the one after the last, the stride of
// the other tensor; `walked` are the sizes of the tensor that has a thread for each element.
struct pad_t {
    i64 axes, mode;
    divider walked[8];
    i64 head[8], tail[8], first[8], stop[8], stride[8];
};
enum { CONSTANT, REFLECT, EDGE, WRAP };
"""
)

_PAD = (
    _AXES
    + r"""
extern "C" __global__ void pad(const T* x, T* y, T value, pad_t pad, i64 n) {
    FOR_EACH(i, n) {
        I rest = (I)i, from = 0;
        bool shown = true;
        for (int d = (int)pad.axes - 1; d >= 0; --d) {
            I first = (I)pad.first[d], stop = (I)pad.stop[d];
            I at = split(rest, pad.walked[d]) - (I)pad.head[d] + first;
            if (pad.mode == WRAP) {
                at = (at - first) % (stop - first);
                at += at < 0 ? stop : first;
            } else if (at < first) {
                shown = shown && pad.mode != CONSTANT;
                at = pad.mode == REFLECT ? 2 * first - at : first;
            } else if (at >= stop) {
                shown = shown && pad.mode != CONSTANT;
                at = pad.mode == REFLECT ? 2 * stop - 2 - at : stop - 1;
            }
            from += at * (I)pad.stride[d];
        }
        T found = value;
        if (shown) found = x[from];
        y[i] = found;
    }
}
"""
)

_PAD_GRADIENT = (
    _AXES
    + r"""
extern "C" __global__ void pad_gradient(const T* dy, T* dx, pad_t pad, i64 n) {
    FOR_EACH(i, n) {
        I rest = (I)i;
        // Places that show the pixel, along each axis: its own, then some before from `low` on, then some behind.
        I own[8], low[8], high[8], before[8], places[8], number[8];
        bool kept = true;
        for (int d = (int)pad.axes - 1; d >= 0; --d) {
            I at = split(rest, pad.walked[d]), first = (I)pad.first[d], stop = (I)pad.stop[d];
            I head = (I)pad.head[d], tail = (I)pad.tail[d], behind = 0;
            kept = kept && at >= first && at < stop;
            own[d] = at - first + head;
            low[d] = high[d] = before[d] = number[d] = 0;
            if (pad.mode == REFLECT) {
                I left = at - first, right = stop - 1 - at;
                before[d] = left > 0 && left <= head;
                low[d] = head - left;
                behind = right > 0 && right <= tail;
                high[d] = head + stop - first + right - 1;
            } else if (pad.mode == EDGE) {
                if (at == first) before[d] = head;
                if (at == stop - 1) behind = tail;
                high[d] = head + stop - first;
            }
            places[d] = 1 + before[d] + behind;
        }
        typename computed<T>::type sum = 0;
        bool more = kept;
        while (more) {
            I from = 0;
            for (int d = 0; d < (int)pad.axes; ++d) {
                I k = number[d];
                I place = k == 0 ? own[d] : k <= before[d] ? low[d] + k - 1 : high[d] + k - 1 - before[d];
                from += place * (I)pad.stride[d];
            }
            sum += get(dy, from);
            more = false;
            for (int d = (int)pad.axes - 1; d >= 0 && !more; --d) {
                more = ++number[d] < places[d];
                if (!more) number[d] = 0;
            }
        }
        put(dx, i, sum);
    }
}
"""
)

_MODES = {"constant": 0, "reflect": 1, "edge": 2, "wrap": 3}


def _padding_of(call: OperatorCall) -> Padding:
    read: Callable[[OperatorCall], Padding] = image_padding if "Image" in call.definition.type else tensor_padding
    return read(call)


def pad_argument(
    unpadded: tuple[int, ...], padding: Padding, mode: str, *, walk_padded: bool
) -> tuple[Any, tuple[int, ...]]:
    """The argument pad_t, and the shape whose elements have a thread each; axes without pads are joined.

    `unpadded` is the shape before padding. Raises ShapeError for more than 8 axes that cannot be joined.
    """
    rows: list[list[int]] = []  # size, head, tail
    for size, head, tail in zip(unpadded, padding.heads, padding.tails, strict=True):
        if rows and not head and not tail and (mode == "constant" or rows[-1][1:] == [0, 0]):
            rows[-1] = [number * size for number in rows[-1]]
        else:
            rows.append([size, head, tail])
    require_axes(len(rows), MAX_AXES, "padding on CUDA")
    before = tuple(size for size, _, _ in rows)
    after = tuple(sum(row) for row in rows)
    walked, other = (after, before) if walk_padded else (before, after)
    empty = [0] * (MAX_AXES - len(rows))
    fields = [
        [max(0, head) for _, head, _ in rows],
        [max(0, tail) for _, _, tail in rows],
        [max(0, -head) for _, head, _ in rows],
        [size - max(0, -tail) for size, _, tail in rows],
        packed_strides(other),
    ]
    dividers = [number for size in [*walked, *(1 for _ in empty)] for number in divider(size)]
    numbers = [number for field in fields for number in [*field, *empty]]
    return by_value([len(rows), _MODES[mode], *dividers, *numbers]), before + after


@on_cuda(*registered_kinds(Padded))
class _CudaPadded(CudaOperator):
    """Fills every place of the output from the input or with the constant."""

    def prepare(self) -> Step:
        """A thread for every element of the output."""
        call, x, y = self.call(), self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        mode = read_mode(call)
        layout, sizes = pad_argument(x.shape, _padding_of(call), mode, walk_padded=True)
        number = pad_value(call) if mode == "constant" else np.zeros(1)
        value = number.astype(y.dtype).view(f"u{y.itemsize}")[0]
        arguments = [x, y, value, layout, np.int64(y.size)]
        kind = index_type(2 * x.size, 2 * y.size, *(2 * size for size in sizes))
        return self.launch("pad", _PAD, arguments, elements=y.size, T=item_type(y.itemsize), I=kind)


@on_cuda(PadGradient, PadImageGradient)
class _CudaPadGradient(CudaOperator):
    """For each pixel the sum of dY over the places that show it; 16-bit floats are summed in float."""

    def prepare(self) -> Step:
        """A thread for every pixel."""
        call, dy, dx = self.call(), self.x(0), self.y(0)
        if not dx.size:
            return nothing_to_do
        layout, sizes = pad_argument(dx.shape, _padding_of(call), read_mode(call), walk_padded=False)
        kind = index_type(2 * dx.size, 2 * dy.size, *(2 * size for size in sizes))
        arguments = [dy, dx, layout, np.int64(dx.size)]
        return self.launch("pad_gradient", _PAD_GRADIENT, arguments, elements=dx.size, T=c_type_of(dx), I=kind)
