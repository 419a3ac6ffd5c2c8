"""The parts of attention as machine code: keys transposed, products of strided matrices, the softmax of rows.

A product's element is one chain of fused products and sums in the order of the inner axis, a row's softmax goes over
the row alone, eight numbers at a time: no byte depends on the other rows, nor on where a kernel is called.

The exponential is 2^n 2^f with whole n and |f| <= 1/2: n goes to the exponent's bits, 2^f is a polynomial with the
constant term 1, so that 2^-127, the least that is computed, has no bit set and is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import numpy as np

from dagexec.ops.kernels.panel_kernels import first_columns, load_columns, store_columns
from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    ADD,
    ADD_INTEGERS,
    AND,
    AND_NOT,
    DIV,
    FMA,
    HORNER,
    MAX,
    MIN,
    MUL,
    OR,
    PERMUTE_HALVES,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    SHUFFLE,
    SUB,
    T0,
    T1,
    UNPACK_HIGH,
    UNPACK_LOW,
    Instruction,
)
from dagexec.platform.assembly.native import REGISTERS, REPEATED, Assembler, GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.platform.records import dataclass

GROUP = 8
"""Keys that are transposed together, and elements of each."""

_SAVED = (S0, S1, S2, S3, S4, S5)
_VECTOR = 32  # bytes
_STEP = 4  # elements of the inner axis in a pass of the loop
_ROWS_OF_BASE = 5
_SPARE = 2  # registers of a panel of one vector beside its sums: for a row of W, and a number of X


# --- keys, transposed

PACK_GROUPS, PACK_TILES, KEY_ROW, GROUP_BYTES, PACKED_ROW = range(5)
"""Places of the fields of `transpose_kernel`: how many groups of keys, and of elements of each; bytes of a row of keys,
of a group of them, and of a row of packed keys."""


@lru_cache(maxsize=1)
def transpose_kernel() -> int | None:
    """The address of a function of keys, packed keys, nothing and fields; None where it cannot run.

    Row n of the keys becomes column n of the packed ones.
    """
    code = Assembler()
    code.enter(*_SAVED)
    for register, field in ((A4, KEY_ROW), (S2, PACKED_ROW), (S3, PACK_GROUPS)):
        code.load_field(register, 8 * field, A3)
    group = code.here()
    pairs = (T0, T1, S1, S0)
    code.move(pairs[0], A0)
    for register, before in zip(pairs[1:], pairs, strict=False):
        code.move(register, before)
        code.add(register, A4)
        code.add(register, A4)
    code.load_field(S4, 8 * PACK_TILES, A3)
    code.move(A2, A1)
    tile = code.here()
    rows = list(range(8))
    for number, register in enumerate(pairs):
        code.load_at(rows[2 * number], register, 0)
        code.load(rows[2 * number + 1], register, A4)
    for row in _transposed(code, rows, list(range(8, 16))):
        code.store_at(row, A2, 0)
        code.add(A2, S2)
    for register in pairs:
        code.add_number(register, _VECTOR)
    code.add_number(S4, -1)
    code.jump_if_not_zero(tile)
    code.add_number(A1, _VECTOR)
    code.add_field(A0, 8 * GROUP_BYTES, A3)
    code.add_number(S3, -1)
    code.jump_if_not_zero(group)
    code.leave(*_SAVED)
    return executable(code.code())


def _transposed(code: Assembler, rows: list[int], free: list[int]) -> list[int]:
    """The vectors that hold the columns of eight rows of eight."""
    for number in range(0, 8, 2):
        code.compute(UNPACK_LOW, free[number], rows[number], rows[number + 1])
        code.compute(UNPACK_HIGH, free[number + 1], rows[number], rows[number + 1])
    for half in (0, 4):
        for number, (left, right) in enumerate(((0, 2), (1, 3))):
            for place, choice in enumerate((0x44, 0xEE)):
                target = rows[half + 2 * number + place]
                code.compute(SHUFFLE, target, free[half + left], free[half + right], choice)
    for number in range(4):
        for place, choice in ((number, 0x20), (number + 4, 0x31)):
            code.compute(PERMUTE_HALVES, free[place], rows[number], rows[number + 4], choice)
    return free


# --- products

(
    PANELS,
    BLOCKS,
    X_ROW,
    X_3_ROWS,
    X_5_ROWS,
    X_BLOCK,
    W_ROW,
    W_PANEL,
    Y_ROW,
    Y_PANEL,
    WHOLE,
) = range(11)
"""Places of the fields of `product_kernel`: how many panels of columns, and of blocks of rows; bytes of rows of X, W
and Y, of blocks and panels; and of the elements of a row of X that passes of the inner loop read."""


def most_rows(lanes: int) -> int:
    """The most rows of a block."""
    return 8 if lanes == 16 else 4


def most_vectors(rows: int, lanes: int) -> int:
    """The most vectors in a row of a panel, for blocks of so many rows."""
    if lanes == 16:
        return 8 if rows == 1 else 4 if rows < 5 else 2
    return (6, 4, 3, 3)[rows - 1]


@lru_cache(maxsize=512)
def product_kernel(rows: int, vectors: int, lanes: int, has_passes: bool, rest: int, columns: int = 0) -> int | None:
    """The address of a function of X, W, Y and fields, Y = X W, for blocks of `rows` and panels of `vectors`.

    Rows of all three may be any distance apart. The inner axis has passes of _STEP elements and `rest` more. Of a
    panel of one vector the first `columns` may be all that there are.
    """
    code = Assembler(lanes)
    code.enter(*_SAVED)
    mask = first_columns(code, rows * vectors + _SPARE, rows * vectors, columns) if columns else None
    for register, field in ((A4, X_ROW), (A5, X_3_ROWS), (S2, W_ROW), (S3, Y_ROW), (S0, PANELS)):
        code.load_field(register, 8 * field, A3)
    panel = code.here()
    code.load_field(RESULT, 8 * BLOCKS, A3)
    code.save(RESULT)
    code.move(S4, A0)
    code.move(S5, A2)
    block = code.here()
    code.move(T0, S4)
    code.load_field(T1, 8 * X_5_ROWS, A3)
    code.add(T1, S4)
    code.move(RESULT, A1)
    sums = [[row * vectors + number for number in range(vectors)] for row in range(rows)]
    for vector in range(rows * vectors):
        code.clear_vector(vector)
    if has_passes:
        code.load_field(S1, 8 * WHOLE, A3)
        code.add(S1, S4)
        inner = code.here()
        _multiply(code, sums, _STEP, mask)
        for base in (T0, T1):
            code.add_number(base, 4 * _STEP)
        code.compare(T0, S1)
        code.jump_if_below(inner)
    _multiply(code, sums, rest, mask)
    for targets in sums:
        for number, vector in enumerate(targets):
            store_columns(code, vector, S5, number, mask)
        code.add(S5, S3)
    code.add_field(S4, 8 * X_BLOCK, A3)
    code.count_down()
    code.jump_if_not_zero(block)
    code.add_field(A1, 8 * W_PANEL, A3)
    code.add_field(A2, 8 * Y_PANEL, A3)
    code.add_number(S0, -1)
    code.jump_if_not_zero(panel)
    code.leave(*_SAVED)
    return executable(code.code())


def _multiply(code: Assembler, sums: list[list[int]], steps: int, mask: int | None) -> None:
    """Adds to the sums the products of so many columns of X and rows of W, of which a mask selects elements."""
    vectors, free = len(sums[0]), sum(map(len, sums))
    weights = range(free, free + vectors)
    column = free + vectors if free + vectors < REGISTERS[code.lanes] else REPEATED[0]
    for step in range(steps):
        for number, vector in enumerate(weights):
            load_columns(code, vector, (RESULT, None), number, mask)
        for row, targets in enumerate(sums):
            base = (T0, T1)[row // _ROWS_OF_BASE]
            index, scale = ((None, 1), (A4, 1), (A4, 2), (A5, 1), (A4, 4))[row % _ROWS_OF_BASE]
            code.broadcast(column, base, index, scale, 4 * step)
            for target, weight in zip(targets, weights, strict=True):
                code.compute(FMA, target, weight, column)
        code.add(RESULT, S2)


# --- kernels that fields choose

KERNEL, FIRST_OFFSET = 11, 12
"""Places of the fields of `by_fields`, behind those of any kernel: its address, and how far its arrays are moved."""


@cache
def by_fields() -> int | None:
    """The address of a function that calls the kernel that its fields name, with the other arguments moved on."""
    code = GeneralAssembler()
    for place, register in enumerate((A0, A1, A2), FIRST_OFFSET):
        code.add_field(register, 8 * place, A3)
    code.open_frame()
    code.call_field(A3, 8 * KERNEL)
    code.close_frame()
    code.end_call()
    return executable(code.code())


@cache
def nothing() -> int | None:
    """The address of a function that does nothing."""
    code = GeneralAssembler()
    code.clear(RESULT)
    code.end_call()
    return executable(code.code())


# --- softmax

ROWS, SCORE_ROW, MAIN, BIAS_ROW, MASK_ROW, NUMBERS = range(6)
"""Places of the fields of `softmax_kernel`: how many rows; bytes of rows, and of what passes of the loop do of each;
and the address of NUMBERS: a mask of the elements of the last vector, zeros there and minus infinity behind, a vector
each, then the scale, what hidden scores become, the factor of an exponent and the cap (see `cap`)."""

_TOGETHER = 4
_LOW, _MOST, _TOTAL = 12, 13, 14
_DEGREE = 6
_SATURATED = 40.0
"""An exponent of 2, from which on the hyperbolic tangent of half of it is 1."""


def tail_numbers(
    keys: int, scale: float, hidden: float, softcap: float = 0.0
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What NUMBERS leads to."""
    inside = np.arange(GROUP) < (keys - 1) % GROUP + 1
    found = np.zeros(2 * GROUP + 4, np.float32)
    found[:GROUP].view(np.int32)[inside] = -1
    found[GROUP : 2 * GROUP][~inside] = -np.inf
    found[2 * GROUP :] = scale, hidden, 2 / math.log(2) * scale / softcap if softcap else 0, softcap
    return found


@lru_cache(maxsize=256)
def softmax_kernel(
    has_passes: bool, rest: int, has_tail: bool, has_bias: bool, has_mask: bool, nan_to_zero: bool, is_capped: bool
) -> int | None:
    """The address of a function of scores, bias, mask and fields, which makes weights of scores, row by row.

    A row is passes of _TOGETHER vectors, `rest` more, and with `has_tail` a part of one; its memory has room for that.
    A mask has all bits set where a score stays.
    """
    code = Assembler()
    softmax = _Softmax(code, has_passes, rest, has_tail)
    code.enter(*_SAVED)
    fields = ((A4, MAIN), (A5, SCORE_ROW), (T0, BIAS_ROW), (T1, MASK_ROW), (S2, NUMBERS), (S3, ROWS))
    for register, field in fields:
        code.load_field(register, 8 * field, A3)
    code.clear(S0)
    code.load_constant(_LOW, -127.0)
    row = code.here()
    code.load_constant(_MOST, -math.inf)
    softmax.over_row(partial(softmax.scale, has_bias, has_mask, is_capped))
    _across(code, MAX, _MOST)
    code.clear_vector(_TOTAL)
    softmax.over_row(softmax.exponentiate)
    _across(code, ADD, _TOTAL)
    code.load_constant(11, 1.0)
    code.compute(DIV, _TOTAL, 11, _TOTAL)
    code.clear_vector(15)
    softmax.over_row(partial(softmax.divide, nan_to_zero))
    for register, other in ((A0, A5), (A1, T0), (A2, T1)):
        code.add(register, other)
    code.add_number(S3, -1)
    code.jump_if_not_zero(row)
    code.leave(*_SAVED)
    return executable(code.code())


@dataclass(frozen=True)
class _Softmax:
    """The loop over a row, and what is done with its vectors in each of three: see `softmax_kernel`."""

    code: Assembler
    has_passes: bool
    rest: int
    has_tail: bool

    def over_row(self, body: Callable[[Sequence[int], bool], None]) -> None:
        """Code of `body` for vectors behind one another, by their places, and for the tail alone."""
        code = self.code
        code.clear(RESULT)
        if self.has_passes:
            loop = code.here()
            body(range(_TOGETHER), False)
            code.add_number(RESULT, _TOGETHER * _VECTOR)
            code.compare(RESULT, A4)
            code.jump_if_below(loop)
        if self.rest:
            body(range(self.rest), False)
            code.add_number(RESULT, self.rest * _VECTOR)
        if self.has_tail:
            body(range(1), True)

    def load(self, what: Instruction | None, target: int, left: int, base: int, place: int, is_tail: bool) -> None:
        """target = memory, or left what memory; zeros behind the end of a row."""
        code = self.code
        if not is_tail:
            if what is None:
                code.load(target, base, RESULT, place * _VECTOR)
            else:
                code.compute_memory(what, target, left, base, RESULT, place * _VECTOR)
            return
        code.load_at(15, S2, 0)
        code.load_masked(15, 15, base, RESULT)
        if what is None:
            code.move_vector(target, 15)
        else:
            code.compute(what, target, left, 15)

    def scale(self, has_bias: bool, has_mask: bool, is_capped: bool, places: Sequence[int], is_tail: bool) -> None:
        """Scores times the scale, capped, or what hidden ones become, plus the bias; and the largest of them."""
        code = self.code
        for place in places:
            self.load(None, place, 0, A0, place, is_tail)
            code.broadcast(11, S2, None, 1, 2 * _VECTOR + 8 * is_capped)
            code.compute(MUL, place, place, 11)
        if is_capped:
            self.cap(places)
        for place in places:
            if has_mask:
                code.broadcast(11, S2, None, 1, 2 * _VECTOR + 4)
                self.load(None, 10, 0, A2, place, is_tail)
                code.compute(AND, place, place, 10)
                code.compute(AND_NOT, 10, 10, 11)
                code.compute(OR, place, place, 10)
            if has_bias:
                self.load(ADD, place, place, A1, place, is_tail)
            if is_tail:
                code.compute_memory(ADD, place, place, S2, S0, _VECTOR)
            code.compute(MAX, _MOST, _MOST, place)
            code.store(place, A0, RESULT, place * _VECTOR)

    def cap(self, places: Sequence[int]) -> None:
        """c tanh(s / c), for the cap c, where vectors have 2 / ln 2 s / c.

        tanh z is e / (e + 2), where e = exp(2 z) - 1 is (2^n - 1) + 2^n (2^f - 1): small ones are as precise as large.
        """
        code, (first, *others, _) = self.code, _powers_of_two()
        chains = [(place, place + 4, place + 8) for place in places]
        for number, what in ((_SATURATED, MIN), (-_SATURATED, MAX)):
            code.load_constant(_TOTAL, number)
            for x, _, _ in chains:
                code.compute(what, x, _TOTAL, x)  # on the right: what is no number stays none
        for x, n, p in chains:
            code.round(n, x)
            code.compute(SUB, x, x, n)
            code.load_constant(p, first)
        for value in others:
            for x, _, p in chains:
                code.compute_constant(HORNER, p, x, value)
        code.load_constant(_TOTAL, 1.0)
        for x, n, p in chains:
            code.compute(MUL, p, p, x)
            code.powers_of_two(n)
            code.compute(ADD_INTEGERS, n, n, _TOTAL)
            code.compute(SUB, x, n, _TOTAL)
            code.compute(FMA, x, p, n)
            code.compute_constant(ADD, n, x, 2.0)
            code.compute(DIV, x, x, n)
        code.broadcast(_TOTAL, S2, None, 1, 2 * _VECTOR + 12)
        for x, _, _ in chains:
            code.compute(MUL, x, x, _TOTAL)

    def exponentiate(self, places: Sequence[int], _is_tail: bool) -> None:
        """Powers of e of what scores have above the largest; and their sum."""
        code, (first, *others) = self.code, _powers_of_two()
        chains = [(place, place + 4, place + 8) for place in places]
        for place, (x, _, p) in enumerate(chains):
            code.load(x, A0, RESULT, place * _VECTOR)
            code.compute(SUB, x, x, _MOST)
            code.compute_constant(MUL, x, x, 1 / math.log(2))
            code.compute(MAX, x, _LOW, x)  # on the right: what is no number stays none
            code.load_constant(p, first)
        for x, n, _ in chains:
            code.round(n, x)
            code.compute(SUB, x, x, n)
        for value in others:
            for x, _, p in chains:
                code.compute_constant(HORNER, p, x, value)
        for place, (_, n, p) in enumerate(chains):
            code.powers_of_two(n)
            code.compute(ADD_INTEGERS, p, p, n)
            code.compute(ADD, _TOTAL, _TOTAL, p)
            code.store(p, A0, RESULT, place * _VECTOR)

    def divide(self, nan_to_zero: bool, places: Sequence[int], _is_tail: bool) -> None:
        """Powers over their sum, whose reciprocal _TOTAL has by now."""
        code = self.code
        for place in places:
            code.load(place, A0, RESULT, place * _VECTOR)
            code.compute(MUL, place, place, _TOTAL)
            if nan_to_zero:
                code.compute(MAX, place, place, 15)
            code.store(place, A0, RESULT, place * _VECTOR)


def _across(code: Assembler, what: Instruction, vector: int) -> None:
    """Every element of a vector becomes what `what` makes of all of them, in a fixed order."""
    for distance in (4, 2, 1):
        code.rotate(11, vector, distance)
        code.compute(what, vector, vector, 11)


@cache
def _powers_of_two() -> list[float]:
    """Coefficients of 2^f for |f| <= 1/2, highest power first, the last one 1. Relative error 1e-8."""
    nodes = np.polynomial.chebyshev.chebpts1(_DEGREE) / 2
    values = np.expm1(nodes * math.log(2)) / nodes
    series = np.polynomial.Chebyshev.fit(nodes, values, _DEGREE - 1, [-0.5, 0.5])
    return [*(float(value) for value in series.convert(kind=np.polynomial.Polynomial).coef[::-1]), 1.0]
