"""Convolutions in pieces: images, and rows of them, each by a primitive of one image and one thread.

Which pieces there are follows from the geometry of one image alone. So the bytes of an image depend neither on
which threads compute the pieces, nor on the images beside it, whatever the library does within a primitive: oneDNN 3.1
chooses how `brgconv` cuts rows, channels and taps by estimates in which images count
(`brg_blocking_t::est_eff` in src/cpu/x64/jit_brgemm_conv_utils.cpp), and with them the order in which it adds up
(`ker_base` in jit_brgemm_conv.cpp: taps that all columns of a block have come after those that some have).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from dagexec.core.native import NativeStep, phases_of
from dagexec.core.native_tables import merged
from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn.bound import Rebindable
from dagexec.ops.engines.onednn.descriptors import Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.problem import (
    Assembled,
    Candidate,
    Memory,
    Pack,
    Problem,
    StillArguments,
    assemble,
    joined,
    on_lines,
)
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import can_run, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

_PARTS = 4
"""Of a batch whose rows need not have the bytes that they have alone."""

MOST_OF_BATCH = 32
"""Pieces of a batch."""

_KEPT_BYTES, _PIXELS = 512 << 10, 64
"""Weights of more bytes are read again for each piece: then it has at least so many pixels, if there are two pieces."""


_ALL = (slice(None),) * 8

ONE = 0, 1
"""The first image alone."""


@dataclass(frozen=True)
class Part:
    """A part of a convolution's result.

    Attributes:
        images: the first that it is of, and the one behind the last; None for all.
        axis: the axis of the window that is cut, 0 for the first.
        rows: the windows along that axis, of images with channels last; None for all.
        filters: those whose channels it is, of images in blocks of so many channels; None for all.
        block: that number.
    """

    images: tuple[int, int] | None = None
    axis: int = 0
    rows: range | None = None
    filters: range | None = None
    block: int = 1

    def axes(self, axes: Sequence[Axis]) -> list[Axis]:
        """The axes of the window, over the pixels that the rows read."""
        if self.rows is None:
            return list(axes)
        first, last = self._read(axes[self.axis])
        cut = axes[self.axis].part(self.rows.start, self.rows.stop)
        cut = replace(cut, size=last - first, head=max(0, cut.head))
        return [*axes[: self.axis], cut, *axes[self.axis + 1 :]]

    def source(self, x: Array, axes: Sequence[Axis]) -> Array:
        """What of images it reads."""
        if self.rows is None:
            return x[self._images]
        return x[(self._images, *_ALL[: self.axis], slice(*self._read(axes[self.axis])))]

    def result(self, y: Array) -> Array:
        """What of images it is."""
        return y[(self._images, *self._place)]

    def parameter(self, array: Array) -> Array:
        """What it reads of a filter M, ... or of a number for each channel of the result."""
        return array if self.filters is None else array[self.filters.start : self.filters.stop]

    def operand(self, operand: Array, y: Array) -> Array:
        """What goes with it of an operand that broadcasts to the result `y`."""
        if operand.ndim != y.ndim:
            return operand
        found = operand[self._images] if len(operand) == len(y) else operand
        axis = len(self._place)
        return found[(_ALL[0], *self._place)] if axis and operand.shape[axis] == y.shape[axis] else found

    @property
    def _images(self) -> slice:
        return slice(*(self.images or (None, None)))

    @property
    def _place(self) -> tuple[slice, ...]:
        """Where it is in an image of the result."""
        if self.filters is not None:
            return (slice(self.filters.start // self.block, self.filters.stop // self.block),)
        return () if self.rows is None else (*_ALL[: self.axis], slice(self.rows.start, self.rows.stop))

    def _read(self, axis: Axis) -> tuple[int, int]:
        """The first pixel along the cut axis that the rows read, and the one behind the last."""
        assert self.rows is not None, "all rows are read"
        start = self.rows.start * axis.stride - axis.head
        stop = (self.rows.stop - 1) * axis.stride - axis.head + axis.extent
        return max(0, start), min(axis.size, stop)


def parts_of_image(axes: Sequence[Axis], seconds: float, weights_nbytes: int) -> list[Part]:
    """The pieces of an image in channels-last order, whose result takes so many seconds, by weights of so many bytes.

    Rows are cut along the first axis that has several, so that pieces are packed.
    """
    cut = _cut_axis(axes)
    if cut is None:
        return [Part(ONE)]
    pixels = prod(axis.out for axis in axes)
    count = pieces_of(seconds, MOST_OF_ONE)
    if weights_nbytes > _KEPT_BYTES:
        count = min(count, max(2, pixels // _PIXELS))
    return rows_of_image(axes, count)


def rows_of_image(axes: Sequence[Axis], count: int, images: tuple[int, int] = ONE) -> list[Part]:
    """An image in channels-last order in at most so many pieces."""
    whole, cut = [Part(images)], _cut_axis(axes)
    if cut is None:
        return whole
    count = min(count, axes[cut].out)
    count -= count > 1 and count % 2  # two threads share them
    if count <= 1:
        return whole
    parts = [Part(images, cut, share) for share in shares(axes[cut].out, count)]
    return parts if all(part.axes(axes)[cut].size > 0 for part in parts) else whole


def _cut_axis(axes: Sequence[Axis]) -> int | None:
    """The first axis that has several rows."""
    return next((number for number, axis in enumerate(axes) if axis.out > 1 or axis.size > 1), None)


def parts_of_filters(filters: int, block: int, seconds: float, most: int) -> list[Part]:
    """The pieces, at most so many, of an image whose result is in blocks of channels and takes so many seconds."""
    blocks = filters // block
    count = min(pieces_of(seconds, most), blocks)
    count -= count > 1 and count % 2
    if count <= 1:
        return [Part(ONE)]
    cut = [range(block * share.start, block * share.stop) for share in shares(blocks, count)]
    return [Part(ONE, filters=channels, block=block) for channels in cut]


def parts_of_batch(batch: int, weights_nbytes: int) -> list[Part]:
    """The parts of a batch whose rows need not have the bytes that they have alone, with weights of so many bytes."""
    count = min(batch, _PARTS if weights_nbytes <= _KEPT_BYTES else 2)
    return [Part((share.start, share.stop)) for share in shares(batch, count)]


class Turns:
    """Working memory of parts that are computed one after another, which is the same for all."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arrays: list[Array] = []
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Bytes that were taken, on lines of a cache."""
        return sum(on_lines(array.nbytes) for array in self._arrays)

    def next_part(self) -> None:
        """From here on it is for another part."""
        self._taken = 0

    def memory(self, nbytes: int) -> Array:
        """As the operator's."""
        place = self._taken
        self._taken += 1
        if place == len(self._arrays):
            self._arrays.append(self._memory(nbytes))
        elif self._arrays[place].nbytes < nbytes:
            self._arrays[place] = self._memory(nbytes)
        found: Array = self._arrays[place][:nbytes]
        return found


class _Packed:
    """Parameters in other layouts, for all pieces.

    Attributes:
        steps: what brings those there that are fed.
    """

    def __init__(self, pack: Pack) -> None:
        self.steps: list[Step] = []
        self._pack = pack
        self._found: list[tuple[int, int, Descriptor, Array]] = []

    def pack(
        self, number: int, array: Array, source: Descriptor, target: Descriptor, making: Making | None = None
    ) -> tuple[Array, Step]:
        """As the operator's; there is nothing left to do in a piece."""
        for known, start, layout, packed in self._found:
            if known == number and layout == target and start == address_of(array):
                return packed, nothing_to_do
        packed, step = self._pack(number, array, source, target, making)
        self._found.append((number, address_of(array), target, packed))
        if step is not nothing_to_do:
            self.steps.append(step)
        return packed, nothing_to_do


class _Bound(Rebindable):
    """The arguments of all pieces, which lie in those of the whole."""

    def __init__(self, pieces: Sequence[Assembled], offsets: Sequence[Mapping[int, int]], sizes: Mapping[int, int]):
        """`offsets`: in elements, from the beginning of an array of the whole; `sizes`: bytes of those."""
        self._pieces, self._offsets, self._sizes = pieces, offsets, sizes

    def move(self, number: int, array: Array) -> None:
        elements = array.reshape(-1)
        for piece, offsets in zip(self._pieces, self._offsets, strict=True):
            piece.bound.move(number, elements[offsets[number] :])

    def nbytes(self, number: int) -> int:
        return self._sizes[number]


class Together(Rebindable):
    """The same arguments of several primitives, so many of which have parts of them, one behind another."""

    def __init__(self, bounds: Sequence[Rebindable], parts: int) -> None:
        self._bounds, self._parts = bounds, parts

    def move(self, number: int, array: Array) -> None:
        size = self._bounds[0].nbytes(number)
        for place, bound in enumerate(self._bounds):
            bound.move(number, array[place % self._parts * size :])

    def nbytes(self, number: int) -> int:
        return self._bounds[0].nbytes(number) * self._parts


Piece = tuple[Problem, Candidate, Mapping[int, Array]]
"""What computes a problem, and the arrays of its arguments."""


def computed_in_pieces(
    label: str,
    parts: Sequence[Piece],
    count: int,
    memory: Memory,
    pack: Pack,
    whole: Mapping[int, Array] | None = None,
) -> Assembled:
    """The steps of all parts, each a candidate for a problem on its part of the arrays, in at most `count` pieces.

    With the arrays of the `whole`, in which those of
    the parts lie, arguments can be moved.
    """
    packed = _Packed(pack)
    made: list[Assembled] = []
    pieces: list[list[Step]] = []
    cut = shares(len(parts), min(len(parts), count))
    for share in cut:
        turns = Turns(memory)
        pieces.append([])
        for problem, candidate, arrays in parts[share.start : share.stop]:
            turns.next_part()
            made.append(assemble(problem, candidate, arrays, turns.memory, packed.pack))
            pieces[-1] += made[-1].steps
        if share is cut[0]:
            memory = joined(memory, turns.nbytes * (len(cut) - 1))
    steps, nbytes = [*packed.steps, *side_by_side(pieces)], sum(one.nbytes for one in made)
    if whole is None:
        return Assembled(steps, StillArguments(), frozenset(), nbytes)
    starts = {number: address_of(array) for number, array in whole.items()}
    offsets = [
        {number: (address_of(array) - starts[number]) // array.itemsize for number, array in arrays.items()}
        for _, _, arrays in parts
    ]
    bound = _Bound(made, offsets, {number: array.nbytes for number, array in whole.items()})
    return Assembled(steps, bound, frozenset.intersection(*(one.direct for one in made)), nbytes)


def side_by_side(pieces: Sequence[Sequence[Step]]) -> list[Step]:
    """The step whose pieces are these steps, each list in order; or all steps, where one is more than native calls."""
    steps = [step for piece in pieces for step in piece]
    found = [[phases_of(step) for step in piece] for piece in pieces]
    if not can_run() or any(phases is None for piece in found for phases in piece):
        return steps
    if len(pieces) == 1:
        return merged(steps)
    calls = tuple(
        tuple(call for phases in piece for phase in phases or () for part in phase for call in part) for piece in found
    )
    return [NativeStep((calls,))]
