"""An operator of several pieces and phases, made of calls of the C library, and the faults that it can have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from dagexec import NetDef
from dagexec.core import registry
from dagexec.core.native import can_run
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OpSchema
from dagexec.ops.kernels.tables import in_phases

Array = npt.NDArray[np.float32]
Fault = Literal["", "merged phases", "one scratch", "a piece less", "a piece twice"]
FAULTS: tuple[Fault, ...] = ("merged phases", "one scratch", "a piece less", "a piece twice")

PIECES = 4
SIZE = 64
TYPE = "TurnedParts"


def turned(x: Array) -> Array:
    """What the operator computes: the parts of x in the opposite order."""
    return np.concatenate(np.split(x, PIECES)[::-1])


@contextmanager
def pieced_operator(fault: Fault = "") -> Iterator[None]:
    """While it lasts, operators of type `TurnedParts` compute `turned` by pieces, with this fault.

    Phase 0: each piece copies its part of x to scratch, and from there to a buffer. Phase 1: each copies the part from
    the other end of the buffer to y.
    """
    assert can_run()
    schema = OpSchema(TYPE, inputs=(1, 1), outputs=(1, 1), infer=lambda call: [call.inputs[0]], doc="For a test.")

    class TurnedParts(Operator):
        def prepare(self) -> Step:
            return in_phases(*_phases(self, fault))

    registry.operator(schema)(TurnedParts)
    try:
        yield
    finally:
        registry._schemas.pop(TYPE)
        registry._operators.pop(("cpu", TYPE, ""))


_Table = list[tuple[int, int, int, int, int]]


def _phases(operator: Operator, fault: Fault) -> tuple[list[list[_Table]], object, str]:
    copy = cast(int, ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value)
    x, y = operator.x(0), operator.y(0)
    part = x.nbytes // PIECES
    buffer = operator.working_memory(x.nbytes)
    scratch = [operator.working_memory(part) for _ in range(PIECES)]
    if fault == "one scratch":
        scratch = scratch[:1] * PIECES
    first = [
        [
            (copy, own.ctypes.data, x.ctypes.data + part * number, part, 0),
            (copy, buffer.ctypes.data + part * number, own.ctypes.data, part, 0),
        ]
        for number, own in enumerate(scratch)
    ]
    last = [
        [(copy, y.ctypes.data + part * number, buffer.ctypes.data + part * (PIECES - 1 - number), part, 0)]
        for number in range(PIECES)
    ]
    if fault == "a piece less":
        del last[1]
    if fault == "a piece twice":
        last.append(last[1])
    phases = [[*first, *last]] if fault == "merged phases" else [first, last]
    return phases, (x, y, buffer, scratch), operator.label


def pieced_net(count: int = 1) -> NetDef:
    """So many of the operator, one after another, from x to y."""
    net = NetDef(name="pieced", external_input=["x"], external_output=["y"])
    for number in range(count):
        net.op.add(
            type=TYPE,
            input=[f"b{number}" if number else "x"],
            output=["y" if number + 1 == count else f"b{number + 1}"],
        )
    return net
