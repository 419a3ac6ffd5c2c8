"""What a kernel that is being written reads from memory and writes to it."""

from __future__ import annotations

from dagexec.ops.kernels.expressions import Expressions
from dagexec.ops.kernels.registers import VECTOR, Value
from dagexec.ops.kernels.registers import Instruction as Written
from dagexec.ops.kernels.values import Mask, Scalar, Vector
from dagexec.platform.assembly.native import Assembler


class MemoryAccess(Expressions):
    """Expressions, and what is at addresses."""

    def number(self, base: Scalar, offset: int = 0) -> Scalar:
        """The 64 bits at base + offset."""
        return self.new_scalar(lambda code, to, base: code.load_number(to, base, None, 1, offset), base)

    def numbers(self, base: Scalar, count: int) -> list[Scalar]:
        """So many numbers of 64 bits that lie one after another."""
        return [self.number(base, 8 * place) for place in range(count)]

    def short_number(self, base: Scalar, index: Scalar | None = None, scale: int = 1, offset: int = 0) -> Scalar:
        """The 32 bits at base + scale * index + offset, an integer with a sign."""
        return self.new_scalar(
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

        return self.new_vector(emit, *_given(mask), base, *_given(index))

    def broadcast(self, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1) -> Vector:
        """The number at base + scale * index + offset as every element."""
        return self.new_vector(
            lambda code, to, *at: code.broadcast(to, *_place(at), scale, offset), base, *_given(index)
        )

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

        self.append(emit, value, *_given(mask), base, *_given(index))

    def load_widened(self, base: Scalar, size: int, *, has_sign: bool) -> Vector:
        """The integers of 1 or 2 bytes at `base`, of 2 without a sign, as integers of 32 bits."""
        return self.new_vector(lambda code, to, base: code.load_widened(to, base, size, has_sign=has_sign), base)

    def store_narrowed(self, value: Vector, base: Scalar, size: int) -> None:
        """Write integers as those of 1 or 2 bytes, which hold them."""

        def emit(code: Assembler, spare: int, vector: int, base: int) -> None:
            code.store_narrowed(vector, spare, base, size)

        spare = Vector(self, VECTOR)
        self.program.instructions.append(Written(emit, spare, (value, base), is_apart=True))

    def store_first(
        self, value: Vector, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1
    ) -> None:
        """Write the first element."""
        self.append(
            lambda code, vector, *at: code.store_first(vector, *_place(at), scale, offset), value, base, *_given(index)
        )

    def load_first(
        self, base: Scalar, index: Scalar | None = None, offset: int = 0, scale: int = 1, *, is_double: bool = False
    ) -> Vector:
        """The number at base + scale * index + offset as the first element, which is float64 with `is_double`."""
        return self.new_vector(
            lambda code, to, *at: code.load_first(to, *_place(at), scale, offset, is_double=is_double),
            base,
            *_given(index),
        )

    def store_number(self, number: Scalar, base: Scalar, offset: int = 0) -> None:
        """Write 64 bits to base + offset."""
        self.append(lambda code, value, to: code.store_number(value, to, offset), number, base)


def _given(value: Value | None) -> tuple[Value, ...]:
    return () if value is None else (value,)


def _place(registers: tuple[int, ...]) -> tuple[int, int | None]:
    """A base and an index, or none."""
    return registers[0], registers[1] if len(registers) > 1 else None
