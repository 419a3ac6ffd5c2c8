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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

from dagexec.ops.kernels.memory_access import MemoryAccess
from dagexec.ops.kernels.registers import ANY, ARGUMENTS, GENERAL, VECTOR, OutOfRegistersError, joined_moves
from dagexec.ops.kernels.values import Mask, Scalar, Vector
from dagexec.platform.assembly.instructions import GREATER, LESS
from dagexec.platform.assembly.native import Assembler
from dagexec.platform.machine_code import executable

__all__ = ["BYTES", "Builder", "Mask", "Scalar", "Vector", "fitting", "within"]

BYTES = 4  # of a float32 number


class Builder(MemoryAccess):
    """A kernel that is being written: a function, with loops around its expressions.

    Attributes:
        lanes: float32 numbers in a vector: 8 for AVX2 with FMA, 16 for AVX-512.
        program: its instructions.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self._code: bytes | None = None

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

        self.append(leave, left, *_scalars(right))
        yield
        self.append(lambda code: code.land(jumps.pop()))

    @contextmanager
    def loop(self) -> Iterator[Callable[[int, Scalar, Scalar | int], None]]:
        """What is inside is done again where the function that this gives, called at its end, compares so."""
        places: list[int] = []
        self.append(lambda code: places.append(code.here()))
        first = len(self.program.instructions) - 1

        def again(condition: int, left: Scalar, right: Scalar | int) -> None:
            def emit(code: Assembler, *at: int) -> None:
                _compare(code, at, right)
                code.jump_if(condition, places[-1])

            self.append(emit, left, *_scalars(right))

        yield again
        self.program.loops.append((first, len(self.program.instructions) - 1))


def within(
    lanes: int, free: Sequence[int], function: Callable[[Builder, Vector], Vector]
) -> Callable[[Assembler, int], None]:
    """What writes into other code: a vector becomes `function` of itself; `free` are others to be used.

    Raises OutOfRegistersError.
    """
    build = Builder(lanes)
    value = Vector(build, VECTOR, ANY)
    value.set(function(build, value))
    return build.program.within(lanes, free)


def fitting(write: Callable[[int], Builder], most: int = 4) -> Builder:
    """What `write` writes for as many vectors together, at most `most`, as there are registers for."""
    for together in range(most, 1, -1):
        build = write(together)
        if build.fits():
            return build
    return write(1)


def _scalars(value: Scalar | int) -> tuple[Scalar, ...]:
    return () if isinstance(value, int) else (value,)


def _compare(code: Assembler, registers: tuple[int, ...], number: Scalar | int) -> None:
    """Compare a register with another, or with a number."""
    if isinstance(number, int):
        code.compare_number(registers[0], number)
    else:
        code.compare(*registers)
