"""Instructions on vectors for x86-64 with AVX2 and FMA, or with AVX-512.

Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2. Vectors are eight or sixteen float32 numbers;
memory is addressed as a register plus a register and a number, relative to a register, or as a constant of the code.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dagexec.platform.assembly.instructions import (
    ADD,
    ADD_INTEGERS,
    AND,
    AND_NOT,
    DIV,
    FMA,
    FROM_INTEGER,
    HORNER,
    MAX,
    MIN,
    MUL,
    MULTIPLY_ADD,
    OR,
    PERMUTE,
    PERMUTE_HALVES,
    SCALE_BY_POWER,
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
from dagexec.platform.assembly.x86_64 import NO_INDEX, SIB, GeneralAssembler

REGISTERS = {8: 16, 16: 32}
"""The number of vector registers, by lanes."""

REPEATED: tuple[int, ...] = ()
"""Further registers, for numbers that `broadcast` repeats and `compute` multiplies by FMA, as the right operand."""

_Encoding = tuple[int, int, int]
"""Opcode map, prefix, opcode."""

_ENCODINGS: dict[Instruction, _Encoding] = {
    ADD: (1, 0, 0x58),
    MUL: (1, 0, 0x59),
    SUB: (1, 0, 0x5C),
    MIN: (1, 0, 0x5D),
    MAX: (1, 0, 0x5F),
    DIV: (1, 0, 0x5E),
    SQRT: (1, 0, 0x51),
    SCALE_BY_POWER: (2, 1, 0x2C),
    FMA: (2, 1, 0xB8),
    SUBTRACT_PRODUCT: (2, 1, 0xBC),
    HORNER: (2, 1, 0xA8),
    SUBTRACT_FROM: (2, 1, 0xAC),
    MULTIPLY_ADD: (2, 1, 0x98),
    SUBTRACT_SCALED: (2, 1, 0x9C),
    ADD_INTEGERS: (1, 1, 0xFE),
    SUBTRACT_INTEGERS: (1, 1, 0xFA),
    AND: (1, 1, 0xDB),
    AND_NOT: (1, 0, 0x55),
    OR: (1, 1, 0xEB),
    TO_INTEGER: (1, 1, 0x5B),
    FROM_INTEGER: (1, 0, 0x5B),
    UNPACK_LOW: (1, 0, 0x14),
    UNPACK_HIGH: (1, 0, 0x15),
    SHUFFLE: (1, 0, 0xC6),
    PERMUTE_HALVES: (3, 1, 0x06),
    PERMUTE: (2, 1, 0x16),
    SUB_DOUBLES: (1, 0x81, 0x5C),
}
_ONE_OPERAND = {SQRT, TO_INTEGER, FROM_INTEGER}
_LOAD, _STORE, _BROADCAST, _STORE_FIRST = (1, 0, 0x10), (1, 0, 0x11), (2, 1, 0x18), (1, 2, 0x11)
_LOAD_MASKED, _STORE_MASKED = (2, 1, 0x2C), (2, 1, 0x2E)
_SHIFT, _ROUND, _COMPARE = (1, 1, 0x72), (3, 1, 0x08), (1, 0, 0xC2)
_MOVE, _TO_LOW, _REPEAT_LOW, _REPEAT = (1, 0, 0x28), (1, 1, 0x6E), (2, 1, 0x58), (2, 1, 0x7C)
_GREATER_INTEGER, _BLEND, _BLEND_MASK = (1, 1, 0x66), (3, 1, 0x4A), (2, 1, 0x65)
_SHUFFLE_QUARTERS, _PERMUTE_FOURS = (3, 1, 0x43), (3, 1, 0x04)
_LOAD_FIRST, _COMPARE_FIRST = (1, 2, 0x10), (1, 0, 0x2E)
_LOAD_DOUBLE, _COMPARE_DOUBLE = (1, 0x83, 0x10), (1, 0x81, 0x2E)  # with the bit that AVX-512 has for float64
_VECTOR = 32  # bytes
_RIP = 5  # in the place of a register: an offset from the next instruction follows
_CLEAR = {8: (1, 0, 0x57), 16: (1, 1, 0xEF)}  # by lanes, an exclusive or

_WIDEN = {(1, False): (2, 1, 0x31), (1, True): (2, 1, 0x21), (2, False): (2, 1, 0x33)}
"""By bytes of an element and whether it has a sign."""

_NARROW = {1: (2, 2, 0x31), 2: (2, 2, 0x33)}  # AVX-512
_PACK_WORDS, _PACK_BYTES = (1, 1, 0x6B), (1, 1, 0x67)  # two vectors in half the bits, four or eight at a time
_STORE_HALF, _STORE_QUARTER, _STORE_BYTE = (1, 0, 0x11), (1, 0, 0x13), (3, 1, 0x14)  # of the first 16 bytes


class Assembler(GeneralAssembler):
    """Appends instructions; `code` gives the bytes, followed by the constants.

    Attributes:
        lanes: float32 numbers in a vector: 8, in 16 registers, or 16, in 32.
    """

    def __init__(self, lanes: int = 8) -> None:
        super().__init__()
        self.lanes = lanes
        self._constants: dict[bytes, int] = {}
        self._uses: list[tuple[int, int, int]] = []

    def code(self) -> bytes:
        """The machine code, and from the next whole vector on the constants."""
        size = 4 * self.lanes
        start = -(-len(self._bytes) // size) * size
        whole = bytearray(super().code().ljust(start, b"\x90"))
        for place, end, number in self._uses:
            struct.pack_into("<i", whole, place, start + number * size - end)
        for value in self._constants:
            whole += value
        return bytes(whole)

    def enter(self, *registers: int) -> None:
        """At the beginning of a function: save registers that the caller keeps."""
        self.push(*registers)

    def leave(self, *pushed: int) -> None:
        """Restore what was pushed, and return 0."""
        self._bytes += bytes.fromhex("c5f877 31c0")  # vzeroupper; xor eax, eax
        self.pop(*pushed)
        self._bytes += b"\xc3"

    def load(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        """vector = memory at base + scale * index + offset."""
        self._indexed(_LOAD, vector, 0, base, index, offset, scale)

    def store(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        """memory at base + scale * index + offset = vector."""
        self._indexed(_STORE, vector, 0, base, index, offset, scale)

    def clear_vector(self, vector: int) -> None:
        """vector = zeros."""
        self._compute(_CLEAR[self.lanes], vector, vector, vector)

    def broadcast(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """Every element of vector = that in memory at base + scale * index + offset."""
        self._indexed(_BROADCAST, vector, 0, base, index, offset, scale, unit=4)

    def load_at(self, vector: int, base: int, offset: int) -> None:
        """vector = memory at base + offset."""
        self._indexed(_LOAD, vector, 0, base, None, offset)

    def store_at(self, vector: int, base: int, offset: int) -> None:
        """memory at base + offset = vector."""
        self._indexed(_STORE, vector, 0, base, None, offset)

    def move_vector(self, vector: int, other: int) -> None:
        """vector = other."""
        self._compute(_MOVE, vector, 0, other)

    def store_masked(
        self, vector: int, mask: int, base: int, index: int | None, scale: int = 1, offset: int = 0
    ) -> None:
        """The elements of memory whose sign in the vector `mask` is set = those of vector.

        With AVX-512 those whose bit in opmask register `mask` is set.
        """
        if self.lanes == 16:
            self._indexed(_STORE, vector, 0, base, index, offset, scale, mask=mask)
        else:
            self._indexed(_STORE_MASKED, vector, mask, base, index, offset, scale)

    def load_masked(
        self, vector: int, mask: int, base: int, index: int | None, scale: int = 1, offset: int = 0
    ) -> None:
        """The elements of vector that `mask` selects, as in `store_masked`, = those of memory; others = 0."""
        if self.lanes == 16:
            self._indexed(_LOAD, vector, 0, base, index, offset, scale, mask=mask, is_zeroed=True)
        else:
            self._indexed(_LOAD_MASKED, vector, mask, base, index, offset, scale)

    def store_first(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """The number in memory = the first of vector."""
        self._indexed(_STORE_FIRST, vector, 0, base, index, offset, scale, unit=4)

    def load_first(
        self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0, *, is_double: bool = False
    ) -> None:
        """The first element of vector = the number in memory, others = 0."""
        what, unit = (_LOAD_DOUBLE, 8) if is_double else (_LOAD_FIRST, 4)
        self._indexed(what, vector, 0, base, index, offset, scale, unit=unit)

    def compare_first(
        self, vector: int, base: int, index: int | None, scale: int = 1, *, is_double: bool = False
    ) -> None:
        """Set the carry flag where the first element of vector < the number in memory, or one of them is NaN."""
        what, unit = (_COMPARE_DOUBLE, 8) if is_double else (_COMPARE_FIRST, 4)
        self._indexed(what, vector, 0, base, index, 0, scale, unit=unit)

    def repeat_number(self, vector: int, register: int) -> None:
        """Every element of vector, as an integer, = the low 32 bits of a general register."""
        if self.lanes == 16:
            self._compute(_REPEAT, vector, 0, register)
            return
        self._compute(_TO_LOW, vector, 0, register, is_short=True)
        self._compute(_REPEAT_LOW, vector, 0, vector)

    def first_elements(self, mask: int, counts: int) -> None:
        """`mask` selects the first elements; every element of `counts`, an integer, is their number."""
        values = struct.pack(f"<{self.lanes}i", *range(self.lanes))
        self._with_bytes(_GREATER_INTEGER, mask, counts, values)

    def compare_vectors(self, mask: int, left: int, right: int, relation: int) -> None:
        """`mask` selects the elements with left relation right."""
        self._compute(_COMPARE, mask, left, right, relation)

    def select(self, target: int, mask: int, chosen: int, other: int) -> None:
        """target = `chosen` where `mask` selects, else `other`."""
        if self.lanes == 16:
            self._compute(_BLEND_MASK, target, other, chosen, mask=mask)
        else:
            self._compute(_BLEND, target, other, chosen, mask << 4)

    def rotate(self, target: int, source: int, distance: int) -> None:
        """target = source with its elements exchanged with those `distance` away, a power of 2 below `lanes`."""
        if distance <= 2:
            self.compute(SHUFFLE, target, source, source, 0x4E if distance == 2 else 0xB1)
        elif self.lanes == 8:
            self.compute(PERMUTE_HALVES, target, source, source, 1)
        else:
            self._compute(_SHUFFLE_QUARTERS, target, source, source, 0x4E if distance == 8 else 0xB1)

    def shift_integers(self, target: int, source: int, bits: int) -> None:
        """target = the integers of source times 2^bits, or without their lowest -bits bits; signs are kept."""
        self._compute(_SHIFT, 6 if bits >= 0 else 4, target, source, abs(bits))

    def round(self, target: int, source: int, how: int = 8) -> None:
        """target = source, rounded to an integer, as float32: 8 the nearest, 9 down, 10 up, 11 to zero."""
        self._compute(_ROUND, target, 0, source, how)

    def powers_of_two(self, vector: int) -> None:
        """Turn whole numbers n of float32 into what multiplies a float32 by 2^n when it is added to its bits.

        NaN becomes 0.
        """
        self.compute(TO_INTEGER, vector, 0, vector)
        self.shift_integers(vector, vector, 23)

    def load_permutation(self, vector: int, elements: Sequence[int]) -> None:
        """vector = the indices of these elements, for PERMUTE, which computes with memory."""
        self._with_bytes(_LOAD, vector, 0, struct.pack(f"<{self.lanes}i", *elements))

    def load_constant(self, vector: int, value: float) -> None:
        """Every element of vector = value, in float32."""
        self._with_constant(_BROADCAST, vector, 0, value)

    def compute(self, what: Instruction, target: int, left: int, right: int, number: int | None = None) -> None:
        """target = left what right, of vectors; for FMA target += left * right. Some need a `number`."""
        self._compute(_ENCODINGS[what], target, 0 if what in _ONE_OPERAND else left, right, number)

    def _compute(
        self,
        what: _Encoding,
        target: int,
        left: int,
        right: int,
        number: int | None = None,
        *,
        mask: int = 0,
        is_short: bool = False,
    ) -> None:
        """`number` is an immediate operand, `mask` an opmask register; `is_short` is for vectors of four with AVX2."""
        self._encode(what, target, left, bool(right & 8), bool(right & 16), mask=mask, is_short=is_short)
        self._bytes.append(0xC0 | (target & 7) << 3 | right & 7)
        self._number(number)

    def compute_memory(
        self, what: Instruction, target: int, left: int, base: int, index: int | None, offset: int = 0
    ) -> None:
        """The same with memory at base + index + offset on the right."""
        self._indexed(_ENCODINGS[what], target, left, base, index, offset)

    def load_widened(self, vector: int, base: int, size: int, *, has_sign: bool) -> None:
        """vector = as many integers of 1 or 2 bytes, those without a sign, from memory at base."""
        self._indexed(_WIDEN[size, has_sign], vector, 0, base, None)

    def store_narrowed(self, vector: int, spare: int, base: int, size: int) -> None:
        """memory at base = the lowest 1 or 2 bytes of the integers of vector, which hold no more; changes `spare`."""
        if self.lanes == 16:
            self._indexed(_NARROW[size], vector, 0, base, None)
            return
        self.compute(PERMUTE_HALVES, spare, vector, vector, 1)
        self._compute(_PACK_WORDS, spare, vector, spare)
        if size == 1:
            self._compute(_PACK_BYTES, spare, spare, spare)
        self._indexed(_STORE_HALF if size == 2 else _STORE_QUARTER, spare, 0, base, None, is_short=True)

    def store_first_byte(self, vector: int, base: int) -> None:
        """The byte at base = the lowest of vector."""
        self._indexed(_STORE_BYTE, vector, 0, base, None, is_short=True, unit=1)
        self._number(0)

    def repeat_within(self, vector: int, base: int, offset: int, elements: Sequence[int]) -> None:
        """Each four of vector = these four `elements` of the same four in memory at base + offset."""
        self._indexed(_PERMUTE_FOURS, vector, 0, base, None, offset)
        self._bytes.append(sum(element << 2 * place for place, element in enumerate(elements)))

    def compute_constant(self, what: Instruction, target: int, left: int, value: float) -> None:
        """The same with a constant on the right."""
        self._with_constant(_ENCODINGS[what], target, left, value)

    def _indexed(
        self,
        what: _Encoding,
        vector: int,
        left: int,
        base: int,
        index: int | None,
        offset: int = 0,
        scale: int = 1,
        *,
        unit: int = 0,
        mask: int = 0,
        is_zeroed: bool = False,
        is_short: bool = False,
    ) -> None:
        """An instruction with memory; AVX-512 counts short offsets in units of what is read, a vector by default."""
        index_is_high = index is not None and index > 7
        self._encode(what, vector, left, base > 7, index_is_high, mask=mask, is_zeroed=is_zeroed, is_short=is_short)
        unit = 1 if self.lanes == 8 else unit or 4 * self.lanes
        units, rest = divmod(offset, unit)
        is_near = not rest and -128 <= units < 128
        mode = (0x40 if is_near else 0x80) | (vector & 7) << 3 | SIB
        place = (scale.bit_length() - 1) << 6 | (NO_INDEX if index is None else index & 7) << 3 | base & 7
        self._bytes += bytes((mode, place, units & 0xFF)) if is_near else struct.pack("<BBi", mode, place, offset)

    def _with_constant(self, what: _Encoding, vector: int, left: int, value: float) -> None:
        bits = struct.pack("<f", value)
        self._with_bytes(what, vector, left, bits * self.lanes)

    def _with_bytes(self, what: _Encoding, vector: int, left: int, value: bytes) -> None:
        number = self._constants.setdefault(value, len(self._constants))
        self._encode(what, vector, left, False, False)
        self._bytes.append((vector & 7) << 3 | _RIP)
        place = len(self._bytes)
        self._bytes += bytes(4)
        self._uses.append((place, len(self._bytes), number))

    def _number(self, number: int | None) -> None:
        if number is not None:
            self._bytes.append(number)

    def _encode(
        self,
        what: _Encoding,
        vector: int,
        left: int,
        base_is_high: bool,
        index_is_high: bool,
        *,
        mask: int = 0,
        is_zeroed: bool = False,
        is_short: bool = False,
    ) -> None:
        """The prefix, VEX or EVEX, and the opcode."""
        opcode_map, prefix, opcode = what
        high = (not vector & 8) << 7 | (not index_is_high) << 6 | (not base_is_high) << 5
        if self.lanes == 8:
            size = 0 if is_short else 4
            self._bytes += bytes([0xC4, high | opcode_map, (~left & 15) << 3 | size | prefix, opcode])
            return
        higher = (not vector & 16) << 4
        size = 0 if is_short else 0x40
        last = is_zeroed << 7 | size | (not left & 16) << 3 | mask
        self._bytes += bytes([0x62, high | higher | opcode_map, (~left & 15) << 3 | 4 | prefix, last, opcode])
