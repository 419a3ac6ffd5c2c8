"""Indices of an axis as places in memory: checked, counted from the end where they are negative, and flattened.

The arithmetic that depends on shapes alone is done once, at preparation; a step checks the values it finds, before
anything is read or written by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.device import CPU
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.shapes import element_count
from dagexec.ops.base.blocks import Array, convert
from dagexec.ops.families.index.indexing import check_indices, failure_of
from dagexec.ops.kernels.gather_kernel import gather_step

_FEW = 1 << 14


def wrapping(indices: Array, size: int, out: Array, label: str, factor: int = 1) -> Step:
    """The step out = factor * indices (int64), negative ones counted from the end of an axis of `size` elements.

    It raises IndexError, naming the operator `label`, unless all are in [-size, size). Of few it is a lookup in a table
    of the results, which checks indices, too; of many NumPy's vectors are faster.
    """
    check = partial(check_indices, indices, -size, size, label)
    if max(size, indices.size) <= _FEW:
        before: Step = nothing_to_do
        packed = indices
        if not indices.flags.c_contiguous:
            before, packed = convert(indices, out), out
        table = np.arange(size, dtype=np.int64) * factor
        native = gather_step(table, packed, out, 0, wraps=True, failure=partial(failure_of, check, label))
        if native is not None:
            return in_sequence([before, native])

    def wrap() -> None:
        check()
        found = np.remainder(indices, size, out=out) if indices.min(initial=0) < 0 else indices
        np.multiply(found, factor, out=out)

    return wrap


def _never_changes(owner: Operator, index: int) -> bool:
    return owner.input(index).constant is not None and owner.runtime.device == CPU


def place_memory(owner: Operator, index: int, shape: tuple[int, ...]) -> Array:
    """Memory for places that follow from input `index`: for the preparation alone, where that never changes."""
    return np.empty(shape, np.int64) if _never_changes(owner, index) else owner.scratch(shape, np.int64)


def located_once(owner: Operator, index: int, locate: Sequence[Step]) -> Sequence[Step]:
    """The steps that locate in a run: none where input `index`, the indices, never changes, as they are called here.

    Nor are they where that fails, of which a run tells.
    """
    if not _never_changes(owner, index):
        return locate
    try:
        in_sequence(locate)()
    except IndexError:
        return locate
    return ()


def part_at(flat: Array, places: Array, *, distinct: bool = True) -> Array | None:
    """The view of `flat` that has its slices at `places` of the first axis; None where none has.

    One has where places grow by the same along each axis, and if they are to be `distinct`, so much that no element is
    there twice.
    """
    if not places.size:
        return None
    corner = places[(slice(1),) * places.ndim]
    steps = [
        int(places.take([min(1, size - 1)], axis).reshape(-1)[0] - corner.item())
        for axis, size in enumerate(places.shape)
    ]
    reach = 1
    for step, size in sorted(zip(steps, places.shape, strict=True)):
        if size > 1:
            if distinct and step < reach:
                return None
            reach += step * (size - 1)
    expected = corner
    for axis, (step, size) in enumerate(zip(steps, places.shape, strict=True)):
        expected = expected + (np.arange(size) * step).reshape([-1 if one == axis else 1 for one in range(places.ndim)])
    if not np.array_equal(expected, places):
        return None
    strides = [step * flat.strides[0] for step in steps]
    return as_strided(flat[corner.item() :], places.shape + flat.shape[1:], (*strides, *flat.strides[1:]))


def strides_of(shape: Sequence[int]) -> list[int]:
    """How many elements lie between neighbors along each axis of a packed array of `shape`."""
    return [element_count(tuple(shape[axis + 1 :])) for axis in range(len(shape))]


def element_places(owner: Operator, shape: tuple[int, ...], indices: Array, axis: int, places: Array) -> list[Step]:
    """The steps that fill `places`, of the shape of `indices`, with flat places in a packed array of `shape`.

    Along `axis` an element is where its index says, along the others where it is itself.
    """
    strides = strides_of(shape)
    first: Array = np.zeros((1,) * len(shape), np.int64)
    for other, stride in enumerate(strides):
        if other != axis:
            view = [-1 if one == other else 1 for one in range(len(shape))]
            first = first + (np.arange(indices.shape[other], dtype=np.int64) * stride).reshape(view)
    located = wrapping(indices, shape[axis], places, owner.label, strides[axis])
    return [located, partial(np.add, places, first, out=places)]


def row_numbers(owner: Operator, shape: tuple[int, ...], indices: Array, batch: int, rows: Array) -> list[Step]:
    """The steps that fill `rows` with numbers of slices of an array of `shape`, one for each index vector.

    The last axis of `indices` has an index for each axis of `shape` behind the first `batch`; what is behind these is a
    slice. `rows` has the shape of the other axes of `indices`, of which the first `batch` are those of `shape`.
    """
    indexed = shape[batch : batch + indices.shape[-1]]
    strides = strides_of(indexed)
    part = place_memory(owner, 1, rows.shape)
    steps: list[Step] = [wrapping(indices[..., 0], indexed[0], rows, owner.label, strides[0])]
    for number, size in enumerate(indexed[1:], 1):
        located = wrapping(indices[..., number], size, part, owner.label, strides[number])
        steps += [located, partial(np.add, rows, part, out=rows)]
    if batch:
        first = np.arange(element_count(shape[:batch]), dtype=np.int64) * element_count(indexed)
        corners = first.reshape(shape[:batch] + (1,) * (rows.ndim - batch))
        steps.append(partial(np.add, rows, corners, out=rows))
    return steps


def picking(owner: Operator, locate: Sequence[Step], table: Array, places: Array, y: Array) -> Step:
    """The step that leaves in `y` what `table` has at `places` of its first axis, which the steps `locate` find."""
    locate = located_once(owner, 1, locate)
    part = None if locate else part_at(table, places)
    if part is not None:
        return partial(np.copyto, y, part)
    check = partial(check_indices, places, 0, len(table), owner.label)
    native = gather_step(table, places, y, 0, wraps=False, failure=partial(failure_of, check, owner.label))
    return in_sequence([*locate, native or partial(np.take, table, places, axis=0, out=y, mode="clip")])
