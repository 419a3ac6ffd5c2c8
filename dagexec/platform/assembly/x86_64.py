"""Instructions on general registers, and jumps, for x86-64 and the calling convention of System V.

Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2. `x86_64_vectors.py` adds those on vectors.
"""

from __future__ import annotations

import struct
import sys

from dagexec.platform.assembly.instructions import A0, A1, RESULT, SP

SIB, NO_INDEX = 4, 4
"""In the place of a register: a base and an index follow; in the place of an index: there is none."""


class GeneralAssembler:
    """Appends instructions; `code` gives the bytes.

    Attributes:
        is_ordered: what is read is read before what comes later, what is written after all before, as other threads
            see it. This processor always does so.
    """

    is_ordered = False

    def __init__(self) -> None:
        self._bytes = bytearray(bytes.fromhex("f30f1efa"))  # endbr64
        self._marks: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def code(self) -> bytes:
        """The machine code."""
        code = bytearray(self._bytes)
        for end, name in self._jumps:
            struct.pack_into("<i", code, end - 4, self._marks[name] - end)
        return bytes(code)

    def here(self) -> int:
        """The place of the next instruction, to jump to."""
        return len(self._bytes)

    def push(self, *registers: int) -> None:
        """Save registers on the stack."""
        for register in registers:
            self._bytes += bytes([0x41] if register > 7 else []) + bytes([0x50 | register & 7])

    def pop(self, *pushed: int) -> None:
        """Restore the registers that were pushed last, given in the order in which they were pushed."""
        for register in reversed(pushed):
            self._bytes += bytes([0x41] if register > 7 else []) + bytes([0x58 | register & 7])

    def open_frame(self, *registers: int) -> None:
        """At the beginning of a function that calls others: save registers on the stack, and align it for calls."""
        self.push(*registers)
        if len(registers) % 2 == 0:
            self.add_number(SP, -8)

    def close_frame(self, *saved: int) -> None:
        """Restore what `open_frame` saved."""
        if len(saved) % 2 == 0:
            self.add_number(SP, 8)
        self.pop(*saved)

    def load_field(self, register: int, offset: int, base: int = A0) -> None:
        """register = the 64 bits at `base` + offset."""
        self._memory(0x8B, register, base, offset)

    def add_field(self, register: int, offset: int, base: int = A0) -> None:
        """register += the 64 bits at `base` + offset."""
        self._memory(0x03, register, base, offset)

    def compare_field(self, register: int, offset: int) -> None:
        """Compare a register with the 64 bits at rdi + offset."""
        self._memory(0x3B, register, A0, offset)

    def move(self, register: int, other: int) -> None:
        """register = other."""
        self._bytes += bytes([0x48 | (other > 7) << 2 | (register > 7), 0x89, 0xC0 | (other & 7) << 3 | register & 7])

    def add(self, register: int, other: int) -> None:
        """register += other."""
        self._bytes += bytes([0x48 | (other > 7) << 2 | (register > 7), 0x01, 0xC0 | (other & 7) << 3 | register & 7])

    def subtract(self, register: int, other: int) -> None:
        """register -= other."""
        self._bytes += bytes([0x48 | (other > 7) << 2 | (register > 7), 0x29, 0xC0 | (other & 7) << 3 | register & 7])

    def negate(self, register: int) -> None:
        """register = -register."""
        self._bytes += bytes([0x48 | (register > 7), 0xF7, 0xD8 | register & 7])

    def multiply(self, register: int, other: int) -> None:
        """register *= other."""
        self._bytes += bytes(
            [0x48 | (register > 7) << 2 | (other > 7), 0x0F, 0xAF, 0xC0 | (register & 7) << 3 | other & 7]
        )

    def multiply_number(self, register: int, other: int, number: int) -> None:
        """register = other * number."""
        self._bytes += bytes(
            [0x48 | (register > 7) << 2 | (other > 7), 0x69, 0xC0 | (register & 7) << 3 | other & 7]
        ) + struct.pack("<i", number)

    def add_number(self, register: int, number: int) -> None:
        """register += number."""
        self._bytes += bytes([0x48 | (register > 7), 0x81, 0xC0 | register & 7]) + struct.pack("<i", number)

    def intersect(self, register: int, other: int) -> None:
        """register &= other."""
        self._bytes += bytes([0x48 | (other > 7) << 2 | (register > 7), 0x21, 0xC0 | (other & 7) << 3 | register & 7])

    def append_carry(self, register: int) -> None:
        """register = 2 * register + the carry flag."""
        self._bytes += bytes([0x48 | (register > 7) * 5, 0x11, 0xC0 | (register & 7) * 9])

    def and_number(self, register: int, number: int) -> None:
        """register &= number, which is sign-extended."""
        self._bytes += bytes([0x48 | (register > 7), 0x81, 0xE0 | register & 7]) + struct.pack("<i", number)

    def compare_number(self, register: int, number: int) -> None:
        """Compare a register with a number."""
        self._bytes += bytes([0x48 | (register > 7), 0x81, 0xF8 | register & 7]) + struct.pack("<i", number)

    def set_number(self, register: int, number: int) -> None:
        """register = number, of 32 bits with a sign."""
        self._bytes += bytes([0x48 | (register > 7), 0xC7, 0xC0 | register & 7]) + struct.pack("<i", number)

    def shift_left(self, register: int, bits: int) -> None:
        """register <<= bits."""
        self._bytes += bytes([0x48 | (register > 7), 0xC1, 0xE0 | register & 7, bits])

    def shift_right(self, register: int, bits: int) -> None:
        """register >>= bits, arithmetically."""
        self._bytes += bytes([0x48 | (register > 7), 0xC1, 0xF8 | register & 7, bits])

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
        """Copy 4 or 8 bytes from rsi to rdi, which then point behind them, through rax."""
        self._bytes += {4: b"\x8b\x06\x89\x07", 8: b"\x48\x8b\x06\x48\x89\x07"}[size]  # mov; movsd takes longer
        for register in (A1, A0):
            self.add_number(register, size)

    def copy_line(self, offset: int) -> None:
        """Copy the 16 bytes at rsi + offset to rdi + offset through vector 0. Needs no AVX."""
        place = struct.pack("<i", offset)
        self._bytes += b"\x0f\x10\x86" + place + b"\x0f\x11\x87" + place  # movups

    def load_float_status(self, register: int) -> None:
        """register = the float status of the thread: 1 where an operation was invalid, and other bits."""
        self._bytes += bytes.fromhex("0fae5c24f8")  # stmxcsr [rsp - 8]
        self.load_short_number(register, SP, None, offset=-8)

    def set_float_status(self, register: int) -> None:
        """The float status = register, which `load_float_status` gave but for the bit 1."""
        self.store_number(register, SP, -8)
        self._bytes += bytes.fromhex("0fae5424f8")  # ldmxcsr [rsp - 8]

    def clear(self, register: int) -> None:
        """register = 0."""
        self._bytes += bytes([0x48 | (register > 7) * 5, 0x31, 0xC0 | (register & 7) * 9])

    def save(self, register: int) -> None:
        """Keep a register where `count_down` finds it, until something is called: in the red zone below the stack."""
        self._bytes += bytes([0x48 | (register > 7) << 2, 0x89, 0x44 | (register & 7) << 3, 0x24, 0xF8])

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
        self._bytes += bytes([0x48 | (register > 7) << 2 | (base > 7), 0x0F])
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
            [0x48 | (register > 7) << 2 | (other > 7), 0x0F, 0xBC, 0xC0 | (register & 7) << 3 | other & 7]
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
        if register != RESULT:
            self.move(register, RESULT)

    def yield_core(self) -> None:
        """Let another thread have the core: by Linux's sched_yield, else `pause`. Changes rax, rcx and r11."""
        if sys.platform != "linux":
            self.pause()
            return
        self._bytes += bytes.fromhex("b818000000 0f05")  # mov eax, 24; syscall

    def compare(self, register: int, other: int) -> None:
        """Compare a register with another."""
        self._bytes += bytes([0x48 | (other > 7) << 2 | (register > 7), 0x39, 0xC0 | (other & 7) << 3 | register & 7])

    def fetch(self, register: int, offset: int) -> None:
        """Prefetch memory at register + offset to the second-level cache; any address will do."""
        self._bytes += bytes([0x40 | (register > 7), 0x0F, 0x18, 0x40 | 2 << 3 | register & 7, offset])

    def _memory(self, opcode: int, register: int, base: int, offset: int) -> None:
        """An instruction of 64 bits with memory at base + offset; `register` may be a part of the opcode."""
        self._bytes += bytes([0x48 | (register > 7) << 2 | (base > 7), opcode, 0x80 | (register & 7) << 3 | base & 7])
        if base & 7 == SP:
            self._bytes.append(0x24)
        self._bytes += struct.pack("<i", offset)

    def _bit(self, opcode: int, register: int, number: int) -> None:
        self._bytes += bytes(
            [0x48 | (number > 7) << 2 | (register > 7), 0x0F, opcode, 0xC0 | (number & 7) << 3 | register & 7]
        )

    def _jump(self, opcode: int, place: int) -> None:
        self._bytes += bytes([0x0F, opcode]) + struct.pack("<i", place - (len(self._bytes) + 6))

    def _general(self, opcode: int, register: int, base: int, index: int | None, scale: int, offset: int) -> None:
        """An instruction of a general register and memory."""
        high = (register > 7) << 2 | (index is not None and index > 7) << 1 | (base > 7)
        place = (NO_INDEX if index is None else index & 7) << 3 | base & 7
        self._bytes += bytes([0x48 | high, opcode, 0x80 | (register & 7) << 3 | SIB])
        self._bytes += bytes([(scale.bit_length() - 1) << 6 | place]) + struct.pack("<i", offset)
