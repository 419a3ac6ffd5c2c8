"""An assembler of the few instructions of x86-64 with AVX2 and FMA, or AVX-512, that code written at run time uses.

Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2. Vectors are eight or sixteen float32 numbers;
memory is addressed as a register plus a register and a number, relative to a register, or as a constant of the code.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 = range(16)
"""Numbers of the general registers."""

REGISTERS = {8: 16, 16: 32}
"""The number of vector registers, by lanes."""

ADD, MUL, SUB, MIN, MAX = (1, 0, 0x58), (1, 0, 0x59), (1, 0, 0x5C), (1, 0, 0x5D), (1, 0, 0x5F)
FMA, SUBTRACT_PRODUCT, HORNER = (2, 1, 0xB8), (2, 1, 0xBC), (2, 1, 0xA8)
DIV, SQRT, SCALE_BY_POWER = (1, 0, 0x5E), (1, 0, 0x51), (2, 1, 0x2C)
MULTIPLY_ADD, SUBTRACT_FROM, SUBTRACT_SCALED = (2, 1, 0x98), (2, 1, 0xAC), (2, 1, 0x9C)
ADD_INTEGERS, SUBTRACT_INTEGERS, AND, OR = (1, 1, 0xFE), (1, 1, 0xFA), (1, 1, 0xDB), (1, 1, 0xEB)
TO_INTEGER, FROM_INTEGER, LOAD_MASKED = (1, 1, 0x5B), (1, 0, 0x5B), (2, 1, 0x2C)
UNPACK_LOW, UNPACK_HIGH, SHUFFLE, PERMUTE_HALVES = (1, 0, 0x14), (1, 0, 0x15), (1, 0, 0xC6), (3, 1, 0x06)
PERMUTE, SUB_DOUBLES = (2, 1, 0x16), (1, 0x81, 0x5C)
"""Vector instructions of three operands: opcode map, prefix, opcode.

FMA adds the product to the first operand, SUBTRACT_PRODUCT subtracts it; HORNER multiplies the first by the second and
adds the third, MULTIPLY_ADD multiplies the first by the third and adds the second, SUBTRACT_FROM subtracts the product
of the first two from the third, SUBTRACT_SCALED that of the first and the third from the second. SCALE_BY_POWER, of
AVX-512, multiplies by a power of 2. LOAD_MASKED reads the elements of memory whose sign in the second is set, and sets
others to 0. UNPACK_LOW to PERMUTE_HALVES reorder the elements of two vectors, PERMUTE those of one by the indices in
another. SUB_DOUBLES subtracts float64 numbers, for which AVX-512 needs a bit that AVX2 ignores.
"""

_LOAD, _STORE, _BROADCAST, _STORE_FIRST = (1, 0, 0x10), (1, 0, 0x11), (2, 1, 0x18), (1, 2, 0x11)
_STORE_MASKED, _SHIFT, _ROUND, _COMPARE = (2, 1, 0x2E), (1, 1, 0x72), (3, 1, 0x08), (1, 0, 0xC2)
_MOVE, _TO_LOW, _REPEAT_LOW, _REPEAT = (1, 0, 0x28), (1, 1, 0x6E), (2, 1, 0x58), (2, 1, 0x7C)
_GREATER_INTEGER, _BLEND, _BLEND_MASK = (1, 1, 0x66), (3, 1, 0x4A), (2, 1, 0x65)
_SHUFFLE_QUARTERS, _PERMUTE_FOURS = (3, 1, 0x43), (3, 1, 0x04)
_LOAD_FIRST, _COMPARE_FIRST = (1, 2, 0x10), (1, 0, 0x2E)
_LOAD_DOUBLE, _COMPARE_DOUBLE = (1, 0x83, 0x10), (1, 0x81, 0x2E)  # with the bit that AVX-512 has for float64
_VECTOR = 32  # bytes
_SIB, _RIP = 4, 5  # in the place of a register: a base and an index follow; an offset from the next instruction
_NO_INDEX = 4  # in the place of an index
_CLEAR = {8: (1, 0, 0x57), 16: (1, 1, 0xEF)}  # by lanes, an exclusive or

Instruction = tuple[int, int, int]

BELOW, NOT_BELOW, ZERO, NOT_ZERO, LESS, NOT_LESS, NOT_GREATER, GREATER = 0x2, 0x3, 0x4, 0x5, 0xC, 0xD, 0xE, 0xF
"""Conditions of jumps: for unsigned numbers, for the last result, for signed numbers."""

EQUAL_TO, LESS_THAN, AT_MOST, IS_NAN = 0x00, 0x11, 0x12, 0x03
"""Comparisons of vectors: equal, less, less or equal (false for NaN), and NaN on one side."""


class Assembler:
    """Appends instructions; `code` gives the bytes, followed by the constants.

    Attributes:
        lanes: float32 numbers in a vector: 8, in 16 registers, or 16, in 32.
    """

    def __init__(self, lanes: int = 8) -> None:
        self.lanes = lanes
        self._bytes = bytearray(bytes.fromhex("f30f1efa"))  # endbr64
        self._constants: dict[bytes, int] = {}
        self._marks: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []
        self._uses: list[tuple[int, int, int]] = []

    def code(self) -> bytes:
        """The machine code."""
        size = 4 * self.lanes
        start = -(-len(self._bytes) // size) * size
        whole = bytearray(self._bytes.ljust(start, b"\x90"))
        for end, name in self._jumps:
            struct.pack_into("<i", whole, end - 4, self._marks[name] - end)
        for place, end, number in self._uses:
            struct.pack_into("<i", whole, place, start + number * size - end)
        for value in self._constants:
            whole += value
        return bytes(whole)

    def here(self) -> int:
        """The place of the next instruction, to jump to."""
        return len(self._bytes)

    def push(self, *registers: int) -> None:
        """Save registers on the stack."""
        for register in registers:
            self._bytes += bytes([0x41] if register > RDI else []) + bytes([0x50 | register & 7])

    def pop(self, *pushed: int) -> None:
        """Restore the registers that were pushed last, given in the order in which they were pushed."""
        for register in reversed(pushed):
            self._bytes += bytes([0x41] if register > RDI else []) + bytes([0x58 | register & 7])

    def leave(self, *pushed: int) -> None:
        """Restore what was pushed, and return 0."""
        self._bytes += bytes.fromhex("c5f877 31c0")  # vzeroupper; xor eax, eax
        self.pop(*pushed)
        self._bytes += b"\xc3"

    def load_field(self, register: int, offset: int, base: int = RDI) -> None:
        """register = the 64 bits at `base` + offset."""
        self._field(0x8B, register, offset, base)

    def add_field(self, register: int, offset: int, base: int = RDI) -> None:
        """register += the 64 bits at `base` + offset."""
        self._field(0x03, register, offset, base)

    def compare_field(self, register: int, offset: int) -> None:
        """Compare a register with the 64 bits at rdi + offset."""
        self._field(0x3B, register, offset, RDI)

    def move(self, register: int, other: int) -> None:
        """register = other."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x89, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def add(self, register: int, other: int) -> None:
        """register += other."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x01, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def subtract(self, register: int, other: int) -> None:
        """register -= other."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x29, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def negate(self, register: int) -> None:
        """register = -register."""
        self._bytes += bytes([0x48 | (register > RDI), 0xF7, 0xD8 | register & 7])

    def multiply(self, register: int, other: int) -> None:
        """register *= other."""
        self._bytes += bytes(
            [0x48 | (register > RDI) << 2 | (other > RDI), 0x0F, 0xAF, 0xC0 | (register & 7) << 3 | other & 7]
        )

    def multiply_number(self, register: int, other: int, number: int) -> None:
        """register = other * number."""
        self._bytes += bytes(
            [0x48 | (register > RDI) << 2 | (other > RDI), 0x69, 0xC0 | (register & 7) << 3 | other & 7]
        ) + struct.pack("<i", number)

    def add_number(self, register: int, number: int) -> None:
        """register += number."""
        self._bytes += bytes([0x48 | (register > RDI), 0x81, 0xC0 | register & 7]) + struct.pack("<i", number)

    def intersect(self, register: int, other: int) -> None:
        """register &= other."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x21, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def append_carry(self, register: int) -> None:
        """register = 2 * register + the carry flag."""
        self._bytes += bytes([0x48 | (register > RDI) * 5, 0x11, 0xC0 | (register & 7) * 9])

    def and_number(self, register: int, number: int) -> None:
        """register &= number, which is sign-extended."""
        self._bytes += bytes([0x48 | (register > RDI), 0x81, 0xE0 | register & 7]) + struct.pack("<i", number)

    def compare_number(self, register: int, number: int) -> None:
        """Compare a register with a number."""
        self._bytes += bytes([0x48 | (register > RDI), 0x81, 0xF8 | register & 7]) + struct.pack("<i", number)

    def set_number(self, register: int, number: int) -> None:
        """register = number, of 32 bits with a sign."""
        self._bytes += bytes([0x48 | (register > RDI), 0xC7, 0xC0 | register & 7]) + struct.pack("<i", number)

    def shift_left(self, register: int, bits: int) -> None:
        """register <<= bits."""
        self._bytes += bytes([0x48 | (register > RDI), 0xC1, 0xE0 | register & 7, bits])

    def shift_right(self, register: int, bits: int) -> None:
        """register >>= bits, arithmetically."""
        self._bytes += bytes([0x48 | (register > RDI), 0xC1, 0xF8 | register & 7, bits])

    def load_number(self, register: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """register = the 64 bits at base + scale * index + offset."""
        self._general(0x8B, register, base, index, scale, offset)

    def load_short_number(self, register: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """register = the 32 bits at base + scale * index + offset, sign-extended."""
        self._general(0x63, register, base, index, scale, offset)

    def store_number(self, register: int, base: int, offset: int = 0, index: int | None = None, scale: int = 1) -> None:
        """The 64 bits at base + scale * index + offset = register."""
        self._general(0x89, register, base, index, scale, offset)

    def store_short_number(self, register: int, base: int) -> None:
        """The 32 bits at base = the low half of register. Not for r8 to r15, nor for rsp and rbp as a base."""
        self._bytes += bytes([0x89, register << 3 | base])

    def copy_bytes(self) -> None:
        """Copy rcx bytes from rsi to rdi, which then point behind them; rcx = 0."""
        self._bytes += b"\xf3\xa4"  # rep movsb

    def copy_number(self, size: int) -> None:
        """Copy 4 or 8 bytes from rsi to rdi, which then point behind them."""
        self._bytes += {4: b"\xa5", 8: b"\x48\xa5"}[size]  # movsd, movsq

    def copy_line(self) -> None:
        """Copy 16 bytes from rsi to rdi, which stay, through vector 0. Needs no AVX."""
        self._bytes += bytes.fromhex("0f1006 0f1107")  # movups xmm0, [rsi]; movups [rdi], xmm0

    def load_float_status(self) -> None:
        """Set the processor's float status, its flags of exceptions among it, to the 32 bits at rsp - 8."""
        self._bytes += bytes.fromhex("0fae5424f8")  # ldmxcsr [rsp - 8]

    def store_float_status(self) -> None:
        """The 32 bits at rsp - 8 = the processor's float status."""
        self._bytes += bytes.fromhex("0fae5c24f8")  # stmxcsr [rsp - 8]

    def clear(self, register: int) -> None:
        """register = 0."""
        self._bytes += bytes([0x48 | (register > RDI) * 5, 0x31, 0xC0 | (register & 7) * 9])

    def save(self, register: int) -> None:
        """Keep a register in the red zone below the stack, where `count_down` finds it."""
        self._bytes += bytes([0x48 | (register > RDI) << 2, 0x89, 0x44 | (register & 7) << 3, 0x24, 0xF8])

    def count_down(self) -> None:
        """Subtract 1 from what was saved; sets flags."""
        self._bytes += bytes.fromhex("48ff4c24f8")  # dec qword [rsp - 8]

    def jump_if_below(self, place: int) -> None:
        """After a comparison of unsigned numbers."""
        self._jump(0x82, place)

    def jump_if_not_zero(self, place: int) -> None:
        """After `count_down`."""
        self._jump(0x85, place)

    def jump_if(self, condition: int, place: int) -> None:
        """Jump back to a place."""
        self._jump(0x80 | condition, place)

    def jump_ahead(self, condition: int) -> int:
        """Jump to where `land` will be called with the returned number."""
        self._jump(0x80 | condition, 0)
        return len(self._bytes)

    def land(self, jump: int) -> None:
        """The place where `jump` ends."""
        struct.pack_into("<i", self._bytes, jump - 4, len(self._bytes) - jump)

    def mark(self, name: str) -> None:
        """The target of jumps to `name`."""
        self._marks[name] = len(self._bytes)

    def jump(self, name: str, condition: int | None = None) -> None:
        """Jump to the mark `name`, always or on a condition."""
        self._bytes += (b"\xe9" if condition is None else bytes([0x0F, 0x80 | condition])) + bytes(4)
        self._jumps.append((len(self._bytes), name))

    def call_place(self, name: str) -> None:
        """Call the function at a mark."""
        self._bytes += b"\xe8" + bytes(4)
        self._jumps.append((len(self._bytes), name))

    def call_field(self, base: int, offset: int) -> None:
        """Call the function whose address is at base + offset."""
        self._memory(0xFF, 2, base, offset)

    def end_call(self) -> None:
        """Return to the caller."""
        self._bytes += b"\xc3"

    def exchange(self, register: int, base: int, offset: int) -> None:
        """Exchange a register and the 64 bits at base + offset, atomically and in order for all threads."""
        self._memory(0x87, register, base, offset)

    def fetch_and_add(self, register: int, base: int, offset: int) -> None:
        """Add a register to the 64 bits at base + offset and get their old value, atomically."""
        self._bytes += b"\xf0"  # lock
        self._bytes += bytes([0x48 | (register > RDI) << 2 | (base > RDI), 0x0F])
        self._bytes += bytes([0xC1, 0x80 | (register & 7) << 3 | base & 7]) + struct.pack("<i", offset)

    def add_to_memory(self, base: int, offset: int, number: int) -> None:
        """The 64 bits at base + offset += number; sets flags."""
        self._memory(0x81, 0, base, offset)
        self._bytes += struct.pack("<i", number)

    def compare_memory(self, base: int, offset: int, number: int) -> None:
        """Compare the 64 bits at base + offset with a number."""
        self._memory(0x81, 7, base, offset)
        self._bytes += struct.pack("<i", number)

    def compare_with_memory(self, register: int, base: int, offset: int) -> None:
        """Compare a register with the 64 bits at base + offset."""
        self._memory(0x3B, register, base, offset)

    def add_memory(self, register: int, base: int, offset: int) -> None:
        """register += the 64 bits at base + offset."""
        self._memory(0x03, register, base, offset)

    def first_bit(self, register: int, other: int) -> None:
        """register = the number of the lowest bit that is set in `other`, which is not 0."""
        self._bytes += bytes(
            [0x48 | (register > RDI) << 2 | (other > RDI), 0x0F, 0xBC, 0xC0 | (register & 7) << 3 | other & 7]
        )

    def set_bit(self, register: int, number: int) -> None:
        """Set the bit of `register` whose number, modulo 64, a register says."""
        self._bit(0xAB, register, number)

    def clear_bit(self, register: int, number: int) -> None:
        """Clear the bit of `register` whose number, modulo 64, a register says."""
        self._bit(0xB3, register, number)

    def pause(self) -> None:
        """Tell the processor that this loop waits for another thread."""
        self._bytes += b"\xf3\x90"  # pause

    def read_clock(self, register: int) -> None:
        """register = the ticks of the processor's clock. Changes rax and rdx."""
        self._bytes += bytes.fromhex("0f31 48c1e220 4809d0")  # rdtsc; shl rdx, 32; or rax, rdx
        if register != RAX:
            self.move(register, RAX)

    def yield_core(self) -> None:
        """Let another thread have the core: Linux's sched_yield. Changes rax, rcx and r11."""
        self._bytes += bytes.fromhex("b818000000 0f05")  # mov eax, 24; syscall

    def compare(self, register: int, other: int) -> None:
        """Compare a register with another."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x39, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def load(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        """vector = memory at base + scale * index + offset."""
        self._indexed(_LOAD, vector, 0, base, index, offset, scale)

    def store(self, vector: int, base: int, index: int | None, offset: int = 0, scale: int = 1) -> None:
        """memory at base + scale * index + offset = vector."""
        self._indexed(_STORE, vector, 0, base, index, offset, scale)

    def clear_vector(self, vector: int) -> None:
        """vector = zeros."""
        self.compute(_CLEAR[self.lanes], vector, vector, vector)

    def broadcast(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """Every element of vector = that in memory at base + scale * index + offset."""
        self._indexed(_BROADCAST, vector, 0, base, index, offset, scale, unit=4)

    def fetch(self, register: int, offset: int) -> None:
        """Prefetch memory at register + offset to the second-level cache; any address will do."""
        self._bytes += bytes([0x40 | (register > RDI), 0x0F, 0x18, 0x40 | 2 << 3 | register & 7, offset])

    def load_at(self, vector: int, base: int, offset: int) -> None:
        """vector = memory at base + offset."""
        self._indexed(_LOAD, vector, 0, base, None, offset)

    def store_at(self, vector: int, base: int, offset: int) -> None:
        """memory at base + offset = vector."""
        self._indexed(_STORE, vector, 0, base, None, offset)

    def move_vector(self, vector: int, other: int) -> None:
        """vector = other."""
        self.compute(_MOVE, vector, 0, other)

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
            self._indexed(LOAD_MASKED, vector, mask, base, index, offset, scale)

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
            self.compute(_REPEAT, vector, 0, register)
            return
        self.compute(_TO_LOW, vector, 0, register, is_short=True)
        self.compute(_REPEAT_LOW, vector, 0, vector)

    def first_elements(self, mask: int, counts: int) -> None:
        """`mask` selects the first elements; every element of `counts`, an integer, is their number."""
        values = struct.pack(f"<{self.lanes}i", *range(self.lanes))
        self._with_bytes(_GREATER_INTEGER, mask, counts, values)

    def compare_vectors(self, mask: int, left: int, right: int, relation: int) -> None:
        """`mask` selects the elements with left relation right."""
        self.compute(_COMPARE, mask, left, right, relation)

    def select(self, target: int, mask: int, chosen: int, other: int) -> None:
        """target = `chosen` where `mask` selects, else `other`."""
        if self.lanes == 16:
            self.compute(_BLEND_MASK, target, other, chosen, mask=mask)
        else:
            self.compute(_BLEND, target, other, chosen, mask << 4)

    def rotate(self, target: int, source: int, distance: int) -> None:
        """target = source with its elements exchanged with those `distance` away, a power of 2 below `lanes`."""
        if distance <= 2:
            self.compute(SHUFFLE, target, source, source, 0x4E if distance == 2 else 0xB1)
        elif self.lanes == 8:
            self.compute(PERMUTE_HALVES, target, source, source, 1)
        else:
            self.compute(_SHUFFLE_QUARTERS, target, source, source, 0x4E if distance == 8 else 0xB1)

    def shift_integers(self, target: int, source: int, bits: int) -> None:
        """target = the integers of source times 2^bits, or without their lowest -bits bits; signs are kept."""
        self.compute(_SHIFT, 6 if bits >= 0 else 4, target, source, abs(bits))

    def round(self, target: int, source: int, how: int = 8) -> None:
        """target = source, rounded to an integer, as float32: 8 the nearest, 9 down, 10 up, 11 to zero."""
        self.compute(_ROUND, target, 0, source, how)

    def powers_of_two(self, vector: int) -> None:
        """Turn whole numbers n of float32 into what multiplies a float32 by 2^n when it is added to its bits.

        NaN becomes 0.
        """
        self.compute(TO_INTEGER, vector, 0, vector)
        self.shift_integers(vector, vector, 23)

    def load_numbers(self, vector: int, values: Sequence[int]) -> None:
        """vector = integers, one for each element."""
        self._with_bytes(_LOAD, vector, 0, struct.pack(f"<{self.lanes}i", *values))

    def load_constant(self, vector: int, value: float) -> None:
        """Every element of vector = value, in float32."""
        self._with_constant(_BROADCAST, vector, 0, value)

    def compute(
        self,
        what: Instruction,
        target: int,
        left: int,
        right: int,
        number: int | None = None,
        *,
        mask: int = 0,
        is_short: bool = False,
    ) -> None:
        """target = left what right, of vectors; for FMA target += left * right.

        `number` is the immediate operand of some instructions; `mask` an opmask register of AVX-512. `is_short` is for
        vectors of four with AVX2.
        """
        self._encode(what, target, left, bool(right & 8), bool(right & 16), mask=mask, is_short=is_short)
        self._bytes.append(0xC0 | (target & 7) << 3 | right & 7)
        self._number(number)

    def compute_memory(
        self, what: Instruction, target: int, left: int, base: int, index: int | None, offset: int = 0
    ) -> None:
        """The same with memory at base + index + offset on the right."""
        self._indexed(what, target, left, base, index, offset)

    def access(
        self,
        what: Instruction,
        vector: int,
        base: int,
        *,
        number: int | None = None,
        mask: int = 0,
        is_short: bool = False,
    ) -> None:
        """An instruction that reads elements of another size at `base`, or writes them.

        `number`, `mask` and `is_short` are as in `compute`.
        """
        self._indexed(what, vector, 0, base, None, mask=mask, is_short=is_short)
        self._number(number)

    def repeat_within(self, vector: int, base: int, offset: int, elements: Sequence[int]) -> None:
        """Each four of vector = these four `elements` of the same four in memory at base + offset."""
        self._indexed(_PERMUTE_FOURS, vector, 0, base, None, offset)
        self._bytes.append(sum(element << 2 * place for place, element in enumerate(elements)))

    def compute_constant(self, what: Instruction, target: int, left: int, value: float) -> None:
        """The same with a constant on the right."""
        self._with_constant(what, target, left, value)

    def _field(self, opcode: int, register: int, offset: int, base: int) -> None:
        self._bytes += bytes([0x48 | (register > RDI) << 2, opcode, 0x80 | (register & 7) << 3 | base])
        self._bytes += struct.pack("<i", offset)

    def _memory(self, opcode: int, register: int, base: int, offset: int) -> None:
        """An instruction of 64 bits with memory at base + offset; `register` may be a part of the opcode."""
        self._bytes += bytes(
            [0x48 | (register > RDI) << 2 | (base > RDI), opcode, 0x80 | (register & 7) << 3 | base & 7]
        )
        if base & 7 == RSP:
            self._bytes.append(0x24)
        self._bytes += struct.pack("<i", offset)

    def _bit(self, opcode: int, register: int, number: int) -> None:
        self._bytes += bytes(
            [0x48 | (number > RDI) << 2 | (register > RDI), 0x0F, opcode, 0xC0 | (number & 7) << 3 | register & 7]
        )

    def _jump(self, opcode: int, place: int) -> None:
        self._bytes += bytes([0x0F, opcode]) + struct.pack("<i", place - (len(self._bytes) + 6))

    def _indexed(
        self,
        what: Instruction,
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
        index_is_high = index is not None and index > RDI
        self._encode(what, vector, left, base > RDI, index_is_high, mask=mask, is_zeroed=is_zeroed, is_short=is_short)
        unit = 1 if self.lanes == 8 else unit or 4 * self.lanes
        units, rest = divmod(offset, unit)
        is_near = not rest and -128 <= units < 128
        mode = (0x40 if is_near else 0x80) | (vector & 7) << 3 | _SIB
        place = (scale.bit_length() - 1) << 6 | (_NO_INDEX if index is None else index & 7) << 3 | base & 7
        self._bytes += bytes((mode, place, units & 0xFF)) if is_near else struct.pack("<BBi", mode, place, offset)

    def _with_constant(self, what: Instruction, vector: int, left: int, value: float) -> None:
        bits = struct.pack("<f", value)
        self._with_bytes(what, vector, left, bits * self.lanes)

    def _with_bytes(self, what: Instruction, vector: int, left: int, value: bytes) -> None:
        number = self._constants.setdefault(value, len(self._constants))
        self._encode(what, vector, left, False, False)
        self._bytes.append((vector & 7) << 3 | _RIP)
        place = len(self._bytes)
        self._bytes += bytes(4)
        self._uses.append((place, len(self._bytes), number))

    def _number(self, number: int | None) -> None:
        if number is not None:
            self._bytes.append(number)

    def _general(self, opcode: int, register: int, base: int, index: int | None, scale: int, offset: int) -> None:
        """An instruction of a general register and memory."""
        high = (register > RDI) << 2 | (index is not None and index > RDI) << 1 | (base > RDI)
        place = (_NO_INDEX if index is None else index & 7) << 3 | base & 7
        self._bytes += bytes([0x48 | high, opcode, 0x80 | (register & 7) << 3 | _SIB])
        self._bytes += bytes([(scale.bit_length() - 1) << 6 | place]) + struct.pack("<i", offset)

    def _encode(
        self,
        what: Instruction,
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
        last = is_zeroed << 7 | 0x40 | (not left & 16) << 3 | mask
        self._bytes += bytes([0x62, high | higher | opcode_map, (~left & 15) << 3 | 4 | prefix, last, opcode])
