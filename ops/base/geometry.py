"""Geometry of sliding windows: kernel, stride, dilation and padding, read and checked in one place.

Convolution and pooling, their shape inference and their cost model all ask here. `read_window` parses the arguments
of an operator; `Window.over` resolves them for an input of known size into one `Axis` for each spatial axis.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import replace

from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.layout import (
    NCHW,
    NHWC,
    ORDER_HELP,
    channel_count,
    channels_last,
    image_order,
    image_shape,
    spatial_sizes,
)
from dagexec.platform.records import dataclass


def _spelled(name: str, text: str) -> dict[str, str]:
    """The spellings of an argument with a number for each spatial axis, with their help texts."""
    pair = f"{name}_h and {name}_w"
    return {
        f"{name}s": f"{text}; or {name}, or {pair}",
        name: f"one number for all axes, instead of {name}s",
        f"{name}_h": f"{pair}, for 2 spatial axes, instead of {name}s",
        f"{name}_w": f"beside {name}_h",
    }


PAD_SIDES = ("pad_t", "pad_l", "pad_b", "pad_r")
PAD_ARGS = {
    "pads": "padding at the heads of all axes, then at the tails (default 0); or pad, or pad_t, pad_l, pad_b, pad_r",
    "pad": "one number for all sides, instead of pads",
} | dict.fromkeys(PAD_SIDES, "top, left, bottom and right, for 2 spatial axes, instead of pads")
WINDOW_ARGS = {
    **_spelled("kernel", "window size of each spatial axis"),
    **_spelled("stride", "step of each axis (default 1)"),
    **_spelled("dilation", "distance between taps of each axis (default 1)"),
    **PAD_ARGS,
    "legacy_pad": "0 NOTSET: as given, 1 VALID: none, 2 SAME: out = ceil(in / stride), 3 CAFFE_LEGACY_POOLING, "
    "4 and 5: SAME_UPPER and SAME_LOWER of ONNX",
    "order": ORDER_HELP,
}
POOL_ARGS = WINDOW_ARGS | {
    "global_pooling": "1: the window is the whole image, whatever the kernel; no stride, pad or dilation beside it",
    "ceil_mode": "1: a last window may reach over the end, if it starts before it (default 0)",
}

TRANSPOSED_ARGS = {
    **_spelled(
        "adj", "pixels added at the tail of each axis of the output, less than the stride or the dilation (default 0)"
    ),
    "output_sizes": "the spatial sizes of the output, from which the pads are found, instead of pads; an odd pixel is "
    "at the tail with legacy_pad SAME_UPPER, and at the head otherwise",
    "legacy_pad": "0 NOTSET: as given, 1 VALID and 2 SAME: no pads, 4 and 5, SAME_UPPER and SAME_LOWER: out = in * "
    "stride",
}

_LIMIT = 1 << 31  # no argument of a window is larger


class LegacyPad(enum.IntEnum):
    """How padding is found, as `legacy_pad` says it; the first four are Caffe2's.

    SAME may cut pixels off, when the stride is larger than the kernel; ONNX's two never do, and put an odd pixel at the
    tail (UPPER) or the head (LOWER).
    """

    NOTSET = 0
    VALID = 1
    SAME = 2
    CAFFE_LEGACY_POOLING = 3
    SAME_UPPER = 4
    SAME_LOWER = 5


COMPUTED_PADS = (LegacyPad.VALID, LegacyPad.SAME, LegacyPad.SAME_UPPER, LegacyPad.SAME_LOWER)
"""The modes that compute the pads, so that none may be given."""

_SAME = COMPUTED_PADS[1:]


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial axis of a window over an input of `size` pixels.

    Window `i` of `out` has taps at `i * stride - head + tap * dilation` for `tap` in range(kernel); taps outside the
    input read padding. `head` and `tail` may be negative (SAME with a stride larger than the kernel).
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    head: int
    tail: int
    out: int

    @property
    def extent(self) -> int:
        """Pixels from the first tap of a window to its last, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def covered(self) -> int:
        """Pixels from the first tap of the first window to the last tap of the last one, both counted."""
        return (self.out - 1) * self.stride + self.extent if self.out else 0

    @property
    def leaves_input(self) -> bool:
        """True when some tap lies outside the input."""
        return self.head > 0 or self.covered - self.head > self.size

    @property
    def reads_padding(self) -> bool:
        """True when some tap lies outside the input, or the first window does not start at pixel 0."""
        return self.head != 0 or self.covered > self.size

    def part(self, start: int, stop: int) -> Axis:
        """The windows from `start` to before `stop`, as an axis over the same pixels."""
        head = self.head - start * self.stride
        tail = (stop - start - 1) * self.stride + self.extent - head - self.size
        return Axis(self.size, self.kernel, self.stride, self.dilation, head, tail, stop - start)

    def tap(self, tap: int) -> tuple[slice, slice]:
        """The windows whose tap `tap` lies inside the input, and the pixels it reads there."""
        offset = tap * self.dilation - self.head
        first = max(0, -(offset // self.stride)) if offset < 0 else 0
        last = min(self.out - 1, (self.size - 1 - offset) // self.stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        start = offset + first * self.stride
        return slice(first, last + 1), slice(start, offset + last * self.stride + 1, self.stride)

    def window_sizes(self, *, with_padding: bool) -> list[int]:
        """How many taps each window has inside the input, or inside the input with its padding (without gaps)."""
        low, high = (-self.head, self.size + self.tail) if with_padding else (0, self.size)
        starts = [index * self.stride - self.head for index in range(self.out)]
        return [self._taps_before(high - start) - self._taps_before(low - start) for start in starts]

    def _taps_before(self, distance: int) -> int:
        """How many taps of a window are less than `distance` pixels behind its first."""
        return min(max(0, -(-distance // self.dilation)), self.kernel)

    def trimmed(self) -> Axis:
        """The same windows without first and last taps that lie outside the input in every window.

        One tap is left in any case. What is left of the kernel is bounded by the sizes of input and output.
        """
        past = (self.out - 1) * self.stride
        first = min(self._taps_before(self.head - past), self.kernel - 1)
        stop = max(self._taps_before(self.size + self.head), first + 1)
        head, tail = self.head - first * self.dilation, self.tail - (self.kernel - stop) * self.dilation
        return replace(self, kernel=stop - first, head=head, tail=tail)


@dataclass(frozen=True, slots=True)
class Window:
    """The arguments of a sliding window, one entry for each spatial axis; `kernel` is not read for global pooling."""

    label: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    legacy_pad: LegacyPad
    ceil_mode: bool
    global_pooling: bool
    order: str

    @property
    def channels_last(self) -> bool:
        """True for NHWC."""
        return self.order == NHWC

    def over(self, sizes: Sequence[int]) -> tuple[Axis, ...]:
        """The window over an image of `sizes` pixels. Raises ArgumentError when it does not fit."""
        if self.global_pooling:
            return tuple([Axis(size, size, 1, 1, 0, 0, 1) for size in sizes])
        return tuple([self._axis(number, size) for number, size in enumerate(sizes)])

    def spatial(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The spatial sizes of an image tensor's shape."""
        return spatial_sizes(self.order, shape)

    def channels(self, shape: tuple[int, ...]) -> int:
        """The number of channels of an image tensor's shape."""
        return channel_count(self.order, shape)

    def image_shape(self, batch: int, channels: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of an image tensor in this order. Raises ArgumentError when the channels fill no blocks."""
        return image_shape(self.order, batch, channels, sizes, self.label)

    def filter_shape(self, outer: int, inner: int) -> tuple[int, ...]:
        """M, C/G, kernel of `outer` filters over `inner` channels; M, kernel, C/G for NHWC."""
        return (outer, *self.kernel, inner) if self.channels_last else (outer, inner, *self.kernel)

    def _axis(self, number: int, size: int) -> Axis:
        kernel, stride, dilation = self.kernel[number], self.stride[number], self.dilation[number]
        head, tail = self.head[number], self.tail[number]
        extent = dilation * (kernel - 1) + 1
        if self.legacy_pad in _SAME:
            out = -(-size // stride)
            need = (out - 1) * stride + extent - size
            if self.legacy_pad is not LegacyPad.SAME:
                need = max(0, need)
            half = abs(need) // 2 * (1 if need >= 0 else -1)
            head, tail = (need - half, half) if self.legacy_pad is LegacyPad.SAME_LOWER else (half, need - half)
            return Axis(size, kernel, stride, dilation, head, tail, out)
        if self.legacy_pad is LegacyPad.CAFFE_LEGACY_POOLING:
            return self._legacy_axis(size, kernel, stride, head)
        room = size + head + tail - extent
        if room < 0:
            raise ArgumentError(
                f"{self.label}: the window does not fit axis {number}: kernel {kernel} with dilation {dilation} spans "
                f"{extent} pixels, the input has {size} + {head} + {tail} of padding"
            )
        out = room // stride + 1
        if self.ceil_mode:
            out = -(-room // stride) + 1
            if (out - 1) * stride >= size + head:
                out -= 1
        return Axis(size, kernel, stride, dilation, head, tail, out)

    def _legacy_axis(self, size: int, kernel: int, stride: int, head: int) -> Axis:
        """Caffe's pooling: rounds up, then drops a window that starts in the padding."""
        room = size + 2 * head - kernel
        if room < 0:
            raise ArgumentError(f"{self.label}: kernel {kernel} is larger than {size} pixels with padding {head}")
        standard = room // stride + 1
        out = -(-room // stride) + 1
        if head > 0 and (out - 1) * stride >= size + head:
            out -= 1
        return Axis(size, kernel, stride, 1, head, head + stride * (out - standard), out)


def read_window(call: OperatorCall, rank: int, *, blocked: bool = False) -> Window:
    """The window arguments of an operator on images of `rank` spatial axes; `blocked` allows orders in blocks.

    Raises ArgumentError for forms that contradict each other, wrong numbers of entries and values out of range.
    """
    window = call.arguments.once(("window", rank, blocked), lambda: _read_window(call, rank, blocked))
    return window if window.label == call.label else replace(window, label=call.label)  # it is in its errors


def _read_window(call: OperatorCall, rank: int, blocked: bool) -> Window:
    args = call.arguments
    plain = NHWC if not blocked and channels_last(call) else NCHW
    global_pooling = args.bool("global_pooling")
    legacy_number = args.int("legacy_pad", 0)
    if not 0 <= legacy_number < len(LegacyPad):
        raise ArgumentError(f"{call.label}: argument 'legacy_pad' must be 0 to 5, found {legacy_number}")
    legacy_pad = LegacyPad(legacy_number)
    kernel = _per_axis(call, "kernel", rank, None, least=0 if global_pooling else 1)
    stride = _per_axis(call, "stride", rank, 1, least=1)
    dilation = _per_axis(call, "dilation", rank, 1, least=1)
    pads = read_pads(call, rank)
    if global_pooling:
        if any(pads) or any(size != 1 for size in stride + dilation):
            raise ArgumentError(f"{call.label}: global_pooling cannot be combined with pad, stride or dilation")
    elif not kernel:
        raise ArgumentError(f"{call.label}: argument 'kernel' (or kernels, or kernel_h and kernel_w) is required")
    if legacy_pad in COMPUTED_PADS and any(pads):
        raise ArgumentError(f"{call.label}: legacy_pad {legacy_pad.name} computes the pads; found pads {list(pads)}")
    if legacy_pad is LegacyPad.CAFFE_LEGACY_POOLING and any(size != 1 for size in dilation):
        raise ArgumentError(f"{call.label}: legacy_pad CAFFE_LEGACY_POOLING allows no dilation, found {dilation}")
    return Window(
        label=call.label,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        head=pads[:rank],
        tail=pads[rank:],
        legacy_pad=legacy_pad,
        ceil_mode=args.bool("ceil_mode"),
        global_pooling=global_pooling,
        order=image_order(call) if blocked else plain,
    )


def read_transposed_window(call: OperatorCall, shape: tuple[int, ...]) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a transposed convolution over input 0 of `shape`, and the axes of the convolution it transposes.

    Of these, `axis.out` is the size of the input and `axis.size` that of the output: (in - 1) * stride + extent + adj
    - head - tail. VALID and SAME of Caffe2 mean no pads here; SAME_UPPER and SAME_LOWER of ONNX, and `output_sizes`,
    give the output's size, and divide what is too much between head and tail. What is missing is at the tail, as much
    as adj might be. Raises ArgumentError.
    """
    rank = len(spatial_sizes(image_order(call), shape))
    window = read_window(call, rank, blocked=True)
    if window.global_pooling or window.ceil_mode:
        raise ArgumentError(f"{call.label}: global_pooling and ceil_mode only apply to pooling")
    if window.legacy_pad is LegacyPad.CAFFE_LEGACY_POOLING:
        raise ArgumentError(f"{call.label}: legacy_pad CAFFE_LEGACY_POOLING only applies to pooling")
    adjs = _per_axis(call, "adj", rank, 0, least=0)
    wanted = call.arguments.ints("output_sizes") if "output_sizes" in call.arguments else None
    if wanted is not None:
        _checked(call, "output_size", wanted, rank, 1)
        if any(window.head + window.tail):
            raise ArgumentError(
                f"{call.label}: output_sizes determines the pads; found pads {window.head + window.tail}"
            )
    axes = []
    for number, size in enumerate(window.spatial(shape)):
        stride, dilation, adj = window.stride[number], window.dilation[number], adjs[number]
        if adj >= max(stride, dilation):
            raise ArgumentError(
                f"{call.label}: adj of axis {number} must be less than stride {stride} or dilation {dilation}, "
                f"found {adj}"
            )
        if size == 0:
            raise call.fail(f"axis {number} has no pixels")
        extent = dilation * (window.kernel[number] - 1) + 1
        full = (size - 1) * stride + extent + adj
        head, tail = window.head[number], window.tail[number]
        out = full - head - tail
        if wanted is not None or window.legacy_pad in (LegacyPad.SAME_UPPER, LegacyPad.SAME_LOWER):
            out = wanted[number] if wanted is not None else size * stride
            most = max(0, full - out)
            reach = full - adj + max(stride, dilation) - 1
            if out > reach:
                raise ArgumentError(
                    f"{call.label}: output_sizes of axis {number} must be at most {reach}: ({size} - 1) * stride "
                    f"{stride} + {extent} for the kernel, plus less than stride or dilation; found {out}"
                )
            head = most // 2 if window.legacy_pad is LegacyPad.SAME_UPPER else most - most // 2
            tail = most - head
        if out < 1:
            raise ArgumentError(
                f"{call.label}: axis {number} of the output has no pixels: ({size} - 1) * stride {stride} + {extent} "
                f"for the kernel + adj {adj} - pads {head} and {tail} is {out}"
            )
        axes.append(Axis(out, window.kernel[number], stride, dilation, head, tail, size))
    return window, tuple(axes)


def tap_count(axes: Sequence[Axis]) -> int:
    """Number of taps of a window."""
    return math.prod(axis.kernel for axis in axes)


def output_sizes(axes: Sequence[Axis]) -> tuple[int, ...]:
    """Number of windows along each axis."""
    return tuple([axis.out for axis in axes])


_SPELLINGS = {name: (f"{name}s", f"{name}_h", f"{name}_w") for name in ("kernel", "stride", "dilation", "adj")}


def _per_axis(call: OperatorCall, name: str, rank: int, default: int | None, least: int) -> tuple[int, ...]:
    """One of the three spellings of an argument; () when absent without a default."""
    args = call.arguments
    plural, *pair = _SPELLINGS[name]
    given = _given(call, plural, name, *pair)
    if not given:
        return () if default is None else (default,) * rank
    if plural in given:
        values = args.ints(plural)
        allowed = {plural}
    elif name in args:
        values = [args.int(name, 0)] * rank
        allowed = {name}
    else:
        if len(given) != 2 or rank != 2:
            raise ArgumentError(
                f"{call.label}: {pair[0]} and {pair[1]} must be given together, for 2 spatial axes; found {given}"
            )
        values = [args.int(form, 0) for form in pair]
        allowed = set(pair)
    if set(given) - allowed:
        raise ArgumentError(f"{call.label}: arguments {given} mean the same; give only one of them")
    return _checked(call, name, values, rank, least)


def _given(call: OperatorCall, plural: str, *others: str) -> list[str]:
    """Which of the spellings of an argument are there; an empty list says nothing, as in Caffe2."""
    args = call.arguments
    found = [form for form in others if form in args]
    return [plural, *found] if plural in args and args.ints(plural) else found


def read_pads(call: OperatorCall, rank: int, least: int = 0) -> tuple[int, ...]:
    """The pads of an operator on `rank` spatial axes, heads and then tails, from one of the three spellings.

    Raises ArgumentError for forms that contradict each other, a wrong number of entries, or one below `least`.
    """
    args = call.arguments
    sides = PAD_SIDES
    given = _given(call, "pads", "pad", *sides)
    if "pads" in given:
        values, allowed = args.ints("pads"), {"pads"}
    elif "pad" in args:
        values, allowed = [args.int("pad", 0)] * (2 * rank), {"pad"}
    elif given:
        if len(given) != 4 or rank != 2:
            raise ArgumentError(
                f"{call.label}: {', '.join(sides)} must be given together, for 2 spatial axes; found {given}"
            )
        values, allowed = [args.int(form, 0) for form in sides], set(sides)
    else:
        return (0,) * (2 * rank)
    if set(given) - allowed:
        raise ArgumentError(f"{call.label}: arguments {given} mean the same; give only one of them")
    return _checked(call, "pad", values, 2 * rank, least)


def _checked(call: OperatorCall, name: str, values: list[int], count: int, least: int) -> tuple[int, ...]:
    if len(values) != count:
        raise ArgumentError(f"{call.label}: {name}s needs {count} entries for this input, found {values}")
    if values and not least <= min(values) <= max(values) < _LIMIT:
        raise ArgumentError(f"{call.label}: {name}s must be at least {least} and less than {_LIMIT}, found {values}")
    return tuple(values)
