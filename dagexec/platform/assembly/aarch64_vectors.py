"""Instructions on vectors for 64-bit Arm with Advanced SIMD (NEON).

Arm, "Arm Architecture Reference Manual for A-profile architecture" (DDI 0487). What each method does,
`x86_64_vectors.py` says.

A vector of eight float32 numbers is a pair of registers of four: vector n is v2n and v2n+1. So everything is computed
as by AVX2, number by number and in the same order, and a kernel gives the same bytes on both, but for NaN's payload.
Two registers remain, for what one instruction of AVX2 does and NEON does by several; they also serve as `REPEATED`.
Vector 15 is in memory, for the few kernels that name so many; what chooses registers has the 15 others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dagexec.platform.assembly.aarch64 import _FOURTH, _REGISTERS, SECOND, GeneralAssembler
from dagexec.platform.assembly.instructions import (
    ADD,
    ADD_INTEGERS,
    AND,
    AND_NOT,
    AT_MOST,
    DIV,
    EQUAL_TO,
    FMA,
    FROM_INTEGER,
    HORNER,
    IS_NAN,
    LESS_THAN,
    MAX,
    MIN,
    MUL,
    MULTIPLY_ADD,
    OR,
    PERMUTE,
    PERMUTE_HALVES,
    RESULT,
    SHUFFLE,
    SQRT,
    SUB,
    SUB_DOUBLES,
    SUBTRACT_FROM,
    SUBTRACT_INTEGERS,
    SUBTRACT_PRODUCT,
    SUBTRACT_SCALED,
    TO_INTEGER,
    UNPACK_HIGH,
    UNPACK_LOW,
    Instruction,
)

REGISTERS = {8: 15}
"""The number of vector registers, by lanes."""

REPEATED = (16, 17)
"""Further registers, for numbers that `broadcast` repeats and `compute` multiplies by FMA, as the right operand."""

_IN_MEMORY = 15
_SPARE = (30, 31)
_FRAME, _KEPT = 14, 32
"""The general register with the address of vector 15, and where from there another is kept."""

_HALVES = (0, 1)

_THREE = {  # of a target and two operands
    ADD: 0x4E20D400,  # fadd .4s
    SUB: 0x4EA0D400,  # fsub
    MUL: 0x6E20DC00,  # fmul
    DIV: 0x6E20FC00,  # fdiv
    ADD_INTEGERS: 0x4EA08400,  # add .4s
    SUBTRACT_INTEGERS: 0x6EA08400,  # sub
    AND: 0x4E201C00,  # and .16b
    OR: 0x4EA01C00,  # orr
    UNPACK_LOW: 0x4E803800,  # zip1 .4s
    UNPACK_HIGH: 0x4E807800,  # zip2
    SUB_DOUBLES: 0x4EE0D400,  # fsub .2d
}
_TWO = {SQRT: 0x6EA1F800, TO_INTEGER: 0x4E21A800, FROM_INTEGER: 0x4E21D800}  # fsqrt, fcvtns, scvtf .4s
_FUSED = {FMA: 0x4E20CC00, SUBTRACT_PRODUCT: 0x4EA0CC00}  # fmla, fmls .4s: the target is added to
_TO_FACTOR = {  # by which the product of the target and an operand is added to the other: to the left, 0, or the right
    HORNER: (0x4E20CC00, 1),
    SUBTRACT_FROM: (0x4EA0CC00, 1),
    MULTIPLY_ADD: (0x4E20CC00, 0),
    SUBTRACT_SCALED: (0x4EA0CC00, 0),
}
_SHUFFLES = {0x44: 0x4EC03800, 0xEE: 0x4EC07800}  # zip1, zip2 .2d
_GREATER, _AT_LEAST, _EQUAL = 0x6EA0E400, 0x6E20E400, 0x4E20E400  # fcmgt, fcmge, fcmeq .4s
_SELECT, _INSERT, _INSERT_OTHERS = 0x6E601C00, 0x6EA01C00, 0x6EE01C00  # bsl, bit, bif .16b
_BIT_CLEAR, _NOT, _GREATER_INTEGER = 0x4E601C00, 0x6E205800, 0x4EA03400  # bic, not .16b, cmgt .4s
_ROUND = {8: 0x4E218800, 9: 0x4E219800, 10: 0x4EA18800, 11: 0x4EA19800}  # frintn, frintm, frintp, frintz .4s
_EXTRACT, _REVERSE, _LOOK_UP, _LOOK_UP_IN_TWO = 0x6E004000, 0x4EA00800, 0x4E000000, 0x4E002000  # ext #8, rev64, tbl
_NARROW_WORDS, _NARROW_SECOND, _NARROW_BYTES = 0x0E612800, 0x4E612800, 0x0E212800  # xtn .4h, xtn2 .8h, xtn .8b
_LOAD, _LOAD_NEAR, _STORE, _STORE_NEAR = 0x3DC00000, 0x3CC00000, 0x3D800000, 0x3C800000  # ldr, ldur, str, stur q
_LOAD_PAIR, _STORE_PAIR = 0xAD400000, 0xAD000000  # ldp, stp q


class Assembler(GeneralAssembler):
    """Appends instructions; `code` gives the bytes, followed by the constants.

    Attributes:
        lanes: float32 numbers in a vector: 8.
    """

    def __init__(self, lanes: int = 8) -> None:
        super().__init__()
        if lanes not in REGISTERS:
            raise ValueError(f"vectors of {lanes} numbers; this processor has those of 8")
        self.lanes = lanes
        self._constants: dict[bytes, int] = {}
        self._uses: list[tuple[int, int]] = []
        self._free = list(_SPARE)
        self._named: tuple[int, ...] = ()

    def code(self) -> bytes:
        super().code()
        self._bytes += bytes(-len(self._bytes) % 16)
        start = len(self._bytes)
        for place, number in self._uses:
            self._aim(place, start + 16 * number)
        self._uses.clear()
        return bytes(self._bytes) + b"".join(self._constants)

    def enter(self, *registers: int) -> None:
        self.push(*registers)
        self._words(0x6DBC27E8, 0x6D012FEA, 0x6D0237EC, 0x6D033FEE)  # stp d8, d9, [sp, #-64]! and so on
        self._words(0xD10103FF, 0x910003E0 | _FRAME)  # sub sp, sp, #64; mov x14, sp

    def leave(self, *pushed: int) -> None:
        self._words(0x910103FF)  # add sp, sp, #64
        self._words(0x6D412FEA, 0x6D4237EC, 0x6D433FEE, 0x6CC427E8)  # ldp d10, d11, [sp, #16]..; ldp d8, d9, [sp], #64
        self.pop(*pushed)
        self.clear(RESULT)
        self.end_call()

    def load(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        at, near = self._pair_place(base, index, scale, offset)
        if vector != _IN_MEMORY and near % 16 == 0 and near <= 1008:
            self._pair(_LOAD_PAIR, vector, at, near)
            return
        for half in _HALVES:
            with self._written(vector, half) as to:
                self._memory(_LOAD, _LOAD_NEAR, to, at, near + 16 * half, 16)

    def store(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        at, near = self._pair_place(base, index, scale, offset)
        if vector != _IN_MEMORY and near % 16 == 0 and near <= 1008:
            self._pair(_STORE_PAIR, vector, at, near)
            return
        for half in _HALVES:
            with self._read(vector, half) as source:
                self._memory(_STORE, _STORE_NEAR, source, at, near + 16 * half, 16)

    def clear_vector(self, vector: int) -> None:
        for half in _HALVES:
            with self._written(vector, half) as to:
                self._words(0x4F000400 | to)  # movi .4s, #0

    def broadcast(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        at = self._address(base, index, scale, offset)
        for half in _HALVES if vector not in REPEATED else (0,):
            with self._written(vector, half) as to:
                self._words(0x4D40C800 | at << 5 | to)  # ld1r .4s

    def load_at(self, vector: int, base: int, offset: int) -> None:
        self.load(vector, base, None, offset)

    def store_at(self, vector: int, base: int, offset: int) -> None:
        self.store(vector, base, None, offset)

    def move_vector(self, vector: int, other: int) -> None:
        for half in _HALVES:
            with self._read(other, half) as source, self._written(vector, half) as to:
                self._copy(to, source)

    def store_masked(
        self, vector: int, mask: int, base: int, index: int | None, scale: int = 1, offset: int = 0
    ) -> None:
        self._named, at = (vector, mask), self._address(base, index, scale, offset)
        for half in _HALVES:
            with self._read(vector, half) as source:
                self._each_selected(mask, half, at, source, _STORE, 0x0D008000)  # st1 .s

    def load_masked(
        self, vector: int, mask: int, base: int, index: int | None, scale: int = 1, offset: int = 0
    ) -> None:
        self._named, at = (vector, mask), self._address(base, index, scale, offset)
        for half in _HALVES:
            with self._written(vector, half) as to:
                self._each_selected(mask, half, at, to, _LOAD, 0x0D408000)  # ld1 .s

    def store_first(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        at, near = self._place(base, index, scale, offset, 4)
        with self._read(vector, 0) as source:
            self._memory(0xBD000000, 0xBC000000, source, at, near, 4)  # str s

    def load_first(
        self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0, *, is_double: bool = False
    ) -> None:
        with self._written(vector, 1) as to:
            self._words(0x4F000400 | to)
        with self._written(vector, 0) as to:
            self._load_number(to, base, index, scale, offset, is_double=is_double)

    def compare_first(
        self, vector: int, base: int, index: int | None, scale: int = 1, *, is_double: bool = False
    ) -> None:
        with self._read(vector, 0) as left, self._spare() as right:
            self._load_number(right, base, index, scale, 0, is_double=is_double)
            self._words(0x1E202000 | is_double << 22 | right << 16 | left << 5)  # fcmp

    def repeat_number(self, vector: int, register: int) -> None:
        for half in _HALVES:
            with self._written(vector, half) as to:
                self._words(0x4E040C00 | _REGISTERS[register] << 5 | to)  # dup .4s, w

    def first_elements(self, mask: int, counts: int) -> None:
        for half in _HALVES:
            numbers = struct.pack("<4i", *range(4 * half, 4 * half + 4))
            self._named = mask, counts
            with self._read(counts, half) as total, self._constant(numbers) as places, self._written(mask, half) as to:
                self._three_vectors(_GREATER_INTEGER, to, total, places)

    def compare_vectors(self, mask: int, left: int, right: int, relation: int) -> None:
        self._named = mask, left, right
        for half in _HALVES:
            with self._read(left, half) as one, self._read(right, half) as other, self._written(mask, half) as to:
                if relation == IS_NAN:
                    with self._spare() as ordered:
                        self._three_vectors(_EQUAL, ordered, one, one)
                        self._three_vectors(_EQUAL, to, other, other)
                        self._three_vectors(_THREE[AND], to, to, ordered)
                        self._words(_NOT | to << 5 | to)
                elif relation == EQUAL_TO:
                    self._three_vectors(_EQUAL, to, one, other)
                else:
                    what = {LESS_THAN: _GREATER, AT_MOST: _AT_LEAST}[relation]
                    self._three_vectors(what, to, other, one)

    def select(self, target: int, mask: int, chosen: int, other: int) -> None:
        self._named = target, mask, chosen, other
        for half in _HALVES:
            with (
                self._read(mask, half) as where,
                self._read(chosen, half) as one,
                self._read(other, half) as two,
                self._written(target, half) as to,
            ):
                if to == two:
                    self._three_vectors(_INSERT, to, one, where)
                elif to == one:
                    self._three_vectors(_INSERT_OTHERS, to, two, where)
                else:
                    self._copy(to, where)
                    self._three_vectors(_SELECT, to, one, two)

    def rotate(self, target: int, source: int, distance: int) -> None:
        if distance == 4:
            self.compute(PERMUTE_HALVES, target, source, source, 1)
            return
        for half in _HALVES:
            with self._read(source, half) as one, self._written(target, half) as to:
                self._words(_EXTRACT | one << 16 | one << 5 | to if distance == 2 else _REVERSE | one << 5 | to)

    def shift_integers(self, target: int, source: int, bits: int) -> None:
        word = 0x4F205400 | bits << 16 if bits >= 0 else 0x4F000400 | 64 + bits << 16  # shl, sshr .4s
        self._each(target, source, lambda to, one: self._words(word | one << 5 | to))

    def round(self, target: int, source: int, how: int = 8) -> None:
        self._each(target, source, lambda to, one: self._words(_ROUND[how] | one << 5 | to))

    def powers_of_two(self, vector: int) -> None:
        self.compute(TO_INTEGER, vector, 0, vector)
        self.shift_integers(vector, vector, 23)

    def load_permutation(self, vector: int, elements: Sequence[int]) -> None:
        for half in _HALVES:
            places = [4 * element + number for element in elements[4 * half : 4 * half + 4] for number in range(4)]
            with self._written(vector, half) as to:
                self._load_constant(to, bytes(places))

    def load_constant(self, vector: int, value: float) -> None:
        for half in _HALVES:
            with self._written(vector, half) as to:
                self._load_constant(to, struct.pack("<f", value) * 4)

    def compute(self, what: Instruction, target: int, left: int, right: int, number: int | None = None) -> None:
        self._named = target, left, right
        if what == PERMUTE_HALVES:
            self._permute_halves(target, left, right, number or 0)
            return
        for half in _HALVES:
            with self._read(right, half) as operand:
                self._half(what, half, target, left, operand, number)

    def compute_memory(
        self, what: Instruction, target: int, left: int, base: int, index: int | None, offset: int = 0
    ) -> None:
        self._named = target, left
        if what == PERMUTE:
            self._permute(target, left, base, index, offset)
            return
        at, near = self._pair_place(base, index, 1, offset)
        for half in _HALVES:
            with self._spare() as operand:
                self._memory(_LOAD, _LOAD_NEAR, operand, at, near + 16 * half, 16)
                self._half(what, half, target, left, operand)

    def compute_constant(self, what: Instruction, target: int, left: int, value: float) -> None:
        self._named, bits = (target, left), struct.pack("<f", value) * 4
        if what in (HORNER, SUBTRACT_FROM):  # which become the constant plus a product
            for half in _HALVES:
                with (
                    self._written(target, half, is_read=True) as to,
                    self._read(left, half) as one,
                    self._constant(bits) as total,
                ):
                    self._three_vectors(_TO_FACTOR[what][0], total, to, one)
                    self._copy(to, total)
            return
        with self._constant(bits) as operand:
            for half in _HALVES:
                self._half(what, half, target, left, operand)

    def load_widened(self, vector: int, base: int, size: int, *, has_sign: bool) -> None:
        unsigned, at = 0 if has_sign else 1 << 29, _REGISTERS[base]
        with self._spare() as words:
            if size == 1:
                self._words(0xFD400000 | at << 5 | words, 0x0F08A400 | unsigned | words << 5 | words)  # ldr d; sxtl .8h
            else:
                self._words(_LOAD | at << 5 | words)
            for half in _HALVES:
                with self._written(vector, half) as to:
                    self._words(0x0F10A400 | half << 30 | unsigned | words << 5 | to)  # sxtl, sxtl2 .4s

    def store_narrowed(self, vector: int, spare: int, base: int, size: int) -> None:
        at = _REGISTERS[base]
        with self._spare() as words:
            for half, what in ((0, _NARROW_WORDS), (1, _NARROW_SECOND)):
                with self._read(vector, half) as one:
                    self._words(what | one << 5 | words)
            if size == 1:
                self._words(_NARROW_BYTES | words << 5 | words, 0xFD000000 | at << 5 | words)  # xtn; str d
            else:
                self._words(_STORE | at << 5 | words)

    def store_first_byte(self, vector: int, base: int) -> None:
        with self._read(vector, 0) as source:
            self._words(0x0D000000 | _REGISTERS[base] << 5 | source)  # st1 .b [0]

    def repeat_within(self, vector: int, base: int, offset: int, elements: Sequence[int]) -> None:
        at, near = self._pair_place(base, None, 1, offset)
        table = bytes(4 * element + number for element in elements for number in range(4))
        with self._constant(table) as places, self._spare() as source:
            for half in _HALVES:
                self._memory(_LOAD, _LOAD_NEAR, source, at, near + 16 * half, 16)
                with self._written(vector, half) as to:
                    self._words(_LOOK_UP | places << 16 | source << 5 | to)

    # Halves of vectors, which are registers

    def _half(
        self, what: Instruction, half: int, target: int, left: int, right: int, number: int | None = None
    ) -> None:
        """One half of `compute`, where `right` is a register."""
        if what in _TWO:
            with self._written(target, half) as to:
                self._words(_TWO[what] | right << 5 | to)
        elif what in _FUSED or what in _TO_FACTOR:
            with self._written(target, half, is_read=True) as to, self._read(left, half) as one:
                self._fused(what, to, one, right)
        else:
            with self._read(left, half) as one, self._written(target, half) as to:
                if what == SHUFFLE:
                    self._three_vectors(_SHUFFLES[number or 0], to, one, right)
                elif what == AND_NOT:
                    self._three_vectors(_BIT_CLEAR, to, right, one)
                elif what in (MIN, MAX):
                    self._extreme(to, one, right, is_greater=what == MAX)
                else:
                    self._three_vectors(_THREE[what], to, one, right)

    def _fused(self, what: Instruction, to: int, left: int, right: int) -> None:
        if what in _FUSED:
            self._three_vectors(_FUSED[what], to, left, right)
            return
        word, addend = _TO_FACTOR[what]
        with self._spare() as total:
            self._copy(total, right if addend else left)
            self._three_vectors(word, total, to, left if addend else right)
            self._copy(to, total)

    def _extreme(self, to: int, left: int, right: int, *, is_greater: bool) -> None:
        """to = left where it is less, or greater, than right, else right: as x86-64 has it for NaN."""
        operands = (left, right) if is_greater else (right, left)
        with self._spare() if to in (left, right) else nullcontext(to) as chosen:
            self._three_vectors(_GREATER, chosen, *operands)
            self._three_vectors(_SELECT, chosen, left, right)
            self._copy(to, chosen)

    def _permute_halves(self, target: int, left: int, right: int, number: int) -> None:
        low, high = [((left, left, right, right)[choice & 3], choice & 1) for choice in (number, number >> 4)]
        if high != (target, 0):
            for half, source in ((0, low), (1, high)):
                with self._read(*source) as one, self._written(target, half) as to:
                    self._copy(to, one)
            return
        with self._spare() as kept:
            with self._read(*low) as one:
                self._copy(kept, one)
            with self._read(*high) as one, self._written(target, 1) as to:
                self._copy(to, one)
            with self._written(target, 0) as to:
                self._copy(to, kept)

    def _permute(self, target: int, left: int, base: int, index: int | None, offset: int) -> None:
        if _IN_MEMORY in (target, left) or target == left:
            raise ValueError(f"vector {left} cannot order what becomes vector {target}")
        self.load(target, base, index, offset)
        first = 2 * target
        with self._spare() as low:
            self._three_vectors(_LOOK_UP_IN_TWO, low, first, 2 * left)
            self._three_vectors(_LOOK_UP_IN_TWO, first + 1, first, 2 * left + 1)
            self._copy(first, low)

    def _each_selected(self, mask: int, half: int, at: int, register: int, whole: int, single: int) -> None:
        """Load or store the elements of half a vector that `mask` selects, at address + 16 * half; all of them at once
        where it selects all. Nothing else is touched."""
        with self._read(mask, half) as where, self._spare() as narrow:
            self._words(_NARROW_WORDS | where << 5 | narrow)
            self._words(0x9E660000 | narrow << 5 | SECOND)  # fmov x17, d: 16 bits for each
        if whole == _LOAD:
            self._words(0x4F000400 | register)
        none = self._jump_on(0xB4000000 | SECOND)  # cbz x17
        self._words(0xAA2003E0 | SECOND << 16 | _FOURTH)  # mvn x12, x17
        some = self._jump_on(0xB5000000 | _FOURTH)  # cbnz x12
        self._words(whole | half << 10 | at << 5 | register)
        all_of_them = self._jump_on(0x14000000)  # b
        self.land(some)
        for element in range(4):
            bit = 16 * element
            unselected = self._jump_on(0x36000000 | bit >> 5 << 31 | (bit & 31) << 19 | SECOND)  # tbz x17
            self._add(_FOURTH, at, 16 * half + 4 * element)
            self._words(single | element >> 1 << 30 | (element & 1) << 12 | _FOURTH << 5 | register)
            self.land(unselected)
        self.land(none)
        self.land(all_of_them)

    def _jump_on(self, word: int) -> int:
        self._words(word)
        return len(self._bytes) - 4

    @contextmanager
    def _spare(self) -> Iterator[int]:
        """A register for a moment: of those that remain, or of a vector that is not named, kept in memory meanwhile."""
        if self._free:
            register = self._free.pop()
            yield register
            self._free.append(register)
            return
        register = 2 * next(vector for vector in range(_IN_MEMORY) if vector not in self._named)
        kept = _KEPT // 16 << 10 | _FRAME << 5 | register
        self._words(_STORE | kept)
        yield register
        self._words(_LOAD | kept)

    @contextmanager
    def _read(self, vector: int, half: int) -> Iterator[int]:
        """The register with half a vector."""
        if vector in REPEATED:
            yield _SPARE[REPEATED.index(vector)]
        elif vector != _IN_MEMORY:
            yield 2 * vector + half
        else:
            with self._spare() as register:
                self._words(_LOAD | half << 10 | _FRAME << 5 | register)
                yield register

    @contextmanager
    def _written(self, vector: int, half: int, *, is_read: bool = False) -> Iterator[int]:
        """The register of half a vector that is written, and read before where `is_read`."""
        if vector in REPEATED:
            yield _SPARE[REPEATED.index(vector)]
        elif vector != _IN_MEMORY:
            yield 2 * vector + half
        else:
            with self._spare() as register:
                if is_read:
                    self._words(_LOAD | half << 10 | _FRAME << 5 | register)
                yield register
                self._words(_STORE | half << 10 | _FRAME << 5 | register)

    @contextmanager
    def _constant(self, value: bytes) -> Iterator[int]:
        """A register with 16 bytes."""
        with self._spare() as register:
            self._load_constant(register, value)
            yield register

    def _load_constant(self, to: int, value: bytes) -> None:
        number = self._constants.setdefault(value, len(self._constants))
        self._uses.append((len(self._bytes), number))
        self._words(0x9C000000 | to)  # ldr q, from behind the code

    def _each(self, target: int, source: int, write: Callable[[int, int], None]) -> None:
        for half in _HALVES:
            with self._read(source, half) as one, self._written(target, half) as to:
                write(to, one)

    def _three_vectors(self, word: int, to: int, left: int, right: int) -> None:
        self._words(word | right << 16 | left << 5 | to)

    def _copy(self, to: int, source: int) -> None:
        if to != source:
            self._three_vectors(_THREE[OR], to, source, source)

    def _pair(self, word: int, vector: int, at: int, offset: int) -> None:
        self._words(word | (offset // 16 & 0x7F) << 15 | 2 * vector + 1 << 10 | at << 5 | 2 * vector)

    def _pair_place(self, base: int, index: int | None, scale: int, offset: int) -> tuple[int, int]:
        """A register and an offset that instructions on 16 bytes can reach, and those behind them, too."""
        at = self._indexed(base, index, scale)
        if -256 <= offset < 240 or (offset % 16 == 0 and 0 <= offset < 65504):
            return at, offset
        return self._moved(at, offset), 0

    def _address(self, base: int, index: int | None, scale: int, offset: int) -> int:
        """A register with the address."""
        at = self._indexed(base, index, scale)
        return self._moved(at, offset) if offset else at

    def _load_number(self, to: int, base: int, index: int | None, scale: int, offset: int, *, is_double: bool) -> None:
        unit = 8 if is_double else 4
        at, near = self._place(base, index, scale, offset, unit)
        size = is_double << 30
        self._memory(0xBD400000 | size, 0xBC400000 | size, to, at, near, unit)  # ldr s or d
