"""The native calls that compute a recurrent layer, one table a piece for all time steps.

Nothing returns to the interpreter between steps. Each direction has pieces of its own: rows of the batch, or units, for
which every step is a phase. An element's bytes depend neither on its batch, nor on how long other sequences are, nor on
the pieces.

What is called differs from step to step by the same numbers of bytes, but for the first step and the last: so few are
written one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dagexec.ops.base.blocks import Array
from dagexec.ops.engines.onednn.recurrent_layer import FLOAT, Arrays, Layer
from dagexec.ops.kernels.gate_kernels import (
    CELL,
    CELL_BEFORE,
    OUTPUT,
    PEEPHOLES,
    RESET,
    RUNNING,
    STATE,
    STATE_BEFORE,
    SUMS,
)
from dagexec.ops.kernels.gate_product import Call
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of_products
from dagexec.ops.kernels.tables import shares
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import core_cache
from dagexec.platform.records import dataclass

Table = npt.NDArray[np.int64]
"""Calls, [calls, 5]."""

_CHUNK = 1 << 19
"""Bytes of X whose products with a panel follow each other."""

_CELL, _STATE, _RESET = range(3)
"""Places in `Arrays.held`."""


@dataclass(frozen=True)
class Part:
    """What one piece computes of every step: some rows and vectors of units of one direction."""

    direction: int
    rows: range
    vectors: range


class Tables:
    """The tables of a layer on its arrays; it holds what they point to."""

    def __init__(self, layer: Layer, arrays: Arrays, packed: Sequence[Array]) -> None:
        self._layer = layer
        self._arrays = arrays
        self._packed = packed
        self._fields: list[Table] = []

    def phases(self) -> list[list[Table]]:
        """The tables of pieces, in phases that wait for all of the phase before."""
        parts, waits = self._parts()
        stages = [[self._stage(part, number) for number in range(len(self._layer.products))] for part in parts]
        found = [list(self._input_tables())]
        if waits:
            for step in range(self._layer.sizes.steps):
                found += [[calls[step] for calls in of_parts] for of_parts in zip(*stages, strict=True)]
        else:
            found.append([np.concatenate(of_stages, axis=1).reshape(-1, 5) for of_stages in stages])
        return found

    def _parts(self) -> tuple[list[Part], bool]:
        """Who computes what in the steps, and whether these wait for each other.

        Rows are shared where the weights stay in each core's cache, else units, where a step is long enough.
        """
        layer, sizes = self._layer, self._layer.sizes
        rows, vectors = [range(sizes.batch)], [range(layer.vectors)]
        weights = sizes.width * sizes.hidden
        groups = -(-layer.vectors // layer.grain)
        of_step = sizes.batch * weights
        waiting = min(groups, pieces_of_products(of_step, layer.lanes, MOST_OF_ONE))
        sharing = min(sizes.batch, pieces_of_products(of_step * sizes.steps, layer.lanes, MOST_OF_ONE))
        is_masked = layer.variation.masked
        if sharing > 1 and (is_masked or FLOAT * weights <= core_cache() or waiting < 2):
            rows = shares(sizes.batch, sharing)
        elif waiting > 1 and not is_masked:
            vectors = [
                range(one.start * layer.grain, min(one.stop * layer.grain, layer.vectors))
                for one in shares(groups, waiting)
            ]
        numbers = range(sizes.directions)
        parts = [Part(number, of_rows, of_units) for number in numbers for of_rows in rows for of_units in vectors]
        return parts, len(vectors) > 1

    def _input_tables(self) -> Iterator[Table]:
        """The product of X in pieces: some rows in all panels, or where there are few rows some panels."""
        sizes, product = self._layer.sizes, self._layer.input_product
        products = sizes.rows * sizes.features * sizes.width * sizes.directions
        pieces = pieces_of_products(products, self._layer.lanes, MOST_OF_ONE * sizes.directions)
        if sizes.rows >= 2 * pieces * product.most_rows:
            every = range(product.panels * sizes.directions)
            jobs = [(every, rows) for rows in shares(sizes.rows, pieces)]
        else:
            jobs = [(panels, range(sizes.rows)) for panels in shares(product.panels * sizes.directions, pieces)]
        for panels, rows in jobs:
            yield np.array(list(self._input_calls(panels, rows)), np.int64).reshape(-1, 5)

    def _input_calls(self, panels: range, rows: range) -> Iterator[Call]:
        """The product of these rows of X in these panels, those of the directions counted one after another."""
        product, arrays = self._layer.input_product, self._arrays
        chunk = max(1, _CHUNK // (product.source_row * product.most_rows)) * product.most_rows
        for number in range(self._layer.sizes.directions):
            before = number * product.panels
            own = range(max(0, panels.start - before), min(product.panels, panels.stop - before))
            weights, sums = address_of(self._packed[0][number]), address_of(arrays.sums[0, 0, number])
            for first in range(rows.start, rows.stop, chunk):
                x, target = address_of(arrays.x) + first * product.source_row, sums + first * product.target_row
                yield from product.calls(x, weights, target, min(chunk, rows.stop - first), own)

    def _stage(self, part: Part, number: int) -> npt.NDArray[np.int64]:
        """The calls of one stage for a part in all steps: steps, calls, 5."""
        layer, stage, product = self._layer, self._layer.form.stages[number], self._layer.products[number]
        steps = layer.sizes.steps
        units = min(part.vectors.stop * layer.lanes, layer.sizes.hidden) - part.vectors.start * layer.lanes
        panels = range(part.vectors.start // product.vectors, -(-part.vectors.stop // product.vectors))
        weights = address_of(self._packed[1 + number][part.direction])
        whole = Part(part.direction, part.rows, range(layer.vectors))
        kernels = [
            layer.kernel(stage, part.direction, gives_state=is_last and self._arrays.last[0] is not None)
            for is_last in (False, True)
        ]
        width = max(len(kernel.fields(0, 0, dict.fromkeys(kernel.arrays, 0))) for kernel in kernels)

        def fields(step: int) -> list[int]:
            kernel = kernels[step == steps - 1]
            addresses = {name: self._address(name, step, part) for name in kernel.arrays}
            found = kernel.fields(len(part.rows), units, addresses)
            return found + [0] * (width - len(found))

        table = along(fields, steps)
        self._fields.append(table)

        def calls(step: int) -> list[Call]:
            x, sums = self._address(stage.source, step, whole), self._address(SUMS, step, whole)
            function = kernels[step == steps - 1].function()
            numbers = address_of(table) + step * table.strides[0]
            return [*product.calls(x, weights, sums, len(part.rows), panels), (function, numbers, 0, 0, 0)]

        return along(calls, steps)

    def _address(self, name: str, step: int, part: Part) -> int:
        """That of the first element of a part in an array, in a step counted in the order of its direction."""
        layer, arrays, sizes = self._layer, self._arrays, self._layer.sizes
        place = sizes.steps - 1 - step if sizes.reversed[part.direction] else step
        unit = part.vectors.start * layer.lanes
        at = part.direction, part.rows.start, unit
        is_first, is_last = step == 0, step == sizes.steps - 1
        if name == SUMS:
            return _of(arrays.sums, place, part.rows.start, part.direction, 0, unit)
        if name == RUNNING:
            return _of(arrays.running, place, part.rows.start)
        if name == PEEPHOLES:
            return _of(arrays.peepholes, part.direction, unit)
        if name == OUTPUT:
            return _of(arrays.y, place, *at)
        if name == RESET:
            return _of(arrays.held[_RESET], *at) if arrays.resets is None else _of(arrays.resets, place, *at)
        if name in (STATE_BEFORE, CELL_BEFORE):
            if is_first:
                return _of(arrays.first[name == CELL_BEFORE], *at)
            before = CELL if name == CELL_BEFORE else STATE if layer.variation.masked else OUTPUT
            return self._address(before, step - 1, part)
        if name == CELL and arrays.cells is not None:
            return _of(arrays.cells, place, *at)
        last = arrays.last[name == CELL] if is_last else None
        return _of(arrays.held[_CELL if name == CELL else _STATE] if last is None else last, *at)


def _of(array: Array | None, *index: int) -> int:
    """The address of an element."""
    assert array is not None
    return address_of(array) + sum(place * stride for place, stride in zip(index, array.strides, strict=False))


def along(make: Callable[[int], Sequence[Sequence[int]] | Sequence[int]], steps: int) -> npt.NDArray[np.int64]:
    """What `make` gives for each of `steps`: between the first and the last step it grows by the same numbers."""
    first = np.array(make(0), np.int64)
    found = np.empty((steps, *first.shape), np.int64)
    found[0] = first
    if steps > 2:
        second = np.array(make(1), np.int64)
        growth = np.array(make(2), np.int64) - second if steps > 3 else np.zeros_like(second)
        numbers = np.arange(steps - 2).reshape(-1, *[1] * second.ndim)
        found[1:-1] = second + numbers * growth
    if steps > 1:
        found[-1] = make(steps - 1)
    return found
