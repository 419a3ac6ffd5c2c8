"""Arrays of the host and of CUDA devices told apart."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_on_device(array: Any) -> bool:
    """True for an array in the memory of a CUDA device."""
    return not isinstance(array, np.ndarray | np.generic) and hasattr(getattr(array, "data", None), "ptr")


def address(array: Any) -> int:
    """Where an array of the host, or of a device, begins."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
