"""Whether all numbers of a tensor are finite, in pieces, each of which leaves a note."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep, Piece
from dagexec.ops.kernels.builder import Builder, Mask, Scalar
from dagexec.ops.kernels.invalid_operations import reading
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of

Array = npt.NDArray[Any]


class FiniteScan:
    """Looks at a packed float32 tensor.

    Attributes:
        step: notes what it finds.
        notes: of the pieces: 0, or NaN where the squares of their numbers have no finite sum.
    """

    def __init__(self, machine: Machine, x: Array, label: str) -> None:
        """Only where `can_scan`."""
        kernel = _kernel(machine.lanes)
        parts = shares(x.size, min(x.size, pieces_of_bytes(x.nbytes)))
        self.notes: Array = np.zeros(len(parts), np.float32)
        notes, start = address_of(self.notes), address_of(x)
        tables = [
            [(kernel or 0, start + 4 * part.start, notes + 4 * number, len(part), 0)]
            for number, part in enumerate(parts)
        ]
        self.step: NativeStep = in_pieces(tables, (x, self.notes), label)

    def piece(self, on_failure: Callable[[], None]) -> Piece:
        """Calls `on_failure` where there is something to be seen in the notes."""
        return tuple(reading(self.notes[number:], on_failure) for number in range(len(self.notes)))


def can_scan(machine: Machine, x: Array) -> bool:
    """True for tensors that a scan may look at."""
    is_plain = x.dtype == np.float32 and x.flags.c_contiguous and x.size > 0
    return is_plain and machine.can_run and _kernel(machine.lanes) is not None


@lru_cache
def _kernel(lanes: int) -> int | None:
    """The address of a function of a tensor, a note and the number of elements; None where it cannot run."""
    build = Builder(lanes)
    x, note, count = build.arguments(3)
    squares = build.constant(0.0)

    def body(place: Scalar, mask: Mask | None) -> None:
        value = build.load(x, place, mask=mask)
        squares.set(build.fma(value, value, squares))

    build.each(count, body)
    build.store_first(build.over_lanes(squares, lambda one, other: one + other) * 0.0, note)
    return build.function()
