"""Padding: Pad on all axes, PadImage on the rows and columns of images, and the gradient of each.

Padding copies each part of the output, its middle, sides and corners, from a part of the input. The gradient goes the
other way: each pixel gets the sum of dY over the places that show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares, operator
from dagexec.core.rows import apart_from
from dagexec.core.rows_call import RowsRule
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Index, compute_dtype
from dagexec.ops.base.geometry import PAD_ARGS, read_pads
from dagexec.ops.base.integers import integers_of
from dagexec.ops.base.layout import ORDER_HELP, channels_last
from dagexec.ops.families.pool.window import image_blocks
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

MAX_PAD = (1 << 31) - 1
_MODES = ("constant", "reflect", "edge", "wrap")
_MODE_HELP = (
    "constant (default), reflect (mirror, without repeating the border pixel), edge (repeat it) or wrap (begin anew)"
)
_MODE_ARGS = {"mode": _MODE_HELP, "value": "what constant padding holds (default 0)"}
_TENSOR_ARGS = {
    "pads": "the heads of all axes, then the tails, when there is no input 1",
    "axes": "the axes that the pads are for, when there is no input 3 (default: all)",
}
_IMAGE_ARGS = PAD_ARGS | {"order": ORDER_HELP}


@dataclass(frozen=True, slots=True)
class Padding:
    """How far every axis of a tensor is extended; a negative number cuts off."""

    heads: tuple[int, ...]
    tails: tuple[int, ...]

    @property
    def cuts(self) -> bool:
        """True when some pixels are cut off."""
        return min((*self.heads, *self.tails), default=0) < 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape after padding a tensor of `shape`."""
        return tuple(head + size + tail for head, size, tail in zip(self.heads, shape, self.tails, strict=True))

    def unpadded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that padding makes `shape` of; a size is negative where the pads are more than there is."""
        return tuple(size - head - tail for head, size, tail in zip(self.heads, shape, self.tails, strict=True))


def image_padding(call: OperatorCall) -> Padding:
    """PadImage's padding: the window arguments' pads on the two spatial axes. Raises ArgumentError or ShapeError."""
    call.require_rank(0, 4)
    top, left, bottom, right = read_pads(call, 2, least=-MAX_PAD)
    if channels_last(call):
        return Padding((0, top, left, 0), (0, bottom, right, 0))
    return Padding((0, 0, top, left), (0, 0, bottom, right))


def tensor_padding(call: OperatorCall) -> Padding:
    """The pads of a Pad: the heads of all axes, or of those named, then the tails. Raises ArgumentError, ShapeError."""
    rank = len(call.inputs[0].shape)
    pads = integers_of(call, 1) if _has_inputs(call) else tuple(call.arguments.ints("pads"))
    axes: Sequence[int] = integers_of(call, 3) if len(call.inputs) > 3 else call.arguments.ints("axes")
    if len(call.inputs) < 4 and "axes" not in call.arguments:
        axes = range(rank)
    if len(pads) != 2 * len(axes):
        raise ArgumentError(f"{call.label}: pads needs {2 * len(axes)} entries (heads, then tails), found {list(pads)}")
    if any(abs(pad) > MAX_PAD for pad in pads):
        raise ArgumentError(f"{call.label}: pads are out of range: {list(pads)}")
    if len({axis % rank for axis in axes if -rank <= axis < rank}) != len(axes):
        raise ArgumentError(f"{call.label}: expected distinct axes in [{-rank}, {rank - 1}], found {list(axes)}")
    heads, tails = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        heads[axis], tails[axis] = pads[place], pads[len(axes) + place]
    return Padding(tuple(heads), tuple(tails))


def _has_inputs(call: OperatorCall) -> bool:
    """True for a Pad whose pads are an input; its gradient has one input, too."""
    return call.definition.type == "Pad" and len(call.inputs) > 1


def pad_value(call: OperatorCall) -> Array:
    """What constant padding holds, one element: input 2 of a Pad, or the argument `value`. Raises ShapeError."""
    if not _has_inputs(call) or len(call.inputs) < 3:
        return np.array([call.arguments.float("value", 0.0)])
    value = call.known_value(2)
    if value.size != 1:
        raise call.fail(f"expected one value to pad with, found {value.size}")
    return value.reshape(1)


_PADDINGS = {"PadImage": image_padding, "Pad": tensor_padding}


def infer_pad(call: OperatorCall) -> list[TensorType]:
    """Every axis grows by its padding. Checks that reflect and edge have pixels to take."""
    padding = _PADDINGS[call.definition.type](call)
    kind = call.inputs[0]
    if read_mode(call) == "constant":
        _require_value(call)
    _require_pixels(call, kind.shape, padding)
    return [TensorType(padding.shape(kind.shape), kind.meta)]


def infer_pad_gradient(call: OperatorCall) -> list[TensorType]:
    """dX is dY without the padding. Checks that PadImage, or Pad, makes dY's shape of it."""
    padding = _PADDINGS[call.definition.type.removesuffix("Gradient")](call)
    if read_mode(call) == "wrap":
        raise ArgumentError(f"{call.label}: padding that wraps has no gradient")
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    for axis, (left, head, tail) in enumerate(zip(padding.unpadded(shape), padding.heads, padding.tails, strict=True)):
        if left < 0:
            raise call.fail(f"pads {head} and {tail} exceed the size {shape[axis]} of axis {axis} of dY")
    _require_pixels(call, padding.unpadded(shape), padding)
    return [TensorType(padding.unpadded(shape), meta)]


def read_mode(call: OperatorCall) -> str:
    """Argument `mode`. Raises ArgumentError for an unknown one."""
    mode = call.arguments.string("mode", "constant")
    if mode not in _MODES:
        raise ArgumentError(f"{call.label}: mode must be one of {', '.join(_MODES)}, found {mode!r}")
    return mode


def _require_pixels(call: OperatorCall, unpadded: tuple[int, ...], padding: Padding) -> None:
    """Raise ArgumentError unless a tensor of shape `unpadded` has the pixels that its padding cuts off and shows."""
    mode = read_mode(call)
    cut = Padding(tuple(min(0, pad) for pad in padding.heads), tuple(min(0, pad) for pad in padding.tails))
    for size, left, head, tail in zip(unpadded, cut.shape(unpadded), padding.heads, padding.tails, strict=True):
        reach = max(head, tail)
        if left < 0:
            raise ArgumentError(
                f"{call.label}: pads {head} and {tail} remove more than the {size} elements of the axis"
            )
        if mode == "reflect" and reach >= left and reach > 0:
            raise ArgumentError(f"{call.label}: reflect needs pads less than the size {left}, found {reach}")
        if mode in ("edge", "wrap") and left == 0 and reach > 0:
            raise ArgumentError(f"{call.label}: {mode} has no pixel to repeat on an axis of size 0")


def _require_value(call: OperatorCall) -> None:
    """Raise ArgumentError unless the element type of the input holds `value` exactly enough to pad with it."""
    [value], meta = pad_value(call).tolist(), call.inputs[0].meta
    if isinstance(value, complex | bytes):
        raise ArgumentError(f"{call.label}: tensors of {meta} have no constant padding")
    fits = meta.is_float
    if meta.is_integer:
        limits = np.iinfo(meta.numpy)
        fits = value == math.floor(value) and limits.min <= value <= limits.max if math.isfinite(value) else False
    if not (fits or (meta is BOOL and value in (0, 1))):
        raise ArgumentError(f"{call.label}: the constant value {value:g} does not fit {meta}")


class Padded(Operator):
    """Fills every region of the output, its middle, sides and corners, from the input or with the constant."""

    def prepare(self) -> Step:
        """Views of both arrays are made once; a run copies between them. What wraps is gathered into a new array."""
        call = self.call()
        padding, mode = _PADDINGS[call.definition.type](call), read_mode(call)
        x, y = self.x(0), self.y(0)
        if mode == "wrap":
            places = _wrapped_places(x.shape, padding)
            return lambda: np.copyto(y, x[places])
        value = pad_value(call).astype(y.dtype) if mode == "constant" else None
        calls: list[Step] = []
        for region in _regions(x.shape, padding, mode):
            if value is not None and region.border:
                calls.append(partial(np.copyto, y[region.target], value))
            else:
                calls.append(partial(np.copyto, y[region.target], x[region.source]))
        return in_sequence(calls)


@declares
def _gradient_operator(of: str, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        f"{of}Gradient",
        infer=infer_pad_gradient,
        doc=f"Gradient of {of}: dX = for each pixel the sum of dY over the places that show it; constant padding "
        "shows none.",
        input_names=("dY",),
        output_names=("dX",),
        args=args | {"mode": _MODE_HELP, "value": f"as of {of}; not read"},
    )


@_gradient_operator("PadImage", _IMAGE_ARGS)
class PadImageGradient(Operator):
    """dX is the middle of dY, plus the borders of dY at the pixels that they show, in a fixed order; 0 where X was
    cut off.
    """

    def prepare(self) -> Step:
        """16-bit types are summed in float32, some planes at a time."""
        call = self.call()
        padding, mode = image_padding(call), read_mode(call)
        if not self.y(0).size:
            return nothing_to_do
        dy, dx = (_planes(array, channels_last(call)) for array in (self.x(0), self.y(0)))
        work = compute_dtype(dx.dtype)
        regions = _regions(dx.shape, padding, mode)
        clear: list[Step] = [partial(dx.fill, 0)] if padding.cuts else []
        if mode == "constant":
            return in_sequence([*clear, _gather(self, regions[:1], dy, dx)])
        if work == dx.dtype:
            return in_sequence([*clear, _gather(self, regions, dy, dx)])
        blocks = image_blocks(len(dx), dx[0].size)
        wide = self.scratch((blocks[0].stop, *dx.shape[1:]), work)
        calls: list[Step] = []
        for block in blocks:
            total = wide[: block.stop - block.start]
            if padding.cuts:
                calls.append(partial(total.fill, 0))
            calls.append(_gather(self, regions, dy[block], total))
            calls.append(partial(np.copyto, dx[block], total, casting="same_kind"))
        return in_sequence(calls)


@_gradient_operator("Pad", _TENSOR_ARGS)
class PadGradient(Operator):
    """As PadImageGradient, on all axes."""

    def prepare(self) -> Step:
        """16-bit types are summed in float32."""
        padding, mode = tensor_padding(self.call()), read_mode(self.call())
        dy, dx = self.x(0), self.y(0)
        if not dx.size:
            return nothing_to_do
        regions = _regions(dx.shape, padding, mode)
        work = compute_dtype(dx.dtype)
        total = dx if work == dx.dtype else self.scratch(dx.shape, work)
        steps: list[Step] = [partial(total.fill, 0)] if padding.cuts else []
        steps.append(_gather(self, regions[:1] if mode == "constant" else regions, dy, total))
        if total is not dx:
            steps.append(partial(np.copyto, dx, total, casting="same_kind"))
        return in_sequence(steps)


gradient_by("PadImage", "PadImageGradient", ("dY",))
gradient_by("Pad", "PadGradient", ("dY",))


def _planes(array: Array, last: bool) -> Array:
    """A view of N, C, H, W as N * C, 1, H, W; N, H, W, C as it is."""
    return array if last else array.reshape(-1, 1, *array.shape[2:])


def _gather(owner: Operator, regions: Sequence[_Region], dy: Array, dx: Array) -> Step:
    """The step that copies the middle of dY, the first region, to dX and adds each other region where it belongs."""
    middle, *borders = regions
    calls: list[Step] = [partial(np.copyto, dx[middle.source], dy[middle.target])]
    for region in borders:
        shown, pixels = dy[region.target], dx[region.source]
        repeated = tuple(axis for axis in range(dx.ndim) if shown.shape[axis] != pixels.shape[axis])
        if repeated:
            total = owner.scratch(pixels.shape, dx.dtype)
            calls.append(partial(np.add.reduce, shown, axis=repeated, dtype=dx.dtype, out=total, keepdims=True))
            shown = total
        calls.append(partial(np.add, pixels, shown, out=pixels, dtype=dx.dtype))
    return in_sequence(calls)


def _wrapped_places(shape: tuple[int, ...], padding: Padding) -> tuple[Array, ...]:
    """The index of the pixels that a tensor of `shape` has when it begins anew at its ends, once it is cut."""
    rows = []
    for size, head, tail in zip(shape, padding.heads, padding.tails, strict=True):
        first, left = max(0, -head), size + min(0, head) + min(0, tail)
        rows.append(first + np.arange(-max(0, head), left + max(0, tail)) % max(left, 1))
    return np.ix_(*rows)


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of the output, and the pixels of the input that it shows."""

    target: Index
    source: Index
    border: bool


def _regions(shape: tuple[int, ...], padding: Padding, mode: str) -> list[_Region]:
    """The middle, then the sides and corners of a padded tensor of `shape`."""
    pieces = (
        _pieces(size, head, tail, mode) for size, head, tail in zip(shape, padding.heads, padding.tails, strict=True)
    )
    return [
        _Region(
            (*(piece.target for piece in region), ...),
            (*(piece.source for piece in region), ...),
            any(piece.border for piece in region),
        )
        for region in product(*pieces)
    ]


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


def _padded(padding: Callable[[OperatorCall], Padding]) -> RowsRule:
    def axes(call: OperatorCall) -> list[int]:
        added = padding(call)
        return [axis for axis, pads in enumerate(zip(added.heads, added.tails, strict=True)) if any(pads)]

    return apart_from(axes)


def _pad_schema(
    name: str, doc: str, args: dict[str, str], role: ImageRole | None = None, optional: tuple[str, ...] = ()
) -> OpSchema:
    return OpSchema(
        name,
        inputs=(1, 1 + len(optional)),
        infer=infer_pad,
        doc=doc,
        input_names=("X", *optional),
        output_names=("Y",),
        args=args | _MODE_ARGS,
        value_inputs=tuple(range(1, 1 + len(optional))),
        image_role=role,
        rows=_padded(tensor_padding if role is ImageRole.PADDING else image_padding),
    )


_PAD_SCHEMAS = (
    _pad_schema(
        "PadImage",
        "Y = X (N, C, H, W) with rows and columns added around each image, or cut off where a pad is negative.",
        _IMAGE_ARGS,
    ),
    _pad_schema(
        "Pad",
        "Y = X with any axis extended, or cut off where a pad is negative. What inputs 1 to 3 hold replaces arguments.",
        _TENSOR_ARGS,
        ImageRole.PADDING,
        ("pads", "value", "axes"),
    ),
)
PADS: tuple[type[Operator], ...] = tuple(
    operator(_schema)(type(_schema.type, (Padded,), {"__doc__": Padded.__doc__, "__module__": __name__}))
    for _schema in _PAD_SCHEMAS
)
