"""Products of a few rows with the weights of gates in panels, as machine code for AVX2 with FMA or for AVX-512.

A layer of G gates and H units has sums [rows, slots, H rounded up to whole vectors], where a slot holds a gate's sums.
The kernel adds X W to slots, or sets them to b + X W, in all panels that it is told. A panel has the weights of some
vectors of units, for all gates: the units of a panel need nothing of the others, so that threads can share panels.

Each element is one chain of fused products and sums in the order of the inner axis, begun with the bias, or with what
the slot held: its bytes depend neither on the other rows nor on where the kernel is called.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dagexec.platform.assembly.instructions import A0, A1, A2, A3, A4, A5, FMA, RESULT, S1, T0, T1
from dagexec.platform.assembly.native import REGISTERS, Assembler
from dagexec.platform.machine_code import executable
from dagexec.platform.records import dataclass

Call = tuple[int, int, int, int, int]
"""A kernel and its arguments."""

Array = npt.NDArray[np.float32]

_UNROLLED = 4
"""Elements of the inner axis in a pass of the loop."""

_VECTORS = {1: 4, 2: 2, 3: 2, 4: 1}
"""By gates, the vectors of units in a panel: four to six sums of a row hide how long each product takes."""


@dataclass(frozen=True)
class Slot:
    """Where a gate's sums are.

    Attributes:
        number: among the slots of a row.
        adds: whether the product is added to what is there; else to the bias.
    """

    number: int
    adds: bool


@dataclass(frozen=True)
class GateProduct:
    """A product of rows with the weights of gates.

    Attributes:
        inner: elements of a row of X.
        units: of each gate.
        slots: of the gates.
        lanes: float32 numbers in a vector.
        source_row: bytes from one row of X to the next.
        slot: bytes from one slot to the next.
        target_row: bytes from one row of sums to the next.
    """

    inner: int
    units: int
    slots: tuple[Slot, ...]
    lanes: int
    source_row: int
    slot: int
    target_row: int

    @property
    def vectors(self) -> int:
        """Vectors of units in a whole panel."""
        return _VECTORS[len(self.slots)]

    @property
    def unit_vectors(self) -> int:
        """Vectors of units, the last of which may be partly unused."""
        return -(-self.units // self.lanes)

    @property
    def panels(self) -> int:
        """How many panels there are; the last may have fewer vectors."""
        return -(-self.unit_vectors // self.vectors)

    @property
    def most_rows(self) -> int:
        """The most rows whose sums registers hold, with a number of each row, or with a row of the panel."""
        columns = len(self.slots) * self.vectors
        registers = REGISTERS[self.lanes]
        return max(1, (registers - 1) // (columns + 1))

    @property
    def panel_rows(self) -> int:
        """Rows of a panel: the inner axis, behind the bias of gates that are not added to."""
        return self.inner + 1

    def packed(self, weights: Array, bias: Array | None) -> Array:
        """Weights [gates, units, inner] and biases [gates, units] as panels, one after another."""
        return self.pack(weights, bias, np.zeros(self.packed_elements, np.float32))

    @property
    def packed_elements(self) -> int:
        """Elements of all panels."""
        return len(self.slots) * self.unit_vectors * self.lanes * self.panel_rows

    def pack(self, weights: Array, bias: Array | None, packed: Array) -> Array:
        """`packed`, all zeros at first, with weights [gates, units, inner] and biases [gates, units] as panels."""
        gates, lanes = len(self.slots), self.lanes
        width = self.vectors * lanes
        for first in range(0, self.unit_vectors * lanes, width):
            last = min(first + width, self.unit_vectors * lanes)
            area = packed[first * gates * self.panel_rows : last * gates * self.panel_rows]
            panel = area.reshape(self.panel_rows, gates, last - first)
            count = min(last, self.units) - first
            np.copyto(panel[1:, :, :count], weights[:, first : first + count].transpose(2, 0, 1))
            if bias is not None:
                np.copyto(panel[0, :, :count], bias[:, first : first + count])
        return packed

    def unpack(self, packed: Array, weights: Array) -> None:
        """Write to `weights` [gates, units, inner] what `pack` packed."""
        gates, lanes = len(self.slots), self.lanes
        width = self.vectors * lanes
        for first in range(0, self.unit_vectors * lanes, width):
            last = min(first + width, self.unit_vectors * lanes)
            area = packed[first * gates * self.panel_rows : last * gates * self.panel_rows]
            count = min(last, self.units) - first
            panel = area.reshape(self.panel_rows, gates, last - first)[1:, :, :count]
            np.copyto(weights[:, first : first + count], panel.transpose(1, 2, 0))

    def calls(self, x: int, packed: int, sums: int, rows: int, panels: range) -> list[Call]:
        """The calls of kernels for so many rows and these panels, at the addresses of the first row and panel."""
        if not rows or not panels:
            return []
        block = -(-rows // -(-rows // self.most_rows))
        found = []
        whole = min(panels.stop, self.unit_vectors // self.vectors) - panels.start
        for vectors, first, count in (
            (self.vectors, panels.start, whole),
            (self.unit_vectors % self.vectors, panels.start + whole, len(panels) - whole),
        ):
            if count < 1:
                continue
            column = first * self.vectors * self.lanes * 4
            weights = packed + column * len(self.slots) * self.panel_rows
            for start, height, blocks in ((0, block, rows // block), (rows // block * block, rows % block, 1)):
                if height:
                    kernel = _kernel(self, height, vectors, count) or 0
                    source, target = x + start * self.source_row, sums + start * self.target_row + column
                    found.append((kernel, source, weights, target, blocks))
        return found


@lru_cache(maxsize=256)
def _kernel(product: GateProduct, rows: int, vectors: int, panels: int) -> int | None:
    """The address of a function of X, panels, sums and the number of blocks of `rows`; None where it cannot run."""
    code = Assembler(product.lanes)
    columns = len(product.slots) * vectors
    row_bytes = 4 * product.lanes * columns
    sums = [[row * columns + column for column in range(columns)] for row in range(rows)]
    code.enter(S1)
    code.set_number(A5, panels)
    panel = code.here()
    code.move(T0, A0)
    code.move(T1, A2)
    code.move(A4, A3)
    block = code.here()
    _begin(code, product, vectors, sums)
    code.move(RESULT, A1)
    code.add_number(RESULT, row_bytes)
    passes, left = divmod(product.inner, _UNROLLED)
    if passes:
        code.set_number(S1, passes)
        inner = code.here()
        for step in range(_UNROLLED):
            _multiply(code, product, sums, step)
        code.add_number(RESULT, _UNROLLED * row_bytes)
        code.add_number(T0, 4 * _UNROLLED)
        code.add_number(S1, -1)
        code.jump_if_not_zero(inner)
    for step in range(left):
        _multiply(code, product, sums, step)
    for row, vectors_of_row in enumerate(sums):
        for vector, (_, place) in zip(vectors_of_row, _columns(product, vectors), strict=True):
            code.store_at(vector, T1, row * product.target_row + place)
    code.add_number(T0, rows * product.source_row - 4 * passes * _UNROLLED)
    code.add_number(T1, rows * product.target_row)
    code.add_number(A4, -1)
    code.jump_if_not_zero(block)
    code.add_number(A1, row_bytes * product.panel_rows)
    code.add_number(A2, 4 * product.lanes * vectors)
    code.add_number(A5, -1)
    code.jump_if_not_zero(panel)
    code.leave(S1)
    return executable(code.code())


def _columns(product: GateProduct, vectors: int) -> list[tuple[Slot, int]]:
    """For each vector of a row of a panel its slot, and its place in a row of sums, in bytes."""
    nbytes = 4 * product.lanes
    return [(slot, slot.number * product.slot + number * nbytes) for slot in product.slots for number in range(vectors)]


def _begin(code: Assembler, product: GateProduct, vectors: int, sums: list[list[int]]) -> None:
    """Set the sums to what the slots hold, or to the biases, which the panel begins with."""
    for row, targets in enumerate(sums):
        for number, (vector, (slot, place)) in enumerate(zip(targets, _columns(product, vectors), strict=True)):
            if slot.adds:
                code.load_at(vector, T1, row * product.target_row + place)
            else:
                code.load_at(vector, A1, 4 * product.lanes * number)


def _multiply(code: Assembler, product: GateProduct, sums: list[list[int]], step: int) -> None:
    """Adds to the sums the products of one column of X and one row of the panel."""
    rows, columns = len(sums), len(sums[0])
    first = step * columns
    numbers = range(rows * columns, rows * columns + rows)
    for row, number in enumerate(numbers):
        code.broadcast(number, T0, None, offset=row * product.source_row + 4 * step)
    weight = numbers.stop
    for column in range(columns):
        place = 4 * product.lanes * (first + column)
        if rows == 1:
            code.compute_memory(FMA, sums[0][column], numbers[0], RESULT, None, place)
            continue
        code.load_at(weight, RESULT, place)
        for targets, number in zip(sums, numbers, strict=True):
            code.compute(FMA, targets[column], weight, number)
