"""MaxPool and AveragePool over 1, 2 or 3 spatial axes, in all padding modes.

A window is a product of ranges, so its maximum or sum is taken one axis after the other: k + k passes instead of k x k.
A pass combines images with themselves, shifted, as one long row from the first pixel to the last: what it finds across
the ends of rows, and between the strides, is for nothing, but no loop is short. At the end the pixels of the output are
picked out. Images with padding are first copied into ones that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dagexec.core.dtypes import FLOAT_TYPES, NUMBER_TYPES, TypeMeta
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.blocks import BLOCK, block_indices, compute_dtype
from dagexec.ops.geometry import COMPUTED_PADS, POOL_ARGS, Axis, Window, output_sizes, read_window, tap_count

Array = npt.NDArray[Any]

_SPATIAL_AXES = {"": (1, 2, 3), "1D": (1,), "2D": (2,), "3D": (3,)}


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
    if window.legacy_pad not in COMPUTED_PADS:
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


Finish = Callable[[Array, Array], Step]
"""The step that ends a block: from the combined windows (a view) to the output."""


class Pooling(Operator):
    """What the two share: cutting the work into blocks of images, and going through the axes."""

    def _reduce(self, combine: np.ufunc, identity: Any, work: np.dtype[Any], finish: Finish) -> Step:
        """The steps that combine every window of x into y, in `work`."""
        window, axes = pool_window(self.call(), dilations=True)
        x, y = self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        first = 1 if window.channels_last else 2
        images = x.reshape(-1, *x.shape[first:])
        targets = y.reshape(-1, *y.shape[first:])
        if all(axis.kernel == axis.size and axis.out == 1 and not axis.reads_padding for axis in axes):
            found = self.scratch(targets.shape, work)
            pixels = images.reshape(len(images), math.prod(axis.size for axis in axes), *images.shape[1 + len(axes) :])
            total = partial(combine.reduce, pixels, axis=1, out=found.reshape(len(found), *pixels.shape[2:]))
            return in_sequence([total, finish(found, targets)])
        staged = work != x.dtype or any(axis.reads_padding for axis in axes)
        shape = (*(axis.covered if staged else axis.size for axis in axes), *images.shape[1 + len(axes) :])
        count = min(len(images), max(1, BLOCK // math.prod(shape)))
        passes = [_shifts(axis, math.prod(shape[1 + number :])) for number, axis in enumerate(axes) if axis.kernel > 1]
        results = [self.scratch((count * math.prod(shape),), work) for _ in passes[:2]]
        padded = self.scratch((count, *shape), work) if staged else None
        if padded is not None:
            padded.fill(identity)
        calls: list[Step] = []
        for (piece,) in block_indices((len(images),), count):
            source = images[piece]
            if padded is not None:
                stage = padded[: len(source)]
                calls.append(_copy_inside(source, stage, axes))
                source = stage
            combined, steps = _combine(combine, source.reshape(-1), passes, results)
            calls += [*steps, finish(_windows(combined, shape, axes, targets[piece].shape), targets[piece])]
        return in_sequence(calls)


def _shifts(axis: Axis, pitch: int) -> list[int]:
    """How far from a window's first pixel its other taps are, with neighbours along the axis `pitch` apart."""
    return [tap * axis.dilation * pitch for tap in range(1, axis.kernel)]


def _copy_inside(images: Array, padded: Array, axes: Sequence[Axis]) -> Step:
    """The step that copies the pixels that some window may read; the rest of `padded` is padding."""
    parts = [replace(axis, kernel=1, stride=1, dilation=1, out=axis.covered).tap(0) for axis in axes]
    every = slice(None)
    target = padded[(every, *(inside for inside, _ in parts))]
    return partial(np.copyto, target, images[(every, *(pixels for _, pixels in parts))])


def _combine(
    combine: np.ufunc, row: Array, passes: Sequence[Sequence[int]], results: Sequence[Array]
) -> tuple[Array, list[Step]]:
    """The steps that combine each pixel of a long row with those that the passes reach from it, and where they are."""
    steps: list[Step] = []
    for number, shifts in enumerate(passes):
        length = len(row) - shifts[-1]
        result = results[number % 2][:length]
        steps.append(partial(combine, row[:length], row[shifts[0] : shifts[0] + length], out=result))
        steps += [partial(combine, result, row[shift : shift + length], out=result) for shift in shifts[1:]]
        row = result
    return row, steps


def _windows(row: Array, shape: tuple[int, ...], axes: Sequence[Axis], out: tuple[int, ...]) -> Array:
    """Of images of `shape`, one after another in a row, the first pixel of each window: a view of shape `out`."""
    pitches = [math.prod(shape[number:]) * row.itemsize for number in range(len(shape) + 1)]
    steps = [pitch * axis.stride for pitch, axis in zip(pitches[1:], axes, strict=False)]
    return as_strided(row, out, (pitches[0], *steps, *pitches[1 + len(axes) :]), writeable=False)


class MaxPooling(Pooling):
    """The maximum of each window; padding never wins."""

    def prepare(self) -> Step:
        """Maxima along one axis after the other."""
        dtype = self.x(0).dtype
        integer = dtype.kind in "iu"
        least = np.iinfo(dtype).min if integer else dtype.type(-np.inf)
        return self._reduce(np.maximum, least, dtype, lambda found, target: partial(np.copyto, target, found))


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

        def finish(found: Array, target: Array) -> Step:
            return partial(np.divide, found, sizes, out=target, casting="same_kind")

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
    operator(_schema(f"MaxPool{_suffix}", _MAX_DOC, POOL_ARGS, NUMBER_TYPES, dilations=True))(
        type(f"MaxPool{_suffix}", (MaxPooling,), {"__doc__": MaxPooling.__doc__})
    )
    operator(_schema(f"AveragePool{_suffix}", _AVERAGE_DOC, POOL_ARGS | _COUNT_ARG, FLOAT_TYPES, dilations=False))(
        type(f"AveragePool{_suffix}", (AveragePooling,), {"__doc__": AveragePooling.__doc__})
    )
