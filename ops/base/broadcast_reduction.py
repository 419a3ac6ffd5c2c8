"""Functions of tensors that are stretched to one shape, summed where the result is stretched: gradients of broadcasts.

If a tensor is stretched to a shape along some axes, its gradient is the sum over these axes of the gradient by the
stretched one. The computation is cut into pieces that stay in the cache, as in `blocks`; of a function of several
passes only pieces of its values exist. Pieces add up in memory order.

Where the first axis is not summed over, it may be a batch: then each of its rows has the same bytes whatever is beside
it, and no BLAS sums, which would choose its order by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, compute_dtype, convert, even_ranges
from dagexec.platform.addresses import address_of

SourcePasses = Callable[[Sequence[Array], Array, Scratch], list[Step]]
"""The NumPy calls for one piece: pieces of the sources, which broadcast to the piece of the result, that piece, and
scratch. The result may be the memory of a source, so no pass reads a source after the result has been written. One pass
alone uses no scratch, as it is not cut."""

Slices = tuple[slice, ...]


def merged_axes(shape: tuple[int, ...], arrays: Sequence[Array]) -> tuple[tuple[int, ...], list[Array]]:
    """The shape and the packed arrays, of as many axes each, in as few axes as say the same; at least one.

    Neighboring axes become one where each array fills both or is stretched along both. No size may be 0.
    """
    sizes: list[int] = []
    kinds: list[tuple[bool, ...]] = []
    for axis, size in enumerate(shape):
        kind = tuple(array.shape[axis] == 1 for array in arrays)
        if size == 1:
            continue
        if kinds and kinds[-1] == kind:
            sizes[-1] *= size
        else:
            sizes.append(size)
            kinds.append(kind)
    views = [
        array.reshape([1 if kind[index] else size for size, kind in zip(sizes, kinds, strict=True)] or [1])
        for index, array in enumerate(arrays)
    ]
    return tuple(sizes) or (1,), views


def reduced(
    owner: Operator, shape: tuple[int, ...], sources: Sequence[Array], target: Array, passes: SourcePasses | None = None
) -> Step:
    """The step that computes `passes` of `sources`, each stretched to `shape`, and sums it into `target`.

    Sources and target are packed, of as many axes as `shape` and along each of that size or 1; the sum is over the axes
    along which the target is stretched. Without `passes` the first source is summed. Pieces have the compute dtype of
    the target; booleans stay. A computation of one pass, without a sum, is not cut.
    """
    if 0 in shape:
        return partial(target.fill, 0) if target.size else nothing_to_do
    if passes is None and sources[0].shape == target.shape and sources[0].dtype == target.dtype:
        return nothing_to_do if _same_memory(sources[0], target) else partial(np.copyto, target, sources[0])
    work = compute_dtype(target.dtype)
    sizes, (result, *arrays) = merged_axes(shape, [target, *sources])
    axes = tuple(axis for axis, size in enumerate(sizes) if result.shape[axis] != size)
    total = result if result.dtype == work else owner.scratch(result.shape, work)
    are_apart = owner.is_batch_invariant and (not shape or shape[0] in (1, target.shape[0]))
    cutter = _Cutter(owner, sizes, work, arrays, passes, are_apart)
    if not axes:
        return in_sequence(cutter.elementwise(total, result))
    steps = cutter.sums(total, axes)
    return in_sequence(steps if total is result else [*steps, convert(total, result)])


class _Cutter:
    """The passes of a computation, piece by piece."""

    def __init__(
        self,
        owner: Operator,
        sizes: tuple[int, ...],
        work: np.dtype[Any],
        arrays: Sequence[Array],
        passes: SourcePasses | None,
        are_apart: bool,
    ) -> None:
        self._sizes = sizes
        self._work = work
        self._arrays = arrays
        self._passes = passes
        self._are_apart = are_apart
        self._ranges = even_ranges(sizes, BLOCK)
        largest = int(np.prod([ranges[0].stop for ranges in self._ranges]))
        self._scratch, self._wide, self._part, self._rows = (Scratch(owner, largest, work) for _ in range(4))

    def elementwise(self, total: Array, result: Array) -> list[Step]:
        """The passes without a sum; of 16-bit floats `result` is narrowed from pieces."""
        steps: list[Step] = []
        narrow = result.dtype != self._work
        whole = (slice(None),) * len(self._sizes)
        if not narrow and all(self._is_as_computed(array) for array in self._arrays):
            first = self._of_piece(self._arrays, total, self._indices()[0])
            if len(first) == 1:
                return self._of_piece(self._arrays, total, whole)
        for index in self._indices():
            before, pieces = self._widened(index)
            out = self._wide(len(self._arrays), result[index].shape) if narrow else result[index]
            steps += [*before, *self._function(pieces, out)]
            if narrow:
                steps.append(convert(out, result[index]))
        return steps

    def sums(self, total: Array, axes: tuple[int, ...]) -> list[Step]:
        """The passes with a sum over `axes` into `total`."""
        steps: list[Step] = []
        begun: set[tuple[int, ...]] = set()
        for index in self._indices():
            before, pieces = self._widened(index)
            steps += before
            values = pieces[0]
            if self._passes is not None or values.shape != self._shape(index):
                values = self._part(0, self._shape(index))
                steps += self._function(pieces, values)
            place = _place(index, total)
            target = total[place]
            start = tuple(piece.start or 0 for piece in place)
            if start in begun:
                part = self._part(1, target.shape)
                steps += self._sum(values, axes, part)
                steps.append(partial(np.add, target, part, out=target))
            else:
                steps += self._sum(values, axes, target)
                begun.add(start)
        return steps

    def _sum(self, values: Array, axes: tuple[int, ...], target: Array) -> list[Step]:
        if self._are_apart:
            return [row_sum_pass(values, axes, target)]
        return _sum_passes(values, axes, target, self._rows)

    def _indices(self) -> list[Slices]:
        return list(product(*self._ranges))

    def _shape(self, index: Slices) -> tuple[int, ...]:
        return tuple(piece.stop - piece.start for piece in index)

    def _is_as_computed(self, array: Array) -> bool:
        return array.dtype in (self._work, np.bool_)

    def _of_piece(self, arrays: Sequence[Array], result: Array, index: Slices) -> list[Step]:
        return self._function([array[_place(index, array)] for array in arrays], result[index])

    def _function(self, pieces: Sequence[Array], out: Array) -> list[Step]:
        if self._passes is not None:
            return self._passes(pieces, out, self._scratch)
        return [partial(np.copyto, out, pieces[0])]

    def _widened(self, index: Slices) -> tuple[list[Step], list[Array]]:
        """Pieces of the sources in the compute dtype, and the passes that convert those of another."""
        steps: list[Step] = []
        pieces: list[Array] = []
        for number, array in enumerate(self._arrays):
            piece = array[_place(index, array)]
            if not self._is_as_computed(array):
                wide = self._wide(number, piece.shape)
                steps.append(convert(piece, wide))
                piece = wide
            pieces.append(piece)
        return steps, pieces


def row_sum_pass(values: Array, axes: tuple[int, ...], target: Array) -> Step:
    """The pass `target = sum of values over axes`, where the target has size 1; both are float32 or float64.

    Each number is summed in an order that the sizes of `axes` decide, and no other: `einsum` sums rows in half the time
    of `np.add.reduce` or less.
    """
    kept = [axis for axis, size in enumerate(values.shape) if size != 1 and axis not in axes]
    summed = [axis for axis in axes if values.shape[axis] != 1]
    if values.flags.c_contiguous and target.flags.c_contiguous and max(kept, default=-1) < min(summed, default=0):
        return partial(np.einsum, "ij->i", values.reshape(target.size, -1), out=target.reshape(-1))
    return partial(np.add.reduce, values, axis=axes, keepdims=True, out=target)


def _sum_passes(values: Array, axes: tuple[int, ...], target: Array, scratch: Scratch) -> list[Step]:
    """The passes `target = sum of values over axes`, as in `row_sum_pass`, in an order that all sizes may decide.

    Sums over the first axes, the last ones, or both, are products of a matrix and ones, which BLAS computes up to 40
    times as fast as NumPy's reduction where rows are short.
    """
    runs: list[tuple[bool, int]] = []
    for axis, size in enumerate(values.shape):
        if runs and runs[-1][0] == (axis in axes):
            runs[-1] = (axis in axes, runs[-1][1] * size)
        elif size != 1:
            runs.append((axis in axes, size))
    kinds = [kind for kind, _ in runs]
    packed = values.flags.c_contiguous and target.flags.c_contiguous
    if not packed or kinds not in ([True], [False, True], [True, False], [True, False, True]):
        return [partial(np.add.reduce, values, axis=axes, keepdims=True, out=target)]
    sizes = [size for _, size in runs]
    head = sizes[0] if kinds[0] and len(kinds) > 1 else 1
    tail = sizes[-1] if kinds[-1] else 1
    kept = values.size // (head * tail)
    steps: list[Step] = []
    rows = values.reshape(head * kept, tail)
    if tail > 1:
        sums = target.reshape(kept, 1) if head == 1 else scratch(0, (head * kept, 1))
        steps.append(partial(np.matmul, rows, np.ones((tail, 1), values.dtype), out=sums))
        rows = sums
    if head > 1:
        ones, result = np.ones((1, head), values.dtype), target.reshape(1, kept)
        steps.append(partial(np.matmul, ones, rows.reshape(head, kept), out=result))
    return steps


def _same_memory(one: Array, other: Array) -> bool:
    """True when two arrays of one shape and dtype, both packed, are one."""
    return address_of(one) == address_of(other)


def _place(index: Slices, array: Array) -> Slices:
    """What of `array` belongs to piece `index` of the shape that it is stretched to."""
    return tuple(slice(None) if size == 1 else piece for piece, size in zip(index, array.shape, strict=True))
