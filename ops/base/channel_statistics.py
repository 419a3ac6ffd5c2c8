"""Sums over all elements of a channel, accurate and in pieces that stay in the cache, for batch normalization.

A tensor is outer x channels x inner: N x C x pixels for NCHW, N * pixels x C x 1 for NHWC. It is worked on by blocks of
whole channels, each in pieces along the outer axis. A piece is summed in its own dtype (float32 for 16-bit floats) by
BLAS, whose partial sums are short, and what pieces give is added in float64. Variances are not differences of large
sums: a piece is centered by its own mean first, and pieces are put together by the formula of Chan, Golub and LeVeque
(1983, "Algorithms for computing the sample variance").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall
from dagexec.ops.base.blocks import BLOCK, Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.layout import channel_axis
from dagexec.platform.records import dataclass

_MIN_RUN = 1024  # elements of a channel block that lie together: shorter runs make slow passes
_SHORT = 128  # pixels below which a pass goes along channels and pixels together
_MAX_ROWS = 4096  # rows that are added up one after another in the dtype of the tensor


def channel_view(call: OperatorCall) -> tuple[int, int, int]:
    """The shape of the first input, an image tensor, as (outer, channels, inner)."""
    shape = call.inputs[0].shape
    axis = channel_axis(call)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class ChannelBlock:
    """Some channels, and the pieces along the outer axis that they are worked on in."""

    channels: slice
    outer: tuple[slice, ...]

    @property
    def width(self) -> int:
        """How many channels."""
        return int(self.channels.stop - self.channels.start)


class ChannelPieces:
    """The pieces of tensors of one shape, and the passes over them.

    `one[i]` is a view of a piece of a tensor; passes write to float64 vectors with an element a channel of the block.
    """

    def __init__(self, owner: Operator, view: tuple[int, int, int], dtype: np.dtype[Any]) -> None:
        """`view` is (outer, channels, inner), none of them 0; `dtype` that of the tensors."""
        outer, channels, inner = view
        self._owner, self._view = owner, view
        self.work = compute_dtype(dtype)
        self._narrow = is_narrow(dtype)
        self._short = inner < _SHORT
        width = min(channels, max(BLOCK // (outer * inner), -(-_MIN_RUN // inner), 1))
        rows = max(1, BLOCK // (width * inner))
        if self._short:
            rows = min(rows, _MAX_ROWS)
        rows = min(rows, outer)
        pieces = tuple(slice(start, min(start + rows, outer)) for start in range(0, outer, rows))
        self.blocks = [
            ChannelBlock(slice(start, min(start + width, channels)), pieces) for start in range(0, channels, width)
        ]
        self._largest = (rows, width, inner)
        self._ones = np.ones(rows if self._short else inner, self.work)
        self._sums = owner.scratch((width * inner,) if self._short else (rows, width), self.work)

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self._view[0] * self._view[2]

    def elements(self, outer: slice) -> int:
        return int(outer.stop - outer.start) * self._view[2]

    def scratch(self) -> Array:
        """Memory for the largest piece, in the dtype of the work; see `cut`."""
        return self._owner.scratch((math.prod(self._largest),), self.work)

    def vector(self, *, wide: bool = True) -> Array:
        """A float64 vector with an element for each channel of a block; in the dtype of the work unless `wide`."""
        return self._owner.scratch((self._largest[1],), np.float64 if wide else self.work)

    def cut(self, scratch: Array, block: ChannelBlock, outer: slice) -> Array:
        """A piece of such memory."""
        rows, width, inner = int(outer.stop - outer.start), block.width, self._view[2]
        flat = scratch[: rows * width * inner]
        return flat.reshape(rows, width * inner) if self._short else flat.reshape(rows, width, inner)

    def piece(self, array: Array, block: ChannelBlock, outer: slice) -> Array:
        """The piece of a tensor."""
        found = array.reshape(self._view)[outer, block.channels]
        return found.reshape(len(found), -1) if self._short else found

    def read(
        self, array: Array, block: ChannelBlock, outer: slice, spare: Array | None = None
    ) -> tuple[Array, list[Step]]:
        """The piece of a tensor in the dtype of the work, with the steps that convert it to memory `spare`."""
        found = self.piece(array, block, outer)
        if not self._narrow or spare is None:
            return found, []
        wide = self.cut(spare, block, outer)
        return wide, [convert(found, wide)]

    def spare(self) -> Array | None:
        """Memory for `read`, where it is needed."""
        return self.scratch() if self._narrow else None

    def walk(self) -> Iterator[tuple[ChannelBlock, slice]]:
        """All pieces, block by block."""
        for block in self.blocks:
            for outer in block.outer:
                yield block, outer

    def total(self, part: Array, target: Array) -> list[Step]:
        """The steps that write the sum of each channel of a piece to `target`, in float64."""
        if self._short:
            sums = self._sums[: part.shape[1]]
            return [partial(np.matmul, self._ones[: len(part)], part, out=sums), self._fold(sums, target)]
        sums = self._sums[: len(part), : part.shape[1]]
        return [partial(np.matmul, part, self._ones, out=sums), self._add_rows(sums, target)]

    def product(self, one: Array, other: Array, target: Array) -> list[Step]:
        """The steps that write the sum over each channel of the products of two pieces to `target`."""
        if self._short:
            sums = self._sums[: one.shape[1]]
            return [partial(np.einsum, "ai,ai->i", one, other, out=sums), self._fold(sums, target)]
        sums = self._sums[: len(one), : one.shape[1]]
        return [partial(np.vecdot, one, other, out=sums), self._add_rows(sums, target)]

    def _fold(self, sums: Array, target: Array) -> Step:
        return partial(np.add.reduce, sums.reshape(len(target), -1), axis=1, dtype=np.float64, out=target)

    def _add_rows(self, sums: Array, target: Array) -> Step:
        return partial(np.add.reduce, sums, axis=0, dtype=np.float64, out=target)

    def spread(self, values: Array) -> tuple[Array, list[Step]]:
        """A vector with an element a channel of a block as it broadcasts to a piece, with the steps that make it so."""
        inner = self._view[2]
        if not self._short:
            return values[:, None], []
        if inner == 1:
            return values, []
        wide = self._owner.scratch((len(values), inner), values.dtype)
        return wide.reshape(-1), [partial(np.copyto, wide, values[:, None])]


def moment_steps(
    pieces: ChannelPieces, x: Array, block: ChannelBlock, mean: Array, variance: Array, memory: MomentMemory
) -> list[Step]:
    """The steps that write the mean and the population variance of each channel of a block, in float64.

    When the block has one piece, the last of `memory.centered` is that piece minus `memory.center` afterwards.
    """
    width = block.width
    total, rest, square = (array[:width] for array in (memory.total, memory.rest, memory.square))
    center = memory.center[:width]
    shift, spread = pieces.spread(center)
    steps: list[Step] = []
    before = 0
    for outer in block.outer:
        source, reads = pieces.read(x, block, outer, memory.spare)
        centered = pieces.cut(memory.centered, block, outer)
        count = pieces.elements(outer)
        steps += [
            *reads,
            *pieces.total(source, total),
            partial(np.divide, total, count, out=center, casting="same_kind"),
            *spread,
            partial(np.subtract, source, shift, out=centered),
            *pieces.total(centered, rest),
            *pieces.product(centered, centered, square),
            partial(_merge, before, count, center, rest, square, mean, variance),
        ]
        before += count
    steps.append(partial(np.divide, variance, before, out=variance))
    return steps


def _merge(before: int, count: int, center: Array, rest: Array, square: Array, mean: Array, deviations: Array) -> None:
    """Add a piece of `count` elements to mean and sum of squared deviations of the `before` elements so far.

    Of the piece, `rest` and `square` are the sums of its elements minus `center`, and of their squares.
    """
    rest /= count
    square -= count * rest * rest
    rest += center
    if before == 0:
        mean[...], deviations[...] = rest, square
        return
    together = before + count
    rest -= mean
    mean += rest * (count / together)
    deviations += square + rest * rest * (before * count / together)


class MomentMemory:
    """Working memory of `moment_steps`, for the blocks of one operator in turn."""

    def __init__(self, pieces: ChannelPieces) -> None:
        self.total, self.rest, self.square = (pieces.vector() for _ in range(3))
        self.center = pieces.vector(wide=False)
        self.centered = pieces.scratch()
        self.spare = pieces.spare()
