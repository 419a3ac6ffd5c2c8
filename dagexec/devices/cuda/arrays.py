"""Arrays of the host and of CUDA devices told apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from dagexec.devices.cuda.binding import cupy

_NOWHERE = 1 << 12  # no memory of a device begins there


def is_on_device(array: Any) -> bool:
    """True for an array in the memory of a CUDA device."""
    return not isinstance(array, np.ndarray | np.generic) and hasattr(getattr(array, "data", None), "ptr")


def address(array: Any) -> int:
    """Where an array of the host, or of a device, begins."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def stand_in(nbytes: int, device: int) -> Any:
    """An array of bytes that stands for memory of a device which is not there yet; it must never be touched."""
    cp = cupy()
    memory = cp.cuda.UnownedMemory(_NOWHERE, nbytes, None, device)
    return cp.ndarray((nbytes,), np.uint8, memptr=cp.cuda.MemoryPointer(memory, 0))
