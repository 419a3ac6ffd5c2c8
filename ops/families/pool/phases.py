"""Pixels laid out by phase, so that one tap of all windows reads one contiguous row.

With a stride s, the pixels that one tap reads are s apart. Pixels whose positions leave the same remainders when
divided by the strides make a phase: an image as large as the output, and a little larger. In it a window's tap is at
the window's own place plus a shift that is the same for all windows, so that images one after another are one long row,
and a tap of all their windows is this row from the shift on. What is found across the ends of rows belongs to no
window. This is the polyphase form of a decimating filter (Vaidyanathan 1993, "Multirate Systems and Filter Banks",
chapter 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.pool.window import Array
from dagexec.platform.records import dataclass

Places = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: where in it there are pixels of the image, and which (the rest is padding)."""

    inside: Places
    pixels: Places


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of images under a window.

    Attributes:
        shape: of an image in each phase: the spatial axes, then any others.
        phases: in the order in which arrays of phases have them.
        taps: for each tap of a window, in row-major order, its phase and its shift along the row.
        windows: where in an image of `shape` the windows are.
        reads_padding: some tap of some window lies outside the image.
        complete: every pixel is in some phase.
    """

    shape: tuple[int, ...]
    phases: tuple[Phase, ...]
    taps: tuple[tuple[int, int], ...]
    windows: Places
    reads_padding: bool
    complete: bool

    @property
    def elements(self) -> int:
        """Elements of an image in one phase."""
        return math.prod(self.shape)


def split_phases(axes: Sequence[Axis], inner: tuple[int, ...]) -> Phases:
    """The phases of images with these spatial axes, and then axes of sizes `inner`."""
    offsets = [[divmod(tap * axis.dilation, axis.stride) for tap in range(axis.kernel)] for axis in axes]
    shape = (*(axis.out + axis.dilation * (axis.kernel - 1) // axis.stride for axis in axes), *inner)
    pitches = [math.prod(shape[number + 1 :]) for number in range(len(axes))]
    remainders = [sorted({remainder for _, remainder in row}) for row in offsets]
    parts = [
        [replace(axis, kernel=1, dilation=1, head=axis.head - remainder, out=length).tap(0) for remainder in row]
        for axis, length, row in zip(axes, shape, remainders, strict=False)
    ]
    keys = list(product(*remainders))
    taps = [
        (
            keys.index(tuple(remainder for _, remainder in tap)),
            sum(quotient * pitch for (quotient, _), pitch in zip(tap, pitches, strict=True)),
        )
        for tap in product(*offsets)
    ]
    found = [sum(len(range(axis.size)[pixels]) for _, pixels in row) for axis, row in zip(axes, parts, strict=True)]
    return Phases(
        shape=shape,
        phases=tuple(Phase(*zip(*phase, strict=True)) for phase in product(*parts)),
        taps=tuple(taps),
        windows=tuple(slice(0, axis.out) for axis in axes),
        reads_padding=any(axis.reads_padding for axis in axes),
        complete=all(count == axis.size for count, axis in zip(found, axes, strict=True)),
    )


def part(images: Array, places: Places) -> Array:
    """The pixels of images at `places` of their spatial axes: a view."""
    return images[(slice(None), *places)]
