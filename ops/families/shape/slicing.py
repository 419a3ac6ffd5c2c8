"""Slice, Tile and Expand: a part of a tensor, and a tensor repeated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Prepared, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import apart_from, stretched
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.shapes import element_count
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import Index
from dagexec.ops.base.copied_view import CopiedView, Viewing
from dagexec.ops.base.integers import integers_of
from dagexec.ops.base.pieces import is_same_memory, piece_offset
from dagexec.ops.families.shape.reshaping import copy_cost, distinct_axes


def slice_ranges(call: OperatorCall) -> list[range]:
    """The positions that are kept on every axis of input 0.

    Bounds, axes and steps are arguments, or inputs 1 to 4 as far as these are there.
    Without `onnx_style` a negative bound counts as size + 1 + bound, so that an end of -1 keeps all, as in Caffe2; a
    bound beyond the size is cut to it. With it bounds follow ONNX's Slice: a negative one counts from the size, and
    forwards both are cut to [0, size], backwards the start to [0, size - 1] and the end to [-1, size - 1].
    Raises ShapeError for bounds in the wrong order, for lists of unequal length, or for bounds that are missing.
    """
    ranges = [range(size) for size in call.inputs[0].shape]
    resolve = _onnx_range if call.arguments.bool("onnx_style") else _caffe2_range
    for axis, *bounds in _bounds_of_axes(call):
        ranges[axis] = resolve(call, axis, bounds)
    return ranges


def _bounds_of_axes(call: OperatorCall) -> list[tuple[int, int, int, int]]:
    """The axes that are cut, each with start, end and step."""
    shape = call.inputs[0].shape
    starts, ends = _bounds(call)
    axes = _sliced_axes(call, len(starts))
    steps: Sequence[int] = call.arguments.ints("steps") if "steps" in call.arguments else [1] * len(starts)
    if len(call.inputs) > 4:
        steps = integers_of(call, 4)
    if not len(starts) == len(ends) == len(axes) == len(steps) or len(starts) > len(shape):
        raise call.fail(
            f"expected equal numbers of starts, ends, axes and steps, at most {len(shape)}; found {len(starts)} "
            f"starts, {len(ends)} ends, {len(axes)} axes and {len(steps)} steps"
        )
    return list(zip(axes, starts, ends, steps, strict=True))


def _bounds(call: OperatorCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(call.inputs) == 2:
        raise call.fail("expected starts and ends as inputs 1 and 2, found only one of them")
    if len(call.inputs) > 2:
        return integers_of(call, 1), integers_of(call, 2)
    for name in ("starts", "ends"):
        if name not in call.arguments:
            raise call.fail(f"the argument {name!r} is missing: give 'starts' and 'ends', or inputs 1 and 2")
    return tuple(call.arguments.ints("starts")), tuple(call.arguments.ints("ends"))


def _sliced_axes(call: OperatorCall, count: int) -> tuple[int, ...]:
    """The axes of `count` bounds."""
    rank = len(call.inputs[0].shape)
    if len(call.inputs) < 4:
        return distinct_axes(call, "axes", rank) if "axes" in call.arguments else tuple(range(count))
    axes = integers_of(call, 3)
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) < len(axes):
        raise call.fail(f"expected distinct axes in [{-rank}, {rank - 1}], found {list(axes)}")
    return tuple(axis % rank for axis in axes)


def _onnx_range(call: OperatorCall, axis: int, bounds: Sequence[int]) -> range:
    if bounds[2] == 0:
        raise call.fail(f"the step of axis {axis} must not be 0")
    size = call.inputs[0].shape[axis]
    start, end = (bound if bound >= 0 else bound + size for bound in bounds[:2])
    if bounds[2] > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), bounds[2])
    return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), bounds[2])


def _caffe2_range(call: OperatorCall, axis: int, bounds: Sequence[int]) -> range:
    size = call.inputs[0].shape[axis]
    start, end = (min(bound if bound >= 0 else size + 1 + bound, size) for bound in bounds[:2])
    if not 0 <= start <= end or bounds[2] < 1:
        raise call.fail(
            f"axis {axis} of size {size} has no slice from {bounds[0]} to {bounds[1]} in steps of {bounds[2]}"
        )
    return range(start, end, bounds[2])


def _sliced(call: OperatorCall) -> list[int]:
    """The axes of which not all is kept, or not in its order."""
    kept = call.once(slice_ranges)
    return [axis for axis, size in enumerate(call.inputs[0].shape) if kept[axis] != range(size)]


def cut_piece(call: OperatorCall, _types: Sequence[TensorType]) -> dict[int, int]:
    """The byte of X at which the slice begins, if it is one piece of it."""
    offset = piece_offset(call.inputs[0].shape, call.once(slice_ranges))
    return {} if offset is None else {0: offset * call.inputs[0].meta.itemsize}


SLICE_ARGS = {
    "starts": "the first position on each axis, when there are no inputs 1 and 2",
    "ends": "the position after the last on each axis",
    "axes": "the axes the bounds are for (default: the first ones)",
    "steps": "distance between the positions kept, each (default 1)",
    "onnx_style": "1: bounds as in ONNX (default 0)",
}


@new_operator(
    "Slice",
    inputs=(1, 5),
    infer=lambda call: [TensorType(tuple(len(kept) for kept in call.once(slice_ranges)), call.inputs[0].meta)],
    doc=(
        "The part of X from `starts` up to and without `ends`, on the first axes or on `axes`. A negative bound "
        "counts as size + 1 + bound (an end of -1 keeps all), unless `onnx_style` is set."
    ),
    input_names=("X", "starts", "ends", "axes", "steps"),
    output_names=("Y",),
    args=SLICE_ARGS
    | {"zero_copy": "1: Y may be a view of X where a memory plan finds that nobody sees it (default 0)"},
    cost=copy_cost,
    value_inputs=(1, 2, 3, 4),
    cut=cut_piece,
    image_role=ImageRole.SLICING,
    moves_elements=True,
    rows=apart_from(_sliced),
)
class Slice(CopiedView):
    """A part of a tensor."""

    def viewing(self, call: OperatorCall) -> Viewing | None:
        """NumPy cuts bounds to the size as ONNX does."""
        if not self.arguments.bool("onnx_style"):
            return None
        call.once(slice_ranges)  # refuses what it does
        index = [slice(None)] * len(call.inputs[0].shape)
        for axis, *bounds in _bounds_of_axes(call):
            index[axis] = slice(*bounds)
        return itemgetter((*index, ...))

    def prepare(self) -> Step:
        """One strided copy, or nothing where Y is that part of X already."""
        part = self.x(0)[as_slices(self.call().once(slice_ranges))]
        if is_same_memory(self.y(0), part):
            return Prepared(nothing_to_do, outputs_in_place=(0,))
        return partial(np.copyto, self.y(0), part)


def as_slices(ranges: Sequence[range]) -> Index:
    """The index that keeps `ranges`, one an axis: a view also where there is no axis."""
    return (*map(_as_slice, ranges), ...)


def _as_slice(kept: range) -> slice:
    """The slice that keeps `kept`; a stop before position 0 is written None, for -1 is the last position."""
    return slice(kept.start, kept.stop if kept.stop >= 0 else None, kept.step) if len(kept) else slice(0, 0)


def tile_plan(call: OperatorCall) -> tuple[int, int]:
    """How often to repeat, and along which axis. Raises ShapeError for a negative count or an axis out of range."""
    rank = len(call.inputs[0].shape)
    tiles = integers_of(call, 1) if len(call.inputs) > 1 else (call.arguments.int("tiles", 1),)
    if len(tiles) != 1 or tiles[0] < 0:
        raise call.fail(f"'tiles' must be one number of at least 0, found {list(tiles)}")
    if len(call.inputs) < 3:
        return tiles[0], call.axis("axis", 0, rank)
    axes = integers_of(call, 2)
    if len(axes) != 1 or not -rank <= axes[0] < rank:
        raise call.fail(f"'axis' must be one number in [{-rank}, {rank - 1}], found {list(axes)}")
    return tiles[0], axes[0] % rank


def infer_tile(call: OperatorCall) -> list[TensorType]:
    """The size along the axis, `tiles` times."""
    shape = call.inputs[0].shape
    tiles, axis = tile_plan(call)
    return [TensorType((*shape[:axis], shape[axis] * tiles, *shape[axis + 1 :]), call.inputs[0].meta)]


def _tiled(call: OperatorCall) -> list[int]:
    """The axis along which X is repeated, if it is."""
    tiles, axis = tile_plan(call)
    return [] if tiles == 1 else [axis]


TILE_ARGS = {"tiles": "how often (default 1)", "axis": "along which axis (default 0)"}


@new_operator(
    "Tile",
    inputs=(1, 3),
    infer=infer_tile,
    doc="X repeated `tiles` times along `axis`. Inputs 1 and 2, where given, replace the arguments.",
    input_names=("X", "tiles", "axis"),
    output_names=("Y",),
    args=TILE_ARGS,
    cost=copy_cost,
    value_inputs=(1, 2),
    rows=apart_from(_tiled),
)
class Tile(Operator):
    """A tensor repeated along an axis."""

    def prepare(self) -> Step:
        """One copy that broadcasts over the repetitions."""
        x = self.x(0)
        tiles, axis = tile_plan(self.call())
        outer, inner = element_count(x.shape[:axis]), element_count(x.shape[axis:])
        return partial(np.copyto, self.y(0).reshape(outer, tiles, inner), x.reshape(outer, 1, inner))


def repeats_of(call: OperatorCall) -> tuple[int, ...]:
    """How often X is repeated along each axis: argument `repeats` or input 1. Raises ShapeError."""
    if (len(call.inputs) == 2) == ("repeats" in call.arguments):
        raise call.fail("expected the counts either as input 1 or as the argument 'repeats'")
    repeats = integers_of(call, 1) if len(call.inputs) == 2 else tuple(call.arguments.ints("repeats"))
    if len(repeats) != len(call.inputs[0].shape) or min(repeats, default=0) < 0:
        raise call.fail(f"expected a count of at least 0 for each axis of X, found {list(repeats)}")
    return repeats


def _tiled_axes(call: OperatorCall) -> list[int]:
    """The axes along which X is repeated."""
    return [axis for axis, count in enumerate(repeats_of(call)) if count != 1]


def infer_tile_axes(call: OperatorCall) -> list[TensorType]:
    """Each size, as often as its axis is repeated."""
    kind = call.inputs[0]
    sizes = (size * count for size, count in zip(kind.shape, repeats_of(call), strict=True))
    return [TensorType(tuple(sizes), kind.meta)]


@new_operator(
    "TileAxes",
    inputs=(1, 2),
    infer=infer_tile_axes,
    doc="X repeated along every axis, as often as `repeats` or input 1 says for that axis.",
    input_names=("X", "repeats"),
    output_names=("Y",),
    args={"repeats": "a count for each axis, when there is no input 1"},
    cost=copy_cost,
    value_inputs=(1,),
    rows=apart_from(_tiled_axes),
)
class TileAxes(Operator):
    """A tensor repeated along all axes."""

    def prepare(self) -> Step:
        """One copy that broadcasts over the repetitions."""
        x = self.x(0)
        pairs = list(zip(repeats_of(self.call()), x.shape, strict=True))
        tiled = self.y(0).reshape([size for pair in pairs for size in pair])
        return partial(np.copyto, tiled, x.reshape([size for _, own in pairs for size in (1, own)]))


not_differentiable("repeat along one axis at a time with Tile", "TileAxes")


def infer_expand(call: OperatorCall) -> list[TensorType]:
    """The shape that X and the wanted shape broadcast to, by NumPy's rule."""
    if (len(call.inputs) == 2) == ("shape" in call.arguments):
        raise call.fail("expected the shape either as input 1 or as the argument 'shape'")
    wanted = integers_of(call, 1) if len(call.inputs) == 2 else tuple(call.arguments.ints("shape"))
    shape = call.inputs[0].shape
    rank = max(len(shape), len(wanted))
    pairs = zip((1,) * (rank - len(shape)) + shape, (1,) * (rank - len(wanted)) + wanted, strict=True)
    sizes = []
    for own, other in pairs:
        if other < 0 or (own != other and own != 1 and other != 1):
            raise call.fail(f"X cannot be broadcast with the shape {wanted}: sizes {own} and {other}")
        sizes.append(other if own == 1 else own)
    return [TensorType(tuple(sizes), call.inputs[0].meta)]


@new_operator(
    "Expand",
    inputs=(1, 2),
    infer=infer_expand,
    doc="X repeated along axes of size 1, to the shape that X's and the given one broadcast to.",
    input_names=("X", "shape"),
    output_names=("Y",),
    args={"shape": "the shape to broadcast with, when there is no input 1"},
    cost=copy_cost,
    value_inputs=(1,),
    rows=stretched,
)
class Expand(Operator):
    """A tensor broadcast to a larger shape."""

    def prepare(self) -> Step:
        return partial(np.copyto, self.y(0), self.x(0))
