"""Pieces of operators: what each writes and reads, found by executing it alone, and where they overlap.

The pieces of a phase may run side by side, so none may write or read a byte that another writes. Which bytes native
calls write does not depend on values. So a piece is executed on memory filled with random bytes and then with their
complements: it has written the bytes that differ afterwards. Then it is executed with other values in the bytes that
other pieces write: if that changes what it writes, it reads them. Values that it loads without using them do not count,
nor bytes that it writes back unchanged.

Only the memory of the operator is touched: its blobs, its working memory and its scratch, all restored in the end.
Blobs that others compute hold random numbers meanwhile, or zeros where they are integers, which may be indices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU
from dagexec.core.graph import Graph, Hazard
from dagexec.core.native import Piece, call_rows, phases_of, rows_of
from dagexec.core.operator import Operator, Prepared, Step, parts_of
from dagexec.core.tensor import Tensor
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Owners = npt.NDArray[np.int16]

_LARGE = 0x4B
"""A byte of which four are 13 million as a float32, which no maximum hides."""

_SEED = 34
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class PieceFault:
    """Pieces of a phase that touch the same bytes, or bytes that no piece writes.

    Attributes:
        kind: WAW where both write, RAW where the second reads what the first writes; CONTROL for a piece that is
            left out or executed twice, and for a phase that begins too early.
        operator: the label of the operator, which names the net.
        phase: the number of the phase; None if it concerns all.
        pieces: their numbers in it.
        memory: what they touch: "blob 'y'", or working memory; empty if unknown.
        what: the fault in words.
    """

    kind: Hazard
    operator: str
    phase: int | None
    pieces: tuple[int, ...]
    memory: str
    what: str

    def __str__(self) -> str:
        who = " and ".join(f"piece {piece}" for piece in self.pieces)
        where = "" if self.phase is None else f"phase {self.phase}" + (f", {who}: " if who else ": ")
        on = f" on {self.memory}" if self.memory else ""
        return f"{self.kind.name}{on}: {self.operator}, {where}{self.what}"


Phase = Sequence[Piece | Step]
"""Pieces of native calls; or one step of Python."""


def phases_of_operator(prepared: Prepared) -> list[Phase]:
    """The phases of an operator, one after another."""
    result: list[Phase] = []
    for step in prepared.parts or (prepared.step,):
        for part in parts_of(step):
            phases = phases_of(part)
            result += [(part,)] if phases is None else phases
    return result


def check_pieces(
    graph: Graph,
    index: int,
    operator: Operator,
    prepared: Prepared,
    inputs: Collection[Blob],
) -> tuple[int, list[PieceFault]]:
    """How many pieces operator `index` has in phases of several, and their faults.

    Nothing else may use its memory meanwhile. The `inputs` keep their values; random numbers are put into its other
    input blobs. Errors of its Python steps are raised.
    """
    phases = phases_of_operator(prepared) if operator.runtime.device == CPU else []
    shared = sum(len(phase) for phase in phases if len(phase) > 1)
    if not shared:
        return 0, []
    with np.errstate(all="ignore"):
        return shared, _Trial(graph, index, operator, prepared, inputs).run(phases)


def _array_of(blob: Blob) -> Array | None:
    tensor = blob.value
    if not isinstance(tensor, Tensor) or tensor.is_empty:
        return None
    array = tensor.array
    return array if isinstance(array, np.ndarray) and array.size and not array.dtype.hasobject else None


class _Memory:
    """Stretches of the host's memory as one row of bytes."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._stretches: list[tuple[int, int, int]] = []  # low, high, and the place of low in the row
        for low, high in sorted(np.lib.array_utils.byte_bounds(array) for array in arrays):
            if self._stretches and low <= self._stretches[-1][1]:
                first, last, place = self._stretches[-1]
                self._stretches[-1] = (first, max(last, high), place)
            else:
                self._stretches.append((low, high, self.nbytes))
        self._live = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low)) for low, high, _ in self._stretches
        ]

    @property
    def nbytes(self) -> int:
        """How long the row is."""
        if not self._stretches:
            return 0
        low, high, place = self._stretches[-1]
        return place + high - low

    def read(self) -> Bytes:
        """A copy of the row."""
        return np.concatenate(self._live)

    def change_to(self, row: Bytes) -> Mask:
        """Set all bytes to those of `row`, and say which were others. Bytes that are equal are not written."""
        changed = np.empty(len(row), np.bool_)
        for live, (_, _, place) in zip(self._live, self._stretches, strict=True):
            part = slice(place, place + len(live))
            np.not_equal(live, row[part], out=changed[part])
            if changed[part].any():
                live[...] = row[part]
        return changed

    def has(self, array: Array) -> bool:
        """True for an array in this memory."""
        address = address_of(array)
        return any(low <= address < high for low, high, _ in self._stretches)

    def within(self, row: Array, array: Array) -> Array:
        """The part of `row`, which has an element for each byte, that stands for `array`: a row of bytes an element."""
        address = address_of(array)
        low, _, start = next(stretch for stretch in self._stretches if stretch[0] <= address <= stretch[1])
        place = start + address - low
        strides = (*array.strides, 1)
        return np.ndarray((*array.shape, array.itemsize), row.dtype, row, place, strides)  # elements of one byte


class _Trial:
    """The execution of the pieces of an operator, each alone."""

    def __init__(
        self, graph: Graph, index: int, operator: Operator, prepared: Prepared, kept: Collection[Blob]
    ) -> None:
        self._label = graph.label(index)
        computed = [blob for blob in operator.input_blobs if not _is_constant(blob)]
        inputs, outputs = _arrays_of(computed), _arrays_of(operator.output_blobs)
        working = [array for array in prepared.working_memory if array.size]
        scratch = [array for array in prepared.scratch if array.size]
        named = [(_array_of(blob), f"blob {blob.name!r}") for blob in (*operator.output_blobs, *operator.input_blobs)]
        self._named = [(array, name) for array, name in named if array is not None]
        self._named += [(array, f"working memory of {self._label}") for array in (*working, *scratch)]
        self._memory = _Memory([*inputs, *outputs, *working, *scratch])
        kept_ids = set(map(id, kept))
        self._drawn = _arrays_of([blob for blob in computed if id(blob) not in kept_ids])
        self._held = self._bytes_of(scratch) & ~self._bytes_of(working) | self._bytes_of(inputs)  # that may be read
        self._wanted = self._bytes_of(outputs) & ~self._held
        self._pattern = np.random.default_rng(_SEED).integers(0, 256, self._memory.nbytes, np.uint8)
        self._faults: list[PieceFault] = []

    def _bytes_of(self, arrays: Iterable[Array]) -> Mask:
        mask = np.zeros(self._memory.nbytes, np.bool_)
        for array in arrays:
            self._memory.within(mask, array)[...] = True
        return mask

    def run(self, phases: Sequence[Phase]) -> list[PieceFault]:
        """The faults of these phases."""
        at_first = self._memory.read()
        try:
            generator = np.random.default_rng(_SEED)
            if self._drawn:  # what scratch holds is to differ from what the second run puts there
                self._draw(generator)
                for phase in phases:
                    _execute(phase)
                self._draw(generator)
            for number, phase in enumerate(phases):
                before = self._memory.read()
                owner = self._writers(number, phase, before)
                _execute(phase)
                if len(phase) > 1:
                    self._check_reads(number, phase, owner, before, self._memory.read())
                self._held |= owner != _NOBODY
            missed = self._wanted & ~self._held
            if missed.any():
                count = f"{np.count_nonzero(missed):,} bytes are written by no piece"
                self._note(Hazard.CONTROL, None, (), int(np.argmax(missed)), count)
        finally:
            self._memory.change_to(at_first)
        return self._faults

    def _draw(self, generator: np.random.Generator) -> None:
        """Put numbers into the inputs."""
        row = self._memory.read()
        for array in self._drawn:
            values: Array = generator.standard_normal(array.shape).astype(np.float32)
            if array.dtype.kind in "iub":
                values = values > 0 if array.itemsize == 1 else np.zeros_like(values)
            self._memory.within(row, array)[...] = values.astype(array.dtype)[..., None].view(np.uint8)
        self._memory.change_to(row)

    def _writers(self, number: int, phase: Phase, before: Bytes) -> Owners:
        """The piece that writes each byte; notes bytes that several write. Memory is as `before` in the end."""
        owner = np.full(len(before), _NOBODY, np.int16)
        noted: set[tuple[int, int]] = set()
        for pattern in (self._pattern, ~self._pattern):
            filled = _mixed(self._held, before, pattern)
            self._memory.change_to(filled)
            for place, piece in enumerate(phase):
                _call(piece)
                written = self._memory.change_to(filled)
                shared = written & (owner != _NOBODY) & (owner != place)
                for other in np.unique(owner[shared]).tolist():
                    if (other, place) not in noted:
                        noted.add((other, place))
                        first = int(np.argmax(shared & (owner == other)))
                        self._note(Hazard.WAW, number, (other, place), first, "both write the same bytes")
                owner[written & ~shared] = place
        self._memory.change_to(before)
        return owner

    def _check_reads(self, number: int, phase: Phase, owner: Owners, before: Bytes, after: Bytes) -> None:
        """Note the pieces that read what another writes. Memory is as `after` in the end."""
        for place, piece in enumerate(phase):
            if not self._depends(piece, owner == place, (owner != _NOBODY) & (owner != place), before, after):
                continue
            for other in range(len(phase)):
                theirs = owner == other
                if other != place and self._depends(piece, owner == place, theirs, before, after):
                    what = "the second reads what the first writes"
                    self._note(Hazard.RAW, number, (other, place), int(np.argmax(theirs)), what)
        self._memory.change_to(after)

    def _depends(self, piece: Piece | Step, written: Mask, others: Mask, before: Bytes, after: Bytes) -> bool:
        """True when a piece writes other values than in `after` once bytes of `others` differ from `before`."""
        for changed in (~before, np.full_like(before, _LARGE)):
            self._memory.change_to(_mixed(others, changed, before))
            _call(piece)
            if ((self._memory.read() != after) & written).any():
                return True
        return False

    def _note(self, kind: Hazard, phase: int | None, pieces: tuple[int, ...], byte: int, what: str) -> None:
        row = np.zeros(self._memory.nbytes, np.bool_)
        row[byte] = True
        memory = next(
            name for array, name in self._named if self._memory.has(array) and self._memory.within(row, array).any()
        )
        self._faults.append(PieceFault(kind, self._label, phase, pieces, memory, what))


def _arrays_of(blobs: Iterable[Blob]) -> list[Array]:
    return [array for blob in blobs if (array := _array_of(blob)) is not None]


def _is_constant(blob: Blob) -> bool:
    return isinstance(blob.value, Tensor) and blob.value.constant is not None


def _mixed(where: Mask, first: Bytes, second: Bytes) -> Bytes:
    """`first` where `where` is True, else `second`: several times as fast as `numpy.where`."""
    chosen = -where.view(np.uint8)
    return first & chosen | second & ~chosen


def _execute(phase: Phase) -> None:
    for piece in phase:
        _call(piece)


def _call(piece: Piece | Step) -> None:
    """Make the calls of a piece, whatever they return: recovering from a failure would touch what others write."""
    if callable(piece):
        piece()
        return
    table, _ = rows_of(piece)
    left = call_rows(table)
    while left:
        left = call_rows(table[len(table) - left + 1 :])
