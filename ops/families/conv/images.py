"""One image after the other, so that the bytes of an image's output do not depend on the batch it is in.

Whatever an algorithm chooses by the batch (images whose columns are multiplied together, tilings, lengths of blocks),
it chooses for one image here, and its products have the sizes that they have for a batch of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.families.conv.problem import Allocate, Array, ConvProblem, Steps


def image_by_image(steps: Steps) -> Steps:
    """`steps` for each image of a batch, all in the memory of the first."""

    def apart(problem: ConvProblem, allocate: Allocate) -> list[Step]:
        calls: list[Step] = []
        memory = _Repeated(allocate)
        for number in range(problem.batch):
            memory.again()
            calls += steps(problem.image(number), memory)
        return calls

    return apart


class _Repeated:
    """An Allocate that gives what it gave before for the same requests, from the first on, after each `again`."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._given: list[Array] = []
        self._next = 0

    def again(self) -> None:
        """The next request is the first one again."""
        self._next = 0

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        if self._next == len(self._given):
            self._given.append(self._allocate(shape, dtype))
        self._next += 1
        return self._given[self._next - 1]
