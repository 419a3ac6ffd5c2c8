"""DeformConv: a convolution whose taps are read beside their places, as offsets say; and ColumnsToImage.

Dai et al., 2017, arXiv:1703.06211; with a mask: Zhu et al., 2019, arXiv:1811.11168.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.rows import along_axis
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.platform.records import dataclass

_LIMIT = 1 << 31


@dataclass(frozen=True)
class Windows:
    """Sliding windows over an image: for each axis its taps, steps, gaps, pads before and behind, and how many."""

    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    counts: tuple[int, ...]

    def padded(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of an image with its padding."""
        return [low + size + high for low, size, high in zip(self.before, sizes, self.behind, strict=True)]

    def inner(self, sizes: Sequence[int]) -> tuple[slice, ...]:
        """Where the image is in one with padding."""
        return tuple(slice(low, low + size) for low, size in zip(self.before, sizes, strict=True))

    def pixels(self, tap: Sequence[int]) -> tuple[slice, ...]:
        """Where all windows have a tap, in an image with padding."""
        steps = zip(tap, self.dilations, self.counts, self.strides, strict=True)
        return tuple(
            slice(one * dilation, one * dilation + (count - 1) * stride + 1, stride)
            for one, dilation, count, stride in steps
        )


def read_windows(call: OperatorCall, sizes: Sequence[int], taps: Sequence[int]) -> Windows:
    """The windows of `taps` over an image of `sizes`. Raises ArgumentError for numbers that make none."""
    rank = len(sizes)
    strides, dilations = (call.arguments.ints(name, [1] * rank) for name in ("strides", "dilations"))
    pads = call.arguments.ints("pads", [0] * (2 * rank))
    wrong = len(taps) != rank or len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank
    if wrong or min([*taps, *strides, *dilations, 1]) < 1 or min([*pads, 0]) < 0:
        raise ArgumentError(
            f"{call.label}: windows over {rank} axes: taps {list(taps)}, strides {strides}, dilations {dilations} and "
            f"pads {pads} do not fit"
        )
    if max([*taps, *strides, *dilations, *pads, *sizes]) >= _LIMIT:
        raise ArgumentError(f"{call.label}: numbers of windows must be below {_LIMIT}")
    before, behind = tuple(pads[:rank]), tuple(pads[rank:])
    counts = tuple(
        (size + low + high - dilation * (tap - 1) - 1) // stride + 1
        for size, low, high, dilation, tap, stride in zip(sizes, before, behind, dilations, taps, strides, strict=True)
    )
    if min(counts, default=1) < 1:
        raise ArgumentError(f"{call.label}: a window does not fit an image of {list(sizes)}")
    return Windows(tuple(taps), tuple(strides), tuple(dilations), before, behind, counts)


_WINDOW_ARGS = {
    "strides": "from one window to the next, an axis each (default 1)",
    "dilations": "from one tap to the next (default 1)",
    "pads": "before the image, then behind it (default 0)",
}


def _integers(call: OperatorCall, index: int) -> list[int]:
    call.require_types(index, INT32, INT64)
    return [int(one) for one in call.known_value(index).reshape(-1)]


def columns_of(call: OperatorCall) -> tuple[Windows, list[int], int]:
    """Windows, image sizes and channels. Raises ArgumentError or ShapeError."""
    sizes, taps = _integers(call, 1), _integers(call, 2)
    if not sizes or min([*sizes, *taps]) < 1:
        raise ArgumentError(f"{call.label}: sizes must be at least 1, found {sizes} and {taps}")
    windows = read_windows(call, sizes, taps)
    _, rows, columns = call.require_rank(0, 3)
    if rows % math.prod(taps) or columns != math.prod(windows.counts):
        found = f"{rows} x {columns}"
        raise call.fail(
            f"expected a multiple of {math.prod(taps)} rows and {math.prod(windows.counts)} columns, {found}"
        )
    return windows, sizes, rows // math.prod(taps)


def infer_columns_to_image(call: OperatorCall) -> list[TensorType]:
    """Batch x channels x the image."""
    meta = call.require_types(0, *NUMBER_TYPES)
    _, sizes, channels = columns_of(call)
    return [TensorType((call.inputs[0].shape[0], channels, *sizes), meta)]


@array_function(
    "ColumnsToImage",
    infer=infer_columns_to_image,
    doc="Columns of taps, batch x (channels x taps) x windows, added up in an image of any number of axes: ONNX's "
    "Col2Im. (dagexec's own; Col2Im is Caffe2's, for two axes.)",
    input_names=("X", "sizes of the image", "taps of a window along each axis"),
    output_names=("Y",),
    args=_WINDOW_ARGS,
    value_inputs=(1, 2),
)
def columns_to_image(call: OperatorCall, x: Array, *_sizes: Array) -> Sequence[Array]:
    """Tap by tap, all windows at once."""
    windows, sizes, channels = columns_of(call)
    image = np.zeros((len(x), channels, *windows.padded(sizes)), compute_dtype(x.dtype))
    taps = x.reshape(len(x), channels, *windows.taps, *windows.counts)
    for place in itertools.product(*map(range, windows.taps)):
        tap_index: tuple[int | slice, ...] = (slice(None), slice(None), *place)
        image[:, :, *windows.pixels(place)] += taps[tap_index]
    return [image[:, :, *windows.inner(sizes)]]


def _deformable(call: OperatorCall) -> tuple[Windows, int, int]:
    """Windows, groups of channels and groups of offsets. Raises ArgumentError or ShapeError."""
    batch, channels, *sizes = call.require_rank(0, 4)
    filters, per_group, *taps = call.require_rank(1, 4)
    windows = read_windows(call, sizes, taps)
    group, offset_group = call.arguments.int("group", 1), call.arguments.int("offset_group", 1)
    if group < 1 or channels != per_group * group or filters % group or offset_group < 1 or channels % offset_group:
        raise ArgumentError(f"{call.label}: groups {group} and {offset_group} do not fit X and the filter")
    count = offset_group * math.prod(windows.taps)
    call.require_shape(2, (batch, 2 * count, *windows.counts), "offsets of the taps of every window")
    bias, mask = call.arguments.bool("bias"), call.arguments.bool("mask")
    if len(call.inputs) != 3 + bias + mask:
        raise call.fail(f"with bias={bias:d} and mask={mask:d} expected {3 + bias + mask} inputs")
    if bias:
        call.require_shape(3, (filters,), "an element a filter")
    if mask:
        call.require_shape(3 + bias, (batch, count, *windows.counts), "a factor for the taps of every window")
    return windows, group, offset_group


def infer_deform_conv(call: OperatorCall) -> list[TensorType]:
    """Batch x filters x windows."""
    meta = call.require_types(0, *FLOAT_TYPES)
    windows, *_ = _deformable(call)
    call.require_same_type()
    return [TensorType((call.inputs[0].shape[0], call.inputs[1].shape[0], *windows.counts), meta)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    taps = math.prod(call.inputs[1].shape[1:])
    read = sum(one.nbytes for one in call.inputs)
    return Cost(2 * taps * outputs[0].elements + 40 * call.inputs[0].elements, read, outputs[0].nbytes)


@array_function(
    "DeformConv",
    inputs=(3, 5),
    infer=infer_deform_conv,
    doc="A convolution of images whose taps are read at their places plus an offset, interpolated linearly, and "
    "times a mask. Outside of the image there are zeros. (dagexec's own, for ONNX.)",
    input_names=("X", "filter", "offsets: y, then x of each tap", "bias, with bias=1", "mask, with mask=1"),
    output_names=("Y",),
    args=_WINDOW_ARGS
    | {
        "group": "groups of channels and filters (default 1)",
        "offset_group": "groups of channels that have offsets of their own (default 1)",
        "bias": "1: input 3 is the bias",
        "mask": "1: the last input is the mask",
    },
    cost=_cost,
    rows=along_axis(0, 0, 2, 3, 4),
)
def deform_conv(call: OperatorCall, x: Array, weights: Array, offsets: Array, *others: Array) -> Sequence[Array]:
    """The columns of an image, then a product, one image after the other."""
    windows, group, offset_group = _deformable(call)
    work = compute_dtype(x.dtype)
    given = list(others)
    bias = given.pop(0) if call.arguments.bool("bias") else np.zeros(len(weights), work)
    count = math.prod(windows.taps)
    columns = math.prod(windows.counts)
    filters = weights.astype(work).reshape(group, len(weights) // group, -1)
    y = np.empty((len(x), len(weights), columns), work)
    for number, image in enumerate(x):
        places = offsets[number].astype(np.float64).reshape(offset_group, count, 2, columns) + _places(windows)
        read = _read(image.astype(work).reshape(offset_group, -1, *image.shape[1:]), places)
        if given:
            read *= given[0][number].astype(work).reshape(offset_group, 1, count, columns)
        product = filters @ read.reshape(group, -1, columns)
        y[number] = product.reshape(len(weights), columns) + bias.astype(work)[:, None]
    return [y]


def _places(windows: Windows) -> Array:
    """Where the taps are without offsets: taps x 2 x windows."""
    along = [
        np.arange(tap)[:, None] * dilation + np.arange(count) * stride - low
        for tap, dilation, count, stride, low in zip(
            windows.taps, windows.dilations, windows.counts, windows.strides, windows.before, strict=True
        )
    ]
    shape = (*windows.taps, *windows.counts)
    rows = np.broadcast_to(along[0][:, None, :, None], shape)
    columns = np.broadcast_to(along[1][None, :, None, :], shape)
    return np.stack([rows, columns]).reshape(2, math.prod(windows.taps), -1).swapaxes(0, 1)


def _read(image: Array, places: Array) -> Array:
    """Channels at places, interpolated: groups x channels x taps x windows; `places`: groups x taps x 2 x windows."""
    groups, channels, height, width = image.shape
    found = np.zeros((groups, channels, places.shape[1], places.shape[3]), image.dtype)
    far = 4.0 * (height + width + 4)
    rows, columns = (np.nan_to_num(places[:, :, axis], nan=-far).clip(-far, far) for axis in (0, 1))
    top, left = np.floor(rows), np.floor(columns)
    for row, of_row in ((top, 1 - (rows - top)), (top + 1, rows - top)):
        for column, of_column in ((left, 1 - (columns - left)), (left + 1, columns - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = np.where(inside, of_row * of_column, 0).astype(image.dtype)
            at = np.where(inside, row * width + column, 0).astype(np.intp)
            for number in range(groups if height * width else 0):
                found[number] += image[number].reshape(channels, -1)[:, at[number]] * weight[number]
    return found


not_differentiable("dagexec has them for inference alone", "DeformConv", "ColumnsToImage")
