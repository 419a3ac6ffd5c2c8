"""Conversions between element types: to float32, to bfloat16, and to 8 bits by the range of the values.

All compute in vectors of float32; `narrow_vectors.py` reads and writes the others. What does not fill a vector is
computed with the vector that ends the array, of which most was written before: the same bytes again. So arrays that are
shorter than a vector are not served, nor are those that overlap.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade
from dagexec.core.operator import Step
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.narrow_vectors import load_as_floats, store_bfloat16, store_first_uint8, store_uint8
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import GREATER

Array = npt.NDArray[Any]

_TARGETS = {np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)}
_SOURCES = {np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.int32, np.int8, np.uint8, np.bool_)}


def convert_step(machine: Machine, x: Array, y: Array, label: str) -> Step | None:
    """The step that writes the elements of `x` to `y`, of as many elements and another type, as NumPy converts them.

    None where the kernels do not serve: other processors and types, less than a vector, strides, or shared memory.
    """
    if not _serves(machine, x, y) or x.dtype == y.dtype or x.dtype not in _SOURCES or y.dtype not in _TARGETS:
        return None
    kernel = _converting(x.dtype, y.dtype, machine.lanes)
    if kernel is None:
        return None

    def make(x: Array, y: Array, label: str) -> Step:
        whole = x.size // machine.lanes
        shared = shares(whole, pieces_of_bytes(x.nbytes + y.nbytes))
        parts = [[(part.start * machine.lanes, len(part))] for part in shared]
        if x.size % machine.lanes:
            parts[-1].append((x.size - machine.lanes, 1))
        tables = [
            [
                (kernel, address_of(x) + start * x.itemsize, address_of(y) + start * y.itemsize, count, 0)
                for start, count in part
            ]
            for part in parts
        ]
        return in_pieces(tables, (x, y), label)

    step = make(x, y, label)
    declare_remade(step, make, (x, y))
    return step


def by_range_step(machine: Machine, x: Array, y: Array, scale: Array, zero: Array, label: str) -> Step | None:
    """The step that quantizes float32 `x` to uint8 `y` by its range, as ONNX's DynamicQuantizeLinear: in one piece.

    scale = (max - min) / 255 and zero = round(-min / scale), the range taken to include 0; of nothing but 0 the scale
    is 1. NaN counts as 0. `scale`, float32, and `zero`, uint8, are arrays of one element. None where the kernel does
    not serve.
    """
    is_float, are_bytes = x.dtype == scale.dtype == np.float32, y.dtype == zero.dtype == np.uint8
    kernel = _by_range(machine.lanes) if is_float and are_bytes and _serves(machine, x, y) else None
    if kernel is None:
        return None

    def make(x: Array, y: Array, scale: Array, zero: Array, label: str) -> Step:
        fields = np.array([x.size, address_of(x), address_of(y), address_of(scale), address_of(zero)], np.int64)
        calls = [[(kernel, address_of(fields), 0, 0, 0)]]
        return in_pieces(calls, (fields, x, y, scale, zero), label)

    step = make(x, y, scale, zero, label)
    declare_remade(step, make, (x, y, scale, zero))
    return step


def _serves(machine: Machine, x: Array, y: Array) -> bool:
    are_packed = x.flags.c_contiguous and y.flags.c_contiguous
    return machine.can_run and x.size == y.size >= machine.lanes and are_packed and not np.may_share_memory(x, y)


@lru_cache
def _converting(source: np.dtype[Any], target: np.dtype[Any], lanes: int) -> int | None:
    """The address of a function of x, y and the number of vectors; None where it cannot run."""
    build = Builder(lanes)
    x, y, count = build.arguments(3)
    with build.repeat(count):
        value = load_as_floats(build, x, source)
        if target == np.float32:
            build.store(value, y)
        else:
            store_bfloat16(build, value, y)
        x.set(x + lanes * source.itemsize)
        y.set(y + lanes * target.itemsize)
    return build.function()


_COUNT, _X, _Y, _SCALE, _ZERO = (8 * number for number in range(5))


@lru_cache
def _by_range(lanes: int) -> int | None:
    """The address of a function of numbers, for `by_range_step`; None where it cannot run."""
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    x, count = build.number(fields, _X), build.number(fields, _COUNT)
    low, high = build.constant(0.0), build.constant(0.0)

    def widen_range(place: Scalar, mask: Mask | None) -> None:
        value = build.load(x, place, mask=mask)  # zeros behind the end, which the range includes
        low.set(build.minimum(value, low))  # the second where the first is NaN
        high.set(build.maximum(value, high))

    build.each(count, widen_range)
    least, most = build.over_lanes(low, build.minimum), build.over_lanes(high, build.maximum)
    step = (most - least) / 255.0
    step = build.select(build.less(0.0, step), step, 1.0)
    zero = build.round(_within(build, (0.0 - least) / step))
    build.store_first(step, build.number(fields, _SCALE))
    store_first_uint8(build, zero, build.number(fields, _ZERO))
    source, target = build.number(fields, _X), build.number(fields, _Y)

    def quantize() -> None:
        store_uint8(build, _within(build, build.round(build.load(source) / step) + zero), target)

    with build.repeat(count >> _bits(lanes)):
        quantize()
        source.set(source + lanes * BYTES)
        target.set(target + lanes)
    rest = count & (lanes - 1)
    back = build.number(fields, _COUNT) + -lanes
    source.set(build.number(fields, _X) + (back << 2))
    target.set(build.number(fields, _Y) + back)
    with build.when(rest, GREATER, 0):
        quantize()
    return build.function()


def _within(build: Builder, value: Vector) -> Vector:
    """From 0 to 255; 0 for NaN."""
    return build.minimum(build.maximum(value, build.constant(0.0)), build.constant(255.0))


def _bits(lanes: int) -> int:
    return lanes.bit_length() - 1
