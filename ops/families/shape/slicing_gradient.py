"""Gradients of Slice, Tile and Expand: dY put back at its place, and the sums over what was repeated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, fill_like, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.reduction.axes import reduction_cost
from dagexec.ops.families.shape.reshaping import copy_cost
from dagexec.ops.families.shape.slicing import SLICE_ARGS, TILE_ARGS, as_slices, slice_ranges, tile_plan


def _infer_slice(call: OperatorCall) -> list[TensorType]:
    """The type of X; where the bounds are arguments, dY must be that slice of it."""
    call.require_types(0, *NUMBER_TYPES, BOOL)
    call.require_same_type(0, len(call.inputs) - 1)
    if len(call.inputs) == 3:
        raise call.fail("expected starts and ends as inputs 1 and 2, before dY, found only one of them")
    if len(call.inputs) == 2:
        shape = tuple(map(len, slice_ranges(replace(call, inputs=call.inputs[:1], values=call.values[:1]))))
        call.require_shape(1, shape, "dY: the slice of X")
    return [call.inputs[0]]


@new_operator(
    "SliceGradient",
    inputs=(2, 6),
    infer=_infer_slice,
    doc="Gradient of Slice, whose arguments it takes: dX = dY where the slice is in X, and 0 elsewhere. dY is the "
    "last input.",
    input_names=("X", "starts or dY", "ends", "axes or dY", "steps or dY", "dY"),
    output_names=("dX",),
    args=SLICE_ARGS,
    cost=copy_cost,
)
class SliceGradient(Operator):
    """dY among zeros. The values of X are not read; those of `starts` and `ends` are, by every run."""

    def prepare(self) -> Step:
        """Zeros, and one strided copy."""
        dy, dx = self.x(len(self.input_blobs) - 1), self.y(0)
        bounds = [self.x(index) for index in range(1, len(self.input_blobs) - 1)]
        call = self.call()
        forward = replace(call, inputs=call.inputs[:-1], values=(None, *bounds))
        if not bounds:
            place = dx[as_slices(slice_ranges(forward))]
            return in_sequence([partial(dx.fill, 0), partial(np.copyto, place, dy)])

        def put_back() -> None:
            found = dx[as_slices(slice_ranges(forward))]
            if found.shape != dy.shape:
                raise call.fail(f"dY must have the shape {found.shape} of the slice of X, found {dy.shape}")
            dx.fill(0)
            np.copyto(found, dy)

        return put_back


@gradient_of("Slice")
def slice_gradient(request: GradientRequest) -> GradientOperators:
    """(X, [starts, ends], dY) -> dX, as Caffe2's."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("SliceGradient", [*request.definition.input, request.dy(0)], [0])


def summed(owner: Operator, source: Array, axes: tuple[int, ...], dx: Array, factor: float = 1.0) -> Step:
    """The step dx = factor * the sum of `source` over `axes`; dX has the shape without them.

    16-bit floats are summed in float32.
    """
    total = owner.scratch(dx.shape, compute_dtype(dx.dtype)) if is_narrow(dx.dtype) else dx
    steps: list[Step] = []
    if axes:
        steps.append(partial(np.add.reduce, source, axis=axes, dtype=total.dtype, out=total))
    else:
        steps.append(convert(source, total))
    if factor != 1:
        steps.append(scalar_pass(np.multiply, total, factor, total))
    return in_sequence(steps if total is dx else [*steps, convert(total, dx)])


def _infer_tile(call: OperatorCall) -> list[TensorType]:
    """dY's size along the axis, divided by the number of tiles."""
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    tiles, axis = tile_plan(call)
    if tiles == 0 or shape[axis] % tiles:
        raise call.fail(f"axis {axis} of dY, of size {shape[axis]}, cannot be divided into {tiles} equal tiles")
    return [TensorType((*shape[:axis], shape[axis] // tiles, *shape[axis + 1 :]), meta)]


@new_operator(
    "TileGradient",
    inputs=(1, 3),
    infer=_infer_tile,
    doc="Gradient of Tile, whose arguments it takes: dX = the sum of the tiles of dY.",
    input_names=("dY", "tiles", "axis"),
    output_names=("dX",),
    args=TILE_ARGS,
    cost=reduction_cost,
    value_inputs=(1, 2),
)
class TileGradient(Operator):
    """The sum over the repetitions."""

    def prepare(self) -> Step:
        tiles, axis = tile_plan(self.call())
        dx = self.y(0)
        outer, inner = math.prod(dx.shape[:axis]), math.prod(dx.shape[axis:])
        return summed(self, self.x(0).reshape(outer, tiles, inner), (1,), dx.reshape(outer, inner))


@gradient_of("Tile")
def tile_gradient(request: GradientRequest) -> GradientOperators:
    """(dY, [tiles, axis]) -> dX, as Caffe2's; no tiles leave zeros."""
    if 0 not in request.wanted:
        return request.result([], {})
    if not request.has_x(1) and request.arguments.int("tiles", 1) == 0:
        return request.result([fill_like(request.x(0), request.dx(0), 0.0)], {0: request.dx(0)})
    return request.single("TileGradient", [request.dy(0), *request.definition.input[1:]], [0])


def _infer_expand(call: OperatorCall) -> list[TensorType]:
    """The type of X, which must broadcast to dY."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1)
    dy, x = call.inputs[0].shape, call.inputs[1].shape
    fits = len(x) <= len(dy) and all(own in (1, other) for own, other in zip(reversed(x), reversed(dy), strict=False))
    if not fits:
        raise call.fail(f"X of shape {x} does not broadcast to dY's shape {dy}")
    if not math.isfinite(call.arguments.float("factor", 1.0)):
        raise ArgumentError(f"{call.label}: argument 'factor' must be finite")
    return [call.inputs[1]]


@new_operator(
    "ExpandGradient",
    infer=_infer_expand,
    doc="Gradient of Expand: dX = the sum of dY over the axes along which X was repeated. The values of X are not "
    "read.",
    input_names=("dY", "X"),
    output_names=("dX",),
    args={"factor": "dX is multiplied by it, for Gemm's gradient (default 1)"},
    cost=reduction_cost,
)
class ExpandGradient(Operator):
    """The sum over the repetitions, by NumPy's rule of broadcasting."""

    def prepare(self) -> Step:
        """One sum; axes of size 1 in X stay."""
        dy, dx = self.x(0), self.y(0)
        padded = (*(1,) * (dy.ndim - dx.ndim), *dx.shape)
        axes = tuple(axis for axis, size in enumerate(padded) if size != dy.shape[axis])
        kept = tuple(size for axis, size in enumerate(padded) if axis not in axes)
        return summed(self, dy, axes, dx.reshape(kept), self.arguments.float("factor", 1.0))


@gradient_of("Expand")
def expand_gradient(request: GradientRequest) -> GradientOperators:
    """(dY, X) -> dX, as Caffe2's; the shape has no gradient."""
    if 0 not in request.wanted:
        return request.result([], {})
    made = request.plain_operator("ExpandGradient", [request.dy(0), request.x(0)], [request.dx(0)])
    return request.result([made], {0: request.dx(0)})
