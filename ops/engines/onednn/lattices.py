"""Convolutions of any kind as products of our own, where oneDNN is missing and no other way is for them.

It serves what `direct`, `pointwise`, `windows` and `winograd` do not: three axes, groups of any size, a filter that is
fed, images in NCHW, and transposed convolutions. Images are read and written with channels last; others are copied
before and behind, and so is an image whose windows leave it, between zeros. A window is some segments
(`panel_kernels`): a row of taps each, or a tap where they lie apart.

Of a transposed convolution the results whose places have the same remainder by the stride have the same taps: they are
those of a convolution that steps by 1, and lie apart. Where they have few channels, and neighbors the same pixels, so
many neighbors as the stride has pixels are computed as if they were channels. So each element of any result is one
chain of products and sums in the order of pixels and channels, and its bytes depend on no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import gcd, prod

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.native import NativeStep, native_rows
from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import NCHW
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import widths
from dagexec.ops.engines.onednn.panel_rows import Panels, Rows, on_panels, panels_of_rows
from dagexec.ops.engines.onednn.problem import (
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    StillArguments,
)
from dagexec.ops.kernels.copies import MOST_CALLS, copy_step
from dagexec.ops.kernels.machine import AVX2, Machine
from dagexec.ops.kernels.panel_kernels import VECTORS
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import shares, step_of_rows
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache
from dagexec.platform.records import dataclass

_PRODUCTS = 3e10
"""A second of one core: fewer than other kernels of our own are estimated to compute."""

_LONGEST = 256
"""Results of a row that are computed one after another."""

_MOST_CALLS = 1 << 18
"""Of an image: a table takes 48 bytes for each."""

_PART = 2
"""The part of the second cache, one in so many, for rows of the image."""

_FLOAT = 4  # bytes

Pair = tuple[Array, Array]
"""An array and the one that it is copied to."""


@dataclass(frozen=True)
class Line:
    """Results along an axis that have the same taps.

    Attributes:
        first, step, count: the place of the first, from one to the next, and how many there are.
        pixel, stride: the first pixel that the first of them reads, which may lie outside, and from its to the next's.
        taps: their numbers, in the order of pixels.
        apart: pixels from a tap to the next.
    """

    first: int
    step: int
    count: int
    pixel: int
    stride: int
    taps: tuple[int, ...]
    apart: int

    @property
    def behind(self) -> int:
        """The pixel behind the last that is read."""
        return self.pixel + (self.count - 1) * self.stride + (len(self.taps) - 1) * self.apart + 1

    @property
    def places(self) -> slice:
        """Of the results."""
        return slice(self.first, self.first + (self.count - 1) * self.step + 1, self.step)

    def parts(self, count: int) -> Iterator[Line]:
        """It in so many parts."""
        for part in shares(self.count, min(count, self.count)):
            first, pixel = self.first + part.start * self.step, self.pixel + part.start * self.stride
            yield replace(self, first=first, count=len(part), pixel=pixel)


Lattice = tuple[Line, ...]
"""Results that have the same taps: those of a line of each axis."""


def lines(axis: Axis) -> tuple[Line, ...]:
    """The one of a convolution."""
    return (Line(0, 1, axis.out, -axis.head, axis.stride, tuple(range(axis.kernel)), axis.dilation),)


def transposed_lines(axis: Axis) -> tuple[Line, ...]:
    """Those of the transposed convolution, for an axis of the convolution that it transposes.

    The result at `place` reads the pixels `(place + head - tap * dilation) / stride`, for the taps where that leaves
    no remainder.
    """
    found = []
    for first in range(min(axis.stride, axis.size)):
        start = first + axis.head
        taps = [tap for tap in reversed(range(axis.kernel)) if (start - tap * axis.dilation) % axis.stride == 0]
        pixel = (start - taps[0] * axis.dilation) // axis.stride if taps else 0
        count, apart = -(-(axis.size - first) // axis.stride), axis.dilation // gcd(axis.dilation, axis.stride)
        found.append(Line(first, axis.stride, count, pixel, 1, tuple(taps), apart))
    return tuple(found)


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        axes: the lines of each axis.
        batch, channels, filters, groups: N, C, M, G.
        orders: of the image and of the result.
        has_bias: a number for each channel is added.
        post_ops: what is done then; ADD_OTHER is among them where it is not the first.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
        joined, skipped: how many neighbors of a row of the result are computed as the channels of one, which are M
            then, and how many of these are before the first of the row.
    """

    axes: tuple[tuple[Line, ...], ...]
    batch: int
    channels: int
    filters: int
    groups: int
    orders: tuple[str, str]
    has_bias: bool
    post_ops: tuple[PostOp, ...] = ()
    other: int = 0
    joined: int = 1
    skipped: int = 0

    def fits(self, lanes: int) -> bool:
        """True for whole vectors."""
        return self.units % lanes == 0

    @property
    def read(self) -> int:
        """Channels that a group reads."""
        return self.channels // self.groups

    @property
    def units(self) -> int:
        """Channels that a group writes."""
        return self.filters // self.groups

    @property
    def lattices(self) -> list[Lattice]:
        """All results."""
        return list(product(*self.axes))

    def inner(self, lattice: Lattice) -> int:
        """Products that are summed up for an element."""
        return self.read * prod(len(line.taps) for line in lattice)

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core."""
        found = sum(prod(line.count for line in lattice) * self.inner(lattice) for lattice in self.lattices)
        return self.batch * self.filters * found / _PRODUCTS

    def in_parts(self) -> list[Lattice]:
        """All results that have taps; rows are cut where they are long, or few."""
        pieces, found = pieces_of(self.seconds / self.batch, MOST_OF_ONE), []
        for lattice in self.lattices:
            rows, last = prod(line.count for line in lattice[:-1]), lattice[-1]
            count = max(-(-last.count // _LONGEST), -(-pieces // rows))
            found += [(*lattice[:-1], part) for part in last.parts(count) if self.inner(lattice)]
        return found

    @property
    def calls(self) -> int:
        """About how many compute an image."""
        panels = -(-self.units // (AVX2 * VECTORS[AVX2]))
        return self.groups * panels * sum(prod(line.count for line in part[:-1]) for part in self.in_parts())


def transposed_layer(
    axes: Sequence[Axis], sizes: tuple[int, int, int], groups: int, order: str, has_bias: bool
) -> Layer:
    """That of a transposed convolution, for the axes of the one that it transposes; `sizes` are N, C, M."""
    batch, channels, filters = sizes
    found, last = tuple(map(transposed_lines, axes)), axes[-1]
    layer = Layer(found, batch, channels, filters, groups, (order, order), has_bias)
    is_even = last.dilation == 1 < last.stride and last.kernel % last.stride == 0
    if groups > 1 or not is_even or filters * last.stride > AVX2 * VECTORS[AVX2]:
        return layer
    taps = tuple(reversed(range(last.kernel // last.stride)))
    row = Line(0, 1, -(-(last.head + last.size) // last.stride), -taps[0], 1, taps, 1)
    layer = replace(layer, axes=(*found[:-1], (row,)), filters=filters * last.stride)
    return replace(layer, joined=last.stride, skipped=last.head)


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer; none with oneDNN."""
    if not library.has_primitives and 0 < layer.calls <= _MOST_CALLS:
        yield from on_panels(library, "lattices", layer, _assemble)


def _assemble(
    layer: Layer, lanes: int, problem: Problem, arrays: Mapping[int, Array], memory: Memory, pack: Pack
) -> Assembled:
    machine, label = problem.library.machine, problem.label
    x, y = (_channels_last(arrays[number], order) for number, order in zip((SRC, DST), layer.orders, strict=True))
    bias = arrays[BIAS] if layer.has_bias else np.zeros(y.shape[-1], np.float32)
    image, low, before = _readable(layer, x, memory)
    result, part = _writable(layer, y, memory)
    addend = None
    if layer.other:
        addend = _channels_last(arrays[layer.other], layer.orders[1])
        if not addend.flags.c_contiguous:
            before.append((addend, _like(addend, memory)))
            addend = before[-1][1]
    panels = _Panels(layer, lanes)
    weights, copied = panels.of(problem, arrays[WEIGHTS], memory, pack)
    before += copied
    for lattice in layer.lattices:
        if not layer.inner(lattice):
            untouched = result[(slice(None), *(line.places for line in lattice))]
            untouched = untouched.reshape(*untouched.shape[:-1], layer.joined, -1)
            before.append((np.broadcast_to(bias, untouched.shape), untouched))
    if layer.joined > 1:
        biases = memory(_FLOAT * layer.filters).view(np.float32)
        before.append((np.broadcast_to(bias, (layer.joined, len(bias))), biases.reshape(layer.joined, -1)))
        bias = biases
    calls = _Calls(layer, panels, (image, low), weights, bias, result, addend)
    steps: list[Step] = [
        *_copied(machine, before, label),
        calls.step(label),
        *_copied(machine, [(part, y)] if part is not y else [], label),
    ]
    if not all(isinstance(step, NativeStep) for step in steps):
        return Assembled(steps, StillArguments(), frozenset())
    moved = {SRC: arrays[SRC]} if layer.other else {SRC: arrays[SRC], DST: arrays[DST]}
    tables = [table for step in steps if isinstance(step, NativeStep) for table in step.native_tables]
    moving = MovedArguments(tables, moved)
    return Assembled(steps, moving, moving.numbers, sum(table.nbytes for table in tables))


def _channels_last(image: Array, order: str) -> Array:
    return np.moveaxis(image, 1, -1) if order == NCHW else image


def _like(image: Array, memory: Memory) -> Array:
    """Working memory for as much."""
    found: Array = memory(image.nbytes).view(np.float32).reshape(image.shape)
    return found


def _writable(layer: Layer, y: Array, memory: Memory) -> tuple[Array, Array]:
    """An array for results with channels last, and what of it is `y`: `y` itself where it is the same memory."""
    *outer, size, filters = y.shape
    count = layer.axes[-1][0].count if layer.joined > 1 else size
    shape = *outer, count, layer.filters
    if y.flags.c_contiguous and count * layer.joined == size:
        return y.reshape(shape), y
    result = memory(_FLOAT * prod(shape)).view(np.float32).reshape(shape)
    row = slice(layer.skipped, layer.skipped + size)
    return result, result.reshape(*outer, -1, filters)[..., row, :]


def _readable(layer: Layer, x: Array, memory: Memory) -> tuple[Array, list[int], list[Pair]]:
    """An image that windows do not leave, the pixel of `x` where each axis of it begins, and what is copied to it."""
    touched = [[line for line in axis if line.taps] for axis in layer.axes]
    low = [min(line.pixel for line in axis) for axis in touched]
    high = [max(line.behind for line in axis) for axis in touched]
    sizes = x.shape[1:-1]
    if x.flags.c_contiguous and min(low) >= 0 and all(end <= size for end, size in zip(high, sizes, strict=True)):
        return x, [0] * len(low), []
    shape = len(x), *(end - start for start, end in zip(low, high, strict=True)), x.shape[-1]
    image = memory(_FLOAT * prod(shape)).view(np.float32).reshape(shape)
    ends = [(max(start, 0), max(start, 0, min(end, size))) for start, end, size in zip(low, high, sizes, strict=True)]
    inside = [slice(first - start, end - start) for (first, end), start in zip(ends, low, strict=True)]
    found = [(x[(slice(None), *(slice(*end) for end in ends))], image[(slice(None), *inside)])]
    for number, place in enumerate(inside):
        for margin in (slice(0, place.start), slice(place.stop, None)):
            zeros = image[(slice(None), *inside[:number], margin)]
            found.append((np.broadcast_to(np.float32(0), zeros.shape), zeros))
    return image, low, found


def _copied(machine: Machine, pairs: Sequence[Pair], label: str) -> list[Step]:
    """The steps that copy these, each in parts of few rows for a call."""
    parts = [part for pair in pairs for part in _parts(*pair)]
    if not parts:
        return []
    step = copy_step(machine, parts, label)
    return [step] if step is not None else [partial(np.copyto, target, source) for source, target in parts]


def _parts(source: Array, target: Array) -> Iterator[Pair]:
    """These, along the first axis where that is more than a step copies of one array; nothing for none."""
    if prod(target.shape[:-2]) > MOST_CALLS:
        for one in zip(source, target, strict=True):
            yield from _parts(*one)
    elif target.size:
        yield source, target


class _Panels:
    """The filter in panels, one after another, for each set of taps those of each group."""

    def __init__(self, layer: Layer, lanes: int) -> None:
        self._layer, self.lanes = layer, lanes
        self._wide = -(-layer.units // lanes) * lanes
        self._places: dict[tuple[tuple[int, ...], ...], int] = {}
        self._size = 0
        for lattice in layer.lattices:
            self._places[tuple(line.taps for line in lattice)] = self._size
            self._size += layer.groups * self._wide * layer.inner(lattice)

    def place(self, lattice: Lattice, group: int) -> int:
        """Bytes from the first panel to those of a group, for the taps of a lattice."""
        first = self._places[tuple(line.taps for line in lattice)]
        return _FLOAT * (first + group * self._wide * self._layer.inner(lattice))

    def of(self, problem: Problem, filters: Array, memory: Memory, pack: Pack) -> tuple[Array, list[Pair]]:
        """The filter in panels, and what is copied there in a run: nothing if it never changes."""
        nbytes, machine = _FLOAT * self._size, problem.library.machine
        if WEIGHTS not in problem.constant:
            packed: Array = memory(nbytes).view(np.float32)
            return packed, self._pairs(filters, packed)

        def fill(packed: Array) -> None:
            for step in _copied(machine, self._pairs(filters, packed.view(np.float32)), problem.label):
                step()

        def unpack(packed: Array, plain: Array) -> None:
            for values, panels in self._pairs(plain, packed.view(np.float32)):
                if values.flags.writeable:
                    np.copyto(values, panels)

        layer = self._layer
        sizes = filters.shape[-len(layer.axes) :]
        taps = [sum(len(line.taps) for line in axis) for axis in layer.axes]
        taps[-1] *= layer.joined
        target = Descriptor.strided(problem.library, (self._size,), FLOAT32, (1,))
        what = f"panels of {self.lanes}, of {layer.joined}, for {list(self._places)}"
        making = Making(what, nbytes, fill, unpack if taps == [*sizes] else None)
        return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0].view(np.float32), []

    def _pairs(self, filters: Array, packed: Array) -> list[Pair]:
        """Parts of a filter M, C/G, taps, or G, M/G, C/G, taps, and of the panels where they are; zeros for columns
        that are not there."""
        groups = filters if self._layer.groups > 1 else filters[np.newaxis]
        found: list[Pair] = []
        for lattice in filter(self._layer.inner, self._layer.lattices):
            taps = tuple(_stepping(line.taps) for line in lattice)
            for group, values in enumerate(groups):
                apart = values.reshape(*values.shape[:-1], -1, self._layer.joined)
                chosen = np.moveaxis(apart[(slice(None), slice(None), *taps)], (0, 1, -1), (-1, -3, -2))
                first = self.place(lattice, group) // _FLOAT
                found += self._group(chosen, packed[first : first + self._wide * self._layer.inner(lattice)])
        return [pair for pair in found if pair[1].size]

    def _group(self, values: Array, packed: Array) -> Iterator[Pair]:
        """The same of one group, [taps, channels read, joined, units]: those that are joined fit into a panel."""
        *inner, joined, units = values.shape
        for first, last, width in widths(joined * units, self.lanes):
            stop = first + -(-(last - first) // width) * width
            panels = packed[first * prod(inner) : stop * prod(inner)].reshape(-1, *inner, width)
            count = min(width, joined * units - first)
            chosen = values[..., first:last].reshape(*inner, joined, len(panels), -1)
            yield np.moveaxis(chosen, -2, 0), panels[..., :count].reshape(len(panels), *inner, joined, -1)
            rest = panels[..., count:]
            yield np.broadcast_to(np.float32(0), rest.shape), rest


def _stepping(taps: tuple[int, ...]) -> slice:
    """Taps that are equally far apart, as they come."""
    if len(taps) < 2:
        return slice(taps[0], taps[0] + 1) if taps else slice(0, 0)
    step = taps[1] - taps[0]
    stop = taps[-1] + (1 if step > 0 else -1)
    return slice(taps[0], stop if stop >= 0 else None, step)


class _Calls:
    """Writes the calls of kernels; it holds what they read."""

    def __init__(
        self,
        layer: Layer,
        panels: _Panels,
        image: tuple[Array, list[int]],
        weights: Array,
        bias: Array,
        result: Array,
        addend: Array | None,
    ) -> None:
        """`image`: that of `_readable`, and where it begins."""
        self._layer, self._weights, self._of_weights = layer, weights, panels
        self._image, self._low = image
        self._bias, self._result, self._addend = bias, result, addend
        self._panels: dict[tuple[tuple[int, ...], ...], list[list[Panels]]] = {}

    def step(self, label: str) -> NativeStep:
        """The step that computes the result, in pieces of about as much work."""
        layer = self._layer
        lattices = layer.in_parts()
        rows = [layer.batch * prod(line.count for line in lattice[:-1]) for lattice in lattices]
        work = np.repeat([lattice[-1].count * layer.inner(lattice) for lattice in lattices], rows).cumsum()
        pieces = pieces_of(layer.seconds, MOST_OF_ONE * layer.batch)
        ends = np.searchsorted(work, [work[-1] * number / pieces for number in range(1, pieces)])
        cut = sorted({0, *ends.tolist(), len(work)})
        starts = np.cumsum([0, *rows]).tolist()
        tables: list[list[Array]] = [[] for _ in cut[1:]]
        for table, piece in zip(tables, pairwise(cut), strict=True):
            for lattice, (start, stop) in zip(lattices, pairwise(starts), strict=True):
                part = range(max(piece[0], start) - start, min(piece[1], stop) - start)
                if part:
                    table += self._products(lattice, part)
        written = native_rows(np.concatenate([calls for table in tables for calls in table]))
        return step_of_rows(written, np.cumsum([sum(map(len, table)) for table in tables]).tolist(), self, label)

    def _products(self, lattice: Lattice, part: range) -> Iterator[Array]:
        """The calls of some rows of a lattice, of those that the second cache has room for one panel after another."""
        layer, last, panels = self._layer, lattice[-1], self._of(lattice)
        steps = last.stride * self._image.strides[-2], last.step * self._result.strides[-2]
        read, written = (starts[part.start : part.stop] for starts in self._starts(lattice))
        line = self._image.strides[-3] * (lattice[-2].stride if len(lattice) > 1 else 1)
        chunk = max(1, core_cache() // _PART // line)
        for start in range(0, len(read), chunk):
            rows = slice(start, start + chunk)
            for group, all_panels in enumerate(panels):
                weights = address_of(self._weights) + self._of_weights.place(lattice, group)
                for one in all_panels:
                    calls = np.empty((len(one.columns), len(read[rows]), len(one.rows), 5), np.int64)
                    columns = one.columns[:, np.newaxis, np.newaxis]
                    calls[..., 0] = one.kernels
                    calls[..., 1] = read[rows, np.newaxis] + one.rows * steps[0] + _FLOAT * group * layer.read
                    calls[..., 2] = weights + _FLOAT * layer.inner(lattice) * columns
                    calls[..., 3] = written[rows, np.newaxis] + one.rows * steps[1]
                    calls[..., 3] += _FLOAT * (group * layer.units + columns)
                    calls[..., 4] = one.addresses[:, np.newaxis]
                    yield calls.reshape(-1, 5)

    def _starts(self, lattice: Lattice) -> tuple[Array, Array]:
        """Of each row of a lattice the addresses of the first pixel that is read, and of the first result."""
        found = []
        begins = [(line.pixel - low, line.stride) for line, low in zip(lattice, self._low, strict=True)]
        for array, ways in ((self._image, begins), (self._result, [(line.first, line.step) for line in lattice])):
            places = address_of(array) + array.strides[0] * np.arange(len(array))
            for (first, step), line, stride in zip(ways[:-1], lattice, array.strides[1:], strict=False):
                places = np.add.outer(places, stride * (first + step * np.arange(line.count))).reshape(-1)
            found.append(places + array.strides[-2] * ways[-1][0])
        return found[0], found[1]

    def _of(self, lattice: Lattice) -> list[list[Panels]]:
        """The panels of each group, for rows of that length and taps."""
        key = (*(line.taps for line in lattice), (lattice[-1].count,))
        if key not in self._panels:
            layer, last, pixel = self._layer, lattice[-1], self._image.strides[-2]
            starts = [0]
            for line, stride in zip(lattice, self._image.strides[1:], strict=False):
                starts = [start + stride * line.apart * tap for start in starts for tap in range(len(line.taps))]
            joined = len(last.taps) if layer.groups == 1 and last.apart == 1 else 1
            segment, starts = layer.read * joined, [*starts[::joined], 0]
            skipped = [after - before - _FLOAT * segment for before, after in pairwise(starts)]
            written = last.step * self._result.strides[-2]
            rows = Rows(last.count, last.stride * pixel, written, layer.inner(lattice), segment, skipped)
            addend = None if self._addend is None else address_of(self._addend) - address_of(self._result)
            make = partial(panels_of_rows, rows, layer.units, self._of_weights.lanes)
            biases = [address_of(self._bias) + _FLOAT * group * layer.units for group in range(layer.groups)]
            self._panels[key] = [make(one, addend=addend, post_ops=layer.post_ops) for one in biases]
        return self._panels[key]
