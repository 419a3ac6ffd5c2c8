"""Products with rows of weights as they lie, as machine code for AVX2 with FMA or for AVX-512: Y = X W^T + b.

Each element is the inner product of a row of X and a row of W: as many chains of fused products and sums as a vector
has numbers, which are added in a fixed order, and then the bias. Its bytes depend neither on the other rows, nor on
the other units, nor on where a kernel is called.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from dagexec.ops.kernels.panel_kernels import first_columns, load_columns
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
from dagexec.platform.machine_code import executable

MOST_ROWS = {8: 3 if REGISTERS[8] > 15 else 2, 16: 4}
"""By lanes, the most rows of X that are multiplied together: with four units their sums take most registers."""

X_ROW, Y_ROW, W_ROW, X_STEP, W_STEP, Y_STEP, BIAS_STEP, INNER, BLOCKS, BIAS = range(10)
"""Places of the 64-bit numbers that rcx points to: bytes of rows of X, Y and W; by how many bytes X, W, Y and the bias
go on behind each block; bytes of a row that are multiplied, whole vectors; how many blocks; and bytes from the first
element of Y to that of the bias."""

_SAVED = (S0, S1, S2, S3, S4, S5)
_SPARE = 2  # vectors for numbers of a single row of X and of one of W
_FREE = (A4, A5, T0, T1, S2, S3, S4, S5)


def units_of_block(rows: int, lanes: int) -> int:
    """How many units are multiplied together for so many rows: eight rows of W are read at once for a single one."""
    return 8 if rows == 1 else 6 if lanes == 16 else 4


@lru_cache(maxsize=64)
def dot_kernel(rows: int, units: int, lanes: int, rest: int = 0, *, has_bias: bool = True) -> int | None:
    """The address of a function of X, W, Y and fields, for blocks of `rows` by `units`; None where it cannot run.

    Blocks lie one behind another along the rows, or along the units. A single row may have `rest` more elements than
    fill vectors.
    """
    code = Assembler(lanes)
    code.enter(*_SAVED)
    mask = first_columns(code, units + _SPARE, units, rest) if rest else None
    sources = [A0, *_FREE[: rows - 1]]
    weights = [A1, *_FREE[rows - 1 : rows + units - 2]]
    code.load_field(S0, 8 * BIAS, A3)
    code.add(S0, A2)
    code.load_field(S1, 8 * INNER, A3)
    code.load_field(RESULT, 8 * BLOCKS, A3)
    code.save(RESULT)
    block = code.here()
    _follow(code, sources, X_ROW)
    _follow(code, weights, W_ROW)
    sums = [[row * units + unit for unit in range(units)] for row in range(rows)]
    for vector in range(rows * units):
        code.clear_vector(vector)
    _multiply(code, sums, sources, weights)
    if mask is not None:
        value, weight = range(units, units + _SPARE)
        load_columns(code, value, (A0, RESULT), 0, mask)
        for unit, register in enumerate(weights):
            load_columns(code, weight, (register, RESULT), 0, mask)
            code.compute(FMA, unit, value, weight)
    spare = rows * units
    for vector in range(rows * units):
        _add_up(code, vector, spare)
    code.move(RESULT, A2)
    for row in sums:
        for unit, vector in enumerate(row):
            if has_bias:
                code.broadcast(spare, S0, None, 1, 4 * unit)
                code.compute(ADD, vector, vector, spare)
            code.store_first(vector, RESULT, None, 1, 4 * unit)
        code.add_field(RESULT, 8 * Y_ROW, A3)
    for register, field in ((A0, X_STEP), (A1, W_STEP), (A2, Y_STEP), (S0, BIAS_STEP)):
        code.add_field(register, 8 * field, A3)
    code.count_down()
    code.jump_if_not_zero(block)
    code.leave(*_SAVED)
    return executable(code.code())


def _follow(code: Assembler, rows: list[int], field: int) -> None:
    """Each register but the first leads to the row behind that of the one before."""
    for before, register in pairwise(rows):
        code.move(register, before)
        code.add_field(register, 8 * field, A3)


def _multiply(code: Assembler, sums: list[list[int]], sources: list[int], weights: list[int]) -> None:
    """Adds to the sums the products of all vectors of the rows."""
    first = len(sources) * len(weights)
    values, weight = range(first, first + len(sources)), first + len(sources)
    code.clear(RESULT)
    inner = code.here()
    for value, source in zip(values, sources, strict=True):
        code.load(value, source, RESULT)
    for unit, register in enumerate(weights):
        if len(sources) == 1:
            code.compute_memory(FMA, sums[0][unit], first, register, RESULT)
            continue
        code.load(weight, register, RESULT)
        for value, row in zip(values, sums, strict=True):
            code.compute(FMA, row[unit], value, weight)
    code.add_number(RESULT, 4 * code.lanes)
    code.compare(RESULT, S1)
    code.jump_if_below(inner)


def _add_up(code: Assembler, vector: int, spare: int) -> None:
    """Every element of a vector becomes the sum of all."""
    distance = code.lanes // 2
    while distance:
        code.rotate(spare, vector, distance)
        code.compute(ADD, vector, vector, spare)
        distance //= 2
