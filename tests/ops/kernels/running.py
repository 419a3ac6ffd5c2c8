"""Kernels called from tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.kernels.builder import Builder, Mask, Scalar, Vector, fitting

Array = npt.NDArray[np.float32]

_found = engine_library()
_machine = None if _found is None else _found.machine
LANES = [lanes for lanes in (8, 16) if _machine is not None and _machine.can_run and lanes <= _machine.lanes]
"""Sizes of vectors that this machine has, within what oneDNN is limited to."""

needs_kernels = pytest.mark.skipif(not LANES, reason="no kernels run here")
each_size = pytest.mark.parametrize("lanes", LANES or [pytest.param(8, marks=needs_kernels)])


def call(build: Builder, *arguments: int) -> None:
    """Call the function that was built."""
    address = build.function()
    assert address is not None
    function = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * len(arguments))(address)
    assert function(*arguments) == 0


def applied(function: Callable[[Builder, Vector], Vector], x: Array, lanes: int, together: int = 1) -> Array:
    """A function of each element by a kernel, which must leave what is behind the result as it was."""

    def write(together: int) -> Builder:
        build = Builder(lanes)
        source, target, count = build.arguments(3)

        def body(place: Scalar, mask: Mask | None) -> None:
            build.store(function(build, build.load(source, place, mask=mask)), target, place, mask=mask)

        build.each(count, body, together)
        return build

    memory = np.full(x.size + 2 * lanes, 7, np.float32)
    call(fitting(write, together), x.ctypes.data, memory.ctypes.data, x.size)
    assert (memory[x.size :] == 7).all()
    return memory[: x.size]
