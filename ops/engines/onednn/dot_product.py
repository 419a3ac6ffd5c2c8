"""Products with constant float32 weights that others read, too, as they lie: Y = X W^T + b, by `dot_kernels`.

A language model's last layer often has the weights of its embedding. In panels they would be in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.kernels.dot_kernels import MOST_ROWS, dot_kernel, units_of_block
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of

_UNITS = 24
"""Threads share multiples of that many units, whole blocks for any number of rows."""

_Call = tuple[int, int, int, int, int]


def can_multiply(library: Library, inner: int) -> bool:
    """True where the kernels run, for rows of so many elements."""
    return library.machine.can_run and inner % library.isa.lanes == 0


def dot_step(library: Library, x: Array, weights: Array, bias: Array, y: Array, label: str) -> Step | None:
    """The step of X [rows, inner], W [units, inner] and b [units], all packed; None where the kernels cannot run."""
    product = _DotProduct(library.isa.lanes, x, weights, bias, y)
    groups, pieces = -(-y.shape[1] // _UNITS), pieces_of_bytes(weights.nbytes)
    tables = [list(product.calls(part.start * _UNITS, part.stop * _UNITS)) for part in shares(groups, pieces)]
    if any(call[0] == 0 for table in tables for call in table):
        return None
    return in_pieces(tables, product, label)


class _DotProduct:
    """The calls of kernels for one product; it holds what they read."""

    def __init__(self, lanes: int, x: Array, weights: Array, bias: Array, y: Array) -> None:
        self._lanes = lanes
        self.arrays = (x, weights, bias, y)
        (self._rows, self._inner), self._units = x.shape, y.shape[1]
        self._x, self._weights, self._bias, self._y = (address_of(array) for array in self.arrays)
        self._known: dict[tuple[int, ...], Array] = {}

    def calls(self, first: int, last: int) -> Iterator[_Call]:
        """Those for the units from `first` to `last`, which may be behind the end.

        W is read once: where there are more rows than a block has, all rows are multiplied with some rows of W before
        the next ones.
        """
        last, most = min(last, self._units), MOST_ROWS[self._lanes]
        if self._rows <= most:
            count = units_of_block(self._rows, self._lanes)
            blocks, rest = divmod(last - first, count)
            yield from self._along_units(first, count, blocks)
            yield from self._along_units(last - rest, rest, 1)
            return
        count = units_of_block(most, self._lanes)
        for start in range(first, last, count):
            units = min(count, last - start)
            rest = self._rows % most
            yield self._call(0, most, start, units, self._rows // most, along_rows=True)
            if rest:
                yield self._call(self._rows - rest, rest, start, units, 1, along_rows=True)

    def _along_units(self, start: int, units: int, blocks: int) -> Iterator[_Call]:
        if units and blocks:
            yield self._call(0, self._rows, start, units, blocks, along_rows=False)

    def _call(self, row: int, rows: int, start: int, units: int, blocks: int, *, along_rows: bool) -> _Call:
        """That for blocks of `rows` by `units`, from `row` and from unit `start` on."""
        width, result = 4 * self._inner, 4 * self._units
        steps = (rows * width, 0, rows * result, 0) if along_rows else (0, units * width, 4 * units, 4 * units)
        bias = self._bias - self._y - row * result
        fields = self._fields(width, result, width, *steps, width, blocks, bias)
        target = self._y + row * result + 4 * start
        kernel = dot_kernel(rows, units, self._lanes) or 0
        return kernel, self._x + row * width, self._weights + start * width, target, fields

    def _fields(self, *numbers: int) -> int:
        """The address of fields with these numbers."""
        if numbers not in self._known:
            self._known[numbers] = np.array(numbers, np.int64)
        return address_of(self._known[numbers])
