"""Registers for the values of a kernel: a linear scan over the instructions (Poletto and Sarkar, 1999).

A value has one register from the first instruction that writes it to the last that uses it; what is made before a loop
and used in it keeps its register to the end of the loop. Nothing is spilled: kernels are made to fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import pairwise

from dagexec.errors import DagexecError
from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    T0,
    T1,
)
from dagexec.platform.assembly.native import REGISTERS, Assembler
from dagexec.platform.records import dataclass

GENERAL, VECTOR, MASK = "general", "vector", "mask"

"""Kinds of registers; masks are opmask registers of AVX-512."""

MOST_ADDRESSES = 15
"""That code may have in registers at one time: as many as there are beside that of the stack."""

ANY = -1
"""A vector that is chosen where the code is written (`Program.within`)."""

ARGUMENTS = (A0, A1, A2, A3)
"""Registers of the arguments of a function."""

PRESERVED = (S0, S1, S2, S3, S4, S5)
"""Registers that a function leaves as they were."""


class OutOfRegistersError(DagexecError):
    """A kernel has more values at once than the processor has registers."""


@dataclass(eq=False, slots=True)
class Value:
    """Something in a register.

    Attributes:
        kind: of the register.
        fixed: its number, of an argument; None to choose one.
    """

    kind: str
    fixed: int | None = None


@dataclass(eq=False, slots=True)
class Instruction:
    """What is written for one operation.

    Attributes:
        emit: writes it, given the assembler and the registers of `written`, if there is one, and of `read`.
        written: the value that it makes or changes.
        read: the values that it reads; the register of one that is not used later suits `written`.
        is_apart: no register of `read` may be that of `written`.
        is_move: `written` becomes what the only one of `read` is.
    """

    emit: Callable[..., None]
    written: Value | None = None
    read: Sequence[Value] = ()
    is_apart: bool = False
    is_move: bool = False

    @property
    def values(self) -> Sequence[Value]:
        """All of them, in the order in which `emit` is given their registers."""
        return self.read if self.written is None else (self.written, *self.read)


@dataclass
class Program:
    """Instructions, and where loops begin and end: the first and the last instruction of each."""

    instructions: list[Instruction] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)

    def write(self, code: Assembler) -> None:
        """Write all of it as a function. Raises OutOfRegistersError."""
        joined_moves(self.instructions)
        registers = allocate(self, _all(code.lanes))
        saved = [register for register in PRESERVED if register in _general(registers)]
        code.enter(*saved)
        self._emit(code, registers)
        code.leave(*saved)

    def within(self, lanes: int, free: Sequence[int]) -> Callable[[Assembler, int], None]:
        """What writes it into other code, for a vector in the place of the value that is fixed in `ANY`.

        That code leaves it the vectors in `free`, of which that vector is none, and all masks. Raises
        OutOfRegistersError.
        """
        joined_moves(self.instructions)
        registers = allocate(self, {**_all(lanes), GENERAL: [], VECTOR: [ANY, *free]})
        steps = [(one.emit, [registers[value] for value in one.values]) for one in self.instructions]

        def write(code: Assembler, vector: int) -> None:
            for emit, numbers in steps:
                emit(code, *[vector if number == ANY else number for number in numbers])

        return write

    def _emit(self, code: Assembler, registers: Mapping[Value, int]) -> None:
        for one in self.instructions:
            one.emit(code, *[registers[value] for value in one.values])


def _all(lanes: int) -> dict[str, list[int]]:
    """The registers that there are, by kind, those first that are to be taken first."""
    return {
        GENERAL: [RESULT, A4, A5, T0, T1, A3, A2, A1, A0, *PRESERVED],
        VECTOR: list(range(REGISTERS[lanes])),
        MASK: list(range(1, 8)),
    }


def joined_moves(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions, where what is computed only to be moved at once is computed where it goes.

    Values used outside of them, other than those that are moved to, must not be computed there.
    """
    joinable = [(a, b) for a, b in pairwise(instructions) if b.is_move and a.written is b.read[0]]
    uses = Counter([value for one in instructions for value in one.values]) if joinable else {}
    for before, one in joinable:
        if not one.is_move or before.written is not one.read[0] or uses[before.written] != 2:
            continue
        if not (before.is_apart and one.written in before.read):
            before.written, one.written, one.read = one.written, None, ()
            one.emit, one.is_move = _nothing, False
    return list(instructions)


def _nothing(code: Assembler) -> None:
    """No instruction."""


def _general(registers: Mapping[Value, int]) -> set[int]:
    """The general registers in use."""
    return {number for value, number in registers.items() if value.kind == GENERAL}


def allocate(program: Program, free: Mapping[str, list[int]]) -> dict[Value, int]:
    """The register of each value, out of those that are `free`, by kind. Raises OutOfRegistersError."""
    found: dict[Value, int] = {}
    ends = _ends(program)
    for value in ends:
        if value.fixed is not None:
            found[value] = value.fixed
            free[value.kind].remove(value.fixed)
    for place, one in enumerate(program.instructions):
        written = one.written
        dying = [value for value in dict.fromkeys(one.read) if ends[value] == place and value is not written]
        if dying and not one.is_apart:
            _release(dying, found, free)
        if written is not None and written not in found:
            suited = () if one.is_apart else dying
            wish = next((found[value] for value in suited if value.kind == written.kind), None)
            found[written] = _take(free[written.kind], wish, written.kind, place)
        if dying and one.is_apart:
            _release(dying, found, free)
        if written is not None and ends[written] == place:
            _release([written], found, free)
    return found


def _take(free: list[int], wish: int | None, kind: str, place: int) -> int:
    if not free:
        raise OutOfRegistersError(f"a kernel needs more {kind} registers than there are, at its instruction {place}")
    number = free[0] if wish is None else wish
    free.remove(number)
    return number


def _release(values: Sequence[Value], found: Mapping[Value, int], free: Mapping[str, list[int]]) -> None:
    for value in values:
        free[value.kind].insert(0, found[value])


def _ends(program: Program) -> dict[Value, int]:
    """The last instruction for which each value has to be kept."""
    starts: dict[Value, int] = {}
    ends: dict[Value, int] = {}
    for place, one in enumerate(program.instructions):
        for value in one.values:
            if value not in starts:
                starts[value] = place if value.fixed is None else -1
            ends[value] = place
    for first, last in sorted(program.loops, key=lambda loop: loop[1]):
        for value, end in ends.items():
            if starts[value] < first <= end < last:
                ends[value] = last
    return ends
