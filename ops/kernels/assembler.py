"""The few instructions of x86-64 with AVX2 and FMA, or with AVX-512, that generated kernels are made of.

Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2. Vectors are eight or sixteen float32 numbers;
memory is addressed as a register plus a register and a number, relative to a register, or as a constant of the code.
"""

from __future__ import annotations

import struct

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 = range(16)
"""Numbers of the general registers."""

ADD, MUL, SUB, MIN, MAX, XOR = (1, 0, 0x58), (1, 0, 0x59), (1, 0, 0x5C), (1, 0, 0x5D), (1, 0, 0x5F), (1, 0, 0x57)
FMA, SUBTRACT_PRODUCT, HORNER = (2, 1, 0xB8), (2, 1, 0xBC), (2, 1, 0xA8)
ADD_INTEGERS, LOAD_MASKED = (1, 1, 0xFE), (2, 1, 0x2C)
"""Vector instructions of three operands: opcode map, prefix, opcode.

FMA adds the product to the first operand, SUBTRACT_PRODUCT subtracts it; HORNER multiplies the first by the second and
adds the third. LOAD_MASKED reads the elements of memory whose sign in the second is set, and makes others 0.
"""

_LOAD, _STORE, _BROADCAST = (1, 0, 0x10), (1, 0, 0x11), (2, 1, 0x18)
_STORE_MASKED, _TO_INTEGER, _SHIFT, _ROUND = (2, 1, 0x2E), (1, 1, 0x5B), (1, 1, 0x72), (3, 1, 0x08)
_VECTOR = 32  # bytes
_SIB, _RIP = 4, 5  # in the place of a register: a base and an index follow; an offset from the next instruction
_NO_INDEX = 4  # in the place of an index
_CLEAR = {8: (1, 0, 0x57), 16: (1, 1, 0xEF)}  # by lanes, an exclusive or

Instruction = tuple[int, int, int]


class Assembler:
    """Appends instructions; `code` gives the bytes, with the constants behind them.

    Attributes:
        lanes: float32 numbers in a vector: 8, in 16 registers, or 16, in 32.
    """

    def __init__(self, lanes: int = 8) -> None:
        self.lanes = lanes
        self._bytes = bytearray(bytes.fromhex("f30f1efa"))  # endbr64
        self._constants: dict[float, int] = {}
        self._uses: list[tuple[int, int]] = []

    def code(self) -> bytes:
        """The machine code."""
        start = -(-len(self._bytes) // _VECTOR) * _VECTOR
        whole = bytearray(self._bytes.ljust(start, b"\x90"))
        for place, number in self._uses:
            struct.pack_into("<i", whole, place, start + number * _VECTOR - (place + 4))
        for value in self._constants:
            whole += struct.pack("<8f", *[value] * 8)
        return bytes(whole)

    def here(self) -> int:
        """The place of the next instruction, to jump to."""
        return len(self._bytes)

    def push(self, *registers: int) -> None:
        """Save registers on the stack."""
        for register in registers:
            self._bytes += bytes([0x41] if register > RDI else []) + bytes([0x50 | register & 7])

    def leave(self, *pushed: int) -> None:
        """Restore what was pushed, and return 0."""
        self._bytes += bytes.fromhex("c5f877 31c0")  # vzeroupper; xor eax, eax
        for register in reversed(pushed):
            self._bytes += bytes([0x41] if register > RDI else []) + bytes([0x58 | register & 7])
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

    def add_number(self, register: int, number: int) -> None:
        """register += number."""
        self._bytes += bytes([0x48 | (register > RDI), 0x81, 0xC0 | register & 7]) + struct.pack("<i", number)

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
        """After a comparison of numbers without sign."""
        self._jump(0x82, place)

    def jump_if_not_zero(self, place: int) -> None:
        """After `count_down`."""
        self._jump(0x85, place)

    def compare(self, register: int, other: int) -> None:
        """Compare a register with another."""
        self._bytes += bytes(
            [0x48 | (other > RDI) << 2 | (register > RDI), 0x39, 0xC0 | (other & 7) << 3 | register & 7]
        )

    def load(self, vector: int, base: int, index: int, offset: int = 0) -> None:
        """vector = memory at base + index + offset."""
        self._indexed(_LOAD, vector, 0, base, index, offset)

    def store(self, vector: int, base: int, index: int, offset: int = 0) -> None:
        """memory at base + index + offset = vector."""
        self._indexed(_STORE, vector, 0, base, index, offset)

    def clear_vector(self, vector: int) -> None:
        """vector = zeros."""
        self.compute(_CLEAR[self.lanes], vector, vector, vector)

    def broadcast(self, vector: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        """Every element of vector = that in memory at base + scale * index + offset."""
        self._indexed(_BROADCAST, vector, 0, base, index, offset, scale, unit=4)

    def compute_broadcast(
        self, what: Instruction, target: int, left: int, base: int, index: int | None, scale: int = 1, offset: int = 0
    ) -> None:
        """As `compute`, with one number in memory, which is every element, on the right; for vectors of 16 alone."""
        self._indexed(what, target, left, base, index, offset, scale, unit=4, is_repeated=True)

    def fetch(self, register: int, offset: int) -> None:
        """Have the processor bring memory at register + offset to the second cache; any address will do."""
        self._bytes += bytes([0x40 | (register > RDI), 0x0F, 0x18, 0x40 | 2 << 3 | register & 7, offset])

    def load_at(self, vector: int, base: int, offset: int) -> None:
        """vector = memory at base + offset."""
        self._indexed(_LOAD, vector, 0, base, None, offset)

    def store_at(self, vector: int, base: int, offset: int) -> None:
        """memory at base + offset = vector."""
        self._indexed(_STORE, vector, 0, base, None, offset)

    def store_masked(self, vector: int, mask: int, base: int, index: int) -> None:
        """The elements of memory at base + index whose sign in `mask` is set = those of vector."""
        self._indexed(_STORE_MASKED, vector, mask, base, index)

    def round(self, target: int, source: int) -> None:
        """target = source, rounded to the nearest integer, as float32."""
        self.compute(_ROUND, target, 0, source)
        self._bytes.append(8)

    def powers_of_two(self, vector: int) -> None:
        """Whole numbers of float32 become what is added to the bits of a float32 to multiply it by 2 to that power.

        NaN becomes 0.
        """
        self.compute(_TO_INTEGER, vector, 0, vector)
        self.compute(_SHIFT, 6, vector, vector)
        self._bytes.append(23)

    def load_constant(self, vector: int, value: float) -> None:
        """Every element of vector = value, in float32."""
        self._with_constant(_BROADCAST, vector, 0, value)

    def compute(self, what: Instruction, target: int, left: int, right: int) -> None:
        """target = left what right, of vectors; for FMA target += left * right."""
        self._encode(what, target, left, bool(right & 8), bool(right & 16))
        self._bytes.append(0xC0 | (target & 7) << 3 | right & 7)

    def compute_memory(self, what: Instruction, target: int, left: int, base: int, index: int, offset: int = 0) -> None:
        """The same with memory at base + index + offset on the right."""
        self._indexed(what, target, left, base, index, offset)

    def compute_constant(self, what: Instruction, target: int, left: int, value: float) -> None:
        """The same with a constant on the right."""
        self._with_constant(what, target, left, value)

    def _field(self, opcode: int, register: int, offset: int, base: int) -> None:
        self._bytes += bytes([0x48 | (register > RDI) << 2, opcode, 0x80 | (register & 7) << 3 | base])
        self._bytes += struct.pack("<i", offset)

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
        is_repeated: bool = False,
    ) -> None:
        """An instruction with memory; AVX-512 counts short offsets in units of what is read, a vector by default."""
        self._encode(what, vector, left, base > RDI, index is not None and index > RDI, is_repeated)
        unit = 1 if self.lanes == 8 else unit or 4 * self.lanes
        is_near = -128 <= offset / unit < 128 and offset % unit == 0
        place = (_NO_INDEX if index is None else index & 7) << 3 | base & 7
        self._bytes += bytes(
            [(0x40 if is_near else 0x80) | (vector & 7) << 3 | _SIB, (scale.bit_length() - 1) << 6 | place]
        )
        self._bytes += struct.pack("<b", offset // unit) if is_near else struct.pack("<i", offset)

    def _with_constant(self, what: Instruction, vector: int, left: int, value: float) -> None:
        number = self._constants.setdefault(value, len(self._constants))
        self._encode(what, vector, left, False, False)
        self._bytes.append((vector & 7) << 3 | _RIP)
        self._uses.append((len(self._bytes), number))
        self._bytes += bytes(4)

    def _encode(
        self,
        what: Instruction,
        vector: int,
        left: int,
        base_is_high: bool,
        index_is_high: bool,
        is_repeated: bool = False,
    ) -> None:
        """The prefix, VEX or EVEX, and the opcode."""
        opcode_map, prefix, opcode = what
        high = (not vector & 8) << 7 | (not index_is_high) << 6 | (not base_is_high) << 5
        if self.lanes == 8:
            self._bytes += bytes([0xC4, high | opcode_map, (~left & 15) << 3 | 4 | prefix, opcode])
            return
        higher = (not vector & 16) << 4
        last = 0x40 | is_repeated << 4 | (not left & 16) << 3
        self._bytes += bytes([0x62, high | higher | opcode_map, (~left & 15) << 3 | 4 | prefix, last, opcode])
