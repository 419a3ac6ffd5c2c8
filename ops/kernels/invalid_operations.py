"""The flag of invalid operations: whether a million maxima have met a NaN, for the price of one instruction.

A processor's maximum gives the other operand for a NaN, so that Relu makes 0 of it. But x86-64 notes every invalid
operation in a flag of the thread that stays set until it is cleared: one that makes a NaN of numbers, and a maximum, a
minimum or an ordered comparison that meets a NaN (Intel, "64 and IA-32 Architectures Software Developer's Manual",
volume 1, 11.5.2.1, and MAXPS in volume 2). So the native calls of a piece are put between two others: one clears the
flag, one looks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeCall, NativeStep, Phases, Piece, can_run
from dagexec.core.operator import Step
from dagexec.errors import DagexecError
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import A0, A3, RESULT, ZERO
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable

_FLAG = 1
"""Of an invalid operation, in the processor's float status."""


@cache
def _codes() -> tuple[int, int, int] | None:
    """The addresses of the code that clears the flag, notes it, and reads a note; None where none runs."""
    addresses = tuple(executable(code) for code in (_clearing(), _noting(), _reading()))
    return None if None in addresses or not can_run() else addresses  # type: ignore[return-value]


def _clearing() -> bytes:
    """Clears the flag."""
    code = GeneralAssembler()
    code.load_float_status(RESULT)
    _clear_flag(code)
    code.clear(RESULT)
    code.end_call()
    return code.code()


def _noting() -> bytes:
    """Where the flag is set, writes 1 to the 32 bits at rdi and clears it."""
    code = GeneralAssembler()
    code.load_float_status(RESULT)
    code.move(A3, RESULT)
    code.and_number(A3, _FLAG)
    code.jump("end", ZERO)
    code.store_short_number(A3, A0)
    _clear_flag(code)
    code.mark("end")
    code.clear(RESULT)
    code.end_call()
    return code.code()


def _reading() -> bytes:
    """Returns the 32 bits at rdi."""
    code = GeneralAssembler()
    code.load_short_number(RESULT, A0, None)
    code.end_call()
    return code.code()


def _clear_flag(code: GeneralAssembler) -> None:
    """The float status = rax without the flag."""
    code.and_number(RESULT, ~_FLAG)
    code.set_float_status(RESULT)


def can_be_seen() -> bool:
    """True where machine code runs that looks at the flag."""
    return _codes() is not None


class Watch:
    """Notes whether an invalid operation happened in the steps that it guards.

    Attributes:
        note: 1 when one happened, until it is set to 0.
    """

    def __init__(self) -> None:
        codes = _codes()
        assert codes is not None, "nothing can be seen here"
        self.note = np.zeros(1, np.int32)
        clear, look, _ = codes
        self._clear, self._look = self._call(clear), self._call(look)

    def _call(self, code: int) -> NativeCall:
        return NativeCall(code, (address_of(self.note), 0, 0, 0), None, _failure, self.note)

    def around(self, step: Step) -> Step:
        """The step that does `step`, which is no native calls, and notes what happened."""
        clear, look = (NativeStep((((call,),),)) for call in (self._clear, self._look))

        def watched() -> None:
            clear()
            step()
            look()

        return watched

    def guarded(self, phases: Phases, recover: Callable[[], None] | None) -> Phases:
        """These phases, whose pieces note; with `recover` it is called, and the note taken back, after a note."""
        noting = tuple(tuple((self._clear, *piece, self._look) for piece in phase) for phase in phases)
        if recover is None:
            return noting

        def on_failure() -> None:
            self.note[0] = 0
            recover()

        read: Piece = (reading(self.note, on_failure),)
        *before, last = noting
        return (*before, ((*last[0], *read),)) if len(last) == 1 else (*noting, (read,))


def reading(note: npt.NDArray[Any], on_failure: Callable[[], None]) -> NativeCall:
    """The call that ends in `on_failure` where the 32 bits at the beginning of `note` are not 0."""
    codes = _codes()
    assert codes is not None, "nothing can be seen here"
    return NativeCall(codes[2], (address_of(note), 0, 0, 0), None, _failure, note, on_failure)


def _failure() -> DagexecError:
    return DagexecError("a note cannot be read")
