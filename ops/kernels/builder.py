"""Kernels as expressions: values in place of registers, loops, and masks for what does not fill a vector.

    build = Builder(lanes)
    x, y, count = build.arguments(3)  # two addresses, and how many float32 numbers there are

    def body(place: Scalar, mask: Mask | None) -> None:
        build.store(build.load(x, place, mask=mask) * 2.0 + 1.0, y, place, mask=mask)

    build.each(count, body)
    address = build.function()  # None where code cannot be run

A value is a vector of float32 numbers (or of 32-bit integers), a number or address of 64 bits, or a mask; `registers`
gives each a register. A value is written once, except by `set`, which changes it: sums in a loop, and addresses that
move on. A float in the place of a vector is a constant.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TypeVar

from dagexec.ops.kernels.registers import (
    ARGUMENTS,
    GENERAL,
    MASK,
    VECTOR,
    OutOfRegistersError,
    Program,
    Value,
    joined_moves,
)
from dagexec.ops.kernels.registers import Instruction as Written
from dagexec.ops.kernels.values import Mask, Scalar, Vector
from dagexec.platform.assembler import (
    ADD_INTEGERS,
    AND,
    EQUAL_TO,
    FMA,
    FROM_INTEGER,
    GREATER,
    HORNER,
    IS_NAN,
    LESS,
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
    Assembler,
    Instruction,
)
from dagexec.platform.machine_code import executable

__all__ = [
    "BYTES",
    "DOWN",
    "NEAREST",
    "TO_ZERO",
    "UP",
    "Builder",
    "Mask",
    "Scalar",
    "Vector",
    "fitting",
    "write_within",
]

NEAREST, DOWN, UP, TO_ZERO = 8, 9, 10, 11
"""How `round` does it; no exception is raised for what is not exact."""

BYTES = 4  # of a float32 number


class Builder:
    """A kernel that is being written.

    Attributes:
        lanes: float32 numbers in a vector: 8 for AVX2 with FMA, 16 for AVX-512.
        program: its instructions.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.program = Program()
        self._code: bytes | None = None

    # The function

    def arguments(self, count: int) -> list[Scalar]:
        """The arguments of the function, at most four."""
        return [Scalar(self, GENERAL, register) for register in ARGUMENTS[:count]]

    def code(self) -> bytes:
        """The machine code, after which nothing is added. Raises OutOfRegistersError."""
        if self._code is None:
            code = Assembler(self.lanes)
            self.program.write(code)
            self._code = code.code()
        return self._code

    def fits(self) -> bool:
        """True when there are registers for all values."""
        try:
            self.code()
        except OutOfRegistersError:
            return False
        return True

    def function(self) -> int | None:
        """The address of the function, which returns 0; None where memory cannot be executed."""
        return executable(self.code())

    # Memory

    def number(self, base: Scalar, offset: int = 0) -> Scalar:
        """The 64 bits at base + offset."""
        return self._scalar(lambda code, to, base: code.load_number(to, base, None, 1, offset), base)

    def numbers(self, base: Scalar, count: int) -> list[Scalar]:
        """So many numbers of 64 bits that lie one after another."""
        return [self.number(base, 8 * place) for place in range(count)]

    def short_number(self, base: Scalar, index: Scalar | None = None, scale: int = 1, offset: int = 0) -> Scalar:
        """The 32 bits at base + scale * index + offset, an integer with a sign."""
        return self._scalar(
            lambda code, to, *at: code.load_short_number(to, *_place(at), scale, offset), base, *_given(index)
        )

    def load(
        self, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1, mask: Mask | None = None
    ) -> Vector:
        """The vector at base + scale * index + offset; zeros where `mask` does not select, of which nothing is read."""

        def emit(code: Assembler, to: int, *at: int) -> None:
            if mask is None:
                code.load(to, *_place(at), offset, scale)
            else:
                code.load_masked(to, at[0], *_place(at[1:]), scale, offset)

        return self._vector(emit, *_given(mask), base, *_given(index))

    def broadcast(self, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1) -> Vector:
        """The number at base + scale * index + offset as every element."""
        return self._vector(lambda code, to, *at: code.broadcast(to, *_place(at), scale, offset), base, *_given(index))

    def store(
        self,
        value: Vector,
        base: Scalar,
        index: Scalar | None = None,
        offset: int = 0,
        scale: int = 1,
        mask: Mask | None = None,
    ) -> None:
        """Write to base + scale * index + offset, with `mask` the elements that it selects."""

        def emit(code: Assembler, vector: int, *at: int) -> None:
            if mask is None:
                code.store(vector, *_place(at), offset, scale)
            else:
                code.store_masked(vector, at[0], *_place(at[1:]), scale, offset)

        self._do(emit, value, *_given(mask), base, *_given(index))

    def load_by(self, what: Instruction, base: Scalar) -> Vector:
        """The vector that an instruction makes of elements of another size at `base`."""
        return self._vector(lambda code, to, base: code.access(what, to, base), base)

    def store_by(
        self,
        what: Instruction,
        value: Vector,
        base: Scalar,
        *,
        number: int | None = None,
        mask: Mask | None = None,
        is_short: bool = False,
    ) -> None:
        """Write elements of another size to `base`, with AVX-512 those that `mask` selects."""

        def emit(code: Assembler, vector: int, base: int, *mask: int) -> None:
            code.access(what, vector, base, number=number, mask=mask[0] if mask else 0, is_short=is_short)

        self._do(emit, value, base, *_given(mask))

    def store_first(
        self, value: Vector, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1
    ) -> None:
        """Write the first element."""
        self._do(
            lambda code, vector, *at: code.store_first(vector, *_place(at), scale, offset), value, base, *_given(index)
        )

    def load_first(
        self, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1, *, is_double: bool = False
    ) -> Vector:
        """The number at base + scale * index + offset as the first element, which is float64 with `is_double`."""
        return self._vector(
            lambda code, to, *at: code.load_first(to, *_place(at), scale, offset, is_double=is_double),
            base,
            *_given(index),
        )

    def store_number(self, number: Scalar, base: Scalar, offset: int = 0) -> None:
        """Write 64 bits to base + offset."""
        self._do(lambda code, value, to: code.store_number(value, to, offset), number, base)

    # Vectors

    def constant(self, value: float) -> Vector:
        """`value`, in float32, as every element."""
        if value == 0 and str(value)[0] != "-":
            return self._vector(lambda code, to: code.clear_vector(to))
        return self._vector(lambda code, to: code.load_constant(to, value))

    def integer(self, value: int) -> Vector:
        """An integer of 32 bits as every element."""
        (same,) = struct.unpack("<f", struct.pack("<i", value))
        return self.constant(same)

    def repeated(self, number: Scalar) -> Vector:
        """The low 32 bits of a number as every element, an integer."""
        return self._vector(lambda code, to, register: code.repeat_number(to, register), number)

    def compute(self, what: Instruction, left: Vector, right: Vector | float, number: int | None = None) -> Vector:
        """An instruction of two operands, and a number that some need."""
        if isinstance(right, Vector):
            return self._vector(lambda code, to, one, other: code.compute(what, to, one, other, number), left, right)
        return self._vector(lambda code, to, one: code.compute_constant(what, to, one, float(right)), left)

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
        return self._vector(lambda code, to, one: code.compute(SQRT, to, 0, one), value)

    def round(self, value: Vector, how: int = NEAREST) -> Vector:
        """A whole number, as float32: the NEAREST (of two the even one), DOWN, UP or TO_ZERO."""
        return self._vector(lambda code, to, one: code.round(to, one, how), value)

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
        return self._vector(lambda code, to, one: code.compute(TO_INTEGER, to, 0, one), value)

    def from_integer(self, value: Vector) -> Vector:
        """Integers as float32."""
        return self._vector(lambda code, to, one: code.compute(FROM_INTEGER, to, 0, one), value)

    def add_integers(self, left: Vector, right: Vector) -> Vector:
        """Sums of integers."""
        return self.compute(ADD_INTEGERS, left, right)

    def subtract_integers(self, left: Vector, right: Vector) -> Vector:
        """Differences of integers."""
        return self.compute(SUBTRACT_INTEGERS, left, right)

    def shift(self, value: Vector, bits: int) -> Vector:
        """Integers times 2^bits; for negative `bits` without their last ones, rounded down."""
        return self._vector(lambda code, to, one: code.shift_integers(to, one, bits), value)

    def scaled(self, value: Vector, power: Vector) -> Vector:
        """value * 2^power, of whole `power`, by AVX-512 alone."""
        return self.compute(SCALE_BY_POWER, value, power)

    def rotate(self, value: Vector, distance: int) -> Vector:
        """Elements exchanged with those `distance` away, a power of 2 below `lanes`."""
        return self._vector(lambda code, to, one: code.rotate(to, one, distance), value)

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
        return self._mask(lambda code, to, one: code.first_elements(to, one), counts)

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
        return self._vector(
            lambda code, to, mask, one, two: code.select(to, mask, one, two),
            mask,
            self._held(chosen),
            self._held(other),
        )

    # Loops

    def each(self, count: Scalar, body: Callable[[Scalar, Mask | None], None], together: int = 1) -> None:
        """`body` for all of `count` float32 numbers: it gets their place in bytes, and a mask for less than a vector.

        It is called for whole vectors first, then for the rest; a value of one call cannot be used in another. The
        instructions for `together` vectors are mixed, so that long computations need not wait for themselves.
        """
        place = self.zero()
        for vectors in dict.fromkeys((together, 1)):
            width = vectors * self.lanes
            with self.range((count - (width - 1)) << 2, width * BYTES, place):
                places = [place, *(place + number * self.lanes * BYTES for number in range(1, vectors))]
                self._mixed([partial(body, one, None) for one in places])
        rest = count & (self.lanes - 1)
        with self.when(rest, GREATER, 0):
            body(place, self.first(rest))

    def _mixed(self, bodies: Sequence[Callable[[], None]]) -> None:
        """The instructions of all `bodies`, which have no loops if they are several, in turns."""
        program, loops = self.program, len(self.program.loops)
        start = len(program.instructions)
        parts = []
        for body in bodies:
            body()
            parts.append(joined_moves(program.instructions[start:]))
            if len(bodies) > 1:
                del program.instructions[start:]
                assert len(program.loops) == loops, "what has loops cannot be mixed"
        if len(bodies) > 1:
            program.instructions += [one for turn in zip_longest(*parts) for one in turn if one is not None]

    @contextmanager
    def range(self, stop: Scalar, step: int, start: Scalar | None = None) -> Iterator[Scalar]:
        """A loop whose number goes from `start`, which it changes, or 0, below `stop` by steps."""
        place = self.zero() if start is None else start
        with self.when(place, LESS, stop), self.loop() as again:
            yield place
            place.set(place + step)
            again(LESS, place, stop)

    @contextmanager
    def repeat(self, count: Scalar) -> Iterator[None]:
        """A loop that is run `count` times."""
        left = self.zero()
        left.set(count)
        with self.when(left, GREATER, 0), self.loop() as again:
            yield
            left.set(left + -1)
            again(GREATER, left, 0)

    @contextmanager
    def when(self, left: Scalar, condition: int, right: Scalar | int) -> Iterator[None]:
        """What is inside is done where LESS, GREATER, NOT_LESS, NOT_GREATER, ZERO (equal) or NOT_ZERO holds."""
        jumps: list[int] = []

        def leave(code: Assembler, *at: int) -> None:
            _compare(code, at, right)
            jumps.append(code.jump_ahead(condition ^ 1))

        self._do(leave, left, *_scalars(right))
        yield
        self._do(lambda code: code.land(jumps.pop()))

    def number_of(self, value: int) -> Scalar:
        """A number of 32 bits with a sign."""
        return self._scalar(lambda code, to: code.set_number(to, value))

    def zero(self) -> Scalar:
        """The number 0, to be changed."""
        return self._scalar(lambda code, to: code.clear(to))

    # Scalars

    def copied(self, value: Scalar) -> Scalar:
        """Another value of the same number, to be changed."""
        return self.changed(value, lambda code, to: None)

    def changed(self, value: Scalar, change: Callable[[Assembler, int], None]) -> Scalar:
        """A copy, changed by an instruction."""

        def emit(code: Assembler, to: int, source: int) -> None:
            if to != source:
                code.move(to, source)
            change(code, to)

        return self._scalar(emit, value)

    def joined(self, left: Scalar, right: Scalar, join: Callable[[Assembler, int, int], None]) -> Scalar:
        """The result of an instruction that changes its first operand, of which the order does not count."""

        def emit(code: Assembler, to: int, one: int, other: int) -> None:
            if to not in (one, other):
                code.move(to, one)
            join(code, to, one if to == other else other)

        return self._scalar(emit, left, right)

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

        return self._scalar(emit, left, right)

    def assign(self, target: Value, source: Value, move: Callable[[Assembler, int, int], None]) -> None:
        """`target` is `source` from here on."""
        self.program.instructions.append(Written(move, target, (source,), (source,), is_move=True))

    # What appends instructions

    def _do(self, emit: Callable[..., None], *read: Value) -> None:
        self.program.instructions.append(Written(emit, None, read))

    def _made(self, value: _Made, emit: Callable[..., None], read: tuple[Value, ...]) -> _Made:
        preferred = [one for one in read if one.kind == value.kind]
        self.program.instructions.append(Written(emit, value, read, preferred))
        return value

    def _vector(self, emit: Callable[..., None], *read: Value) -> Vector:
        return self._made(Vector(self, VECTOR), emit, read)

    def _scalar(self, emit: Callable[..., None], *read: Value) -> Scalar:
        return self._made(Scalar(self, GENERAL), emit, read)

    def _mask(self, emit: Callable[..., None], *read: Value) -> Mask:
        return self._made(Mask(self, MASK if self.lanes == 16 else VECTOR), emit, read)

    def _held(self, value: Vector | float) -> Vector:
        return value if isinstance(value, Vector) else self.constant(float(value))

    def _compared(self, relation: int, left: Vector | float, right: Vector | float) -> Mask:
        return self._mask(
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

        return self._vector(emit, left, right)

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

        return self._vector(emit, left, addend)

    @contextmanager
    def loop(self) -> Iterator[Callable[[int, Scalar, Scalar | int], None]]:
        """What is inside is done again where the function that this gives, called at its end, compares so."""
        places: list[int] = []
        self._do(lambda code: places.append(code.here()))
        first = len(self.program.instructions) - 1

        def again(condition: int, left: Scalar, right: Scalar | int) -> None:
            def emit(code: Assembler, *at: int) -> None:
                _compare(code, at, right)
                code.jump_if(condition, places[-1])

            self._do(emit, left, *_scalars(right))

        yield again
        self.program.loops.append((first, len(self.program.instructions) - 1))


def write_within(
    code: Assembler, vector: int, free: Sequence[int], function: Callable[[Builder, Vector], Vector]
) -> None:
    """Write into other code: the register `vector` becomes `function` of itself; `free` are others to be used.

    Raises OutOfRegistersError.
    """
    build = Builder(code.lanes)
    value = Vector(build, VECTOR, vector)
    value.set(function(build, value))
    build.program.write_within(code, [vector, *free])


def fitting(write: Callable[[int], Builder], most: int = 4) -> Builder:
    """What `write` writes for as many vectors together, at most `most`, as there are registers for."""
    for together in range(most, 1, -1):
        build = write(together)
        if build.fits():
            return build
    return write(1)


_Made = TypeVar("_Made", bound=Value)


def _given(value: Value | None) -> tuple[Value, ...]:
    return () if value is None else (value,)


def _scalars(value: Scalar | int) -> tuple[Scalar, ...]:
    return () if isinstance(value, int) else (value,)


def _place(registers: tuple[int, ...]) -> tuple[int, int | None]:
    """A base and an index, or none."""
    base, *index = registers
    return base, index[0] if index else None


def _compare(code: Assembler, registers: tuple[int, ...], number: Scalar | int) -> None:
    """Compare a register with another, or with a number."""
    if isinstance(number, int):
        code.compare_number(registers[0], number)
    else:
        code.compare(*registers)
