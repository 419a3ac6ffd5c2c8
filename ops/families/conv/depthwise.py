"""Depthwise convolution (as many groups as channels): every tap adds a shifted image, scaled by a weight a channel.

A matrix product of one row would waste the BLAS. Channels are taken in blocks that stay in the cache over all taps.
With channels first the padded image is dealt out into stride x stride phases, so that the pixels a tap reads are
neighbors in one of them. A phase and its shift are read as one long row each: pixels at the ends of the rows are
computed for nothing, but the inner loops are long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem, add_bias, wide_weights

_BLOCK_BYTES = 256 << 10
Load = Callable[[int], list[Step]]
"""The steps that bring image n where it is read."""


def _refusal(problem: ConvProblem) -> str:
    if not problem.group == problem.channels > 1:
        return f"the {problem.channels} channels are divided into {problem.group} group(s)"
    need = _nbytes(problem)
    if need > problem.limit:
        return f"an image and its sums take {need:,} bytes, more than ws_nbytes_limit {problem.limit:,}"
    return ""


def forward(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """Image by image, block by block."""
    weights, calls = wide_weights(problem, allocate)
    output = allocate(problem.y.shape[1:], problem.work) if problem.work != problem.y.dtype else None
    way = _ChannelsLast if problem.channels_last else _ChannelsFirst
    sums = way(problem, weights, allocate)
    calls = [*calls, *sums.before]
    for image in range(problem.batch):
        calls += sums.image(image, problem.y[image] if output is None else output)
        if output is not None:
            calls.append(partial(np.copyto, problem.y[image], output, casting="same_kind"))
    return calls


DEPTHWISE = Algorithm("DEFAULT", _refusal, forward, own_memory=True, keeps_apart=lambda _: True)


class _ChannelsFirst:
    """Sums over phases of C, H, W images, in blocks of channels."""

    def __init__(self, problem: ConvProblem, weights: Array, allocate: Allocate) -> None:
        self._problem = problem
        self._multiplier = problem.filters // problem.channels
        self._factors = weights.reshape(problem.channels, self._multiplier, -1)
        self._bias = None if problem.bias is None else problem.bias.reshape(problem.channels, self._multiplier)
        self.before: list[Step] = []
        self._phases: Array | None = None
        self._load: Load | None = None
        if _needs_phases(problem):
            self._phases, self._load = self._make_phases(allocate)
        self._pitches, self._length = _long_rows(problem)
        self._block = _channels_of_block(problem, self._length)
        self._part, self._total = (allocate((self._block, self._length), problem.work) for _ in range(2))

    def image(self, number: int, y: Array) -> list[Step]:
        """The steps that compute `y` (M, out) from image `number`."""
        problem = self._problem
        if self._phases is None or self._load is None:
            calls: list[Step] = []
            phases = problem.x[number].reshape(*(1,) * len(problem.axes), *problem.x.shape[1:])
        else:
            calls, phases = self._load(number), self._phases
        shifts = self._shifts(phases)
        outputs = y.reshape(problem.channels, self._multiplier, *problem.out)
        for start in range(0, problem.channels, self._block):
            channels = slice(start, min(start + self._block, problem.channels))
            part, total = (array[: channels.stop - start] for array in (self._part, self._total))
            for filter_number in range(self._multiplier):
                scales = self._factors[channels, filter_number, :, None]
                calls += _weighted_sum([shift[channels] for shift in shifts], scales.swapaxes(0, 1), part, total)
                bias = None if self._bias is None else self._bias[channels, filter_number]
                calls.append(self._finish(total, bias, outputs[channels, filter_number]))
        return calls

    def _make_phases(self, allocate: Allocate) -> tuple[Array, Load]:
        """The phases, zero where padding is, and the steps that put an image there.

        Pixel `q` of the padded image is pixel `q // stride` of phase `q % stride`.
        """
        problem = self._problem
        strides = tuple(axis.stride for axis in problem.axes)
        sizes = tuple(_phase_size(axis) for axis in problem.axes)
        phases = allocate((*strides, problem.channels, *sizes), problem.work)
        phases.fill(0)
        read = [sorted({tap * axis.dilation % axis.stride for tap in range(axis.kernel)}) for axis in problem.axes]
        copies = []
        for phase in product(*read):
            parts = [
                replace(axis, kernel=axis.stride, dilation=1, out=size).tap(offset)
                for axis, size, offset in zip(problem.axes, sizes, phase, strict=True)
            ]
            target = _at(phases[phase], slice(None), *(inside for inside, _ in parts))
            copies.append((target, tuple(pixels for _, pixels in parts)))

        def load(image: int) -> list[Step]:
            x: Array = problem.x[image]
            return [partial(np.copyto, target, _at(x, slice(None), *source)) for target, source in copies]

        return phases, load

    def _shifts(self, phases: Array) -> list[Array]:
        """For each tap, its phase from the tap's first pixel on, as (C, length) with one long row a channel."""
        problem = self._problem
        found = []
        for tap in product(*(range(axis.kernel) for axis in problem.axes)):
            places = [divmod(index * axis.dilation, axis.stride) for index, axis in zip(tap, problem.axes, strict=True)]
            start = sum(place * pitch for (place, _), pitch in zip(places, self._pitches, strict=True))
            rows = phases[tuple(phase for _, phase in places)].reshape(problem.channels, -1)
            found.append(rows[:, start : start + self._length])
        return found

    def _finish(self, total: Array, bias: Array | None, target: Array) -> Step:
        """The step that takes the pixels of the output from the long rows, and adds the bias."""
        strides = (total.strides[0], *(pitch * total.itemsize for pitch in self._pitches))
        pixels = as_strided(total, target.shape, strides, writeable=False)
        if bias is None:
            return partial(np.copyto, target, pixels)
        return partial(np.add, pixels, bias.reshape(-1, *(1,) * len(self._problem.axes)), out=target)


class _ChannelsLast:
    """Sums over windows of H, W, C images, in blocks of rows."""

    def __init__(self, problem: ConvProblem, weights: Array, allocate: Allocate) -> None:
        self._problem = problem
        self._multiplier = problem.filters // problem.channels
        taps = allocate((weights[0].size, problem.filters), problem.work)
        self.before: list[Step] = [partial(np.copyto, taps, weights.reshape(problem.filters, -1).T)]
        self._factors = taps.reshape(-1, problem.channels, self._multiplier)
        self._source: Array | None = None
        self._load: Load | None = None
        if _needs_source(problem):
            self._source, self._load = _padded_image(problem, allocate)
        self._block = _rows_of_block(problem)
        self._part = allocate((self._block, *problem.out[1:], problem.channels), problem.work)

    def image(self, number: int, y: Array) -> list[Step]:
        """The steps that compute `y` (out, M) from image `number`."""
        problem = self._problem
        calls = [] if self._load is None else self._load(number)
        windows = _windows(problem, problem.x[number] if self._source is None else self._source)
        outputs = y.reshape(*problem.out, problem.channels, self._multiplier)
        every = (slice(None),) * (len(problem.axes) - 1)
        taps = list(product(*(range(axis.kernel) for axis in problem.axes)))
        for start in range(0, problem.out[0], self._block):
            rows = slice(start, min(start + self._block, problem.out[0]))
            for filter_number in range(self._multiplier):
                shifts = [_at(windows, rows, *every, *tap) for tap in taps]
                target = outputs[rows, ..., filter_number]
                calls += _weighted_sum(shifts, self._factors[..., filter_number], self._part[: len(target)], target)
        return [*calls, *add_bias(y.reshape(-1, problem.filters), problem.bias, channels_last=True)]


def _needs_source(problem: ConvProblem) -> bool:
    """True when an image must be copied before its windows can be viewed."""
    return problem.work != problem.x.dtype or any(axis.reads_padding for axis in problem.axes)


def _needs_phases(problem: ConvProblem) -> bool:
    """True when an image with channels first must be dealt out into phases, of which there may be one."""
    return _needs_source(problem) or not problem.unit_strides


def _long_rows(problem: ConvProblem) -> tuple[list[int], int]:
    """Elements from one window to the next along each axis of a channel's phase, and from the first to the last."""
    sizes = [_phase_size(axis) if _needs_phases(problem) else axis.size for axis in problem.axes]
    pitches = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
    return pitches, sum((axis.out - 1) * pitch for axis, pitch in zip(problem.axes, pitches, strict=True)) + 1


def _channels_of_block(problem: ConvProblem, length: int) -> int:
    """Channels whose long rows stay in the cache together."""
    return min(problem.channels, max(1, _BLOCK_BYTES // problem.work.itemsize // length))


def _rows_of_block(problem: ConvProblem) -> int:
    """Rows of the output, of all channels, that stay in the cache together."""
    row = problem.channels * math.prod(problem.out[1:])
    return min(problem.out[0], max(1, _BLOCK_BYTES // problem.work.itemsize // row))


def _nbytes(problem: ConvProblem) -> int:
    """Bytes of workspace beside the filter: the image as it is read, the sums of a block, an output to be converted."""
    if problem.channels_last:
        source = math.prod(axis.covered for axis in problem.axes) * problem.channels if _needs_source(problem) else 0
        sums = _rows_of_block(problem) * math.prod(problem.out[1:]) * problem.channels
    else:
        phases = math.prod(axis.stride * _phase_size(axis) for axis in problem.axes) * problem.channels
        source = phases if _needs_phases(problem) else 0
        _, length = _long_rows(problem)
        sums = 2 * _channels_of_block(problem, length) * length
    output = problem.y[0].size if problem.work != problem.y.dtype else 0
    return (source + sums + output) * problem.work.itemsize


def _padded_image(problem: ConvProblem, allocate: Allocate) -> tuple[Array, Load]:
    """Memory for one H, W, C image with its padding, and the steps that put image n there.

    The border is zero from the start and is never written.
    """
    padded = allocate((*(axis.covered for axis in problem.axes), problem.channels), problem.work)
    padded.fill(0)
    parts = [replace(axis, kernel=1, stride=1, dilation=1, out=axis.covered).tap(0) for axis in problem.axes]
    target = padded[tuple(inside for inside, _ in parts)]
    source = tuple(pixels for _, pixels in parts)
    return padded, lambda image: [partial(np.copyto, target, problem.x[image][source])]


def _windows(problem: ConvProblem, image: Array) -> Array:
    """All windows of an H, W, C image as a view: out, kernel, C."""
    steps = [stride * axis.stride for stride, axis in zip(image.strides, problem.axes, strict=False)]
    taps = [stride * axis.dilation for stride, axis in zip(image.strides, problem.axes, strict=False)]
    shape = (*problem.out, *problem.kernel, problem.channels)
    return as_strided(image, shape, (*steps, *taps, image.strides[-1]), writeable=False)


def _at(array: Array, *index: int | slice) -> Array:
    """The view of `array` at `index`."""
    view: Array = array[index]
    return view


def _phase_size(axis: Axis) -> int:
    """Pixels of a phase along an axis."""
    return -(-axis.covered // axis.stride)


def _weighted_sum(shifts: list[Array], scales: Array, part: Array, target: Array) -> list[Step]:
    """target = sum of shifts[t] * scales[t], tap by tap; `part` is scratch of the shape of `target`."""
    calls: list[Step] = [partial(np.multiply, shifts[0], scales[0], out=target)]
    for shift, scale in zip(shifts[1:], scales[1:], strict=True):
        calls += [partial(np.multiply, shift, scale, out=part), partial(np.add, target, part, out=target)]
    return calls
