"""Running a kernel of the emulation on NumPy arrays of the host, for the tests of the emulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cuda.emulated.compiler import EmulatedKernel, build


def run_kernel(
    source: str, *arguments: Any, grid: Any = (1, 1, 1), block: Any = (32, 1, 1), shared_bytes: int = 0
) -> None:
    """Run kernel `k` of `source`, with no device memory: arrays are passed as pointers, NumPy scalars by value."""
    packed = [
        np.uint64(argument.ctypes.data).tobytes() if isinstance(argument, np.ndarray) else argument.tobytes()
        for argument in arguments
    ]
    EmulatedKernel(build(source), "k").run(packed, grid, block, shared_bytes)
