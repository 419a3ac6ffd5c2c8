"""Combining the pixels of each window, over 1, 2 or 3 spatial axes, in all padding modes.

A window is a product of ranges, so its maximum or sum is taken one axis after the other: k + k passes instead of k x k.
A pass combines images with themselves, shifted, as one long row from the first pixel to the last: what it finds across
the ends of rows, and between the strides, is for nothing, but no loop is short. At the end the pixels of the output are
picked out. Images with padding are first copied into ones that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import ImageOperator
from dagexec.ops.families.pool.window import Array, as_images, image_blocks, is_whole, pool_window

Load = Callable[[Array, Array], Sequence[Step]]
"""The steps that bring pixels into the work dtype: from the input (a view) to an array of the same shape (a view)."""

Finish = Callable[[Array, Array], Step]
"""The step that ends a block: from the combined windows (a view) to the output."""


class Pooling(ImageOperator):
    """What poolings share: cutting the work into blocks of images, and going through the axes."""

    def reduce(
        self, combine: np.ufunc, identity: Any, work: np.dtype[Any], finish: Finish, load: Load | None = None
    ) -> Step:
        """The steps that combine every window of x into y, in `work`; `load` is needed when it is not just a copy."""
        window, axes = pool_window(self.call())
        if not self.y(0).size:
            return nothing_to_do
        images, targets = as_images(self.x(0), window), as_images(self.y(0), window)
        if is_whole(axes):
            return self._reduce_whole(combine, images, targets, work, finish, load)
        axes = tuple(axis.trimmed() for axis in axes)
        staged = load is not None or work != images.dtype or any(axis.reads_padding for axis in axes)
        shape = (*(axis.covered if staged else axis.size for axis in axes), *images.shape[1 + len(axes) :])
        blocks = image_blocks(len(images), math.prod(shape))
        count = blocks[0].stop
        combined_axes = sum(axis.kernel > 1 for axis in axes)
        results = [self.scratch((count * math.prod(shape),), work) for _ in range(min(2, combined_axes))]
        padded = self.scratch((count, *shape), work) if staged else None
        passes = axis_shifts(axes, shape)  # long lists for huge kernels: memory that they do not fit is refused before
        if padded is not None:
            padded.fill(identity)
        calls: list[Step] = []
        for piece in blocks:
            source = images[piece]
            if padded is not None:
                stage = padded[: len(source)]
                calls += (load or copied)(*_inside(source, stage, axes))
                source = stage
            combined, steps = combine_shifted(combine, source.reshape(-1), passes, results)
            calls += [*steps, finish(window_starts(combined, shape, axes, targets[piece].shape), targets[piece])]
        return in_sequence(calls)

    def _reduce_whole(
        self, combine: np.ufunc, images: Array, targets: Array, work: np.dtype[Any], finish: Finish, load: Load | None
    ) -> Step:
        """`reduce` when the one window is the image."""
        rank = len(pool_window(self.call())[1])
        found = self.scratch(targets.shape, work)
        pixels = images.reshape(len(images), math.prod(images.shape[1 : 1 + rank]), *images.shape[1 + rank :])
        totals = found.reshape(len(found), *pixels.shape[2:])  # pixels: N, pixels of an image, then C with NHWC
        if load is None:
            return in_sequence([partial(combine.reduce, pixels, axis=1, out=totals), finish(found, targets)])
        blocks = image_blocks(len(images), math.prod(pixels.shape[1:]))
        loaded = self.scratch((blocks[0].stop, *pixels.shape[1:]), work)
        calls: list[Step] = []
        for piece in blocks:
            stage = loaded[: len(pixels[piece])]
            calls += [*load(pixels[piece], stage), partial(combine.reduce, stage, axis=1, out=totals[piece])]
        return in_sequence([*calls, finish(found, targets)])


def copied(source: Array, target: Array) -> list[Step]:
    """The pixels as they are, in another dtype perhaps."""
    return [partial(np.copyto, target, source)]


def axis_shifts(axes: Sequence[Axis], shape: tuple[int, ...]) -> list[list[int]]:
    """For each axis with a kernel larger than 1, how far from a window's first pixel its other taps are.

    The pixels are in memory as images of `shape`: the spatial axes, then any others.
    """
    return [
        [tap * axis.dilation * math.prod(shape[1 + number :]) for tap in range(1, axis.kernel)]
        for number, axis in enumerate(axes)
        if axis.kernel > 1
    ]


def combine_shifted(
    combine: np.ufunc, row: Array, passes: Sequence[Sequence[int]], results: Sequence[Array]
) -> tuple[Array, list[Step]]:
    """The steps that combine each pixel of a long row with those that the passes reach from it, and where they are."""
    steps: list[Step] = []
    for number, shifts in enumerate(passes):
        length = len(row) - shifts[-1]
        result = results[number % 2][:length]
        steps.append(partial(combine, row[:length], row[shifts[0] : shifts[0] + length], out=result))
        steps += [partial(combine, result, row[shift : shift + length], out=result) for shift in shifts[1:]]
        row = result
    return row, steps


def window_starts(row: Array, shape: tuple[int, ...], axes: Sequence[Axis], out: tuple[int, ...]) -> Array:
    """Of images of `shape`, one after another in a row, the first pixel of each window: a view of shape `out`."""
    pitches = [math.prod(shape[number:]) * row.itemsize for number in range(len(shape) + 1)]
    steps = [pitch * axis.stride for pitch, axis in zip(pitches[1:], axes, strict=False)]
    return as_strided(row, out, (pitches[0], *steps, *pitches[1 + len(axes) :]), writeable=False)


def _inside(images: Array, padded: Array, axes: Sequence[Axis]) -> tuple[Array, Array]:
    """The pixels that some window may read, and where they are in `padded`, the rest of which is padding."""
    parts = [replace(axis, kernel=1, stride=1, dilation=1, out=axis.covered).tap(0) for axis in axes]
    every = slice(None)
    return images[(every, *(pixels for _, pixels in parts))], padded[(every, *(inside for inside, _ in parts))]
