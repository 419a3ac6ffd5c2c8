"""The operator of stress tests: it copies its input, or fails in the way that a value it is fed with asks for."""

from __future__ import annotations

import enum

import numpy as np

from dagexec.core.dtypes import INT32
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, first_to_first
from dagexec.errors import DeviceError

FAILING_OPERATOR = "StressFailure"


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


@operator(
    OpSchema(
        FAILING_OPERATOR,
        infer=_infer,
        doc="Y = X, unless element `number` of SWITCHES (int32) asks for a failure. For stress tests only.",
        input_names=("X", "SWITCHES"),
        output_names=("Y",),
        args={"number": "the element of SWITCHES that this operator obeys"},
        required_args=("number",),
        inplace=first_to_first,
    )
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
