"""Expressions of a kernel that is being written: values that are computed from others.

Each method appends an instruction to the program and gives the value that this makes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from dagexec.ops.kernels.registers import GENERAL, MASK, VECTOR, Program, Value
from dagexec.ops.kernels.registers import Instruction as Written
from dagexec.ops.kernels.values import Mask, Scalar, Vector
from dagexec.platform.assembly.instructions import (
    ADD_INTEGERS,
    AND,
    EQUAL_TO,
    FMA,
    FROM_INTEGER,
    HORNER,
    IS_NAN,
    LESS_THAN,
    MAX,
    MIN,
    MULTIPLY_ADD,
    OR,
    SCALE_BY_POWER,
    SQRT,
    SUBTRACT_FROM,
    SUBTRACT_INTEGERS,
    SUBTRACT_PRODUCT,
    SUBTRACT_SCALED,
    TO_INTEGER,
    Instruction,
)
from dagexec.platform.assembly.native import Assembler

NEAREST, DOWN, UP, TO_ZERO = 8, 9, 10, 11
"""How `round` does it; no exception is raised for what is not exact."""


class Expressions:
    """The instructions of a kernel so far, and what computes values.

    Attributes:
        lanes: float32 numbers in a vector: 8 for AVX2 with FMA, 16 for AVX-512.
        program: its instructions.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.program = Program()

    # Vectors

    def constant(self, value: float) -> Vector:
        """`value`, in float32, as every element."""
        if value == 0 and str(value)[0] != "-":
            return self.new_vector(lambda code, to: code.clear_vector(to))
        return self.new_vector(lambda code, to: code.load_constant(to, value))

    def integer(self, value: int) -> Vector:
        """An integer of 32 bits as every element."""
        (same,) = struct.unpack("<f", struct.pack("<i", value))
        return self.constant(same)

    def repeated(self, number: Scalar) -> Vector:
        """The low 32 bits of a number as every element, an integer."""
        return self.new_vector(lambda code, to, register: code.repeat_number(to, register), number)

    def compute(self, what: Instruction, left: Vector, right: Vector | float, number: int | None = None) -> Vector:
        """An instruction of two operands, and a number that some need."""
        if isinstance(right, Vector):
            return self.new_vector(lambda code, to, one, other: code.compute(what, to, one, other, number), left, right)
        return self.new_vector(lambda code, to, one: code.compute_constant(what, to, one, float(right)), left)

    def maximum(self, left: Vector | float, right: Vector) -> Vector:
        """The greater; `right` where one of them is NaN."""
        return self.compute(MAX, self._held(left), right)

    def minimum(self, left: Vector | float, right: Vector) -> Vector:
        """The smaller; `right` where one of them is NaN."""
        return self.compute(MIN, self._held(left), right)

    def fma(self, left: Vector, right: Vector | float, addend: Vector | float) -> Vector:
        """left * right + addend, rounded once."""
        return self._fused(left, right, addend, (FMA, HORNER, MULTIPLY_ADD))

    def fnma(self, left: Vector, right: Vector | float, addend: Vector) -> Vector:
        """addend - left * right, rounded once."""
        return self._fused(left, right, addend, (SUBTRACT_PRODUCT, SUBTRACT_FROM, SUBTRACT_SCALED))

    def square_root(self, value: Vector) -> Vector:
        """Its square root; NaN of what is negative."""
        return self.new_vector(lambda code, to, one: code.compute(SQRT, to, 0, one), value)

    def round(self, value: Vector, how: int = NEAREST) -> Vector:
        """A whole number, as float32: the NEAREST (of two the even one), DOWN, UP or TO_ZERO."""
        return self.new_vector(lambda code, to, one: code.round(to, one, how), value)

    def absolute(self, value: Vector) -> Vector:
        """Without its sign."""
        return self.compute(AND, value, self.integer(0x7FFFFFFF))

    def sign_of(self, value: Vector) -> Vector:
        """The sign bit alone, to be joined to what is not negative by `either`."""
        return self.compute(AND, value, self.integer(-0x80000000))

    def either(self, left: Vector, right: Vector) -> Vector:
        """The bits that are set in one of them."""
        return self.compute(OR, left, right)

    def to_integer(self, value: Vector) -> Vector:
        """The nearest integers."""
        return self.new_vector(lambda code, to, one: code.compute(TO_INTEGER, to, 0, one), value)

    def from_integer(self, value: Vector) -> Vector:
        """Integers as float32."""
        return self.new_vector(lambda code, to, one: code.compute(FROM_INTEGER, to, 0, one), value)

    def add_integers(self, left: Vector, right: Vector) -> Vector:
        """Sums of integers."""
        return self.compute(ADD_INTEGERS, left, right)

    def subtract_integers(self, left: Vector, right: Vector) -> Vector:
        """Differences of integers."""
        return self.compute(SUBTRACT_INTEGERS, left, right)

    def shift(self, value: Vector, bits: int) -> Vector:
        """Integers times 2^bits; for negative `bits` without their last ones, rounded down."""
        return self.new_vector(lambda code, to, one: code.shift_integers(to, one, bits), value)

    def scaled(self, value: Vector, power: Vector) -> Vector:
        """value * 2^power, of whole `power`, by AVX-512 alone."""
        return self.compute(SCALE_BY_POWER, value, power)

    def rotate(self, value: Vector, distance: int) -> Vector:
        """Elements exchanged with those `distance` away, a power of 2 below `lanes`."""
        return self.new_vector(lambda code, to, one: code.rotate(to, one, distance), value)

    def over_lanes(self, value: Vector, join: Callable[[Vector, Vector], Vector]) -> Vector:
        """All elements joined pair by pair, such as their sum; the result is every element."""
        distance = self.lanes // 2
        while distance:
            value = join(value, self.rotate(value, distance))
            distance //= 2
        return value

    # Masks

    def first(self, count: Scalar) -> Mask:
        """The first `count` elements; all where there are fewer."""
        counts = self.repeated(count)
        return self._new_mask(lambda code, to, one: code.first_elements(to, one), counts)

    def less(self, left: Vector | float, right: Vector | float) -> Mask:
        """Where left < right, and neither is NaN."""
        return self._compared(LESS_THAN, left, right)

    def equal(self, left: Vector | float, right: Vector | float) -> Mask:
        """Where they are equal, and neither is NaN."""
        return self._compared(EQUAL_TO, left, right)

    def is_nan(self, value: Vector) -> Mask:
        """Where there is no number."""
        return self._compared(IS_NAN, value, value)

    def select(self, mask: Mask, chosen: Vector | float, other: Vector | float) -> Vector:
        """`chosen` where the mask selects, else `other`."""
        return self.new_vector(
            lambda code, to, mask, one, two: code.select(to, mask, one, two),
            mask,
            self._held(chosen),
            self._held(other),
        )

    # Numbers

    def number_of(self, value: int) -> Scalar:
        """A number of 32 bits with a sign."""
        return self.new_scalar(lambda code, to: code.set_number(to, value))

    def zero(self) -> Scalar:
        """The number 0, to be changed."""
        return self.new_scalar(lambda code, to: code.clear(to))

    def copied(self, value: Scalar) -> Scalar:
        """Another value of the same number, to be changed."""
        return self.changed(value, lambda code, to: None)

    def changed(self, value: Scalar, change: Callable[[Assembler, int], None]) -> Scalar:
        """A copy, changed by an instruction."""

        def emit(code: Assembler, to: int, source: int) -> None:
            if to != source:
                code.move(to, source)
            change(code, to)

        return self.new_scalar(emit, value)

    def joined(self, left: Scalar, right: Scalar, join: Callable[[Assembler, int, int], None]) -> Scalar:
        """The result of an instruction that changes its first operand, of which the order does not count."""

        def emit(code: Assembler, to: int, one: int, other: int) -> None:
            if to not in (one, other):
                code.move(to, one)
            join(code, to, one if to == other else other)

        return self.new_scalar(emit, left, right)

    def append_less(
        self, number: Scalar, left: Vector, base: Scalar, index: Scalar, *, is_double: bool = False
    ) -> None:
        """number = 2 * number, plus 1 where the first element of left < x or one is NaN, of the element x at an index.

        Its elements are float32, or float64 with `is_double`.
        """

        def emit(code: Assembler, to: int, *at: int) -> None:
            vector, base, index, _ = at
            code.compare_first(vector, base, index, 8 if is_double else 4, is_double=is_double)
            code.append_carry(to)

        self.program.instructions.append(Written(emit, number, (left, base, index, number)))

    def difference(self, left: Scalar, right: Scalar) -> Scalar:
        """left - right."""

        def emit(code: Assembler, to: int, one: int, other: int) -> None:
            if to == other:
                code.negate(to)
                code.add(to, one)
                return
            if to != one:
                code.move(to, one)
            code.subtract(to, other)

        return self.new_scalar(emit, left, right)

    def assign(self, target: Value, source: Value, move: Callable[[Assembler, int, int], None]) -> None:
        """`target` is `source` from here on."""
        self.program.instructions.append(Written(move, target, (source,), is_move=True))

    # What appends instructions

    def append(self, emit: Callable[..., None], *read: Value) -> None:
        """An instruction that makes no value."""
        self.program.instructions.append(Written(emit, None, read))

    def _made(self, value: _Made, emit: Callable[..., None], read: tuple[Value, ...]) -> _Made:
        self.program.instructions.append(Written(emit, value, read))
        return value

    def new_vector(self, emit: Callable[..., None], *read: Value) -> Vector:
        """What an instruction makes."""
        return self._made(Vector(self, VECTOR), emit, read)

    def new_scalar(self, emit: Callable[..., None], *read: Value) -> Scalar:
        """What an instruction makes."""
        return self._made(Scalar(self, GENERAL), emit, read)

    def _new_mask(self, emit: Callable[..., None], *read: Value) -> Mask:
        return self._made(Mask(self, MASK if self.lanes == 16 else VECTOR), emit, read)

    def _held(self, value: Vector | float) -> Vector:
        return value if isinstance(value, Vector) else self.constant(float(value))

    def _compared(self, relation: int, left: Vector | float, right: Vector | float) -> Mask:
        return self._new_mask(
            lambda code, to, one, other: code.compare_vectors(to, one, other, relation),
            self._held(left),
            self._held(right),
        )

    def _fused(
        self, left: Vector, right: Vector | float, addend: Vector | float, forms: tuple[Instruction, ...]
    ) -> Vector:
        """A product and a sum, by the form that changes the addend, the one that changes a factor, or that with a
        constant factor."""
        to_addend, to_factor, by_constant = forms
        if not isinstance(addend, Vector):
            return self._with_constant(left, self._held(right), float(addend), to_factor)
        if not isinstance(right, Vector):
            return self._by_constant(left, float(right), addend, to_addend, by_constant)

        def emit(code: Assembler, to: int, one: int, other: int, sum_: int) -> None:
            if to in (one, other) and to != sum_:
                code.compute(to_factor, to, other if to == one else one, sum_)
                return
            if to != sum_:
                code.move_vector(to, sum_)
            code.compute(to_addend, to, one, other)

        return self._made(Vector(self, VECTOR), emit, (left, right, addend))

    def _with_constant(self, left: Vector, right: Vector, addend: float, form: Instruction) -> Vector:
        def emit(code: Assembler, to: int, one: int, other: int) -> None:
            if to not in (one, other):
                code.move_vector(to, one)
            code.compute_constant(form, to, one if to == other else other, addend)

        return self.new_vector(emit, left, right)

    def _by_constant(
        self, left: Vector, right: float, addend: Vector, to_addend: Instruction, by_constant: Instruction
    ) -> Vector:
        def emit(code: Assembler, to: int, one: int, sum_: int) -> None:
            if to == one and to != sum_:
                code.compute_constant(by_constant, to, sum_, right)
                return
            if to != sum_:
                code.move_vector(to, sum_)
            code.compute_constant(to_addend, to, one, right)

        return self.new_vector(emit, left, addend)


_Made = TypeVar("_Made", bound=Value)
