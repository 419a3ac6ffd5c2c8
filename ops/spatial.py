"""Operators that move pixels: padding, nearest-neighbour resizing, channel shuffle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT_TYPES
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.blocks import Index
from dagexec.ops.geometry import read_pads
from dagexec.ops.layout import ORDER_HELP, channel_axis, channels_last

Array = npt.NDArray[Any]

_MODES = ("constant", "reflect", "edge")
_MODE_ARGS = {
    "mode": "constant (default), reflect (mirror, without repeating the border pixel) or edge (repeat it)",
    "value": "what constant padding holds (default 0)",
}


@dataclass(frozen=True, slots=True)
class Padding:
    """How far every axis of a tensor is extended; a negative number cuts off."""

    heads: tuple[int, ...]
    tails: tuple[int, ...]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape after padding a tensor of `shape`."""
        return tuple(head + size + tail for head, size, tail in zip(self.heads, shape, self.tails, strict=True))


def image_padding(call: OperatorCall) -> Padding:
    """PadImage's padding: the window arguments' pads on the two spatial axes. Raises ArgumentError or ShapeError."""
    call.require_rank(0, 4)
    top, left, bottom, right = read_pads(call, 2)
    if channels_last(call):
        return Padding((0, top, left, 0), (0, bottom, right, 0))
    return Padding((0, 0, top, left), (0, 0, bottom, right))


def tensor_padding(call: OperatorCall) -> Padding:
    """Pad's padding: the heads of all axes, then the tails. Raises ArgumentError."""
    rank = len(call.inputs[0].shape)
    pads = call.arguments.ints("pads")
    if len(pads) != 2 * rank:
        raise ArgumentError(f"{call.label}: pads needs {2 * rank} entries (heads, then tails), found {pads}")
    if any(abs(pad) >= 1 << 31 for pad in pads):
        raise ArgumentError(f"{call.label}: pads are out of range: {pads}")
    return Padding(tuple(pads[:rank]), tuple(pads[rank:]))


_PADDINGS = {"PadImage": image_padding, "Pad": tensor_padding}


def infer_pad(call: OperatorCall) -> list[TensorType]:
    """Every axis grows by its padding. Checks that reflect and edge have pixels to take."""
    padding = _PADDINGS[call.definition.type](call)
    kind = call.inputs[0]
    mode = call.arguments.string("mode", "constant")
    if mode not in _MODES:
        raise ArgumentError(f"{call.label}: mode must be one of {', '.join(_MODES)}, found {mode!r}")
    if mode == "constant":
        _require_value(call)
    shape = padding.shape(kind.shape)
    cut = Padding(tuple(min(0, pad) for pad in padding.heads), tuple(min(0, pad) for pad in padding.tails))
    for size, left, head, tail in zip(kind.shape, cut.shape(kind.shape), padding.heads, padding.tails, strict=True):
        reach = max(head, tail)
        if left < 0:
            raise ArgumentError(f"{call.label}: pads {head} and {tail} cut off more than the {size} there are")
        if mode == "reflect" and reach >= left and reach > 0:
            raise ArgumentError(f"{call.label}: reflect needs pads less than the size {left}, found {reach}")
        if mode == "edge" and left == 0 and reach > 0:
            raise ArgumentError(f"{call.label}: edge has no pixel to repeat on an axis of size 0")
    return [TensorType(shape, kind.meta)]


def _require_value(call: OperatorCall) -> None:
    """Raise ArgumentError unless the element type of the input holds `value` exactly enough to pad with it."""
    value, meta = call.arguments.float("value", 0.0), call.inputs[0].meta
    fits = meta.is_float
    if meta.is_integer:
        limits = np.iinfo(meta.numpy)
        fits = value.is_integer() and limits.min <= value <= limits.max
    if not (fits or (meta is BOOL and value in (0, 1))):
        raise ArgumentError(f"{call.label}: the constant value {value:g} does not fit {meta}")


class Padded(Operator):
    """Fills every region of the output, its middle, sides and corners, from the input or with the constant."""

    def prepare(self) -> Step:
        """Views of both arrays are made once; a run copies between them."""
        call = self.call()
        padding = _PADDINGS[call.definition.type](call)
        mode = self.arguments.string("mode", "constant")
        x, y = self.x(0), self.y(0)
        value = np.asarray(self.arguments.float("value", 0.0)).astype(y.dtype) if mode == "constant" else None
        pieces = (
            _pieces(size, head, tail, mode)
            for size, head, tail in zip(x.shape, padding.heads, padding.tails, strict=True)
        )
        calls: list[Step] = []
        for region in product(*pieces):
            inside: Index = (*(piece.target for piece in region), ...)
            shown: Index = (*(piece.source for piece in region), ...)
            if value is not None and any(piece.border for piece in region):
                calls.append(partial(np.copyto, y[inside], value))
            else:
                calls.append(partial(np.copyto, y[inside], x[shown]))
        return in_sequence(calls)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an axis of the output, and the pixels of the input that it shows."""

    target: slice
    source: slice
    border: bool


def _pieces(size: int, head: int, tail: int, mode: str) -> list[_Piece]:
    """The head (if any), middle and tail of an axis of `size` pixels; a negative pad cuts off."""
    first, stop = max(0, -head), size - max(0, -tail)
    start, end = max(0, head), max(0, head) + stop - first
    pieces = [_Piece(slice(start, end), slice(first, stop), border=False)]
    if head > 0:
        source = slice(first + head, first, -1) if mode == "reflect" else slice(first, first + 1)
        pieces.append(_Piece(slice(0, start), source, border=True))
    if tail > 0:
        last = stop - 2 - tail
        mirrored = slice(stop - 2, last if last >= 0 else None, -1)
        source = mirrored if mode == "reflect" else slice(stop - 1, stop)
        pieces.append(_Piece(slice(end, end + tail), source, border=True))
    return pieces


def _pad_schema(name: str, doc: str, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        name,
        inputs=(1, 1),
        outputs=(1, 1),
        infer=infer_pad,
        doc=doc,
        input_names=("X",),
        output_names=("Y",),
        args=args | _MODE_ARGS,
    )


_PAD_SCHEMAS = (
    _pad_schema(
        "PadImage",
        "Y = X (N, C, H, W) with rows and columns added around each image.",
        {"pads": "top, left, bottom, right; or pad, or pad_t, pad_l, pad_b, pad_r", "order": ORDER_HELP},
    ),
    _pad_schema(
        "Pad",
        "Y = X with any axis extended, or cut off where a pad is negative.",
        {"pads": "the heads of all axes, then the tails"},
    ),
)
for _schema in _PAD_SCHEMAS:
    operator(_schema)(type(_schema.type, (Padded,), {"__doc__": Padded.__doc__}))


def resize_scales(call: OperatorCall) -> tuple[float, float]:
    """Height and width scale, from the second input or the arguments. Raises ArgumentError unless both are positive."""
    if len(call.inputs) == 2:
        call.require_shape(1, (2,), "height scale and width scale")
        call.require_types(1, *FLOAT_TYPES)
        height, width = (float(scale) for scale in call.known_value(1))
    else:
        height, width = call.arguments.float("height_scale", 1.0), call.arguments.float("width_scale", 1.0)
    for name, scale in (("height_scale", height), ("width_scale", width)):
        if not (math.isfinite(scale) and scale > 0):
            raise ArgumentError(f"{call.label}: {name} must be a positive number, found {scale}")
    return height, width


def _scaled(size: int, scale: float) -> int:
    """int(size * scale) in float32, as Caffe2 computes it; exact for whole numbers, which float32 may not hold."""
    if not size or scale.is_integer():
        return size * int(scale) if size else 0
    return int(np.float32(size) * np.float32(scale))


def infer_resize(call: OperatorCall) -> list[TensorType]:
    """Height and width are multiplied and rounded down."""
    shape = list(call.require_rank(0, 4))
    first = 1 if channels_last(call) else 2
    for axis, scale in zip((first, first + 1), resize_scales(call), strict=True):
        if shape[axis] * scale >= 1 << 31:
            raise ArgumentError(f"{call.label}: scale {scale} makes an axis of {shape[axis]} too large")
        shape[axis] = _scaled(shape[axis], scale)
    return [TensorType(tuple(shape), call.inputs[0].meta)]


@operator(
    OpSchema(
        "ResizeNearest",
        inputs=(1, 2),
        outputs=(1, 1),
        infer=infer_resize,
        doc="Y = X with rows and columns repeated or left out: output pixel i is input pixel int(i / scale).",
        input_names=("X", "scales"),
        output_names=("Y",),
        args={
            "height_scale": "factor of the height, rounded down (default 1)",
            "width_scale": "factor of the width, rounded down (default 1)",
            "order": ORDER_HELP,
        },
        value_inputs=(1,),
    )
)
class ResizeNearest(Operator):
    """Repetition by a view where scales are whole numbers, else gathers along each axis."""

    def prepare(self) -> Step:
        """The rows are resized first, then the columns."""
        call = self.call()
        height, width = resize_scales(call)
        x, y = self.x(0), self.y(0)
        if not y.size:
            return nothing_to_do
        first = 1 if channels_last(call) else 2
        if height.is_integer() and width.is_integer():
            return self._repeat(x, y, first, int(height), int(width))
        rows = self.scratch((*x.shape[:first], y.shape[first], *x.shape[first + 1 :]), x.dtype)
        row_index = _nearest(y.shape[first], height)
        column_index = _nearest(y.shape[first + 1], width)
        return in_sequence(
            [
                partial(np.take, x, row_index, axis=first, out=rows, mode="clip"),
                partial(np.take, rows, column_index, axis=first + 1, out=y, mode="clip"),
            ]
        )

    @staticmethod
    def _repeat(x: Array, y: Array, first: int, height: int, width: int) -> Step:
        outer, (rows, columns), inner = x.shape[:first], x.shape[first : first + 2], x.shape[first + 2 :]
        target = y.reshape(*outer, rows, height, columns, width, *inner)
        source = x.reshape(*outer, rows, 1, columns, 1, *inner)
        return partial(np.copyto, target, source)


def _nearest(out: int, scale: float) -> npt.NDArray[np.intp]:
    """The input pixel for each output pixel, in float32 arithmetic; rounding may put the last behind the image."""
    return (np.arange(out, dtype=np.float32) / np.float32(scale)).astype(np.intp)


def infer_shuffle(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the groups must divide the channels."""
    kind = call.inputs[0]
    if len(kind.shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(kind.shape)}")
    channels, group = kind.shape[channel_axis(call)], call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} channels, found {group}")
    return [kind]


@operator(
    OpSchema(
        "ChannelShuffle",
        inputs=(1, 1),
        outputs=(1, 1),
        infer=infer_shuffle,
        doc="Deals the channels of the groups out in turn: output channel k * group + g is input channel "
        "g * (C / group) + k. Zhang et al. 2017, arXiv:1707.01083.",
        input_names=("X",),
        output_names=("Y",),
        args={"group": "number of groups (default 1)", "order": ORDER_HELP},
    )
)
class ChannelShuffle(Operator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Channels seen as (group, C / group) are written as (C / group, group)."""
        call = self.call()
        x, y = self.x(0), self.y(0)
        group, axis = self.arguments.int("group", 1), channel_axis(call)
        width = x.shape[axis] // group
        outer, inner = x.shape[:axis], x.shape[axis + 1 :]
        source = x.reshape(*outer, group, width, *inner)
        target = y.reshape(*outer, width, group, *inner)
        return partial(np.copyto, target, source.swapaxes(axis, axis + 1))
