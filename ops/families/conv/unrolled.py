"""Columns of an image: Im2Col, which writes the taps of every window side by side, and Col2Im, which adds them back.

Images and columns are walked tap by tap: one NumPy call moves what a tap reads in all windows of a block, so that no
padded copy of the image is needed. Locally connected layers use the same walk on blocks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, block_indices, compute_dtype
from dagexec.ops.base.geometry import WINDOW_ARGS, Axis, Window, output_sizes, read_window, tap_count

Array = npt.NDArray[Any]


def some_windows(axes: Sequence[Axis], ranges: Sequence[slice]) -> list[Axis]:
    """Axes of a range of windows each: the same pixels, fewer windows."""
    return [axis.part(windows.start, windows.stop) for axis, windows in zip(axes, ranges, strict=True)]


def some_pixels(axes: Sequence[Axis], ranges: Sequence[slice]) -> list[Axis]:
    """Axes of a range of pixels each: the same windows, whose taps in other pixels now read padding."""
    return [
        replace(axis, head=axis.head + pixels.start, size=pixels.stop - pixels.start)
        for axis, pixels in zip(axes, ranges, strict=True)
    ]


def read_pixels(axis: Axis) -> slice:
    """The range of pixels from the first to the last that some window may read."""
    start = min(max(0, -axis.head), axis.size)
    return slice(start, max(start, min(axis.size, axis.covered - axis.head)))


def copy_to_columns(image: Array, columns: Array, axes: Sequence[Axis]) -> list[Step]:
    """The steps that give each tap of each window the pixel it reads, or 0 for padding, converting the type.

    `image` is spatial, rest; `columns` is kernel, out, rest, with the sizes of `axes`; both may be views.
    """
    steps: list[Step] = []
    for tap, windows, pixels in _taps(axes):
        read = columns[tap]
        for number, axis in enumerate(axes):
            inside = windows[number]
            for outside in (slice(0, inside.start), slice(inside.stop, axis.out)):
                padding = read[(*windows[:number], outside)]
                if padding.size:
                    steps.append(partial(padding.fill, 0))
        if read[windows].size:
            steps.append(partial(np.copyto, read[windows], image[pixels]))
    return steps


def add_to_image(columns: Array, image: Array, axes: Sequence[Axis]) -> list[Step]:
    """The steps that add to each pixel the columns of all taps that read it, in the order of the taps.

    Shapes are those of `copy_to_columns`. What belongs to padding is dropped.
    """
    steps: list[Step] = []
    for tap, windows, pixels in _taps(axes):
        target = image[pixels]
        if target.size:
            steps.append(partial(np.add, target, columns[tap][windows], out=target))
    return steps


def _taps(axes: Sequence[Axis]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Each tap, with the windows in which it lies inside the image, and the pixels that these read."""
    for tap in product(*(range(axis.kernel) for axis in axes)):
        pairs = [axis.tap(number) for axis, number in zip(axes, tap, strict=True)]
        yield tap, tuple(windows for windows, _ in pairs), tuple(pixels for _, pixels in pairs)


def spatial_first(image: Array, channels_last: bool) -> Array:
    """A view of an image tensor as spatial, N, C."""
    first = 1 if channels_last else 2
    rank = image.ndim - 2
    return image.transpose(*range(first, first + rank), 0, image.ndim - 1 if channels_last else 1)


def as_slices(index: Sequence[Any], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a block of an array of `shape` as one range for each axis, none of which drops its axis."""
    full = [*index, *(slice(None),) * (len(shape) - len(index))]
    parts = [part if isinstance(part, slice) else slice(part, part + 1) for part in full]
    return tuple(slice(*part.indices(size)) for part, size in zip(parts, shape, strict=True))


def _image_parts(block: tuple[slice, ...], channels_last: bool) -> tuple[tuple[slice, ...], slice, slice]:
    """The spatial ranges, the images and the channels of a block of an image tensor."""
    return (block[1:-1], block[0], block[-1]) if channels_last else (block[2:], block[0], block[1])


def columns_window(
    call: OperatorCall, image: int, spatial_axes: Sequence[int] = (1, 2, 3)
) -> tuple[Window, tuple[Axis, ...]]:
    """The window over the image that is input `image`, and its axes. Raises ArgumentError or ShapeError."""
    shape = call.require_rank(image, *(rank + 2 for rank in spatial_axes))
    window = read_window(call, len(shape) - 2)
    if window.global_pooling or window.ceil_mode:
        raise ArgumentError(f"{call.label}: global_pooling and ceil_mode only apply to pooling")
    return window, window.over(window.spatial(shape))


def columns_shape(window: Window, axes: Sequence[Axis], image: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the columns of an image tensor of shape `image`."""
    return window.image_shape(image[0], window.channels(image) * tap_count(axes), output_sizes(axes))


def _split_columns(columns: Array, axes: Sequence[Axis], channels_last: bool) -> Array:
    """A view of a tensor of columns as kernel, out, N, C."""
    kernel, rank = [axis.kernel for axis in axes], len(axes)
    if channels_last:
        split = columns.reshape(*columns.shape[:-1], *kernel, columns.shape[-1] // tap_count(axes))
        return split.transpose(*range(1 + rank, 1 + 2 * rank), *range(1, 1 + rank), 0, 1 + 2 * rank)
    split = columns.reshape(columns.shape[0], columns.shape[1] // tap_count(axes), *kernel, *columns.shape[2:])
    return split.transpose(*range(2, 2 + 2 * rank), 0, 1)


def _infer_im2col(call: OperatorCall) -> list[TensorType]:
    meta = call.require_types(0, *NUMBER_TYPES)
    window, axes = columns_window(call, 0)
    return [TensorType(columns_shape(window, axes, call.inputs[0].shape), meta)]


def _infer_col2im(call: OperatorCall) -> list[TensorType]:
    meta = call.require_types(0, *NUMBER_TYPES)
    window, axes = columns_window(call, 1)
    image = call.inputs[1].shape
    layout = "N, out, kernel * C" if window.channels_last else "N, C * kernel, out"
    why = f"{layout} for an image of shape {image} and kernel {window.kernel}"
    call.require_shape(0, columns_shape(window, axes, image), why)
    return [TensorType(image, meta)]


def _im2col_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return Cost(0, call.inputs[0].nbytes, outputs[0].nbytes)


def _col2im_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """One addition for each column element; the image that gives the shape is not read."""
    return Cost(call.inputs[0].elements, call.inputs[0].nbytes, outputs[0].nbytes)


@new_operator(
    "Im2Col",
    infer=_infer_im2col,
    doc="The pixels that each window of X reads, with 0 for padding. X is N, C, spatial, Y is N, C * kernel, out; "
    "with order NHWC, X is N, spatial, C and Y is N, out, kernel * C. 1, 2 or 3 spatial axes. The gradient "
    "operator is Col2Im(dY, X). Chellapilla, Puri, Simard 2006.",
    input_names=("X",),
    output_names=("Y",),
    args=WINDOW_ARGS,
    cost=_im2col_cost,
)
class Im2Col(Operator):
    """Copies tap by tap, in blocks of windows that read pixels still in the cache."""

    def prepare(self) -> Step:
        """The copies of every block."""
        window, axes = columns_window(self.call(), 0)
        x, last = self.x(0), window.channels_last
        image, columns = spatial_first(x, last), _split_columns(self.y(0), axes, last)
        steps: list[Step] = []
        walked = window.image_shape(x.shape[0], window.channels(x.shape), output_sizes(axes))
        for index in block_indices(walked):
            windows, images, channels = _image_parts(as_slices(index, walked), last)
            part: tuple[EllipsisType | slice, ...] = (..., *windows, images, channels)
            steps += copy_to_columns(image[..., images, channels], columns[part], some_windows(axes, windows))
        return in_sequence(steps)


@new_operator(
    "Col2Im",
    infer=_infer_col2im,
    doc="The sum, for every pixel, of the columns that read it: the transpose of Im2Col, not its inverse. X has "
    "the columns as Im2Col gives them, image the shape of the output; its values are not read. Integers wrap "
    "around. The gradient operator is Im2Col(dY), for X; image has no gradient.",
    input_names=("X", "image"),
    output_names=("Y",),
    args=WINDOW_ARGS,
    cost=_col2im_cost,
)
class Col2Im(Operator):
    """Adds tap by tap, in blocks of pixels that stay in the cache; 16-bit floats are summed in float32."""

    def prepare(self) -> Step:
        """The sums of every block."""
        window, axes = columns_window(self.call(), 1)
        y, last = self.y(0), window.channels_last
        columns = _split_columns(self.x(0), axes, last)
        work = compute_dtype(y.dtype)
        sums = None if work == y.dtype else self.scratch((min(y.size, BLOCK),), work)
        steps: list[Step] = []
        for index in block_indices(y.shape):
            part = as_slices(index, y.shape)
            pixels, images, channels = _image_parts(part, last)
            block = y[part] if sums is None else sums[: y[part].size].reshape(y[part].shape)
            steps.append(partial(block.fill, 0))
            source = columns[..., images, channels]
            steps += add_to_image(source, spatial_first(block, last), some_pixels(axes, pixels))
            if sums is not None:
                steps.append(partial(np.copyto, y[part], block, casting="same_kind"))
        return in_sequence(steps)
