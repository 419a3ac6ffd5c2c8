"""Primitives on parts of their tensors, one for each piece.

That is for what computes an element of its result from elements at the same place of some axes alone: functions of
elements, normalizations of rows, poolings of channels. The implementation is the one of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from dagexec.core.native import NativeStep, can_run, declare_remade
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import BLOCKS, NHWC
from dagexec.ops.engines.onednn.bound import BoundPrimitive, Rebindable, memory_at
from dagexec.ops.engines.onednn.descriptors import (
    ATTR_SCALES,
    DIFF_SRC,
    DST,
    MEAN,
    POST_OP,
    SCALE,
    SHIFT,
    VARIANCE,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.primitive import Primitive, PrimitiveDescriptor
from dagexec.ops.kernels.tables import shares
from dagexec.platform.addresses import address_of

_LINE = 64
"""Elements: pieces of less would write to the same lines of a cache."""

Arguments = Mapping[int, tuple[Descriptor, Array]]
Bind = Callable[[PrimitiveDescriptor, Arguments], BoundPrimitive]

_WHOLE = frozenset({SCALE, SHIFT, MEAN, VARIANCE})
"""Arguments that are not cut, beside scales and zero points: they have a number for each channel."""


class Parts(Rebindable):
    """Primitives on parts of the same tensors.

    Attributes:
        bounds: of the parts.
        step: the step whose pieces are the parts.
    """

    def __init__(
        self, bounds: Sequence[BoundPrimitive], offsets: Sequence[Mapping[int, int]], whole: Mapping[int, Array]
    ) -> None:
        """`offsets` are the bytes of arrays of the `whole` at which the arguments of each part begin, by number."""
        self.bounds = bounds
        self._offsets = offsets
        self._sizes = {number: array.nbytes for number, array in whole.items()}
        self.step = NativeStep((tuple([(bound.native_call,) for bound in bounds]),))
        arrays, numbers = list(whole.values()), list(whole)
        parts = []
        for bound, at in zip(bounds, offsets, strict=True):
            arguments = []
            for number, memory in bound.memories.items():
                if number not in at:  # working memory of its own
                    arrays.append(memory.array)
                place = numbers.index(number) if number in at else len(arrays) - 1
                arguments.append((number, memory.descriptor, place, at.get(number, 0)))
            parts.append((bound.primitive, arguments))
        declare_remade(self.step, partial(_again, parts, offsets, numbers), arrays)

    def move(self, number: int, array: Array) -> None:
        elements = array.reshape(-1)
        for bound, offsets in zip(self.bounds, self._offsets, strict=True):
            bound.move(number, elements[offsets[number] // array.itemsize :])

    def nbytes(self, number: int) -> int:
        return self._sizes[number]


def _again(
    parts: Sequence[tuple[Primitive, Sequence[tuple[int, Descriptor, int, int]]]],
    offsets: Sequence[Mapping[int, int]],
    numbers: Sequence[int],
    *arrays_and_label: Any,
) -> Parts:
    """The same primitives on other arrays: the whole, argument by argument, and working memory."""
    *arrays, label = arrays_and_label
    places = list(map(address_of, arrays))
    bounds = []
    for primitive, arguments in parts:
        memories = [
            memory_at(primitive.library, layout, arrays[place], places[place] + offset, label)
            for _, layout, place, offset in arguments
        ]
        bounds.append(BoundPrimitive(primitive, tuple([number for number, *_ in arguments]), memories, label))
    return Parts(bounds, offsets, dict(zip(numbers, arrays, strict=False)))


def parts_of_whole(
    asked: Sequence[tuple[PrimitiveDescriptor, Arguments]], whole: Mapping[int, Array], bind: Bind
) -> Parts:
    """Primitives on their arguments, parts of the `whole`."""
    offsets = [
        {number: address_of(arguments[number][1]) - address_of(array) for number, array in whole.items()}
        for _, arguments in asked
    ]
    return Parts([bind(*one) for one in asked], offsets, whole)


def cut_primitive(
    found: PrimitiveDescriptor, arguments: Arguments, axes: Sequence[int], unit: int, pieces: int, bind: Bind
) -> Parts | None:
    """The parts of the primitive `found` on `arguments`, in about so many `pieces`; None where it is not cut.

    It may be cut along `axes` of its result, of which each but the last is cut into single elements if there are not
    enough of them, and the last into multiples of `unit`. What lies in memory before them has size 1.
    """
    shape = arguments[DIFF_SRC if DIFF_SRC in arguments else DST][0].shape
    cuts = list(_cuts(shape, [axis for axis in axes if axis < len(shape) and shape[axis] > 1], unit, pieces))
    made: list[tuple[PrimitiveDescriptor, Arguments]] = []
    known: dict[Hashable, PrimitiveDescriptor | None] = {}
    for cut in cuts if len(cuts) > 1 and can_run() else ():
        ranges = {axis: (shape[axis], indices) for axis, indices in cut.items()}
        given = dict(arguments)
        try:
            for number, (layout, array) in arguments.items():
                if number not in _WHOLE and not ATTR_SCALES <= number < POST_OP:
                    own, before = layout.part(ranges)
                    given[number] = own, behind(array, before)
        except UnsupportedFeatureError:
            return None
        size = tuple((axis, len(indices)) for axis, indices in cut.items())
        if size not in known:
            known[size] = next((one for one in found.asked_for(ranges) if one.name == found.name), None)
        part = known[size]
        if part is None:
            return None
        made.append((part, given))
    return parts_of_whole(made, {number: array for number, (_, array) in arguments.items()}, bind) if made else None


def image_axes(order: str) -> tuple[tuple[int, ...], int]:
    """The axes along which images in an order are cut where their channels are independent, and the unit."""
    return (0,) if order == NHWC else (0, 1), BLOCKS.get(order, 1)


def behind(array: Array, nbytes: int) -> Array:
    """What lies in the memory of `array` from so many bytes on."""
    span = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)) // array.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,))
    return flat[nbytes // array.itemsize :]


def _cuts(shape: Sequence[int], axes: Sequence[int], unit: int, pieces: int) -> Iterator[Mapping[int, range]]:
    """The indices of each part along some of `axes`."""
    if not axes or pieces < 2:
        yield {}
        return
    axis, *inner = axes
    least = unit if not inner else 1
    least = max(least, -(-_LINE // prod(shape[axis + 1 :])) // least * least)
    count = shape[axis] // least
    if not count:
        yield {}
    elif count >= pieces or not inner:
        for part in shares(count, min(count, pieces)):
            stop = shape[axis] if part.stop == count else part.stop * least
            yield {axis: range(part.start * least, stop)}
    else:
        for index in range(shape[axis]):
            for cut in _cuts(shape, inner, unit, -(-pieces // shape[axis])):
                yield {axis: range(index, index + 1), **cut}
