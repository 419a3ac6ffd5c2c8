"""Depthwise convolution (as many groups as channels): every tap adds a shifted image, scaled by a weight a channel.

A matrix product of one row would waste the BLAS. Channels are taken in blocks that stay in the cache over all taps.
With stride 1 an image and its shift are read as one long row each: pixels at the ends of the rows are computed for
nothing, but the inner loops are long.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.conv.problem import Array, ConvProblem

_BLOCK_BYTES = 256 << 10


def applies(problem: ConvProblem) -> bool:
    """True when every channel is a group of its own."""
    return problem.group == problem.channels > 1


def steps(problem: ConvProblem) -> list[Step]:
    """Image by image, block of channels by block of channels."""
    weights, calls = problem.staged(problem.weights)
    bias, load_bias = (None, []) if problem.bias is None else problem.staged(problem.bias)
    calls = [*calls, *load_bias]
    output = problem.allocate(problem.y.shape[1:], problem.work) if problem.narrow else None
    source, load = problem.image_source() if problem.needs_source else (None, None)
    sums = _channels_last_sums if problem.channels_last else _channels_first_sums
    scratch = _Scratch(problem)
    if problem.channels_last:
        taps = problem.allocate((weights[0].size, problem.filters), problem.work)
        calls.append(partial(np.copyto, taps, weights.reshape(problem.filters, -1).T))
    else:
        taps = weights.reshape(problem.filters, -1)
    for image in range(problem.batch):
        if load is not None:
            calls += load(image)
        y = problem.y[image] if output is None else output
        calls += sums(problem, problem.x[image] if source is None else source, taps, y, scratch)
        flat = y.reshape(-1, problem.filters) if problem.channels_last else y.reshape(problem.filters, -1)
        calls += problem.add_bias(flat, bias)
        if output is not None:
            calls.append(partial(np.copyto, problem.y[image], output, casting="same_kind"))
    return calls


class _Scratch:
    """Two arrays of a block's size, shared by all blocks."""

    def __init__(self, problem: ConvProblem) -> None:
        longest = max(math.prod(axis.covered for axis in problem.axes), math.prod(problem.out))
        elements = max(_BLOCK_BYTES // problem.work.itemsize, longest, problem.channels * math.prod(problem.out[1:]))
        self._arrays = [problem.allocate((elements,), problem.work) for _ in range(2)]
        self.elements = elements

    def take(self, number: int, shape: tuple[int, ...]) -> Array:
        """Array `number` as an array of `shape`."""
        return self._arrays[number][: math.prod(shape)].reshape(shape)


def _channels_first_sums(problem: ConvProblem, image: Array, taps: Array, y: Array, scratch: _Scratch) -> list[Step]:
    multiplier = problem.filters // problem.channels
    windows = problem.windows(image)
    flat = _flat_rows(problem, image)
    width = math.prod(problem.out) if flat is None else flat[0].shape[-1]
    block = max(1, scratch.elements // width)
    outputs = y.reshape(problem.channels, multiplier, *problem.out)
    factors = taps.reshape(problem.channels, multiplier, -1)
    calls: list[Step] = []
    for start in range(0, problem.channels, block):
        channels = slice(start, min(start + block, problem.channels))
        for filter_number in range(multiplier):
            target = outputs[channels, filter_number]
            scale = factors[channels, filter_number]
            if flat is None:
                shifts = [_at(windows, channels, *tap) for tap in _taps(problem)]
                calls += _accumulate(shifts, scale.reshape(*scale.shape, *(1,) * len(problem.out)), target, scratch)
                continue
            total = scratch.take(1, (channels.stop - channels.start, width))
            calls += _accumulate([shift[channels] for shift in flat], scale[:, :, None], total, scratch)
            calls.append(partial(np.copyto, target, _row_pixels(problem, image, total)))
    return calls


def _channels_last_sums(problem: ConvProblem, image: Array, taps: Array, y: Array, scratch: _Scratch) -> list[Step]:
    """`taps` is (taps, M). Blocks are rows of the output."""
    multiplier = problem.filters // problem.channels
    windows = problem.windows(image)
    every = (slice(None),) * (len(problem.axes) - 1)
    outputs = y.reshape(*problem.out, problem.channels, multiplier)
    factors = taps.reshape(-1, problem.channels, multiplier)
    block = max(1, scratch.elements // max(1, problem.channels * math.prod(problem.out[1:])))
    calls: list[Step] = []
    for start in range(0, problem.out[0], block):
        rows = slice(start, min(start + block, problem.out[0]))
        for filter_number in range(multiplier):
            target = outputs[rows, ..., filter_number]
            shifts = [_at(windows, rows, *every, *tap) for tap in _taps(problem)]
            scale = np.moveaxis(factors[:, :, filter_number], 0, -1)
            calls += _accumulate(shifts, scale, target, scratch)
    return calls


def _accumulate(shifts: list[Array], scale: Array, target: Array, scratch: _Scratch) -> list[Step]:
    """target = sum of shifts[t] * scale[:, t], tap by tap. `scale` has the taps as axis 1, broadcast to the rest."""
    part = scratch.take(0, target.shape)
    calls: list[Step] = [partial(np.multiply, shifts[0], scale[:, 0], out=target)]
    for number, shift in enumerate(shifts[1:], 1):
        calls += [
            partial(np.multiply, shift, scale[:, number], out=part),
            partial(np.add, target, part, out=target),
        ]
    return calls


def _at(windows: Array, *index: int | slice) -> Array:
    shift: Array = windows[index]
    return shift


def _taps(problem: ConvProblem) -> list[tuple[int, ...]]:
    return list(product(*(range(axis.kernel) for axis in problem.axes)))


def _flat_rows(problem: ConvProblem, image: Array) -> list[Array] | None:
    """For stride 1: for each tap, the image from that tap on, as (C, length) with one long row a channel."""
    if any(axis.stride != 1 for axis in problem.axes) or not image.flags.c_contiguous:
        return None
    sizes = image.shape[1:]
    pitches = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
    length = sum((axis.out - 1) * pitch for axis, pitch in zip(problem.axes, pitches, strict=True)) + 1
    flat = image.reshape(image.shape[0], -1)
    starts = (
        sum(index * axis.dilation * pitch for index, axis, pitch in zip(tap, problem.axes, pitches, strict=True))
        for tap in _taps(problem)
    )
    return [flat[:, start : start + length] for start in starts]


def _row_pixels(problem: ConvProblem, image: Array, total: Array) -> Array:
    """The pixels of the output within long rows: a view (C, out) of `total` (C, length)."""
    sizes = image.shape[1:]
    pitches = [math.prod(sizes[number + 1 :]) * total.itemsize for number in range(len(sizes))]
    return np.lib.stride_tricks.as_strided(
        total, (total.shape[0], *problem.out), (total.strides[0], *pitches), writeable=False
    )
