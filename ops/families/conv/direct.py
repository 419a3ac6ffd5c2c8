"""Sums over taps without a column buffer: each tap of the filter multiplies the pixels that it reads, where they lie.

Y[m, i] = sum over taps k of (W[k] X)[m, i * stride - head + k * dilation]: for each tap and row of windows one matrix
product (M/G, C/G) (C/G, pixels). Taps with the same place on the last axis read the same columns of the image: they
are added up first, then to the output. All in a fixed order. Pixels of padding take no part.

The BLAS needs one axis of a matrix to be without gaps. Rows of x have that when the stride along them is 1, and always
in NHWC; other rows, rows too short for a product, and 16-bit floats that become float32, are gathered first, for one
tap at a time. Memory, whatever the size of the image: blocks of products, sums and gathered pixels, each of `_BLOCK`
bytes at most (or one pixel, if that is more), and a copy of the filter with one matrix for each tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from itertools import product as every

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis, output_sizes, tap_count
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem
from dagexec.ops.families.conv.product import product
from dagexec.platform.records import dataclass

_BLOCK = 256 << 10  # bytes: a few blocks stay in the L2 cache of a core
_SHORT_ROW = 12  # pixels: a matrix product of fewer takes longer than gathering several rows for one
_MAX_PRODUCTS = 50_000  # that are prepared: with more, the steps of a part are made again in every run

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Tap:
    """A tap: its place in the kernel, the windows in which it lies inside the input, and the pixels that these read."""

    place: tuple[int, ...]
    windows: Slices
    pixels: Slices

    @property
    def count(self) -> tuple[int, ...]:
        """Windows along each axis."""
        return _sizes(self.windows)


def _refusal(problem: ConvProblem) -> str:
    need = _Memory(problem).nbytes
    if need <= problem.limit:
        return ""
    return f"the filter by taps and the blocks of products take {need} bytes, more than the limit of {problem.limit}"


def _steps(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """Part by part: the sum over taps, then the bias."""
    memory = _Memory(problem)
    memory.take(allocate)
    weights, calls = _matrices(problem, memory)
    few = len(memory.parts) * tap_count(problem.axes) <= _MAX_PRODUCTS
    for images, *windows in memory.parts:
        part = _Part(problem, memory, weights, images, tuple(windows))
        calls += part.steps() if few else [part.run]
    return calls


DIRECT = Algorithm("DIRECT", _refusal, _steps)


class _Memory:
    """What the algorithm asks for, in elements of the work dtype, and how it divides the output.

    Attributes:
        parts: for each part of the output, its images and its windows along each axis.
    """

    def __init__(self, problem: ConvProblem) -> None:
        self._work = problem.work
        self.parts = _parts(problem)
        largest = max(math.prod(_sizes(part)) for part in self.parts)
        converts = problem.work != problem.x.dtype
        adds_up = tap_count(problem.axes) > 1 or any(axis.reads_padding for axis in problem.axes[:-1])
        self._elements = {
            "filters": problem.weights.size,
            "products": problem.filters * largest if adds_up else 0,
            "columns": problem.filters * largest if problem.axes[-1].reads_padding else 0,
            "gathered": problem.channels * largest if converts or _rows_are_gathered(problem) else 0,
            "sums": problem.filters * largest if converts else 0,
        }
        self._kept = problem.constant is not None
        self._arrays: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, with those of a filter that is kept elsewhere."""
        return sum(self._elements.values()) * self._work.itemsize

    def take(self, allocate: Allocate) -> None:
        """Allocate what is needed."""
        for name, elements in self._elements.items():
            if elements and not (self._kept and name == "filters"):
                self._arrays[name] = allocate((elements,), self._work)

    def needs(self, name: str) -> bool:
        """True when this piece is in use."""
        return self._elements[name] > 0

    def shaped(self, name: str, shape: Sequence[int]) -> Array:
        """A piece as an array of a shape with at most as many elements."""
        return self._arrays[name][: math.prod(shape)].reshape(shape)


def _rows_are_gathered(problem: ConvProblem) -> bool:
    """True when rows of x make no good matrix: pixels that are not neighbors, or few of them."""
    row = problem.axes[-1]
    strided = row.stride > 1 and not problem.channels_last
    return problem.channels > problem.group and (strided or (row.out < _SHORT_ROW and problem.out[:-1] != ()))


def _parts(problem: ConvProblem) -> list[Slices]:
    """Images and windows of each part, in order; whole rows, images and batches while a block holds them."""
    left = _BLOCK // (max(problem.filters, problem.channels) * problem.work.itemsize)
    ranges: list[list[slice]] = []
    for size in (*reversed(problem.out), problem.batch):
        count = max(1, min(size, left))
        left //= count
        ranges.insert(0, [slice(start, min(start + count, size)) for start in range(0, size, count)])
    return list(every(*ranges))


def _sizes(parts: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in parts)


def _matrices(problem: ConvProblem, memory: _Memory) -> tuple[Array, list[Step]]:
    """The filter as (taps, G, M/G, C/G), or (taps, G, C/G, M/G) for NHWC, and the steps that bring it there."""
    groups, taps = problem.group, tap_count(problem.axes)
    per_group, channels = problem.filters // groups, problem.channels // groups
    if problem.channels_last:
        view = problem.weights.reshape(groups, per_group, taps, channels).transpose(2, 0, 3, 1)
    else:
        view = problem.weights.reshape(groups, per_group, channels, taps).transpose(3, 0, 1, 2)
    if problem.constant is not None:
        key = ("direct", groups, problem.channels_last, problem.work.str)
        return problem.constant.derived(key, lambda: np.ascontiguousarray(view, problem.work)), []
    packed = memory.shaped("filters", view.shape)
    return packed, [partial(np.copyto, packed, view)]


class _Part:
    """The steps for a part of the output.

    Images are split by groups: (n, G, C/G, spatial), or (n, spatial, G, C/G) for NHWC.
    """

    def __init__(self, problem: ConvProblem, memory: _Memory, weights: Array, images: slice, windows: Slices) -> None:
        self._problem, self._memory, self._weights = problem, memory, weights
        self._axes = [
            replace(axis, head=axis.head - some.start * axis.stride, out=some.stop - some.start)
            for axis, some in zip(problem.axes, windows, strict=True)
        ]
        self._x = self._split(problem.x[images])
        self._y = self._split(problem.y[images])[self._index(windows)]

    def steps(self) -> list[Step]:
        """Sum over the taps, add the bias, and store what was summed in another type."""
        problem = self._problem
        sums = self._memory.shaped("sums", self._y.shape) if self._memory.needs("sums") else self._y
        calls = self._taps(sums)
        if problem.bias is not None:
            row = problem.bias.reshape(problem.group, -1)
            row = row if problem.channels_last else row.reshape(*row.shape, *(1,) * len(self._axes))
            calls.append(partial(np.add, sums, row, out=sums, casting="same_kind"))
        if sums is not self._y:
            calls.append(partial(np.copyto, self._y, sums, casting="same_kind"))
        return calls

    def run(self) -> None:
        """Make the steps and run them."""
        for step in self.steps():
            step()

    def _taps(self, sums: Array) -> list[Step]:
        """sums = the sum over all taps: the columns of taps that read for every window first."""
        columns = [list(taps) for _, taps in groupby(_taps_inside(self._axes), key=lambda tap: tap.place[-1])]
        out = self._axes[-1].out
        whole = [column for column in columns if column[0].count[-1] == out]
        calls: list[Step] = [] if whole else [partial(sums.fill, 0)]
        for number, column in enumerate(whole):
            calls += self._add_taps(column, sums, add=number > 0)
        for column in columns:
            if column[0].count[-1] != out:
                target = sums[self._index((*(slice(None),) * (len(self._axes) - 1), column[0].windows[-1]))]
                part = self._memory.shaped("columns", target.shape)
                calls += [*self._add_taps(column, part, add=False), partial(np.add, target, part, out=target)]
        return calls

    def _add_taps(self, taps: list[_Tap], sums: Array, *, add: bool) -> list[Step]:
        """sums = the products of taps of one column, or sums += these."""
        calls: list[Step] = []
        if not add:
            rows = output_sizes(self._axes)[:-1]
            first = next((tap for tap in taps if tap.count[:-1] == rows), None)
            calls = [partial(sums.fill, 0)] if first is None else self._product(first, sums)
            taps = [tap for tap in taps if tap is not first]
        for tap in taps:
            target = sums[self._index((*tap.windows[:-1], slice(None)))]
            block = self._memory.shaped("products", target.shape)
            calls += [*self._product(tap, block), partial(np.add, target, block, out=target)]
        return calls

    def _product(self, tap: _Tap, out: Array) -> list[Step]:
        """out = W[tap] times the pixels that the tap reads."""
        matrix = self._weights[np.ravel_multi_index(tap.place, self._problem.kernel)]
        pixels = self._x[self._index(tap.pixels)]
        calls: list[Step] = []
        last, gathers = self._problem.channels_last, self._memory.needs("gathered")
        if gathers:
            gathered = self._memory.shaped("gathered", pixels.shape)
            calls.append(partial(np.copyto, gathered, pixels))
            pixels = gathered
        if self._problem.channels == self._problem.group:
            column = matrix[:, 0] if last else matrix.reshape(*matrix.shape[:2], *(1,) * len(self._axes))
            return [*calls, partial(np.multiply, pixels, column, out=out)]
        stacks = self._one_matrix if gathers else self._matrix_of_each_row
        left, right = (stacks(pixels), matrix) if last else (matrix, stacks(pixels))
        return [*calls, product(left, right, stacks(out))]

    def _one_matrix(self, images: Array) -> Array:
        """(n, G, C/G, pixels), or (G, pixels of all images, C/G) for NHWC; the spatial axes must be without gaps."""
        if self._problem.channels_last:
            return images.reshape(-1, *images.shape[-2:]).swapaxes(0, 1)
        return images.reshape(*images.shape[:3], -1)

    def _matrix_of_each_row(self, images: Array) -> Array:
        """(n, rows, G, C/G, pixels), or (n, rows, G, pixels, C/G) for NHWC."""
        if self._problem.channels_last:
            return images.swapaxes(-3, -2)
        return np.moveaxis(images, (1, 2), (-3, -2))

    def _split(self, images: Array) -> Array:
        groups = self._problem.group
        if self._problem.channels_last:
            return images.reshape(*images.shape[:-1], groups, images.shape[-1] // groups)
        return images.reshape(images.shape[0], groups, images.shape[1] // groups, *images.shape[2:])

    def _index(self, parts: Slices) -> Slices:
        """Ranges of the spatial axes as an index of images that are split by groups."""
        full = slice(None)
        return (full, *parts) if self._problem.channels_last else (full, full, full, *parts)


def _taps_inside(axes: Sequence[Axis]) -> Iterator[_Tap]:
    """The taps that lie inside the input for some window: column by column of the last axis, then row-major."""
    for last, *rest in every(*(range(axis.kernel) for axis in (axes[-1], *axes[:-1]))):
        place = (*rest, last)
        pairs = [axis.tap(number) for axis, number in zip(axes, place, strict=True)]
        tap = _Tap(place, tuple(windows for windows, _ in pairs), tuple(pixels for _, pixels in pairs))
        if all(tap.count):
            yield tap
