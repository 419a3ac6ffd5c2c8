"""The transforms of Winograd's algorithm along one axis, as machine code for AVX2 with FMA.

A kernel reads up to six lines of vectors, and writes as many lines, each a sum of those read with the coefficients of a
matrix: B^T or A^T of `ops/families/conv/toom_cook.py`. It is called with the address of `Lines`, which say where they
are: as often as `outer`, it goes along `inner_bytes` of all lines, and then moves the lines read and written by their
steps. The last one of a convolution also adds the bias and does the post-ops (`Epilogue`).

No code knows a geometry: padding, strides and tiles are in the addresses that `winograd` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from dagexec.platform.assembly.instructions import (
    A1,
    A2,
    A3,
    A4,
    A5,
    ADD,
    FMA,
    MAX,
    MIN,
    MUL,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    SUB,
    T0,
    T1,
)
from dagexec.platform.assembly.native import Assembler
from dagexec.platform.machine_code import executable
from dagexec.platform.records import dataclass

LANES = 8
"""Float32 numbers in a vector: lines are whole vectors."""

READ, WRITTEN, INNER, OUTER, READ_STEP, WRITE_STEP, BIAS_LINE, OTHER, FIELDS = 0, 6, 12, 13, 14, 15, 16, 17, 18
"""Places of the 64-bit numbers of `Lines`: addresses of lines read and written, `inner_bytes`, `outer`, the steps in
bytes, the address of the bias, and the distance from what is written to what is added to it."""

_FIELD = 8  # bytes
_STEP = 4 * LANES
_INPUTS = (RESULT, A3, A2, S0, S1, A1)
_OUTPUTS = (A4, A5, T0, T1, S2, S3)
_BIAS, _OTHER, _INDEX, _FREE = S2, S3, S4, S5  # the first two where no more than four lines are written
_SAVED = (S0, S1, S2, S3, S4, S5)
_FIRST_RESULT = 6  # vectors below hold what was read
_LAST_VECTOR = 15

MAX_LIMITS = 2
"""How many of RELU and CLIP `Epilogue` may have: vectors hold their limits."""

ADD_OTHER = "add"
RELU = "relu"
CLIP = "clip"


@dataclass(frozen=True)
class Epilogue:
    """What is done to sums before they are written.

    Attributes:
        bias: a number for each channel is added.
        post_ops: in order, of RELU, CLIP with its limits, and ADD_OTHER: what lies `OTHER` bytes from the result.
    """

    bias: bool = False
    post_ops: tuple[tuple[str, float, float], ...] = ()


Matrix = tuple[tuple[Fraction, ...], ...]

_Term = tuple[Fraction, int]
"""A coefficient and the vector that it multiplies."""


@lru_cache(maxsize=64)
def line_kernel(matrix: Matrix, finish: Epilogue | None = None) -> int | None:
    """The address of a kernel for the rows of `matrix`, at most four with `finish`; None where it cannot run."""
    return executable(_kernel(matrix, finish))


def _kernel(matrix: Matrix, finish: Epilogue | None) -> bytes:
    code = Assembler()
    inputs, outputs = _INPUTS[: len(matrix[0])], _OUTPUTS[: len(matrix)]
    code.enter(*_SAVED)
    for first, registers in ((READ, inputs), (WRITTEN, outputs)):
        for number, register in enumerate(registers):
            code.load_field(register, _FIELD * (first + number))
    code.load_field(_FREE, _FIELD * OUTER)
    code.save(_FREE)
    write = _write if finish is None else _finishing(code, finish)
    outer = code.here()
    code.clear(_INDEX)
    inner = code.here()
    for number, register in enumerate(inputs):
        code.load(number, register, _INDEX)
    _rows(code, matrix, lambda row, vector: write(code, outputs[row], vector))
    code.add_number(_INDEX, _STEP)
    code.compare_field(_INDEX, _FIELD * INNER)
    code.jump_if_below(inner)
    for field, registers in ((READ_STEP, inputs), (WRITE_STEP, outputs)):
        code.load_field(_FREE, _FIELD * field)
        for register in registers:
            code.add(register, _FREE)
    code.count_down()
    code.jump_if_not_zero(outer)
    code.leave(*_SAVED)
    return code.code()


def _write(code: Assembler, line: int, vector: int) -> None:
    code.store(vector, line, _INDEX)


def _finishing(code: Assembler, finish: Epilogue) -> Callable[[Assembler, int, int], None]:
    """Loads what `finish` needs into registers. Returns what writes a vector to a line."""
    free = _LAST_VECTOR
    limits: list[tuple[int, int]] = []
    if finish.bias:
        code.load_field(_BIAS, _FIELD * BIAS_LINE)
    code.load_field(_OTHER, _FIELD * OTHER)
    for kind, low, high in finish.post_ops:
        if kind in (RELU, CLIP):
            code.load_constant(free, low)
            code.load_constant(free - 1, high)
            limits.append((free, free - 1))
            free -= 2

    def write(code: Assembler, line: int, vector: int) -> None:
        remaining = iter(limits)
        if finish.bias:
            code.compute_memory(ADD, vector, vector, _BIAS, _INDEX)
        for kind, _, _ in finish.post_ops:
            if kind == ADD_OTHER:
                code.clear(_FREE)
                code.add(_FREE, line)
                code.add(_FREE, _INDEX)
                code.compute_memory(ADD, vector, vector, _FREE, _OTHER)
                continue
            least, most = next(remaining)  # on the left: what is no number stays none
            code.compute(MAX, vector, least, vector)
            if kind == CLIP:
                code.compute(MIN, vector, most, vector)
        code.store(vector, line, _INDEX)

    return write


def _rows(code: Assembler, matrix: Matrix, write: Callable[[int, int], None]) -> None:
    """Computes every row of `matrix` on the vectors read, and calls `write` with its number and vector.

    The points of the algorithm are there with both signs: what two columns or two rows share is computed once.
    """
    free, terms = _paired_terms(code, matrix)
    pairs = _paired_rows(matrix) if free == _FIRST_RESULT else []
    for row, other in pairs:
        alike, opposite = (
            [(a, number) for number, a in enumerate(matrix[row]) if a and a == matrix[other][number] * sign]
            for sign in (1, -1)
        )
        left, right = _sum(code, alike, free), _sum(code, opposite, free + 1)
        for number, what, vector in ((row, ADD, free + 2), (other, SUB, free + 3)):
            code.compute(what, vector, left, right)
            write(number, vector)
    for row in sorted(set(range(len(matrix))) - {row for pair in pairs for row in pair}):
        write(row, _sum(code, terms[row], free))


def _paired_terms(code: Assembler, matrix: Matrix) -> tuple[int, list[list[_Term]]]:
    """The next free vector and the terms of each row, of which two columns that differ in signs only make one."""
    free = _FIRST_RESULT
    terms = [[(a, number) for number, a in enumerate(row) if a] for row in matrix]
    for left, right in _paired_columns(matrix):
        for sign, what in ((1, ADD), (-1, SUB)):
            rows = [number for number, row in enumerate(matrix) if row[left] and row[left] == row[right] * sign]
            if not rows:
                continue
            code.compute(what, free, left, right)
            for number in rows:
                others = [term for term in terms[number] if term[1] not in (left, right)]
                terms[number] = [*others, (matrix[number][left], free)]
            free += 1
    return free, terms


def _sum(code: Assembler, terms: Sequence[_Term], vector: int) -> int:
    """Adds up terms in `vector`. Returns where the sum is: a single term without a factor stays where it is."""
    (first, register), *others = sorted(terms, key=lambda term: (abs(term[0]) == 1, term[0] < 0))
    if first != 1:
        code.compute_constant(MUL, vector, register, float(first))
    elif not others:
        return register
    else:
        (second, other), *others = others
        code.compute(ADD if second > 0 else SUB, vector, register, other)
    for factor, register in others:
        if abs(factor) == 1:
            code.compute(ADD if factor > 0 else SUB, vector, vector, register)
        else:
            code.compute_constant(FMA, vector, register, float(factor))
    return vector


def _paired_columns(matrix: Matrix) -> list[tuple[int, int]]:
    """Neighboring columns that are equal but for the signs of some entries."""
    found = []
    for left in range(1, len(matrix[0]) - 1, 2):
        both = [(row[left], row[left + 1]) for row in matrix]
        if all(abs(a) == abs(b) for a, b in both):
            found.append((left, left + 1))
    return found


def _paired_rows(matrix: Matrix) -> list[tuple[int, int]]:
    """Neighboring rows that are equal but for the signs of some entries, of which there are both kinds."""
    found = []
    for row in range(1, len(matrix) - 1, 2):
        both = [(a, b) for a, b in zip(matrix[row], matrix[row + 1], strict=True) if a or b]
        if all(abs(a) == abs(b) for a, b in both) and {a == b for a, b in both} == {True, False}:
            found.append((row, row + 1))
    return found
