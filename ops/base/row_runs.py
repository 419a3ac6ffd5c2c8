"""Rows of tensors that are stretched to some leading axes, as runs: in each, every tensor has its rows at a stride.

That is 0 for what all rows of a run share: a scale, or the mask of an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def joined_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """As few axes as say the same, none of size 1: the size of each, and the strides of several arrays along it."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(before == size * step for before, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = axes[-1][0] * size, tuple(steps)
        else:
            axes.append((size, tuple(steps)))
    return axes


class RowRuns:
    """The rows of arrays of at least one axis, the last of which is within rows, stretched to leading axes.

    Attributes:
        rows: how many there are of each.
        count: those of a run.
        steps: the bytes from each array's row to its next, in a run.
    """

    def __init__(self, leading: Sequence[int], arrays: Sequence[Array]) -> None:
        views = [np.broadcast_to(array, (*leading, array.shape[-1])) for array in arrays]
        self._arrays, self.rows = arrays, math.prod(leading)
        self._axes = joined_axes(leading, [view.strides[:-1] for view in views]) or [(1, (0,) * len(arrays))]
        self.count, self.steps = self._axes[-1]

    def offsets(self, row: int) -> list[int]:
        """The bytes from the beginning of each array to its row of this number."""
        found = [0] * len(self._arrays)
        for size, strides in reversed(self._axes):
            row, index = divmod(row, size)
            found = [offset + index * stride for offset, stride in zip(found, strides, strict=True)]
        return found

    def cut(self, part: range, most: int = 1 << 62) -> Iterator[range]:
        """Rows of a part in pieces of one run and of at most so many."""
        start = part.start
        while start < part.stop:
            stop = min(part.stop, start - start % self.count + self.count, start + most)
            yield range(start, stop)
            start = stop

    def views(self, piece: range) -> list[Array]:
        """What is in a piece of one run of each array: [rows, what is in a row, 1]."""
        return [
            np.lib.stride_tricks.as_strided(
                array.reshape(-1)[offset // array.itemsize :],
                (len(piece), array.shape[-1], 1),
                (step, array.itemsize, array.itemsize),
            )
            for array, offset, step in zip(self._arrays, self.offsets(piece.start), self.steps, strict=True)
        ]
