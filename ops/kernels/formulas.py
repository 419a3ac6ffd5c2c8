"""Formulas: results of elements, each a few expressions of the elements of several tensors in the same place.

A formula is a function that writes a kernel's expressions. All of it is computed in registers: every tensor is read
once and every result written once, where NumPy's passes go through memory for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import declare_remade
from dagexec.core.operator import Step
from dagexec.ops.base.pieces import is_same_memory, overlap
from dagexec.ops.base.row_runs import joined_axes
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector, fitting
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.registers import MOST_ADDRESSES
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of

Array = npt.NDArray[Any]

Formula = Callable[[Builder, Callable[[int], Vector]], Sequence[Vector]]
"""From a builder, and a function that reads the input of a number, to the results; hashable, equal where it does the
same."""

MOST_CALLS = 1 << 12


def formula_step(
    machine: Machine,
    formula: Formula,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    label: str,
) -> Step | None:
    """The step that computes float32 `outputs`, which have one shape, from `inputs`, which broadcast to it.

    An output may be the array of an input of its shape; results behind the last output are left out. None where the
    kernels do not serve: other processors, types or strides, more than there are registers for, or inputs that are
    overwritten before they are read.
    """
    arrays = (*outputs, *inputs)
    found = _layout(machine, formula, inputs, outputs)
    if found is None:
        return None
    kernel, sizes, strides, is_remade = found

    pieces = pieces_of_bytes(len(arrays) * outputs[0].nbytes)

    def make(*arrays_and_label: Any) -> Step:
        *arrays, label = arrays_and_label
        plan = _Plan(kernel, sizes, strides, [address_of(array) for array in arrays])
        return in_pieces(plan.tables(pieces, machine.lanes), (plan, arrays), label)

    step = make(*arrays, label)
    if is_remade:
        declare_remade(step, make, arrays)
    return step


def formula_call(
    machine: Machine, formula: Formula, inputs: Sequence[Array], outputs: Sequence[Array]
) -> tuple[int, list[int]] | None:
    """The kernel that computes matrices, and the numbers that it takes (`formula_kernel`); None as `formula_step`."""
    found = _layout(machine, formula, inputs, outputs)
    if found is None:
        return None
    kernel, (*outer, rows, count), strides, _ = found
    if outer:
        return None
    addresses = [address_of(array) for array in (*outputs, *inputs)]
    return kernel, [rows, count, *addresses, *(one[-2] for one in strides)]


def _layout(
    machine: Machine, formula: Formula, inputs: Sequence[Array], outputs: Sequence[Array]
) -> tuple[int, tuple[int, ...], list[tuple[int, ...]], bool] | None:
    """The kernel, the sizes of few axes and all arrays' strides along these; and whether it serves other arrays."""
    arrays = (*outputs, *inputs)
    shape = outputs[0].shape
    views = [np.broadcast_to(array, shape) for array in arrays]
    is_plain = all(view.dtype == np.float32 for view in views)
    if not machine.can_run or not is_plain or not outputs[0].size or _is_overwritten(outputs, inputs):
        return None
    count = len(outputs)
    sizes, strides = _joined(shape, [view.strides for view in views], [array.shape == shape for array in arrays])
    if any(one[-1] != BYTES for one in strides[:count]) or any(one[-1] not in (0, BYTES) for one in strides[count:]):
        return None
    if math.prod(sizes[:-2]) > MOST_CALLS:
        return None
    own = tuple(number if one[-1] else None for number, one in enumerate(strides))[count:]
    kernel = formula_kernel(formula, count, own, machine.lanes)
    is_remade = kernel is not None
    if kernel is None:
        kernel = formula_kernel(formula, count, _shared(arrays, own, strides), machine.lanes)
    return None if kernel is None else (kernel, sizes, strides, is_remade)


Sources = tuple[int | None, ...]
"""For each input the array, of outputs and inputs, whose elements it has; None where it has one number for a row."""


def _shared(arrays: Sequence[Array], own: Sources, strides: Sequence[tuple[int, ...]]) -> Sources:
    """`own`, but inputs that are overwritten have their elements from the outputs, which spares an address."""
    count = len(arrays) - len(own)
    found: list[int | None] = []
    for number, source in enumerate(own, count):
        place = address_of(arrays[number]), strides[number]
        alike = [one for one in range(count) if (address_of(arrays[one]), strides[one]) == place]
        found.append(alike[0] if alike and source is not None else source)
    return tuple(found)


def _is_overwritten(outputs: Sequence[Array], inputs: Sequence[Array]) -> bool:
    """True where elements are written before they are read as those of an array that is not the same, or twice."""
    beside = [(one, other) for number, one in enumerate(outputs) for other in outputs[:number]]
    pairs = [(y, x) for y in outputs for x in inputs if not is_same_memory(y, x)]
    return any(overlap(*pair) for pair in beside + pairs)


def _joined(
    shape: Sequence[int], strides: Sequence[Sequence[int]], is_whole: Sequence[bool]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape and strides of several arrays in as few axes as say the same, at least two.

    `is_whole` says which arrays have that shape, which counts where there is but one element.
    """
    axes = joined_axes(shape, strides)
    while len(axes) < 2:
        axes.insert(0, (1, tuple(0 if axes else BYTES * whole for whole in is_whole)))
    return tuple(size for size, _ in axes), list(zip(*(steps for _, steps in axes), strict=True))


class _Plan:
    """The calls of a kernel; it holds what they read."""

    def __init__(
        self, kernel: int, shape: tuple[int, ...], strides: list[tuple[int, ...]], addresses: Sequence[int]
    ) -> None:
        self._kernel, self._shape, self._strides, self._addresses = kernel, shape, strides, addresses
        self._kept: list[Array] = []

    def tables(self, pieces: int, lanes: int) -> list[list[tuple[int, int, int, int, int]]]:
        """A table a piece: of the outer axes, rows, or parts of rows that are whole vectors."""
        *outer, rows, count = self._shape
        parts = [(part, range(count)) for part in shares(rows, pieces)]
        if rows < pieces:
            ends = [min(count, -(-count * number // pieces // lanes) * lanes) for number in range(pieces + 1)]
            parts = [(range(rows), range(*pair)) for pair in pairwise(ends)]
        tables: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(pieces)]
        if math.prod(outer) >= pieces:
            parts = [(range(rows), range(count))]
        places = list(product(*map(range, outer)))
        for number, (rows_of_part, columns) in enumerate(parts):
            for which, place in enumerate(places):
                piece = number if len(parts) > 1 else which * pieces // len(places)
                if len(rows_of_part) and len(columns):
                    tables[piece].append(self._call(place, rows_of_part, columns))
        return tables

    def _call(self, outer: Sequence[int], rows: range, columns: range) -> tuple[int, int, int, int, int]:
        place = (*outer, rows.start, columns.start)
        addresses = [
            address + sum(index * step for index, step in zip(place, steps, strict=True))
            for address, steps in zip(self._addresses, self._strides, strict=True)
        ]
        fields = np.array([len(rows), len(columns), *addresses, *(steps[-2] for steps in self._strides)], np.int64)
        self._kept.append(fields)
        return self._kernel, address_of(fields), 0, 0, 0


@lru_cache(maxsize=256)
def formula_kernel(formula: Formula, outputs: int, sources: Sources, lanes: int) -> int | None:
    """The address of a function of numbers, for rows of a formula; None where it cannot run or registers are too few.

    The numbers, of 64 bits, are how many rows, elements in a row, the addresses of the outputs and of the inputs, and
    the bytes from each one's row to the next.
    """
    used = {*range(outputs), *(source for source in sources if source is not None)}
    if len(used) > MOST_ADDRESSES:
        return None
    build = fitting(lambda together: _rows(formula, outputs, sources, lanes, together), 3)
    return build.function() if build.fits() else None


def _rows(formula: Formula, outputs: int, sources: Sources, lanes: int, together: int) -> Builder:
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    count = build.number(fields, 8)
    strides = 2 + outputs + len(sources)  # their place among the fields
    used = dict.fromkeys([*range(outputs), *(source for source in sources if source is not None)])
    places = {number: build.number(fields, 8 * (2 + number)) for number in used}
    row = build.zero()
    with build.repeat(build.number(fields)):
        fixed = {}
        for number, source in enumerate(sources):
            if source is None:
                offset = build.number(fields, 8 * (strides + outputs + number)) * row
                fixed[number] = build.broadcast(build.number(fields, 8 * (2 + outputs + number)), offset)

        def body(place: Scalar, mask: Mask | None) -> None:
            def read(number: int) -> Vector:
                source = sources[number]
                return fixed[number] if source is None else build.load(places[source], place, mask=mask)

            for target, value in enumerate(formula(build, read)[:outputs]):
                build.store(value, places[target], place, mask=mask)

        build.each(count, body, together)
        for number, place in places.items():
            place.set(place + build.number(fields, 8 * (strides + number)))
        row.set(row + 1)
    return build
