"""The values of a kernel that is being written: vectors, masks and numbers, and what Python's operators do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagexec.ops.kernels.registers import Value
from dagexec.platform.assembly.instructions import ADD, DIV, MUL, SUB
from dagexec.platform.assembly.native import Assembler

if TYPE_CHECKING:
    from dagexec.ops.kernels.expressions import Expressions


class _Of(Value):
    """A value of a kernel."""

    __slots__ = ("build",)

    def __init__(self, build: Expressions, kind: str, fixed: int | None = None) -> None:
        self.build, self.kind, self.fixed = build, kind, fixed


class Vector(_Of):
    """Float32 numbers, or 32-bit integers where a method says so."""

    __slots__ = ()

    def __add__(self, other: Vector | float) -> Vector:
        return self.build.compute(ADD, self, other)

    def __radd__(self, other: float) -> Vector:
        return self.build.compute(ADD, self, other)

    def __sub__(self, other: Vector | float) -> Vector:
        return self.build.compute(SUB, self, other)

    def __rsub__(self, other: float) -> Vector:
        return self.build.compute(SUB, self.build.constant(other), self)

    def __mul__(self, other: Vector | float) -> Vector:
        return self.build.compute(MUL, self, other)

    def __rmul__(self, other: float) -> Vector:
        return self.build.compute(MUL, self, other)

    def __truediv__(self, other: Vector | float) -> Vector:
        return self.build.compute(DIV, self, other)

    def __rtruediv__(self, other: float) -> Vector:
        return self.build.compute(DIV, self.build.constant(other), self)

    def set(self, other: Vector) -> None:
        """This value is `other` from here on."""
        self.build.assign(self, other, lambda code, to, source: code.move_vector(to, source))


class Mask(_Of):
    """Elements of a vector that are selected."""

    __slots__ = ()


class Scalar(_Of):
    """A number or an address of 64 bits."""

    __slots__ = ()

    def __add__(self, other: Scalar | int) -> Scalar:
        if isinstance(other, int):
            return self.build.changed(self, lambda code, to: code.add_number(to, other))
        return self.build.joined(self, other, Assembler.add)

    def __sub__(self, other: Scalar | int) -> Scalar:
        if isinstance(other, int):
            return self + -other
        return self.build.difference(self, other)

    def __mul__(self, other: Scalar | int) -> Scalar:
        if isinstance(other, int):
            return self.build.changed(self, lambda code, to: code.multiply_number(to, to, other))
        return self.build.joined(self, other, Assembler.multiply)

    def __and__(self, bits: Scalar | int) -> Scalar:
        if isinstance(bits, Scalar):
            return self.build.joined(self, bits, Assembler.intersect)
        return self.build.changed(self, lambda code, to: code.and_number(to, bits))

    def __lshift__(self, bits: int) -> Scalar:
        return self.build.changed(self, lambda code, to: code.shift_left(to, bits))

    def __rshift__(self, bits: int) -> Scalar:
        return self.build.changed(self, lambda code, to: code.shift_right(to, bits))

    def set(self, other: Scalar) -> None:
        """This value is `other` from here on."""
        self.build.assign(self, other, lambda code, to, source: code.move(to, source))
