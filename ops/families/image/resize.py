"""Resize: tensors with other sizes along any axes, by nearest elements or by linear or cubic interpolation.

The axes are resized one after the other. Along each, an output element is a sum of a few input elements, its taps.
Their places and weights are found once for the sizes. Places, weights and their names are those of ONNX's Resize.
Keys, 1981, "Cubic convolution interpolation for digital image processing".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.traits import ImageRole, Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import BLOCK, Array, row_pieces
from dagexec.platform.host_memory import check_fits
from dagexec.platform.records import dataclass

Places = npt.NDArray[np.floating[Any]]
_MODES = ("nearest", "linear", "cubic")
_POLICIES = ("stretch", "not_larger", "not_smaller")
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """One axis that is resized.

    Attributes:
        axis: its number.
        size, out: elements before and after.
        scale: the factor.
        length: size times the factor, which `out` is the floor of where the factor was given.
        start, end: the part of the axis that `tf_crop_and_resize` reads; 0 is the first element, 1 the last.
    """

    axis: int
    size: int
    out: int
    scale: float
    length: float
    start: float
    end: float

    def half_pixel(self) -> Places:
        """(i + 1/2) / scale - 1/2; with the exact factor where `out` is size times it."""
        centers = np.arange(self.out) + 0.5
        return (centers * self.size / self.out if self.length == self.out else centers / self.scale) - 0.5

    def asymmetric(self) -> Places:
        """The element i / scale."""
        places = np.arange(self.out, dtype=np.float64)
        return places * self.size / self.out if self.length == self.out else places / self.scale

    def half_pixel_symmetric(self) -> Places:
        """As half_pixel, with the middle of the output on the middle of the input."""
        centers = np.arange(self.out) + (1 - self.out) / 2
        steps = centers * self.size / self.out if self.length == self.out else centers / self.scale
        return steps + (self.size - 1) / 2

    def pytorch_half_pixel(self) -> Places:
        """As half_pixel, but the first element for an output of one."""
        return self.half_pixel() if self.out > 1 else np.zeros(self.out)

    def tf_half_pixel_for_nn(self) -> Places:
        """(i + 1/2) / scale."""
        return self.half_pixel() + 0.5

    def align_corners(self) -> Places:
        """First element on first, last on last."""
        return np.arange(self.out) * (self.size - 1) / (self.length - 1) if self.length != 1 else np.zeros(self.out)

    def tf_crop_and_resize(self) -> Places:
        """First and last element at start and end."""
        last = self.size - 1
        if self.length == 1:
            return np.full(1, (self.start + self.end) / 2 * last)
        return self.start * last + np.arange(self.out) * (self.end - self.start) * last / (self.length - 1)


COORDINATES: dict[str, Callable[[ResizedAxis], Places]] = {
    "half_pixel": ResizedAxis.half_pixel,
    "half_pixel_symmetric": ResizedAxis.half_pixel_symmetric,
    "pytorch_half_pixel": ResizedAxis.pytorch_half_pixel,
    "tf_half_pixel_for_nn": ResizedAxis.tf_half_pixel_for_nn,
    "align_corners": ResizedAxis.align_corners,
    "asymmetric": ResizedAxis.asymmetric,
    "tf_crop_and_resize": ResizedAxis.tf_crop_and_resize,
}

ROUNDINGS: dict[str, Callable[[Places], Places]] = {
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _choice(call: OperatorCall, name: str, choices: Sequence[str]) -> str:
    found = call.arguments.string(name, choices[0])
    if found not in choices:
        raise ArgumentError(f"{call.label}: argument {name!r} must be one of {', '.join(choices)}, found {found!r}")
    return found


def _axes(call: OperatorCall, rank: int) -> list[int]:
    """The axes that are resized. Raises ArgumentError for one that X has not, or that is named twice."""
    axes = call.arguments.ints("axes", list(range(rank)))
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise ArgumentError(f"{call.label}: 'axes' must be different axes of a tensor of {rank}, found {axes}")
    return [axis % rank for axis in axes]


def _given(call: OperatorCall, name: str, index: int, count: int) -> list[Any]:
    """Numbers from input `index` where argument `name`_input says so, else from the argument `name`.

    Raises ArgumentError unless there are `count`.
    """
    if call.arguments.bool(f"{name}_input"):
        call.require_types(index, *((INT32, INT64) if name == "sizes" else FLOAT_TYPES))
        values: list[Any] = call.known_value(index).astype("i8" if name == "sizes" else "f8").reshape(-1).tolist()
    else:
        values = call.arguments.ints(name) if name == "sizes" else call.arguments.floats(name)
    if len(values) != count:
        raise ArgumentError(f"{call.label}: {count} {name} are needed, found {values}")
    return values


def resized_axes(call: OperatorCall) -> list[ResizedAxis]:
    """The axes with their sizes. Raises ArgumentError for what does not fit X, or is out of range."""
    shape = call.inputs[0].shape
    axes = _axes(call, len(shape))
    by_size = call.arguments.bool("sizes_input") or "sizes" in call.arguments
    inputs = 1 + sum(call.arguments.bool(f"{name}_input") for name in ("sizes", "scales", "roi"))
    if len(call.inputs) != inputs:
        raise call.fail(f"its arguments ask for {inputs} inputs, found {len(call.inputs)}")
    starts, ends = [0.0] * len(axes), [1.0] * len(axes)
    if call.arguments.bool("roi_input") or "roi" in call.arguments:
        roi = _given(call, "roi", inputs - 1, 2 * len(axes))
        starts, ends = roi[: len(axes)], roi[len(axes) :]
    sizes = [shape[axis] for axis in axes]
    if by_size:
        scaled = _by_sizes(call, sizes)
    else:
        scaled = [_by_scale(call, *one) for one in zip(sizes, _given(call, "scales", 1, len(axes)), strict=True)]
    found = [
        ResizedAxis(axis, size, *one, start, end)
        for axis, size, one, start, end in zip(axes, sizes, scaled, starts, ends, strict=True)
    ]
    for one in found:
        if not 0 <= one.out < _MOST:
            raise ArgumentError(f"{call.label}: axis {one.axis} cannot have {one.out} elements")
        if one.out and not one.size:
            raise call.fail(f"axis {one.axis} has no elements to make {one.out} of")
        if not (math.isfinite(one.start) and math.isfinite(one.end)):
            raise ArgumentError(f"{call.label}: 'roi' must be numbers, found {one.start} and {one.end}")
    return found


def _by_scale(call: OperatorCall, size: int, scale: float) -> tuple[int, float, float]:
    """Output size, factor and exact length: the product is that of float32, as in ONNX's shape inference."""
    if not 0 < scale < _MOST:
        raise ArgumentError(f"{call.label}: a scale must be a positive number, found {scale}")
    length = float(np.float32(size) * np.float32(scale))
    return int(length), scale, length


def _by_sizes(call: OperatorCall, sizes: list[int]) -> list[tuple[int, float, float]]:
    """Output size, factor and exact length of each axis for the sizes asked for, under the policy."""
    wanted = _given(call, "sizes", 1, len(sizes))
    policy = _choice(call, "keep_aspect_ratio_policy", _POLICIES)
    scales = [out / size if size else 1.0 for out, size in zip(wanted, sizes, strict=True)]
    if policy != "stretch":
        scale = (min if policy == "not_larger" else max)(scales, default=1.0)
        return [(math.floor(scale * size + 0.5), scale, scale * size) for size in sizes]
    return [(out, scale, float(out)) for out, scale in zip(wanted, scales, strict=True)]


def infer_resize(call: OperatorCall) -> list[TensorType]:
    """X with other sizes. Raises ArgumentError for a mode that does not exist, too."""
    meta = call.inputs[0].meta
    mode = _choice(call, "mode", _MODES)
    if mode != "nearest":
        call.require_types(0, *NUMBER_TYPES)
    coordinates = _choice(call, "coordinates", tuple(COORDINATES))
    _choice(call, "rounding", tuple(ROUNDINGS))
    if coordinates == "tf_crop_and_resize" and not call.arguments.bool("roi_input"):
        call.arguments.floats("roi")
        if "roi" not in call.arguments:
            raise ArgumentError(f"{call.label}: tf_crop_and_resize needs the argument 'roi' or the input")
    shape = list(call.inputs[0].shape)
    for one in resized_axes(call):
        shape[one.axis] = one.out
    return [TensorType(tuple(shape), meta)]


def _rows(asked: RowsCall) -> list[Rows | None]:
    """On an axis that stays as it is; so sizes may come from the number of rows."""
    rows = asked.rows[0]
    if rows is None:
        raise asked.without_rows()
    for one in resized_axes(asked.call):
        stays = (one.out, one.scale, one.start, one.end) == (one.size, 1, 0, 1)
        if one.axis == rows.axis and not stays:
            raise asked.mixes(rows.axis)
    return [rows]


@dataclass(frozen=True, slots=True)
class Taps:
    """What an axis is computed from.

    Attributes:
        places: taps x output elements, the input elements.
        weights: likewise; None for one tap of weight 1.
        outside: output elements that lie outside of the input; None where such take the nearest elements.
    """

    places: npt.NDArray[np.intp]
    weights: Places | None
    outside: npt.NDArray[np.bool_] | None

    def repeats(self, size: int) -> int:
        """k, when each of `size` elements is there k times and nothing else is; else 0."""
        times, rest = divmod(self.places.shape[1], size)
        if rest or self.weights is not None or self.outside is not None:
            return 0
        return times if np.array_equal(self.places[0], np.arange(size).repeat(times)) else 0


def find_taps(call: OperatorCall, axis: ResizedAxis) -> Taps:
    """The taps of an axis that has elements."""
    coordinates = call.arguments.string("coordinates", "half_pixel")
    places = COORDINATES[coordinates](axis)
    last = axis.size - 1
    outside = None
    if coordinates == "tf_crop_and_resize":
        outside = (places < 0) | (places > last)
    places = places.clip(-2.0 * axis.size - 4, 3.0 * axis.size + 4)
    mode = call.arguments.string("mode", "nearest")
    if mode == "nearest":
        nearest = ROUNDINGS[call.arguments.string("rounding", "round_prefer_floor")](places)
        return Taps(nearest.clip(0, last).astype(np.intp)[None], None, outside)
    reach, kernel = _LINEAR if mode == "linear" else (2, partial(_cubic, a=call.arguments.float("cubic_a", -0.75)))
    narrow = min(axis.scale, 1.0) if call.arguments.bool("antialias") else 1.0
    side = max(1, math.ceil(reach / narrow))
    first = np.floor(places)
    taps = first + np.arange(1 - side, side + 1)[:, None]
    weights = kernel(np.abs(taps - places) * narrow)
    if narrow < 1:
        weights /= weights.sum(0)
    if call.arguments.bool("exclude_outside"):
        weights = np.where((taps < 0) | (taps > last), 0.0, weights)
        total = weights.sum(0)
        weights /= np.where(total == 0, 1.0, total)
    return Taps(taps.clip(0, last).astype(np.intp), weights, outside)


def _linear(distance: Places) -> Places:
    return (1 - distance).clip(0, 1)


_LINEAR: tuple[int, Callable[[Places], Places]] = (1, _linear)


def _cubic(distance: Places, a: float) -> Places:
    """The convolution kernel of Keys with its free parameter."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    flops = {"nearest": 1, "linear": 8, "cubic": 16}[call.arguments.string("mode", "nearest")]
    return Cost(flops * outputs[0].elements, call.inputs[0].nbytes, outputs[0].nbytes)


@new_operator(
    "Resize",
    inputs=(1, 3),
    infer=infer_resize,
    doc="X with other sizes along `axes`, given by `sizes` or as factors, `scales`. Output element i stands at the "
    "place of X that `coordinates` says, and is the nearest element there, or interpolates between neighbors "
    "along each axis; behind the first and the last element these repeat. (dagexec's own, for ONNX.)",
    input_names=("X", "sizes or scales, with sizes_input=1 or scales_input=1", "roi, with roi_input=1"),
    output_names=("Y",),
    args={
        "mode": "nearest, linear or cubic (default nearest)",
        "coordinates": f"{', '.join(COORDINATES)}: ONNX's coordinate_transformation_mode (default half_pixel)",
        "rounding": f"{', '.join(ROUNDINGS)}: which element is the nearest (default round_prefer_floor)",
        "sizes": "elements of each of the axes",
        "scales": "or the factor of each; the size is rounded down",
        "axes": "the axes that these are for (default: all)",
        "roi": "for tf_crop_and_resize: the starts of the axes, then their ends, 1 being the last element",
        "sizes_input": "1: the input behind X is the sizes, int32 or int64",
        "scales_input": "1: it is the scales, floats",
        "roi_input": "1: the last input is the roi",
        "cubic_a": "parameter of the cubic kernel (default -0.75)",
        "antialias": "1: where an axis shrinks, the kernel is as wide as an element of Y (default 0)",
        "exclude_outside": "1: elements behind first and last have weight 0 (default 0)",
        "extrapolation_value": "for tf_crop_and_resize: what is there outside of X (default 0)",
        "keep_aspect_ratio_policy": "one factor for all axes, with which no size is larger than asked for "
        "(not_larger), or none smaller (not_smaller) (default stretch: each its own)",
    },
    cost=_cost,
    value_inputs=(1, 2),
    image_role=ImageRole.RESIZING,
    rows=_rows,
)
class Resize(ArrayOperator):
    """Nearest elements by views or gathers; interpolation as sums of gathers, a few images at a time."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """Pieces of the axes before the first that is resized; of each, axis by axis, the shrinking ones first."""
        call, x, y = self.call(), inputs[0], outputs[0]
        crops = call.arguments.string("coordinates", "half_pixel") == "tf_crop_and_resize"
        axes = [one for one in resized_axes(call) if crops or one.out != one.size or one.scale != 1]
        if not y.size:
            return nothing_to_do
        if not axes:
            return partial(np.copyto, y, x)
        taps = {one.axis: find_taps(call, one) for one in sorted(axes, key=lambda one: one.scale)}
        counts = [taps[axis].repeats(size) if axis in taps else 1 for axis, size in enumerate(x.shape)]
        if all(counts):
            return _repeating(x, y, counts)
        first = min(taps)
        lead = math.prod(x.shape[:first])
        source, target = x.reshape(lead, *x.shape[first:]), y.reshape(lead, *y.shape[first:])
        moved = {axis - first + 1: found for axis, found in taps.items()}
        count = min(lead, max(1, BLOCK // max(math.prod(source.shape[1:]), math.prod(target.shape[1:]))))
        memory = _Memory(self.label)
        work = _work_dtype(x.dtype) if any(found.weights is not None for found in taps.values()) else x.dtype
        outside = call.arguments.float("extrapolation_value", 0.0)
        steps: list[Step] = []
        for piece in row_pieces(lead, count):
            steps += _passes(source[piece], target[piece], moved, work, memory)
            steps += _outside(target[piece], moved, outside)
        return in_sequence(steps)


not_differentiable("train with ResizeNearest or UpsampleBilinear", "Resize")


class _Memory:
    """Scratch arrays by number and shape; pieces of one shape share them."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._arrays: dict[tuple[Any, ...], Array] = {}

    def __call__(self, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        key = (number, shape, dtype)
        if key not in self._arrays:
            check_fits(math.prod(shape) * dtype.itemsize, f"{self._label}: working memory of shape {shape}")
            self._arrays[key] = np.empty(shape, dtype)
        return self._arrays[key]


def _work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float64 where float32 does not hold the numbers, else float32."""
    wide = dtype.itemsize == 8 or (dtype.kind in "iu" and dtype.itemsize == 4)
    return np.dtype(np.float64 if wide else np.float32)


def _repeating(x: Array, y: Array, counts: Sequence[int]) -> Step:
    """Every element so many times along each axis: one copy of a broadcast view."""
    target = y.reshape([size for pair in zip(x.shape, counts, strict=True) for size in pair])
    return partial(np.copyto, target, x.reshape([size for one in x.shape for size in (one, 1)]))


def _passes(x: Array, y: Array, taps: dict[int, Taps], work: np.dtype[Any], memory: _Memory) -> list[Step]:
    """The passes for a piece: in the type to compute in, every axis from one array to the next."""
    steps: list[Step] = []
    if x.dtype != work:
        wide = memory(0, x.shape, work)
        steps.append(partial(np.copyto, wide, x, casting="unsafe"))
        x = wide
    for number, (axis, found) in enumerate(taps.items()):
        shape = (*x.shape[:axis], found.places.shape[1], *x.shape[axis + 1 :])
        last = number == len(taps) - 1
        target = y if last and y.dtype == work else memory(1 + number, shape, work)
        steps += _sum_of_taps(x, target, axis, found, memory)
        x = target
    if x is not y:
        steps += _narrowing(x, y)
    return steps


def _sum_of_taps(x: Array, y: Array, axis: int, taps: Taps, memory: _Memory) -> list[Step]:
    """Gathers along an axis, each times its weights."""
    if taps.weights is None:
        return [partial(np.take, x, taps.places[0], axis=axis, out=y, mode="clip")]
    column = (-1, *(1,) * (x.ndim - axis - 1))
    steps: list[Step] = []
    for number, (places, weights) in enumerate(zip(taps.places, taps.weights.astype(x.dtype), strict=True)):
        target = y if number == 0 else memory(-1, y.shape, y.dtype)
        steps.append(partial(np.take, x, places, axis=axis, out=target, mode="clip"))
        steps.append(partial(np.multiply, target, weights.reshape(column), out=target))
        if number:
            steps.append(partial(np.add, y, target, out=y))
    return steps


def _narrowing(x: Array, y: Array) -> list[Step]:
    """The copy to another type; integers are cut off, and stay in their range."""
    copy = partial(np.copyto, y, x, casting="unsafe")
    if y.dtype.kind not in "iu":
        return [copy]
    limits = np.iinfo(y.dtype)
    return [partial(np.clip, x, x.dtype.type(limits.min), x.dtype.type(limits.max), out=x), copy]


def _outside(y: Array, taps: dict[int, Taps], value: float) -> list[Step]:
    """What sets the elements whose place is outside of X."""
    steps: list[Step] = []
    for axis, found in taps.items():
        if found.outside is not None and found.outside.any():
            where = found.outside.reshape(-1, *(1,) * (y.ndim - axis - 1))
            steps.append(partial(np.copyto, y, np.asarray(value).astype(y.dtype), where=where))
    return steps
