"""How much of each pixel of an image is in each pixel of a rotated region, whose samples lie on no rows or columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.schema import OperatorCall
from dagexec.errors import ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.image.regions import MOST_SAMPLES, corners_of, require_sides


class RotatedRegion:
    """Samples of a region: the pixels around each, and their weights."""

    def __init__(
        self, call: OperatorCall, place: Array, image: Sequence[int], sizes: Sequence[int], work: np.dtype
    ) -> None:
        """Of the scaled center, width and height and the angle in degrees, counterclockwise, where rows go down.

        Raises ShapeError for a region that is no number, or too large; with aligned=1, for one of negative sides.
        """
        if not np.isfinite(place).all():
            raise ShapeError(f"{call.label}: a region must be numbers, found {place.tolist()}")
        x, y, wide, high, degrees = place
        if call.arguments.bool("aligned"):
            require_sides(call, wide, high)
        else:
            wide, high = max(wide, 1.0), max(high, 1.0)
        ratio = max(0, call.arguments.int("sampling_ratio", 0))
        counts = [ratio or math.ceil(side / size) for side, size in zip((high, wide), sizes, strict=True)]
        if math.prod(counts) * math.prod(sizes) > MOST_SAMPLES:
            raise ShapeError(f"{call.label}: a region of {wide:g} x {high:g} pixels is too large to be sampled")
        down, right = (
            side * ((np.arange(size)[:, None] + (np.arange(count) + 0.5) / max(1, count)) / size - 0.5)
            for side, size, count in zip((high, wide), sizes, counts, strict=True)
        )
        down, right = down[:, None, :, None], right[None, :, None, :]
        sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
        shape = (*sizes, math.prod(counts))
        self._rows = corners_of((down * cosine - right * sine + y).reshape(shape), image[0])
        self._columns = corners_of((right * cosine + down * sine + x).reshape(shape), image[1])
        self._work = work

    def _pixels(self) -> Iterator[tuple[Array, Array, Array]]:
        """Four times the rows, the columns and the weights of a pixel of each sample."""
        row, next_row, down, in_rows = self._rows
        column, next_column, right, in_columns = self._columns
        share = (in_rows & in_columns) / max(1, row.shape[2])
        for rows, of_row in ((row, 1 - down), (next_row, down)):
            for columns, of_column in ((column, 1 - right), (next_column, right)):
                yield rows, columns, (of_row * of_column * share).astype(self._work)[..., None]

    def mean(self, pixels: Array) -> Array:
        """The region of an image, both height x width x channels."""
        found: Array = sum((weights * pixels[rows, columns]).sum(2) for rows, columns, weights in self._pixels())
        return found

    def add_gradient(self, of_region: Array, pixels: Array) -> None:
        """Add to the gradient of an image what the gradient of the region gives."""
        for rows, columns, weights in self._pixels():
            np.add.at(pixels, (rows, columns), weights * of_region[:, :, None])
