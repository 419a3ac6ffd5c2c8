"""The inner part of a matrix product on weights in panels, as machine code for AVX2 with FMA or for AVX-512.

A kernel computes some rows of Y = X W + b, in the columns of one panel of W, for as many blocks of rows as it is told.
Each element is one chain of fused products and sums in the order of the inner axis, then the bias, then what is added:
its bytes depend neither on the other rows nor on where the kernel is called. The sums of a block stay in registers,
two vectors a row (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
"""

from __future__ import annotations

import struct
from functools import lru_cache

from dagexec.ops.kernels.post_ops import ADD_OTHER, PostOp, post_op_within
from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    ADD,
    FMA,
    RESULT,
    S1,
    S2,
    S3,
    S4,
    S5,
    T0,
    T1,
)
from dagexec.platform.assembly.native import REGISTERS, REPEATED, Assembler
from dagexec.platform.machine_code import executable

VECTORS = {8: 3, 16: 2}
"""By lanes, the most vectors in a row of a panel."""

MAX_ROWS = {8: 4, 16: 8}
"""By lanes, the most rows of a block. With AVX2 their sums take all registers but those for a row of the panel and one
more. With AVX-512 14 rows would do; but the first cache has only 8 places for lines of rows that are some multiple of
4096 bytes apart: 128 x 3072 x 768 ran at 54 GFLOP/s with 13 rows, at 96 with 8."""

STEP = 4
"""Elements of the inner axis in a pass of the loop; what is over is computed behind it."""

BLOCKS, PANEL_BYTES, SOURCE_ROW, SOURCE_3_ROWS, SOURCE_5_ROWS, SOURCE_BLOCK, TARGET_ROW, BIAS, ADDEND, AHEAD = range(10)
"""Places of the 64-bit numbers that rcx points to: how many blocks, and bytes: of a panel, of rows of X and of a block
of them, of a row of Y, from an element of Y to that of the bias and to that which is added, and by how much a pass of
the inner loop goes on in what is behind the panel, which it has the processor fetch."""

SEGMENT_BYTES, SKIPPED = AHEAD, AHEAD + 1
"""Places of those where rows of X are in segments: bytes of the panel for a segment, and the address of as many numbers
as there are segments, the bytes from the end of each to the next. That of the bias is an address then."""

LINE, FETCHED_LINES = 64, 2
"""Bytes of a cache line, and how many a pass of the inner loop has fetched."""

_SAVED = (S1, S2, S3, S4, S5)
_BASES = (T0, T1)  # of rows 0 to 4, 5 to 9
_ROWS_OF_BASE = 5
_SPARE = 2
"""Registers for numbers of X by turns. A number is loaded once for all vectors: read from memory by each product, loads
are what takes longest on a processor with two units for vectors of 16. 128 x 768 x 3072 runs at 224 GFLOP/s on a
processor of 228, by products that read memory at 190."""


def length_of(inner: int) -> int:
    """What a kernel has to know of so many elements of the inner axis: whether there are passes, and what is over."""
    return inner if inner < STEP else STEP + inner % STEP


@lru_cache(maxsize=256)
def panel_kernel(
    rows: int,
    vectors: int,
    lanes: int,
    adds: bool,
    post_ops: tuple[PostOp, ...] = (),
    in_segments: bool = False,
    length: int = STEP,
    rest: int = 0,
) -> int | None:
    """The address of a function of X, panel, Y and fields, for blocks of `rows`; None where it cannot run.

    With `adds` a tensor of the shape of Y is added: first, and then it may be Y itself, or where ADD_OTHER is among the
    `post_ops`. `in_segments` tells that a row of X is some stretches of equal length, which other rows may read, too.
    `length`, of `length_of`, says what is behind whole passes of the inner axis, or of a stretch. Of the last vector
    the first `rest` columns are there, all for 0; the panel has numbers for the others, too.
    """
    code, width, over = Assembler(lanes), 4 * lanes * vectors, length % STEP
    code.enter(*_SAVED)
    for register, field in ((A4, SOURCE_ROW), (A5, SOURCE_3_ROWS), (S2, TARGET_ROW), (S3, ADDEND)):
        code.load_field(register, 8 * field, A3)
    if not in_segments:
        code.load_field(S4, 8 * BIAS, A3)
        code.add(S4, A2)
    code.load_field(RESULT, 8 * BLOCKS, A3)
    code.save(RESULT)
    code.load_field(S5, 8 * PANEL_BYTES, A3)
    code.add(S5, A1)  # where the panel ends, and what is fetched begins
    _move_back(code, S1, S5, over * width)
    block = code.here()
    if in_segments:
        _move_back(code, S1, A1, over * width)
        code.load_field(S4, 8 * SKIPPED, A3)
    code.move(T0, A0)
    code.load_field(T1, 8 * SOURCE_5_ROWS, A3)
    code.add(T1, T0)
    code.move(RESULT, A1)
    sums = [[row * vectors + number for number in range(vectors)] for row in range(rows)]
    for vector in range(rows * vectors):
        code.clear_vector(vector)
    segment = code.here()
    if in_segments:
        code.add_field(S1, 8 * SEGMENT_BYTES, A3)
    if length >= STEP:
        inner = code.here()
        _multiply(code, sums, STEP)
        if not in_segments:
            for line in range(FETCHED_LINES):
                code.fetch(S5, line * LINE)
            code.add_field(S5, 8 * AHEAD, A3)
        _go_on(code, STEP, width)
        code.compare(RESULT, S1)
        code.jump_if_below(inner)
    if over:
        _multiply(code, sums, over)
        _go_on(code, over, width)
    if in_segments:
        for base in _BASES:
            code.add_field(base, 0, S4)
        code.add_number(S4, 8)
        code.compare(RESULT, S5)
        code.jump_if_below(segment)
        code.load_field(S4, 8 * BIAS, A3)
    code.move(RESULT, A2)
    write = _write_first if rest else _write
    write(code, sums, adds and all(kind != ADD_OTHER for kind, _, _ in post_ops), rest)
    if post_ops:
        _finish(code, rows, vectors, post_ops, rest)
    code.add_field(A0, 8 * SOURCE_BLOCK, A3)
    code.count_down()
    code.jump_if_not_zero(block)
    code.leave(*_SAVED)
    return executable(code.code())


def _move_back(code: Assembler, register: int, other: int, nbytes: int) -> None:
    """register = so many bytes before other."""
    code.move(register, other)
    if nbytes:
        code.add_number(register, -nbytes)


def _go_on(code: Assembler, steps: int, width: int) -> None:
    """Be so many rows of `width` bytes further in the panel, and columns in X."""
    for register, nbytes in ((RESULT, steps * width), *((base, 4 * steps) for base in _BASES)):
        code.add_number(register, nbytes)


def _multiply(code: Assembler, sums: list[list[int]], steps: int) -> None:
    """Adds to the sums the products of so many columns of X and rows of the panel, one after another."""
    vectors, free = len(sums[0]), sum(map(len, sums))
    nbytes = 4 * code.lanes
    weights = range(free, free + vectors)
    spare = [*range(free + vectors, REGISTERS[code.lanes]), *REPEATED][:_SPARE]
    for step in range(steps):
        for number, vector in enumerate(weights):
            code.load_at(vector, RESULT, (step * vectors + number) * nbytes)
        for row, targets in enumerate(sums):
            base, (index, scale) = _BASES[row // _ROWS_OF_BASE], _row_of(row % _ROWS_OF_BASE)
            number = spare[row % len(spare)]
            code.broadcast(number, base, index, scale, 4 * step)
            for target, weight in zip(targets, weights, strict=True):
                code.compute(FMA, target, weight, number)


def _row_of(number: int) -> tuple[int | None, int]:
    """The index register and its scale that lead from a base to one of the five rows it is for."""
    return ((None, 1), (A4, 1), (A4, 2), (A5, 1), (A4, 4))[number]


def _write(code: Assembler, sums: list[list[int]], adds: bool, rest: int = 0) -> None:
    """Adds the bias, and what else is to be added, and writes the rows; Y's register goes on behind them."""
    vectors, free = len(sums[0]), sum(map(len, sums))
    nbytes = 4 * code.lanes
    for number in range(vectors):
        code.load_at(free + number, S4, number * nbytes)
    for targets in sums:
        for number, vector in enumerate(targets):
            code.compute(ADD, vector, vector, free + number)
            if adds:
                code.compute_memory(ADD, vector, vector, A2, S3, number * nbytes)
            code.store_at(vector, A2, number * nbytes)
        code.add(A2, S2)


def _write_first(code: Assembler, sums: list[list[int]], adds: bool, rest: int) -> None:
    """As `_write`, where of the last vectors of rows only the first `rest` columns are there.

    One vector of the bias is there at a time: with NEON three registers are free.
    """
    spare = sum(map(len, sums))
    mask = first_columns(code, spare + 1, spare, rest)
    for number in range(len(sums[0])):
        load_columns(code, spare, (S4, None), number, mask if number == len(sums[0]) - 1 else None)
        for targets in sums:
            code.compute(ADD, targets[number], targets[number], spare)
    for targets in sums:
        for number, vector in enumerate(targets):
            within = mask if vector == targets[-1] else None
            if adds:
                load_columns(code, spare, (A2, S3), number, within)
                code.compute(ADD, vector, vector, spare)
            store_columns(code, vector, A2, number, within)
        code.add(A2, S2)


def first_columns(code: Assembler, vector: int, spare: int, count: int) -> int:
    """What selects the first `count` columns: `vector`, or with AVX-512 another kind of register. `spare` changes."""
    mask = vector if code.lanes == 8 else 1
    [number] = struct.unpack("<f", struct.pack("<i", count))
    code.load_constant(spare, number)
    code.first_elements(mask, spare)
    return mask


def load_columns(code: Assembler, vector: int, place: tuple[int, int | None], number: int, mask: int | None) -> None:
    """Of the vectors at a place, vector = that of a number, or the elements of it that a mask selects."""
    offset = number * 4 * code.lanes
    if mask is None:
        code.load(vector, *place, offset)
    else:
        code.load_masked(vector, mask, *place, 1, offset)


def store_columns(code: Assembler, vector: int, base: int, number: int, mask: int | None) -> None:
    """Likewise, of the vectors at a base that of a number = vector."""
    offset = number * 4 * code.lanes
    if mask is None:
        code.store_at(vector, base, offset)
    else:
        code.store_masked(vector, mask, base, None, 1, offset)


def _finish(code: Assembler, rows: int, vectors: int, post_ops: tuple[PostOp, ...], rest: int) -> None:
    """Does post-ops to rows that were just written, from rax on: before that their sums took too many registers."""
    *free, spare, of_mask = range(1, REGISTERS[code.lanes] + (0 if rest else 2))
    written = [None if one[0] == ADD_OTHER else post_op_within(code.lanes, free, one) for one in post_ops]
    for _ in range(rows):
        for number in range(vectors):
            is_part = rest and number == vectors - 1
            mask = first_columns(code, of_mask, spare, rest) if is_part else None
            load_columns(code, 0, (RESULT, None), number, mask)
            for write in written:
                if write is not None:
                    write(code, 0)
                elif mask is None:
                    code.compute_memory(ADD, 0, 0, RESULT, S3, number * 4 * code.lanes)
                else:
                    load_columns(code, spare, (RESULT, S3), number, first_columns(code, of_mask, spare, rest))
                    code.compute(ADD, 0, 0, spare)
            store_columns(code, 0, RESULT, number, first_columns(code, of_mask, spare, rest) if is_part else None)
        code.add(RESULT, S2)
