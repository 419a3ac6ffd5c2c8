"""Instructions on general registers, and jumps, for 64-bit Arm and its standard calling convention.

Arm, "Arm Architecture Reference Manual for A-profile architecture" (DDI 0487); "Procedure Call Standard for the Arm
64-bit Architecture". What each method does, `x86_64.py` says.

A function is called by code around it, which moves its result where the convention wants it: within it RESULT and A0
are different registers, as its callers expect. Functions within the code are called by jumps that save the address to
return to on the stack. Where `is_ordered`, memory is read and written in the order of x86-64: what is read before what
comes later, what is written after all before; threads that share a lock alone need no more than that and `exchange`.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable

from dagexec.platform.assembly.instructions import (
    A0,
    A1,
    A2,
    A3,
    A4,
    A5,
    BELOW,
    GREATER,
    LESS,
    NOT_BELOW,
    NOT_GREATER,
    NOT_LESS,
    NOT_ZERO,
    RESULT,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    SP,
    T0,
    T1,
    ZERO,
)

_REGISTERS = {
    A0: 0,
    A1: 1,
    A2: 2,
    A3: 3,
    A4: 4,
    A5: 5,
    RESULT: 8,
    T0: 9,
    T1: 10,
    S0: 19,
    S1: 20,
    S2: 21,
    S3: 22,
    S4: 23,
    S5: 24,
    SP: 31,
}
"""Those of Arm: the first arguments are x0 to x5, and x19 to x24 are kept for the caller."""

_CONDITIONS = {ZERO: 0, NOT_ZERO: 1, NOT_BELOW: 2, BELOW: 3, NOT_LESS: 10, LESS: 11, GREATER: 12, NOT_GREATER: 13}

FIRST, SECOND = 16, 17
"""Registers that no function keeps, for what one instruction of x86-64 does and Arm does by several."""

_THIRD, _FOURTH, _COUNTER = 11, 12, 15
_LINK, _ZERO, _STACK = 30, 31, 31

_CALL = " by a call"
"""Behind the name of a mark: code that saves the address to return to and jumps there."""

_DATA_BARRIER, _READ_BARRIER = 0xD5033BBF, 0xD50339BF  # dmb ish, dmb ishld
_SCHED_YIELD = 124


class GeneralAssembler:
    """Appends instructions; `code` gives the bytes.

    Attributes:
        is_ordered: memory is read and written in the order of x86-64.
    """

    is_ordered = False

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._marks: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []
        self._called: dict[str, None] = {}
        self._words(0xD503245F, 0xA9BF7BFD)  # bti c; stp x29, x30, [sp, #-16]!
        self._words(0x94000004)  # bl, behind the return
        self._words(0xAA0803E0, 0xA8C17BFD, 0xD65F03C0)  # mov x0, x8; ldp x29, x30, [sp], #16; ret
        self._words(0xF81F0FFE)  # str x30, [sp, #-16]!

    def code(self) -> bytes:
        """The machine code."""
        for name in self._called:
            self.mark(name + _CALL)
            self._words(0xF81F0FFE)  # str x30, [sp, #-16]!
            self.jump(name)
        self._called.clear()
        for place, name in self._jumps:
            self._aim(place, self._marks[name])
        self._jumps.clear()
        return bytes(self._bytes)

    def here(self) -> int:
        return len(self._bytes)

    def push(self, *registers: int) -> None:
        for register in registers:
            self._words(0xF81F0FE0 | _REGISTERS[register])  # str x, [sp, #-16]!

    def pop(self, *pushed: int) -> None:
        for register in reversed(pushed):
            self._words(0xF84107E0 | _REGISTERS[register])  # ldr x, [sp], #16

    def open_frame(self, *registers: int) -> None:
        self.push(*registers)

    def close_frame(self, *saved: int) -> None:
        self.pop(*saved)

    def load_field(self, register: int, offset: int, base: int = A0) -> None:
        self._load(_REGISTERS[register], base, None, 1, offset)

    def add_field(self, register: int, offset: int, base: int = A0) -> None:
        self.add_memory(register, base, offset)

    def compare_field(self, register: int, offset: int) -> None:
        self.compare_with_memory(register, A0, offset)

    def move(self, register: int, other: int) -> None:
        self._words(0xAA0003E0 | _REGISTERS[other] << 16 | _REGISTERS[register])  # mov

    def add(self, register: int, other: int) -> None:
        self._three(0xAB000000, register, register, other)  # adds

    def subtract(self, register: int, other: int) -> None:
        self._three(0xEB000000, register, register, other)  # subs

    def negate(self, register: int) -> None:
        self._words(0xEB0003E0 | _REGISTERS[register] << 16 | _REGISTERS[register])  # negs

    def multiply(self, register: int, other: int) -> None:
        self._three(0x9B007C00, register, register, other)  # mul

    def multiply_number(self, register: int, other: int, number: int) -> None:
        self._number(FIRST, number)
        self._words(0x9B007C00 | FIRST << 16 | _REGISTERS[other] << 5 | _REGISTERS[register])  # mul

    def add_number(self, register: int, number: int) -> None:
        self._add(_REGISTERS[register], _REGISTERS[register], number, sets_flags=True)

    def intersect(self, register: int, other: int) -> None:
        self._three(0xEA000000, register, register, other)  # ands

    def append_carry(self, register: int) -> None:
        to = _REGISTERS[register]
        self._words(0x9A9FA7E0 | FIRST)  # cset x16, lt: after a comparison less, or not ordered
        self._words(0x8B000400 | to << 16 | FIRST << 5 | to)  # add to, x16, to, lsl #1

    def and_number(self, register: int, number: int) -> None:
        self._number(FIRST, number)
        self._words(0xEA000000 | FIRST << 16 | _REGISTERS[register] << 5 | _REGISTERS[register])  # ands

    def compare_number(self, register: int, number: int) -> None:
        self._compare(_REGISTERS[register], number)

    def set_number(self, register: int, number: int) -> None:
        self._number(_REGISTERS[register], number)

    def shift_left(self, register: int, bits: int) -> None:
        to = _REGISTERS[register]
        self._words(0xD3400000 | (-bits & 63) << 16 | (63 - bits) << 10 | to << 5 | to)  # lsl

    def shift_right(self, register: int, bits: int) -> None:
        to = _REGISTERS[register]
        self._words(0x9340FC00 | bits << 16 | to << 5 | to)  # asr

    def load_number(self, register: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        self._load(_REGISTERS[register], base, index, scale, offset)

    def load_short_number(self, register: int, base: int, index: int | None, scale: int = 1, offset: int = 0) -> None:
        at, near = self._place(base, index, scale, offset, 4)
        self._memory(0xB9800000, 0xB8800000, _REGISTERS[register], at, near, 4)  # ldrsw
        self._after_reading()

    def store_number(self, register: int, base: int, offset: int = 0, index: int | None = None, scale: int = 1) -> None:
        at, near = self._place(base, index, scale, offset, 8)
        self._before_writing()
        self._memory(0xF9000000, 0xF8000000, _REGISTERS[register], at, near, 8)  # str

    def store_short_number(self, register: int, base: int) -> None:
        self._before_writing()
        self._words(0xB9000000 | _REGISTERS[base] << 5 | _REGISTERS[register])  # str w

    def copy_bytes(self) -> None:
        source, target, left = (_REGISTERS[one] for one in (A1, A0, A3))
        self._words(0xF1004000 | left << 5 | left)  # subs left, left, #16
        few = self.jump_ahead(LESS)
        many = self.here()
        self._words(0x3CC10400 | source << 5 | 31, 0x3C810400 | target << 5 | 31)  # ldr q31, [x], #16; str
        self._words(0xF1004000 | left << 5 | left)
        self.jump_if(NOT_LESS, many)
        self.land(few)
        self._words(0xB1004000 | left << 5 | left)  # adds left, left, #16
        none = self.jump_ahead(ZERO)
        each = self.here()
        self._words(0x38401400 | source << 5 | FIRST, 0x38001400 | target << 5 | FIRST)  # ldrb w16, [x], #1; strb
        self._words(0xF1000400 | left << 5 | left)
        self.jump_if(NOT_ZERO, each)
        self.land(none)

    def copy_number(self, size: int) -> None:
        load, store = {4: (0xB8404400, 0xB8004400), 8: (0xF8408400, 0xF8008400)}[size]  # ldr, str with [x], #size
        self._words(load | _REGISTERS[A1] << 5 | FIRST, store | _REGISTERS[A0] << 5 | FIRST)

    def copy_line(self, offset: int) -> None:
        """As for x86-64; the offset is a multiple of 16 below 64 KiB."""
        place = offset // 16 << 10
        self._words(0x3DC00000 | place | _REGISTERS[A1] << 5, 0x3D800000 | place | _REGISTERS[A0] << 5)  # ldr, str q0

    def load_float_status(self, register: int) -> None:
        self._words(0xD53B4420 | _REGISTERS[register])  # mrs, fpsr

    def set_float_status(self, register: int) -> None:
        self._words(0xD51B4420 | _REGISTERS[register])  # msr fpsr

    def clear(self, register: int) -> None:
        self._number(_REGISTERS[register], 0)

    def save(self, register: int) -> None:
        self._words(0xAA0003E0 | _REGISTERS[register] << 16 | _COUNTER)  # mov

    def count_down(self) -> None:
        self._words(0xF1000400 | _COUNTER << 5 | _COUNTER)  # subs x15, x15, #1

    def jump_if_below(self, place: int) -> None:
        self.jump_if(BELOW, place)

    def jump_if_not_zero(self, place: int) -> None:
        self.jump_if(NOT_ZERO, place)

    def jump_if(self, condition: int, place: int) -> None:
        self._words(0x54000000 | _CONDITIONS[condition])  # b.
        self._aim(len(self._bytes) - 4, place)

    def jump_ahead(self, condition: int) -> int:
        self._words(0x54000000 | _CONDITIONS[condition])
        return len(self._bytes) - 4

    def land(self, jump: int) -> None:
        self._aim(jump, len(self._bytes))

    def mark(self, name: str) -> None:
        self._marks[name] = len(self._bytes)

    def jump(self, name: str, condition: int | None = None) -> None:
        self._jumps.append((len(self._bytes), name))
        self._words(0x14000000 if condition is None else 0x54000000 | _CONDITIONS[condition])

    def call_place(self, name: str) -> None:
        self._called[name] = None
        self._jumps.append((len(self._bytes), name + _CALL))
        self._words(0x94000000)  # bl

    def call_field(self, base: int, offset: int) -> None:
        self._load(FIRST, base, None, 1, offset)
        self._words(0xD63F0000 | FIRST << 5, 0xAA0003E0 | _REGISTERS[RESULT])  # blr x16; mov x8, x0

    def end_call(self) -> None:
        self._words(0xF84107FE, 0xD65F03C0)  # ldr x30, [sp], #16; ret

    def exchange(self, register: int, base: int, offset: int) -> None:
        self._atomic(register, base, offset, lambda: _REGISTERS[register])

    def fetch_and_add(self, register: int, base: int, offset: int) -> None:
        def total() -> int:
            self._words(0x8B000000 | _REGISTERS[register] << 16 | SECOND << 5 | _FOURTH)  # add x12, x17, x
            return _FOURTH

        self._atomic(register, base, offset, total)

    def add_to_memory(self, base: int, offset: int, number: int) -> None:
        at, near = self._place(base, None, 1, offset, 8)
        self._memory(0xF9400000, 0xF8400000, SECOND, at, near, 8)  # ldr x17
        self._after_reading()
        if not -4096 < number < 4096:
            raise ValueError(f"{number} is no number that is added to memory")
        self._add(SECOND, SECOND, number, sets_flags=True)
        self._before_writing()
        self._memory(0xF9000000, 0xF8000000, SECOND, at, near, 8)

    def compare_memory(self, base: int, offset: int, number: int) -> None:
        self._load(SECOND, base, None, 1, offset)
        self._compare(SECOND, number)

    def compare_with_memory(self, register: int, base: int, offset: int) -> None:
        self._load(SECOND, base, None, 1, offset)
        self._words(0xEB00001F | SECOND << 16 | _REGISTERS[register] << 5)  # cmp

    def add_memory(self, register: int, base: int, offset: int) -> None:
        self._load(SECOND, base, None, 1, offset)
        self._words(0xAB000000 | SECOND << 16 | _REGISTERS[register] << 5 | _REGISTERS[register])  # adds

    def first_bit(self, register: int, other: int) -> None:
        to = _REGISTERS[register]
        self._words(0xDAC00000 | _REGISTERS[other] << 5 | to, 0xDAC01000 | to << 5 | to)  # rbit; clz

    def set_bit(self, register: int, number: int) -> None:
        self._bit(0xAA000000, register, number)  # orr

    def clear_bit(self, register: int, number: int) -> None:
        self._bit(0x8A200000, register, number)  # bic

    def pause(self) -> None:
        self._words(0xD503203F)  # yield

    def read_clock(self, register: int) -> None:
        self._words(0xD53BE040 | _REGISTERS[register])  # mrs, cntvct_el0

    def yield_core(self) -> None:
        if sys.platform != "linux":
            self.pause()
            return
        kept = (A0, RESULT)
        self.push(*kept)
        self._number(8, _SCHED_YIELD)
        self._words(0xD4000001)  # svc #0
        self.pop(*kept)

    def compare(self, register: int, other: int) -> None:
        self._words(0xEB00001F | _REGISTERS[other] << 16 | _REGISTERS[register] << 5)  # cmp

    def fetch(self, register: int, offset: int) -> None:
        self._words(0xF9800002 | offset // 8 << 10 | _REGISTERS[register] << 5)  # prfm pldl2keep

    # What several instructions are made of

    def _words(self, *words: int) -> None:
        self._bytes += struct.pack(f"<{len(words)}I", *words)

    def _aim(self, place: int, target: int) -> None:
        """Let the jump at a place go to another."""
        (word,) = struct.unpack_from("<I", self._bytes, place)
        distance = (target - place) // 4
        is_far = word & 0x7C000000 == 0x14000000  # b, bl; tbz has 14 bits, others 19
        bits, shift = (26, 0) if is_far else (14, 5) if word & 0x7E000000 == 0x36000000 else (19, 5)
        if not -(1 << bits - 1) <= distance < 1 << bits - 1:
            raise ValueError(f"a jump of {target - place:,} bytes is too far")
        field = (1 << bits) - 1
        struct.pack_into("<I", self._bytes, place, word & ~(field << shift) | (distance & field) << shift)

    def _three(self, word: int, target: int, left: int, right: int) -> None:
        self._words(word | _REGISTERS[right] << 16 | _REGISTERS[left] << 5 | _REGISTERS[target])

    def _number(self, to: int, number: int) -> None:
        """to = number, by 16 bits each."""
        rest = number if number >= 0 else ~number
        parts = [rest >> shift & 0xFFFF for shift in range(0, 64, 16)]
        first = next((place for place, part in enumerate(parts) if part), 0)
        self._words((0xD2800000 if number >= 0 else 0x92800000) | first << 21 | parts[first] << 5 | to)  # movz, movn
        for place in range(first + 1, 4):
            if parts[place]:
                part = parts[place] if number >= 0 else parts[place] ^ 0xFFFF
                self._words(0xF2800000 | place << 21 | part << 5 | to)  # movk

    def _compare(self, register: int, number: int) -> None:
        if 0 <= number < 1 << 12:
            self._words(0xF100001F | number << 10 | register << 5)  # cmp
        elif -(1 << 12) < number < 0:
            self._words(0xB100001F | -number << 10 | register << 5)  # cmn
        else:
            self._number(FIRST, number)
            self._words(0xEB00001F | FIRST << 16 | register << 5)

    def _add(self, to: int, source: int, number: int, *, sets_flags: bool = False) -> None:
        """to = source + number; either may be the stack, without flags."""
        size, what = abs(number), (0xD1000000 if number < 0 else 0x91000000) | sets_flags << 29  # sub, add
        if size < 1 << 12:
            self._words(what | size << 10 | source << 5 | to)
        elif size < 1 << 24 and not size & 0xFFF:
            self._words(what | 1 << 22 | size >> 12 << 10 | source << 5 | to)
        else:
            self._number(FIRST, number)
            word = 0xAB000000 if sets_flags else 0x8B206000  # adds; add of an extended register, which the stack may be
            self._words(word | FIRST << 16 | source << 5 | to)

    def _place(self, base: int, index: int | None, scale: int, offset: int, unit: int) -> tuple[int, int]:
        """A register and an offset that an instruction on `unit` bytes can reach."""
        at = self._indexed(base, index, scale)
        if -256 <= offset < 256 or (offset >= 0 and offset % unit == 0 and offset < unit << 12):
            return at, offset
        return self._moved(at, offset), 0

    def _indexed(self, base: int, index: int | None, scale: int) -> int:
        """A register with base + scale * index."""
        if index is None:
            return _REGISTERS[base]
        shift = scale.bit_length() - 1
        self._words(0x8B000000 | _REGISTERS[index] << 16 | shift << 10 | _REGISTERS[base] << 5 | FIRST)  # add x16, lsl
        return FIRST

    def _moved(self, at: int, offset: int) -> int:
        """A register with `at` + offset."""
        if at != FIRST or abs(offset) < 1 << 12:
            self._add(FIRST, at, offset)
        else:
            self._number(_FOURTH, offset)
            self._words(0x8B000000 | _FOURTH << 16 | FIRST << 5 | FIRST)  # add x16, x16, x12
        return FIRST

    def _memory(self, whole: int, near: int, register: int, at: int, offset: int, unit: int) -> None:
        """An instruction with an offset in units of what it reads or writes, or in bytes, from -256 to 255."""
        if offset >= 0 and offset % unit == 0:
            self._words(whole | offset // unit << 10 | at << 5 | register)
        else:
            self._words(near | (offset & 0x1FF) << 12 | at << 5 | register)

    def _load(self, to: int, base: int, index: int | None, scale: int, offset: int) -> None:
        at, near = self._place(base, index, scale, offset, 8)
        self._memory(0xF9400000, 0xF8400000, to, at, near, 8)  # ldr
        self._after_reading()

    def _after_reading(self) -> None:
        if self.is_ordered:
            self._words(_READ_BARRIER)

    def _before_writing(self) -> None:
        if self.is_ordered:
            self._words(_DATA_BARRIER)

    def _atomic(self, register: int, base: int, offset: int, new: Callable[[], int]) -> None:
        """register = memory, which becomes the register that `new` gives; x17 has what it was."""
        self._add(FIRST, _REGISTERS[base], offset)
        again = self.here()
        self._words(0xC85FFC00 | FIRST << 5 | SECOND)  # ldaxr x17, [x16]
        value = new()
        self._words(0xC800FC00 | _THIRD << 16 | FIRST << 5 | value)  # stlxr w11, value, [x16]
        self._words(0x35000000 | _THIRD)  # cbnz w11
        self._aim(len(self._bytes) - 4, again)
        self._words(_DATA_BARRIER, 0xAA0003E0 | SECOND << 16 | _REGISTERS[register])

    def _bit(self, what: int, register: int, number: int) -> None:
        to = _REGISTERS[register]
        self._number(FIRST, 1)
        self._words(0x9AC02000 | _REGISTERS[number] << 16 | FIRST << 5 | FIRST)  # lsl x16, x16, number
        self._words(what | FIRST << 16 | to << 5 | to)
