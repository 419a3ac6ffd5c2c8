"""MaxPool and AveragePool over 1, 2 or 3 spatial axes, in all padding modes.

A window is a product of ranges, so its maximum or sum is taken one axis after the other: k + k passes instead of k x k.
Each pass combines shifted slices, cut to where the tap lies inside the image, so padding is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import ALL_TYPES, BOOL, FLOAT_TYPES, STRING, TypeMeta
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.blocks import BLOCK, block_indices, compute_dtype
from dagexec.ops.geometry import POOL_ARGS, Axis, LegacyPad, Window, output_sizes, read_window, tap_count

Array = npt.NDArray[Any]
Combine = Callable[..., Any]

_SPATIAL_AXES = {"": (1, 2, 3), "1D": (1,), "2D": (2,), "3D": (3,)}
_ORDERED_TYPES = tuple(meta for meta in ALL_TYPES if meta not in (BOOL, STRING))


def pool_window(call: OperatorCall, dilations: bool) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a pooling operator, and its axes over the input's size. Raises ArgumentError or ShapeError."""
    suffix = call.definition.type.partition("Pool")[2]
    shape = call.require_rank(0, *(rank + 2 for rank in _SPATIAL_AXES[suffix]))
    window = read_window(call, len(shape) - 2)
    if not dilations and any(size != 1 for size in window.dilation):
        raise ArgumentError(f"{call.label}: dilation must be 1, found {window.dilation}")
    sizes = window.spatial(shape)
    if any(size == 0 for size in sizes):
        raise call.fail("there is nothing to pool over: a spatial size is 0")
    axes = window.over(sizes)
    if window.legacy_pad is not LegacyPad.SAME:
        for axis, head, tail in zip(axes, window.head, window.tail, strict=True):
            if max(head, tail) >= axis.extent and not window.global_pooling:
                raise ArgumentError(
                    f"{call.label}: pads must be less than the kernel {axis.kernel}, found {head} and {tail}"
                )
    for axis in axes:
        if (axis.out - 1) * axis.stride >= axis.size + axis.head:
            raise ArgumentError(
                f"{call.label}: legacy_pad CAFFE_LEGACY_POOLING rounds up: the last of {axis.out} windows, with stride "
                f"{axis.stride}, starts behind the {axis.size} pixels"
            )
    return window, axes


def _infer(metas: tuple[TypeMeta, ...], dilations: bool) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(0, *metas)
        window, axes = pool_window(call, dilations)
        call.arguments.bool("count_include_pad")
        shape = call.inputs[0].shape
        return [TensorType(window.image_shape(shape[0], window.channels(shape), output_sizes(axes)), meta)]

    return infer


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    _, axes = pool_window(call, dilations=True)
    return Cost(outputs[0].elements * tap_count(axes), call.inputs[0].nbytes, outputs[0].nbytes)


class Pooling(Operator):
    """What the two share: cutting the work into blocks of planes, and going through the axes."""

    def _reduce(self, combine: Combine, identity: Any, work: np.dtype[Any], finish: _Finish) -> Step:
        """The steps that combine every window of x into y, in `work`; `finish` gives those that end a block."""
        window, axes = pool_window(self.call(), dilations=True)
        x, y = self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        first = 1 if window.channels_last else 2
        planes = x.reshape(-1, *x.shape[first:])
        targets = y.reshape(-1, *y.shape[first:])
        plane = math.prod(planes.shape[1:])
        count = min(len(planes), max(1, BLOCK // plane))
        passes = [number for number, axis in enumerate(axes) if _needs_pass(axis)] or [0]
        shapes = _pass_shapes(planes.shape[1:], axes, passes)
        scratch = [self.scratch((count, *shape), work) for shape in shapes[:-1]]
        if work != x.dtype:
            scratch = [*scratch, self.scratch((count, *shapes[-1]), work)]
        calls: list[Step] = []
        for (piece,) in block_indices((len(planes),), count):
            source, target = planes[piece], targets[piece]
            outputs = [array[: len(source)] for array in scratch] + ([target] if work == x.dtype else [])
            for number, output in zip(passes, outputs, strict=True):
                calls += _combine_axis(combine, identity, source, output, axes[number], 1 + number)
                source = output
            calls += finish(source, target)
        return in_sequence(calls)


_Finish = Callable[[Array, Array], list[Step]]
"""The steps that end a block: the combined windows, and the output."""


def _needs_pass(axis: Axis) -> bool:
    """False when each window is the one pixel at its own place, so that there is nothing to combine."""
    return axis.kernel > 1 or axis.stride > 1 or axis.reads_padding


def _pass_shapes(plane: tuple[int, ...], axes: tuple[Axis, ...], passes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape of a plane after each pass; `plane` ends in the channels for NHWC."""
    shapes = []
    sizes = list(plane)
    for number in passes:
        sizes[number] = axes[number].out
        shapes.append(tuple(sizes))
    return shapes


def _combine_axis(
    combine: Combine, identity: Any, source: Array, target: Array, axis: Axis, position: int
) -> list[Step]:
    """Steps that set `target` to the combination of each window of `source` along array axis `position`."""
    if axis.kernel == axis.size and axis.out == 1 and not axis.reads_padding:
        return [partial(combine.reduce, source, axis=position, out=target, keepdims=True)]  # type: ignore[attr-defined]

    def at(array: Array, piece: slice) -> Array:
        view: Array = array[(slice(None),) * position + (piece,)]
        return view

    taps = [axis.tap(tap) for tap in range(axis.kernel)]
    complete = [tap for tap in taps if tap[0] == slice(0, axis.out)][:1]
    rest = [tap for tap in taps if tap not in complete and tap[0] != slice(0, 0)]
    if not complete:
        steps: list[Step] = [partial(target.fill, identity)]
    elif not rest:
        steps = [partial(np.copyto, target, at(source, complete[0][1]))]
    else:
        windows, pixels = rest.pop(0)
        base = complete[0][1].start
        steps = [
            partial(np.copyto, at(target, edge), at(source, _every(base, axis.stride, edge)))
            for edge in (slice(0, windows.start), slice(windows.stop, axis.out))
            if edge.start < edge.stop
        ]
        pair = at(source, _every(base, axis.stride, windows)), at(source, pixels)
        steps.append(partial(combine, *pair, out=at(target, windows), dtype=target.dtype))
    return steps + [
        partial(combine, at(target, windows), at(source, pixels), out=at(target, windows)) for windows, pixels in rest
    ]


def _every(start: int, stride: int, windows: slice) -> slice:
    """The pixels that `windows` read with a tap that lies at pixel `start` in window 0."""
    return slice(start + windows.start * stride, start + (windows.stop - 1) * stride + 1, stride)


class MaxPooling(Pooling):
    """The maximum of each window; padding never wins."""

    def prepare(self) -> Step:
        """Maxima along one axis after the other."""
        dtype = self.x(0).dtype
        integer = dtype.kind in "iu"
        least = np.iinfo(dtype).min if integer else dtype.type(-np.inf)
        return self._reduce(np.maximum, least, dtype, lambda _found, _target: [])


class AveragePooling(Pooling):
    """The mean of each window, over the pixels inside the image or (count_include_pad=1) inside the padded image."""

    def prepare(self) -> Step:
        """Sums along one axis after the other, then a division by the number of pixels."""
        window, axes = pool_window(self.call(), dilations=False)
        x = self.x(0)
        work = compute_dtype(x.dtype)
        padded = self.arguments.bool("count_include_pad")
        sizes = np.ones((), work)
        for axis in axes:
            sizes = sizes[..., None] * np.asarray(axis.window_sizes(with_padding=padded), work)
        if (sizes == sizes.flat[0]).all():
            sizes = np.asarray(sizes.flat[0])
        elif window.channels_last:
            sizes = sizes[..., None]

        def finish(found: Array, target: Array) -> list[Step]:
            return [partial(np.divide, found, sizes, out=target, casting="same_kind")]

        return self._reduce(np.add, 0, work, finish)


def _schema(name: str, doc: str, args: dict[str, str], metas: tuple[TypeMeta, ...], dilations: bool) -> OpSchema:
    return OpSchema(
        name,
        inputs=(1, 1),
        outputs=(1, 1),
        infer=_infer(metas, dilations),
        doc=doc,
        input_names=("X",),
        output_names=("Y",),
        args=args,
        cost=_cost,
    )


_MAX_DOC = "Y = the maximum of each window of X (N, C, spatial, or N, spatial, C with order NHWC)."
_AVERAGE_DOC = (
    "Y = the mean of each window of X (N, C, spatial, or N, spatial, C with order NHWC); padding does not count, "
    "unless count_include_pad is 1."
)
_COUNT_ARG = {"count_include_pad": "1: padding counts as zeros, as far as it reaches (default 0)"}

for _suffix in _SPATIAL_AXES:
    operator(_schema(f"MaxPool{_suffix}", _MAX_DOC, POOL_ARGS, _ORDERED_TYPES, dilations=True))(
        type(f"MaxPool{_suffix}", (MaxPooling,), {"__doc__": MaxPooling.__doc__})
    )
    operator(_schema(f"AveragePool{_suffix}", _AVERAGE_DOC, POOL_ARGS | _COUNT_ARG, FLOAT_TYPES, dilations=False))(
        type(f"AveragePool{_suffix}", (AveragePooling,), {"__doc__": AveragePooling.__doc__})
    )
