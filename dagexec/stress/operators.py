"""The operators of stress tests: they copy their input, one by pieces in two phases, and one fails when told to.

A value of its input says how it fails.
"""

from __future__ import annotations

import ctypes
import enum
from functools import cache

import numpy as np

from dagexec.core.dtypes import INT32
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.errors import DeviceError
from dagexec.ops.kernels.tables import can_run, in_phases, shares

FAILING_OPERATOR = "StressFailure"
PIECED_OPERATOR = "StressPieces"

_PIECES = 4


class Failure(enum.IntEnum):
    """How an operator fails."""

    NONE = 0
    EXCEPTION = 1
    DAGEXEC_ERROR = 2
    UNPRINTABLE = 3
    SYSTEM_EXIT = 4


class InjectedError(Exception):
    """An operator failed because a stress case asked for it."""


class UnprintableError(InjectedError):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("this exception has no text")


def fail(failure: Failure, number: int) -> None:
    """Raise what `failure` stands for; `number` says which operator it is."""
    if failure is Failure.EXCEPTION:
        raise InjectedError(f"failing operator {number} was told to")
    if failure is Failure.DAGEXEC_ERROR:
        raise DeviceError(f"failing operator {number} was told to")
    if failure is Failure.UNPRINTABLE:
        raise UnprintableError
    if failure is Failure.SYSTEM_EXIT:
        raise SystemExit(3)


def _infer(call: OperatorCall) -> list[TensorType]:
    call.require_types(1, INT32)
    call.require_rank(1, 1)
    return [call.inputs[0]]


@new_operator(
    FAILING_OPERATOR,
    infer=_infer,
    doc="Y = X, unless element `number` of SWITCHES (int32) asks for a failure. For stress tests only.",
    input_names=("X", "SWITCHES"),
    output_names=("Y",),
    args={"number": "the element of SWITCHES that this operator obeys"},
    required_args=("number",),
    inplace=first_to_first,
)
class StressFailure(Operator):
    """Copies, or fails."""

    def prepare(self) -> Step:
        """A step that reads its switch each time."""
        x, switches, y = self.x(0), self.x(1), self.y(0)
        number = self.arguments.int("number", 0)

        def step() -> None:
            fail(Failure(int(switches[number])), number)
            np.copyto(y, x)

        return step


@new_operator(
    PIECED_OPERATOR,
    infer=lambda call: [call.inputs[0]],
    doc="Y = X, by pieces that workers share. For stress tests only.",
    input_names=("X",),
    output_names=("Y",),
    inplace=first_to_first,
    rows=first_axis,
)
class StressPieces(Operator):
    """Copies the bytes of a tensor to memory of its own, each piece over a line of its own, and then from there."""

    def prepare(self) -> Step:
        """Two phases of pieces; where no machine code runs, one step."""
        x, y = self.x(0), self.y(0)
        copy = _copying()
        if copy is None:
            return lambda: np.copyto(y, x)
        buffer = self.working_memory(x.nbytes)
        parts = [range(part.start, part.stop) for part in shares(x.nbytes, _PIECES)]
        lines = [self.working_memory(len(part)) for part in parts]
        first = [
            [
                (copy, line.ctypes.data, x.ctypes.data + part.start, len(part), 0),
                (copy, buffer.ctypes.data + part.start, line.ctypes.data, len(part), 0),
            ]
            for part, line in zip(parts, lines, strict=True)
        ]
        then = [
            [(copy, y.ctypes.data + part.start, buffer.ctypes.data + part.start, len(part), 0)]
            for part in reversed(parts)
        ]
        return in_phases([first, then], (x, y, buffer, lines), self.label)


@cache
def _copying() -> int | None:
    """The address of the C library's memcpy, where native calls can be made."""
    return ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value if can_run() else None
