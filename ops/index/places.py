"""Indices of an axis as places in memory: checked, counted from the end where they are negative, and flattened.

The arithmetic that depends on shapes alone is done once, at preparation; a step checks the values it finds, before
anything is read or written by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Operator, Step
from dagexec.core.shapes import element_count
from dagexec.ops.base.blocks import Array
from dagexec.ops.index.indexing import check_indices


def wrapping(indices: Array, size: int, out: Array, label: str, factor: int = 1) -> Step:
    """The step out = factor * indices (int64), negative ones counted from the end of an axis of `size` elements.

    It raises IndexError, naming the operator `label`, unless all are in [-size, size).
    """

    def wrap() -> None:
        low = indices.min(initial=0)
        if low < -size or indices.max(initial=-size) >= size:
            check_indices(indices, -size, size, label)
        found = np.remainder(indices, size, out=out) if low < 0 else indices
        np.multiply(found, factor, out=out)

    return wrap


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
    part = owner.scratch(rows.shape, np.int64)
    steps: list[Step] = [wrapping(indices[..., 0], indexed[0], rows, owner.label, strides[0])]
    for number, size in enumerate(indexed[1:], 1):
        located = wrapping(indices[..., number], size, part, owner.label, strides[number])
        steps += [located, partial(np.add, rows, part, out=rows)]
    if batch:
        first = np.arange(element_count(shape[:batch]), dtype=np.int64) * element_count(indexed)
        corners = first.reshape(shape[:batch] + (1,) * (rows.ndim - batch))
        steps.append(partial(np.add, rows, corners, out=rows))
    return steps
