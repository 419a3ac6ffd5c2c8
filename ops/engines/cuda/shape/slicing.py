"""Slice, Tile and Expand on CUDA, which are strided copies, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Prepared, Step, nothing_to_do
from dagexec.core.schema import OperatorCall
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type, packed_strides, require_axes
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.base.strided_copy import item_type, strided_copy
from dagexec.ops.families.shape.reshaping import distinct_axes
from dagexec.ops.families.shape.slicing import Expand, Slice, Tile, as_slices, slice_ranges, tile_plan
from dagexec.ops.families.shape.slicing_gradient import ExpandGradient, SliceGradient, TileGradient

MAX_AXES = 8


@on_cuda(Slice)
class _CudaSlice(CudaOperator):
    """A part of a tensor."""

    def prepare(self) -> Step:
        """One strided copy, or nothing where Y is that part of X already."""
        part: Any = self.x(0)[as_slices(slice_ranges(self.call()))]
        y = self.y(0)
        if y.size and address(part) == address(y) and part.flags.c_contiguous:
            return Prepared(nothing_to_do, outputs_in_place=(0,))
        return strided_copy(self, y, part)


@on_cuda(Tile)
class _CudaTile(CudaOperator):
    """A tensor repeated along an axis."""

    def prepare(self) -> Step:
        """One copy that broadcasts over the repetitions."""
        x = self.x(0)
        tiles, axis = tile_plan(self.call())
        outer, inner = prod(x.shape[:axis]), prod(x.shape[axis:])
        return strided_copy(self, self.y(0).reshape(outer, tiles, inner), x.reshape(outer, 1, inner))


@on_cuda(Expand)
class _CudaExpand(CudaOperator):
    """A tensor broadcast to a larger shape."""

    def prepare(self) -> Step:
        return strided_copy(self, self.y(0), self.x(0))


_PUT_BACK = (
    INDICES
    + r"""
struct slice_t { i64 axes, onnx; divider size[8]; i64 kept[8], stride[8], bound[8], step[8]; };
__device__ inline i64 limited(i64 x, i64 low, i64 high) {
    if (x < low) x = low;
    return x > high ? high : x;
}
// The first position and the number of them that a slice keeps of an axis, -1 for bounds that are none.
__device__ inline void resolve(i64 size, i64 start, i64 end, i64 step, bool onnx, i64& first, i64& count) {
    bool valid = true;
    if (onnx) {
        if (start < 0) start += size;
        if (end < 0) end += size;
        start = limited(start, 0, step > 0 ? size : size - 1);
        end = limited(end, step > 0 ? 0 : -1, step > 0 ? size : size - 1);
    } else {
        if (start < 0) start += size + 1;
        if (end < 0) end += size + 1;
        if (start > size) start = size;
        if (end > size) end = size;
        valid = 0 <= start && start <= end;
    }
    i64 span = step > 0 ? end - start : start - end, pace = step > 0 ? step : -step;
    first = start;
    count = !valid ? (i64)-1 : span > 0 ? (span + pace - 1) / pace : (i64)0;
}
extern "C" __global__ void put_back(
    const T* dy, const B* starts, const E* ends, T* dx, int* fault, slice_t slice, i64 n
) {
    FOR_EACH(i, n) {
        I rest = (I)i, from = 0;
        bool inside = true;
        for (int d = (int)slice.axes - 1; d >= 0; --d) {
            i64 at = split(rest, slice.size[d]);
            i64 k = slice.bound[d];
            if (k >= 0) {
                i64 first, count, step = slice.step[d];
                resolve(slice.size[d].size, starts[k], ends[k], step, slice.onnx != 0, first, count);
                if (count != slice.kept[d]) {
                    atomicExch(fault, 1);
                    inside = false;
                }
                i64 distance = step > 0 ? at - first : first - at, pace = step > 0 ? step : -step;
                at = distance / pace;
                inside = inside && distance >= 0 && at * pace == distance && at < slice.kept[d];
            }
            from += (I)at * (I)slice.stride[d];
        }
        T value = {};
        if (inside) value = dy[from];
        dx[i] = value;
    }
}
"""
)


@on_cuda(SliceGradient)
class _CudaSliceGradient(CheckedOperator):
    """dY among zeros; bounds that are inputs are read by every run, and its fault word is for those of another slice.

    See `dagexec.ops.engines.cuda.base.faults`.
    """

    @property
    def inputs_checked(self) -> Sequence[int]:
        """The bounds that are inputs."""
        return range(1, len(self.input_blobs) - 1)

    def prepare(self) -> Step:
        """One kernel, a thread for every element of dX."""
        dy, dx = self.x(len(self.input_blobs) - 1), self.y(0)
        shape, arguments = dx.shape, self.arguments
        if not dx.size:
            return nothing_to_do
        given = [self.x(index) for index in range(1, len(self.input_blobs) - 1)]
        if not given:
            given = [uploaded(self, np.array(arguments.ints(name), np.int64)) for name in ("starts", "ends")]
        starts, ends = given
        count = min(starts.size, ends.size)
        call = self.call()
        axes = distinct_axes(call, "axes", len(shape)) if "axes" in arguments else tuple(range(count))
        steps = arguments.ints("steps") if "steps" in arguments else [1] * count
        if not starts.size == ends.size == len(axes) == len(steps) or dy.ndim != len(shape):
            raise call.fail(
                f"expected equal numbers of starts, ends, axes and steps, and dY with the axes of X; found "
                f"{starts.size} starts, {ends.size} ends, {len(axes)} axes, {len(steps)} steps, dY of shape {dy.shape}"
            )
        if any(own != other for axis, (own, other) in enumerate(zip(dy.shape, shape, strict=True)) if axis not in axes):
            raise call.fail(f"dY must have the sizes of X, {shape}, on the other axes, found {dy.shape}")
        another = call.fail(f"the bounds were those of a slice of another shape than dY's, {dy.shape}")
        fault = self.fault_word(partial(self._check_bounds, call, given), another)
        pace = dict(zip(axes, steps, strict=True))
        bounds = {axis: number for number, axis in enumerate(axes)}
        layout = slice_argument(shape, dy.shape, bounds, pace, onnx=arguments.bool("onnx_style"))
        types = {"T": item_type(dx.itemsize), "B": c_type_of(starts), "E": c_type_of(ends)}
        operands = [dy, starts, ends, dx, fault, layout, np.int64(dx.size)]
        kind = index_type(dx.size, dy.size)
        return self.launch(
            "put_back", _PUT_BACK, operands, elements=dx.size, T=types["T"], B=types["B"], E=types["E"], I=kind
        )

    def _check_bounds(self, call: OperatorCall, bounds: list[Array]) -> None:
        """Raise ShapeError when the bounds are those of a slice of another shape than dY's."""
        values = tuple(map(self.fetched, bounds)) if len(call.inputs) == 4 else ()
        found = tuple(map(len, slice_ranges(replace(call, inputs=call.inputs[:-1], values=(None, *values)))))
        dy = call.inputs[-1].shape
        if found != dy:
            raise call.fail(f"dY must have the shape {found} of the slice of X, found {dy}")


def slice_argument(
    shape: tuple[int, ...], kept: tuple[int, ...], bounds: Mapping[int, int], steps: Mapping[int, int], *, onnx: bool
) -> Any:
    """The argument slice_t: axes that are not sliced are joined. Raises ShapeError for more than 8."""
    rows: list[list[int]] = []  # size, kept, stride, bound, step
    for axis, (size, part, stride) in enumerate(zip(shape, kept, packed_strides(kept), strict=True)):
        if rows and axis not in bounds and rows[-1][3] < 0:
            rows[-1][:3] = [rows[-1][0] * size, rows[-1][1] * part, stride]
        else:
            rows.append([size, part, stride, bounds.get(axis, -1), steps.get(axis, 1)])
    require_axes(len(rows), MAX_AXES, "the gradient of a slice on CUDA")
    count = len(rows)
    rows += [[1, 1, 0, -1, 1]] * (MAX_AXES - count)
    sizes, *columns = zip(*rows, strict=True)
    dividers = [number for size in sizes for number in divider(size)]
    return by_value([count, int(onnx), *dividers, *(number for column in columns for number in column)])


def _summed(op: CudaOperator, dy: Array, axes: tuple[int, ...], dx: Array, factor: float = 1.0) -> Step:
    """The step dx = factor * the sum of dY over `axes`, which have size 1 in `dx`."""
    phase = Phase("sum_of<W>", "s.add((W)x);")
    groups = Groups([phase], last="y = (A)(total0.total * (W)factor);")
    return by_groups(
        op, "repeats", dy.shape, axes, groups, {"x": dy}, {"y": dx}, {"factor": computed_scalar(dy, factor)}
    )


@on_cuda(TileGradient)
class _CudaTileGradient(CudaOperator):
    """The sum over the repetitions."""

    def prepare(self) -> Step:
        tiles, axis = tile_plan(self.call())
        dx = self.y(0)
        outer, inner = prod(dx.shape[:axis]), prod(dx.shape[axis:])
        return _summed(self, self.x(0).reshape(outer, tiles, inner), (1,), dx.reshape(outer, 1, inner))


@on_cuda(ExpandGradient)
class _CudaExpandGradient(CudaOperator):
    """The sum over the repetitions, by NumPy's rule of broadcasting."""

    def prepare(self) -> Step:
        """One sum; axes of size 1 in X stay."""
        dy, dx = self.x(0), self.y(0)
        padded = (*(1,) * (dy.ndim - dx.ndim), *dx.shape)
        axes = tuple(axis for axis, size in enumerate(padded) if size != dy.shape[axis])
        return _summed(self, dy, axes, dx.reshape(padded), self.arguments.float("factor", 1.0))
