"""Tiles: an output cut into overlapping windows of t = m + r - 1 pixels, of which each gives m pixels of the output.

What Winograd's algorithm (`winograd`) knows of geometry is here: which tiles are transformed together, their pixels
read from x with zeros around them, and their results written to y. Between the two, channels are the last axis: copies
are of long runs then, whatever the size of the image. `column_blocks` does the same for windows that become columns.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import even_ranges
from dagexec.ops.families.conv.problem import Array, ConvProblem
from dagexec.ops.families.conv.toom_cook import MinimalFilter
from dagexec.platform.records import dataclass

LINE = 64  # bytes of a line of the cache
_SETS, _WAYS = 64, 8  # of a first-level cache


@dataclass(frozen=True)
class Tiling:
    """F(m, r) along each axis, and how many tiles cover the output."""

    filters: tuple[MinimalFilter, ...]
    counts: tuple[int, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """m of each axis."""
        return tuple(one.outputs for one in self.filters)

    @property
    def sizes(self) -> tuple[int, ...]:
        """t of each axis."""
        return tuple(one.tile for one in self.filters)


@dataclass(frozen=True)
class Block:
    """Some images of a batch, and the tiles of them that are transformed together.

    Attributes:
        tiling: of the whole output.
        images: images of the batch.
        tiles: tiles along each axis.
    """

    tiling: Tiling
    images: slice
    tiles: tuple[slice, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Images, then tiles along each axis."""
        return tuple(part.stop - part.start for part in (self.images, *self.tiles))

    @property
    def size(self) -> int:
        """Tiles in all."""
        return math.prod(self.counts)

    @property
    def pixels(self) -> tuple[int, ...]:
        """Images, then pixels that the tiles read along each axis."""
        images, *tiles = self.counts
        spans = (one.outputs * count + one.taps - 1 for one, count in zip(self.tiling.filters, tiles, strict=True))
        return (images, *spans)


def cut(tiling: Tiling, batch: int, most: int) -> list[Block]:
    """Blocks of at most `most` tiles, each a range of the tiles of an image, or all tiles of several images.

    None is larger than the first, along any axis.
    """
    ranges = even_ranges((batch, *tiling.counts), most)
    return [Block(tiling, images, tuple(tiles)) for images, *tiles in product(*ranges)]


def row_pitch(width: int, itemsize: int) -> int:
    """Elements from one row of `width` elements to the next: an odd number of cache lines.

    With a power of two, a column of the rows would fall into a few sets of the cache and push itself out.
    """
    line = LINE // itemsize
    return (-(-width // line) | 1) * line


def needs_staging(problem: ConvProblem) -> bool:
    """True when reading all channels of one pixel after another would push them out of the cache, or converts them."""
    if problem.channels_last:
        return False
    lines = problem.x.strides[1] // LINE
    sets = _SETS // math.gcd(lines, _SETS)
    return problem.x.dtype != problem.work or problem.channels > sets * _WAYS


def load(problem: ConvProblem, block: Block, pixels: Array, stage: Array) -> list[Step]:
    """The steps that write `pixels`: images, pixels of each axis, C; zeros where no window reads any.

    Where it `needs_staging`, they are copied to `stage` before, C rows with room for them.
    """
    images = problem.x if problem.channels_last else np.moveaxis(problem.x, 1, -1)
    inside, source = [slice(None)], [block.images]
    calls: list[Step] = []
    for axis, part, one in zip(problem.axes, block.tiles, block.tiling.filters, strict=True):
        number = len(inside)
        length = pixels.shape[number]
        origin = part.start * one.outputs - axis.head
        start = min(max(0, -origin), length)
        stop = max(start, min(length, min(axis.size, axis.covered - axis.head) - origin))
        every = (slice(None),) * number
        gaps = (pixels[(*every, slice(0, start))], pixels[(*every, slice(stop, None))])
        calls += [partial(gap.fill, 0) for gap in gaps if gap.size]
        inside.append(slice(start, stop))
        source.append(slice(start + origin, stop + origin))
    target, origin_pixels = pixels[tuple(inside)], images[tuple(source)]
    if not target.size:
        return calls
    if needs_staging(problem):
        rows = stage[:, : target.size // problem.channels]
        staged = np.moveaxis(rows.reshape(problem.channels, *target.shape[:-1]), 0, -1)
        calls.append(partial(np.copyto, staged, origin_pixels))
        origin_pixels = staged
    return [*calls, partial(np.copyto, target, origin_pixels)]


def gather(block: Block, pixels: Array, target: Array) -> Step:
    """The step that copies the pixels of the tiles of the last axis to `target`.

    `pixels` is images, pixels of each axis, C; `target` t of the last axis, images, pixels of the other axes, tiles of
    the last one, C.
    """
    *outer, last, channel = pixels.strides
    one = block.tiling.filters[-1]
    shape = (one.tile, *pixels.shape[:-2], block.counts[-1], pixels.shape[-1])
    view = as_strided(pixels, shape, (last, *outer, one.outputs * last, channel), writeable=False)
    return partial(np.copyto, target.reshape(shape), view)


def store(problem: ConvProblem, block: Block, results: Array) -> list[Step]:
    """The steps that write `results` (images, tiles, m of each axis, M) to their pixels of y.

    The last tile of an axis may hold pixels that y does not have.
    """
    output = (problem.y if problem.channels_last else np.moveaxis(problem.y, 1, -1))[block.images]
    image, *steps, filters = output.strides
    outputs = block.tiling.outputs
    strides = (image, *(m * step for m, step in zip(outputs, steps, strict=True)), *steps, filters)
    choices = []
    for axis, part, m in zip(problem.axes, block.tiles, outputs, strict=True):
        whole, rest = divmod(min(part.stop * m, axis.out) - part.start * m, m)
        choices.append([(slice(0, whole), m)] * (whole > 0) + [(slice(whole, whole + 1), rest)] * (rest > 0))
    calls: list[Step] = []
    for pieces in product(*choices):
        source = results[(slice(None), *(tiles for tiles, _ in pieces), *(slice(0, count) for _, count in pieces))]
        starts = [part.start + tiles.start for part, (tiles, _) in zip(block.tiles, pieces, strict=True)]
        corner = output[(slice(None), *(slice(start * m, None) for start, m in zip(starts, outputs, strict=True)))]
        target = as_strided(corner, source.shape, strides)
        calls.append(_copy_runs(target.swapaxes(-2, -1), source.swapaxes(-2, -1)))
    return calls


def _copy_runs(target: Array, source: Array) -> Step:
    """The step that copies `source`, the last axis as one element where it is contiguous in both.

    NumPy moves such an element at once, where its loop over a short axis costs more than the elements.
    """
    run = target.shape[-1]
    if run > 1 and target.dtype == source.dtype and {target.strides[-1], source.strides[-1]} == {target.itemsize}:
        whole = np.dtype((np.void, run * target.itemsize))
        target, source = target.view(whole)[..., 0], source.view(whole)[..., 0]
    return partial(np.copyto, target, source, casting="same_kind")
