"""Arrays to a CUDA device and back, by CuPy's runtime alone, for the tests of the emulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from dagexec.devices.cuda.binding import cupy


def to_device(array: np.ndarray[Any, Any]) -> Any:
    """A new device array with these elements."""
    cp = cupy()
    made = cp.ndarray(array.shape, array.dtype, memptr=cp.cuda.MemoryPointer(cp.cuda.Memory(max(array.nbytes, 1)), 0))
    packed = np.ascontiguousarray(array)
    cp.cuda.runtime.memcpy(made.data.ptr, packed.ctypes.data, array.nbytes, cp.cuda.runtime.memcpyHostToDevice)
    return made


def from_device(array: Any) -> np.ndarray[Any, Any]:
    """The elements of a packed device array."""
    cp = cupy()
    found = np.empty(array.shape, array.dtype)
    cp.cuda.runtime.memcpy(found.ctypes.data, array.data.ptr, found.nbytes, cp.cuda.runtime.memcpyDeviceToHost)
    return found
