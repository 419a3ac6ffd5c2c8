"""The transpose of summing windows: each pixel gets the sum, over the windows that it is in, of one value a window.

The values are laid out over the pixels, at the stride, with zeros between them, the last tap of each window first. A
pixel's sum is then that of a window of stride 1, which is taken one axis after the other (see `reduction`), always in
the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.pool.reduction import axis_shifts, combine_shifted, window_starts
from dagexec.ops.families.pool.window import Array, image_blocks

Values = Callable[[slice, Array], Sequence[Step]]
"""The steps that write the value of each window of the images `piece` into an array (a strided view)."""

Sums = Callable[[slice, Array], Sequence[Step]]
"""The steps that turn the sums for the images `piece` (a view of their shape) into the result."""


def spread(
    owner: Operator, shape: tuple[int, ...], axes: Sequence[Axis], work: np.dtype[Any], values: Values, sums: Sums
) -> Step:
    """The step that spreads values over images of `shape`: their number, the spatial axes, then any others."""
    axes = [axis.trimmed() for axis in axes]
    inner = shape[1 + len(axes) :]
    before = [max(0, axis.head - axis.extent + 1) for axis in axes]  # room for windows that end before the image
    starts = [room + axis.extent - 1 - axis.head for room, axis in zip(before, axes, strict=True)]
    places = tuple(
        slice(start, start + (axis.out - 1) * axis.stride + 1, axis.stride)
        for start, axis in zip(starts, axes, strict=True)
    )
    lengths = (
        max(room + axis.size + axis.extent - 1, place.stop)
        for room, axis, place in zip(before, axes, places, strict=True)
    )
    grid = (*lengths, *inner)
    blocks = image_blocks(shape[0], math.prod(grid))
    count = blocks[0].stop
    laid_out = owner.scratch((count, *grid), work)
    laid_out.fill(0)
    first = sum(room * math.prod(grid[1 + number :]) for number, room in enumerate(before))
    passes = axis_shifts(axes, grid)
    results = [owner.scratch((count * math.prod(grid),), work) for _ in passes[:2]]
    single = [replace(axis, stride=1) for axis in axes]
    calls: list[Step] = []
    for piece in blocks:
        block = laid_out[: piece.stop - piece.start]
        row, steps = combine_shifted(np.add, block.reshape(-1), passes, results)
        found = window_starts(row[first:], grid, single, (len(block), *shape[1:]))
        calls += [*values(piece, block[(slice(None), *places)]), *steps, *sums(piece, found)]
    return in_sequence(calls)
