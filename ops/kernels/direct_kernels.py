"""Convolutions of few channels a group by sums over taps, as machine code for AVX2 with FMA or for AVX-512.

A kernel computes a row of a result in blocks of columns whose sums stay in registers: all blocks of a vector
of channels one after another, or of wide rows all vectors of a block. A row of taps is read once for a block, and each
pixel once for all columns of the block that it is a tap of (Zhang et al., "High performance zero-memory overhead direct
convolutions", 2018). Taps on columns outside of the image have no code; rows outside of it are left to whoever calls.

An element is one chain of fused products and sums, from the bias on: rows of taps from top to bottom, in each channel
by channel, and taps from left to right. So its bytes depend neither on the columns beside it nor on where they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import NamedTuple

from dagexec.ops.kernels.post_ops import ADD_OTHER, TEMPORARIES, PostOp, post_op_within
from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    ADD,
    FMA,
    PERMUTE,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    T0,
    T1,
    ZERO,
)
from dagexec.platform.assembly.native import REGISTERS, Assembler
from dagexec.platform.machine_code import executable
from dagexec.platform.records import dataclass

ROWS, ROW_BYTES, VECTORS, SOURCE_STEP, BIAS, OTHER, NEXT_OTHER, NEXT_RUN, ALL_RUNS, NEXT_VECTOR, COUNTS = range(11)
"""Places of the 64-bit numbers that rcx points to: rows of taps, bytes from the image's row of one to that of the next,
vectors of channels, bytes from the channels read for one to those for the next, the address of the bias, bytes from
the result to what is added to it, by one or two post-ops, and then those of `RowKernel`: bytes from behind a run of
channels to the next, of all runs, from a vector of the result to the next, and counts of blocks."""

MOST_OTHERS = 2
"""Post-ops of that kind."""

PLAIN = ("relu", ADD_OTHER)
"""Post-ops of an instruction, which leave registers to sums."""

_FLOAT = 4  # bytes
_MOST_TAPS = 7  # of a row, whose weights are in registers together
_MOST_COLUMNS = {8: 11, 16: 14}
_TEMPORARIES_OF_PLAIN = 3
_LINE, _FIRST_CACHE = 64, 48 << 10  # bytes
_QUAD = 4  # elements among which AVX exchanges them without a table
_FIELDS, _OTHERS = ((S2, ROW_BYTES), (S4, BIAS), (S5, VECTORS)), (S3, A4)
_SAVED = (S0, S1, S2, S3, S4, S5)


@dataclass(frozen=True)
class Row:
    """A row of a result, and how it is computed.

    Attributes:
        lanes: float32 numbers in a vector.
        group: channels of a group that are written: a divisor of `lanes`, or a multiple.
        read: channels of a group that are read: as many where groups are narrower than a vector, else any number.
        taps: of a row of the window.
        stride, dilation, head: of the window along the row; `head` columns of zeros are before the image.
        columns: of the image.
        result: columns of the result.
        pixel, plane: numbers of the image from a column to the next, which are all channels or some, and from those
            to the next channels.
        written, vector: numbers of the result from a column to the next, and from a vector to the next.
        window: rows of the whole window.
        together: vectors of a group that are computed at once, each pixel read once for them; their weights lie beside
            one another.
        has_bias: a number for each channel is added.
        post_ops: what is done then, in order: those of `post_ops.FUNCTIONS`, and ADD_OTHER.
    """

    lanes: int
    group: int
    read: int
    taps: int
    stride: int
    dilation: int
    head: int
    columns: int
    result: int
    pixel: int
    plane: int
    written: int
    vector: int
    window: int
    together: int
    has_bias: bool
    post_ops: tuple[PostOp, ...]

    @property
    def chunk(self) -> int:
        """Taps whose weights are in registers together."""
        parts = -(-self.taps // (_MOST_TAPS // self.together))
        return -(-self.taps // parts)

    @property
    def tables(self) -> int:
        """Vectors that say which channels of the image the elements of another are multiplied with."""
        return self.group if _QUAD < self.group < self.lanes else 0

    @property
    def block(self) -> int:
        """Columns of the result whose sums are in registers together: few blocks, and the last one not narrow."""
        is_plain = all(kind in PLAIN for kind, _, _ in self.post_ops)
        spare = max(self.together * self.chunk + 1, _TEMPORARIES_OF_PLAIN if is_plain else TEMPORARIES)
        registers = REGISTERS[self.lanes] - self.tables - spare
        most = min(_MOST_COLUMNS[self.lanes], registers // self.together, self.result)
        return min(range((most + 1) // 2, most + 1), key=lambda size: (-(-self.result // size), -self.result % size))

    def valid(self, column: int) -> tuple[int, ...]:
        """The taps of a column of the result that are on the image."""
        first = column * self.stride - self.head
        return tuple(tap for tap in range(self.taps) if 0 <= first + tap * self.dilation < self.columns)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """The blocks of a row, those that are alike counted."""
        size = self.block
        first = -(-self.head // self.stride)
        last = (self.columns - 1 - (self.taps - 1) * self.dilation + self.head) // self.stride
        inner: Block = (tuple(range(self.taps)),) * size  # of columns from `first` to `last`, all taps are on the image
        begin = -(-first // size)
        end = max(begin, (min(last, self.result - 1) + 1) // size)

        def some(blocks: range) -> list[tuple[int, Block]]:
            columns = (range(number * size, min((number + 1) * size, self.result)) for number in blocks)
            return [(1, tuple(map(self.valid, one))) for one in columns]

        count = -(-self.result // size)
        made = [*some(range(min(begin, count))), (end - begin, inner), *some(range(end, count))]
        for block, alike in groupby((one for one in made if one[0]), key=itemgetter(1)):
            yield sum(number for number, _ in alike), block

    @property
    def is_wide(self) -> bool:
        """True where a vector of all columns takes more than the first cache: 400 x 256 took twice as long."""
        pixel = min(_LINE, self.read * _FLOAT) if self.pixel in (1, self.read) else _LINE
        return self.window * self.columns * pixel + self.result * _LINE > _FIRST_CACHE

    @property
    def row_weights(self) -> int:
        """Bytes of the weights of a row of taps, for vectors that are computed at once."""
        return self.taps * self.read * self.width

    @property
    def width(self) -> int:
        """Bytes of vectors that are computed at once."""
        return self.together * self.lanes * _FLOAT


Block = tuple[tuple[int, ...], ...]
"""The taps that are on the image, of each column."""


class RowKernel(NamedTuple):
    """A function, and the fields that follow from the sizes of a row.

    Attributes:
        address: None where it cannot run.
        fields: from NEXT_RUN on; at the end how many blocks there are alike, of each that there are several of.
    """

    address: int | None
    fields: tuple[int, ...]


@lru_cache(maxsize=512)
def row_kernel(row: Row) -> RowKernel:
    """A function of image, weights, result and fields.

    The image is given where the first row of taps and the first column is, without a head, and the first channel; the
    weights as [vectors, taps of a column, taps of a row, channels of a group, together, lanes], from that row of taps
    on. Code stays for good, so that rows whose blocks differ in nothing but their counts have the same.
    """
    blocks = list(row.blocks())
    run = min(row.read, row.pixel)
    steps = [_FLOAT * number for number in (row.plane - run, row.read // run * row.plane, row.vector)]
    shape = tuple([(count > 1, block) for count, block in blocks])
    alike = replace(row, columns=0, result=0, plane=0, vector=0)
    counts = [count for count, _ in blocks if count > 1]
    return RowKernel(_kernel(alike, row.block, shape, row.is_wide), (*steps, *counts))


@cache
def _kernel(row: Row, size: int, blocks: tuple[tuple[bool, Block], ...], is_wide: bool) -> int | None:
    """The address of the function for `blocks` of up to `size` columns, of which there are several where that is so."""
    return executable(_Writer(row, size, blocks, is_wide).code())


class _Writer:
    """Writes the code of a row, whatever its width."""

    def __init__(self, row: Row, size: int, blocks: Sequence[tuple[bool, Block]], is_wide: bool) -> None:
        self._row, self._row_blocks, self._is_wide = row, blocks, is_wide
        self._code = Assembler(row.lanes)
        registers = list(range(REGISTERS[row.lanes]))
        sums = size * row.together
        self._sums = registers[:sums]
        self._tables = registers[len(registers) - row.tables :]
        self._free = registers[sums : len(registers) - row.tables]
        free = self._free[:TEMPORARIES]
        self._post_ops = [None if one[0] == ADD_OTHER else post_op_within(row.lanes, free, one) for one in row.post_ops]

    def code(self) -> bytes:
        row, code = self._row, self._code
        code.enter(*_SAVED)
        for register, field in (*_FIELDS, *zip(_OTHERS, (OTHER, NEXT_OTHER), strict=True)):
            code.load_field(register, 8 * field, A3)
        for number, table in enumerate(self._tables):
            code.load_permutation(table, [lane // row.group * row.group + number for lane in range(row.lanes)])
        code.add_number(A0, -row.head * row.pixel * _FLOAT)
        if self._is_wide:
            self._blocks(self._vectors_of)
        else:
            self._vectors(self._columns)
        code.leave(*_SAVED)
        return code.code()

    def _vectors(self, write: Callable[[], None]) -> None:
        """What `write` writes for all vectors, in a loop: rdi, rsi, rdx and r14 go on to the next."""
        row, code = self._row, self._code
        vectors = code.here()
        write()
        code.add_field(A0, 8 * SOURCE_STEP, A3)
        for _ in range(row.together):
            code.add_field(A2, 8 * NEXT_VECTOR, A3)
        code.add_number(A1, row.window * row.row_weights)
        code.add_number(S4, row.width)
        code.add_number(S5, -1)
        code.jump_if_not_zero(vectors)

    def _columns(self) -> None:
        """All blocks of a vector."""
        self._code.push(A0, A2)
        self._blocks(self._block)
        self._code.pop(A0, A2)

    def _vectors_of(self, block: Block) -> None:
        """All vectors of a block."""
        kept = A0, A1, A2, S4, S5
        self._code.push(*kept)
        self._vectors(partial(self._block, block))
        self._code.pop(*kept)

    def _blocks(self, write: Callable[[Block], None]) -> None:
        """What `write` writes for each block of a row: rdi and rdx are where it begins in image and result."""
        row, code = self._row, self._code
        count = COUNTS
        for are_several, block in self._row_blocks:
            if are_several:
                code.load_field(S0, 8 * count, A3)
                count += 1
            again = code.here()
            write(block)
            code.add_number(A0, len(block) * row.stride * row.pixel * _FLOAT)
            code.add_number(A2, len(block) * row.written * _FLOAT)
            if are_several:
                code.add_number(S0, -1)
                code.jump_if_not_zero(again)

    def _block(self, block: Block) -> None:
        """A block of a vector."""
        code = self._code
        self._start(block)
        code.move(T0, A0)
        code.move(T1, A1)
        code.load_field(RESULT, 8 * ROWS, A3)
        code.compare_number(RESULT, 0)
        none = code.jump_ahead(ZERO)
        rows = code.here()
        self._row_of_taps(block)
        code.add(T0, S2)
        code.add_number(RESULT, -1)
        code.jump_if_not_zero(rows)
        code.land(none)
        self._finish(block)

    def _start(self, block: Block) -> None:
        """The sums begin with the bias, or with 0."""
        row = self._row
        for number, vector in enumerate(self._sums[: len(block) * row.together]):
            if row.has_bias:
                self._code.load_at(vector, S4, number % row.together * row.lanes * _FLOAT)
            else:
                self._code.clear_vector(vector)

    def _row_of_taps(self, block: Block) -> None:
        """Adds the products of a row of taps, of all channels of a group; r11 goes on to the next row."""
        row, code = self._row, self._code
        if row.group < row.lanes:
            for channel in range(row.group):
                self._channel(block, channel)
            code.add_number(T1, row.row_weights)
            return
        run = min(row.read, row.pixel)
        code.set_number(A5, row.read // run)
        runs = code.here()
        code.set_number(S1, run)
        channels = code.here()
        self._channel(block, 0)
        code.add_number(T0, _FLOAT)
        code.add_number(T1, row.width)
        code.add_number(S1, -1)
        code.jump_if_not_zero(channels)
        code.add_field(T0, 8 * NEXT_RUN, A3)
        code.add_number(A5, -1)
        code.jump_if_not_zero(runs)
        code.load_field(A5, 8 * ALL_RUNS, A3)
        code.subtract(T0, A5)
        code.add_number(T1, row.row_weights - row.read * row.width)

    def _channel(self, block: Block, channel: int) -> None:
        """Adds the products of a row of taps and one channel of each group."""
        row, code, parts = self._row, self._code, range(self._row.together)
        *weights, pixel = self._free[: row.chunk * row.together + 1]
        for first in range(0, row.taps, row.chunk):
            wanted = sorted({tap for taps in block for tap in taps if first <= tap < first + row.chunk})
            for tap, part in product(wanted, parts):
                offset = (tap * row.read + channel) * row.width + part * row.lanes * _FLOAT
                code.load_at(weights[(tap - first) * row.together + part], T1, offset)
            for place, uses in self._pixels(block, wanted):
                self._read(pixel, place * row.pixel * _FLOAT, channel)
                for (column, tap), part in product(uses, parts):
                    total, weight = column * row.together + part, (tap - first) * row.together + part
                    code.compute(FMA, self._sums[total], pixel, weights[weight])

    def _pixels(self, block: Block, wanted: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The columns of the image that are read, in order, and the columns of the block and taps that each is for."""
        row = self._row
        uses = [
            (column * row.stride + tap * row.dilation, (column, tap))
            for column, taps in enumerate(block)
            for tap in taps
            if tap in wanted
        ]
        for place, group in groupby(sorted(uses), key=lambda use: use[0]):
            yield place, [use for _, use in group]

    def _read(self, vector: int, offset: int, channel: int) -> None:
        """The channel of its group that each element of a vector is multiplied with, at r10 + offset."""
        group, code = self._row.group, self._code
        if group == 1:
            code.load_at(vector, T0, offset)
        elif group <= _QUAD:
            code.repeat_within(vector, T0, offset, [place // group * group + channel for place in range(_QUAD)])
        elif group < self._row.lanes:
            code.compute_memory(PERMUTE, vector, self._tables[channel], T0, None, offset)
        else:
            code.broadcast(vector, T0, None, 1, offset)

    def _finish(self, block: Block) -> None:
        """Does the post-ops and writes the sums."""
        row, code = self._row, self._code
        parts = (A2, T0, T1)[: row.together]
        for before, register in pairwise(parts):
            code.move(register, before)
            code.add_field(register, 8 * NEXT_VECTOR, A3)
        for vector, (column, target) in zip(self._sums, product(range(len(block)), parts), strict=False):
            offset, others = column * row.written * _FLOAT, iter(_OTHERS)
            for write in self._post_ops:
                if write is None:
                    code.compute_memory(ADD, vector, vector, target, next(others), offset)
                else:
                    write(code, vector)
            code.store_at(vector, target, offset)
