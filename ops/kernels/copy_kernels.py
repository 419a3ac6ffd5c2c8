"""Copies between arrays of other strides, as machine code: rows, repeated numbers, and blocks that are transposed.

A kernel is called with the addresses of what is read and written, and of `FIELDS` that say how far. Elements have four
bytes, or are moved as if they had.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dagexec.ops.kernels.builder import BYTES, Builder, Scalar, Vector
from dagexec.platform.assembly.instructions import GREATER, LESS, PERMUTE_HALVES, SHUFFLE, UNPACK_HIGH, UNPACK_LOW

_EachBlock = Callable[[Scalar, Scalar, int], None]

COUNT, ROWS, SOURCE_ROW, TARGET_ROW = range(4)
"""Places of the 64-bit numbers of `row_kernel`: elements in a row, rows, and bytes from one to the next."""

SOURCE_STRIDE, TARGET_STRIDE, DOWN_BLOCKS, ACROSS_BLOCKS, MATRICES, SOURCE_MATRIX, TARGET_MATRIX = range(7)
"""Those of `transposing_kernel`: bytes from row to row where it reads and where it writes, whole blocks: of HEIGHT rows
that are read, and of SIDE columns; how many matrices there are, and bytes from one to the next."""

SIDE = 8
"""Rows and columns that are transposed in registers."""

HEIGHT = 2 * SIDE
"""Rows of a block, which fill a cache line of the target: written in halves, far apart in time, lines that do not fit
into the cache would be fetched and written back twice."""


@lru_cache
def row_kernel(lanes: int, is_repeated: bool) -> int | None:
    """The address of a function of source, target and fields that copies rows; None where it cannot run.

    With `is_repeated` one number fills each row. What is written must not be read.
    """
    build = Builder(lanes)
    source, target, fields = build.arguments(3)
    count = build.number(fields, 8 * COUNT)
    rest = count & (lanes - 1)
    bulk = (count - rest) << 2
    with build.repeat(build.number(fields, 8 * ROWS)):
        _copy_row(build, source, target, count, bulk, rest, is_repeated)
        source.set(source + build.number(fields, 8 * SOURCE_ROW))
        target.set(target + build.number(fields, 8 * TARGET_ROW))
    return build.function()


def _copy_row(
    build: Builder, source: Scalar, target: Scalar, count: Scalar, bulk: Scalar, rest: Scalar, is_repeated: bool
) -> None:
    """Whole vectors; what is left over is the last vector of the row, or a part of one where there are no others."""

    def read(place: Scalar) -> Vector:
        return build.broadcast(source) if is_repeated else build.load(source, place)

    with build.range(bulk, build.lanes * BYTES) as place:
        build.store(read(place), target, place)
    with build.when(rest, GREATER, 0):
        with build.when(count, GREATER, build.lanes):
            last = (count - build.lanes) << 2
            build.store(read(last), target, last)
        with build.when(count, LESS, build.lanes):
            mask = build.first(rest)
            value = build.broadcast(source) if is_repeated else build.load(source, mask=mask)
            build.store(value, target, mask=mask)


@lru_cache(maxsize=8 * HEIGHT * SIDE)
def transposing_kernel(rows: int, columns: int, is_down_first: bool, is_packed: bool) -> int | None:
    """The address of a function of source, target and fields that transposes matrices of whole blocks and the rest.

    Rows are read, and written as columns. `rows` and `columns` say by `outline` whether there are whole blocks and what
    the rest is; `is_down_first` says that blocks follow one another down the columns that are read, `is_packed` that
    what is written has nothing between columns of `rows` numbers. None where it cannot run.
    """
    return _transposing(rows, columns, is_down_first, is_packed).function()


def outline(size: int, block: int) -> int:
    """The same number for all sizes with whole blocks, of `block`, and the same rest: below 2 * `block`."""
    return size if size < block else block + size % block


def _transposing(rows: int, columns: int, is_down_first: bool, is_packed: bool) -> Builder:
    build = Builder(SIDE)
    source, target, fields = build.arguments(3)
    read, write = build.numbers(fields, 2)

    def down(source: Scalar, target: Scalar, each: _EachBlock) -> None:
        if rows >= HEIGHT:
            with build.repeat(build.number(fields, 8 * DOWN_BLOCKS)):
                each(source, target, HEIGHT)
                source.set(source + (read << 4))
                target.set(target + HEIGHT * BYTES)
        if rows % HEIGHT:
            each(source, target, rows % HEIGHT)

    def across(source: Scalar, target: Scalar, each: _EachBlock) -> None:
        if columns >= SIDE:
            with build.repeat(build.number(fields, 8 * ACROSS_BLOCKS)):
                each(source, target, SIDE)
                source.set(source + SIDE * BYTES)
                target.set(target + (write << 3))
        if columns % SIDE:
            each(source, target, columns % SIDE)

    outer, inner = (across, down) if is_down_first else (down, across)

    def line(source: Scalar, target: Scalar, size: int) -> None:
        def block(source: Scalar, target: Scalar, other: int) -> None:
            sizes = (other, size) if is_down_first else (size, other)
            _block(build, source, target, read, write, *sizes, is_packed)

        inner(build.copied(source), build.copied(target), block)

    with build.repeat(build.number(fields, 8 * MATRICES)):
        outer(build.copied(source), build.copied(target), line)
        source.set(source + build.number(fields, 8 * SOURCE_MATRIX))
        target.set(target + build.number(fields, 8 * TARGET_MATRIX))
    return build


def _block(
    build: Builder,
    source: Scalar,
    target: Scalar,
    read: Scalar,
    write: Scalar,
    rows: int,
    columns: int,
    is_packed: bool,
) -> None:
    """`rows` x `columns` elements, at most a block."""
    for start in range(0, rows, SIDE):
        if start:
            source, target = source + (read << 3), target + SIDE * BYTES
        _square(build, source, target, read, write, min(SIDE, rows - start), columns, is_packed)


def _square(
    build: Builder,
    source: Scalar,
    target: Scalar,
    read: Scalar,
    write: Scalar,
    rows: int,
    columns: int,
    is_packed: bool,
) -> None:
    """At most SIDE x SIDE elements. Packed columns of fewer numbers are written over what was beside the last one."""
    across = None if columns == SIDE else build.first(build.zero() + columns)
    values: list[Vector] = []
    for number in range(rows):
        values.append(build.load(source, mask=across))
        if number + 1 < rows:
            source = source + read
    if is_packed and rows in (2, 4) and columns == SIDE:
        for number, vector in enumerate(_interleaved(build, values)):
            build.store(vector, target, offset=number * SIDE * BYTES)
        return
    values += [build.constant(0.0)] * (SIDE - rows)
    down = None if rows == SIDE else build.first(build.zero() + rows)
    turned = _turned(build, values)
    for number in range(columns):
        is_inside = is_packed and number * rows + SIDE <= columns * rows
        build.store(turned[number], target, mask=None if is_inside else down)
        if number + 1 < columns:
            target = target + write


def _interleaved(build: Builder, rows: list[Vector]) -> list[Vector]:
    """The columns of two or four vectors, one after another."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    parts = [build.compute(unpack, *pair) for unpack in (UNPACK_LOW, UNPACK_HIGH) for pair in pairs]
    if len(rows) == 4:
        halves = list(zip(parts[::2], parts[1::2], strict=True))
        parts = [build.compute(SHUFFLE, *pair, which) for pair in halves for which in (0x44, 0xEE)]
    ends = list(zip(parts[::2], parts[1::2], strict=True))
    return [build.compute(PERMUTE_HALVES, *pair, half) for half in (0x20, 0x31) for pair in ends]


def _turned(build: Builder, rows: list[Vector]) -> list[Vector]:
    """Eight vectors of eight as the columns of a matrix."""
    pairs: list[Vector] = []
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        pairs += [build.compute(UNPACK_LOW, one, other), build.compute(UNPACK_HIGH, one, other)]
    fours: list[Vector] = []
    for place in (0, 1, 4, 5):
        one, other = pairs[place], pairs[place + 2]
        fours += [build.compute(SHUFFLE, one, other, 0x44), build.compute(SHUFFLE, one, other, 0xEE)]
    halves = list(zip(fours[:4], fours[4:], strict=True))
    return [build.compute(PERMUTE_HALVES, *pair, half) for half in (0x20, 0x31) for pair in halves]
