"""A convolution of several images as that of one image, several times: an image gets the bytes that it gets alone.

It is for implementations that add up in another order for another number of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.kernels.native import join
from dagexec.ops.onednn.primitive import Array, Descriptor, Rebindable
from dagexec.ops.onednn.problem import Assembled, Candidate, Compute, Memory, Pack, Problem, assemble


class _Shared:
    """Working memory, and parameters in other layouts, of the first image for all of them: they take turns."""

    def __init__(self, memory: Memory, pack: Pack) -> None:
        self._memory, self._pack = memory, pack
        self._arrays: list[Array] = []
        self._packed: dict[int, Array] = {}
        self._taken = 0

    def next_image(self) -> None:
        """From here on it is for another image."""
        self._taken = 0

    def memory(self, nbytes: int) -> Array:
        """As the operator's, at the same place for each image: all ask for the same in the same order."""
        if self._taken == len(self._arrays):
            self._arrays.append(self._memory(nbytes))
        self._taken += 1
        return self._arrays[self._taken - 1]

    def pack(
        self, number: int, array: Array, source: Descriptor, target: Descriptor, compute: Compute | None = None
    ) -> tuple[Array, Step]:
        """As the operator's for the first image; there is nothing left to do for others."""
        if number in self._packed:
            return self._packed[number], nothing_to_do
        self._packed[number], step = self._pack(number, array, source, target, compute)
        return self._packed[number], step


class _EachImage(Rebindable):
    """The arguments of all images; those in `divided` have a part for each."""

    def __init__(self, images: Sequence[Rebindable], divided: frozenset[int]) -> None:
        self._images, self._divided = images, divided

    def move(self, number: int, array: Array) -> None:
        for place, image in enumerate(self._images):
            image.move(number, array[place : place + 1] if number in self._divided else array)

    def nbytes(self, number: int) -> int:
        return self._images[0].nbytes(number) * (len(self._images) if number in self._divided else 1)


def image_by_image(
    problem: Problem,
    candidate: Candidate,
    images: Sequence[Mapping[int, Array]],
    memory: Memory,
    pack: Pack,
    divided: frozenset[int],
) -> Assembled:
    """The steps of `candidate`, for the problem of one image, on the arrays of all `images`, one after another.

    Arguments in `divided` are parts of arrays, an image each; others are the same for all images.
    """
    shared = _Shared(memory, pack)
    found = []
    for arrays in images:
        shared.next_image()
        found.append(assemble(problem, candidate, arrays, shared.memory, shared.pack))
    steps = [step for one in found for step in one.steps]
    return Assembled(
        join(steps, [0.0] * len(steps), 1.0),
        _EachImage([one.bound for one in found], divided),
        frozenset.intersection(*(one.direct for one in found)),
        sum(one.nbytes for one in found),
    )
