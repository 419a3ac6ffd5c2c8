"""Where an array begins in memory, without the object that `ndarray.ctypes` makes for that.

Preparation asks for some ten addresses an operator; that object took 1.6 us each time, and this takes 0.1. The first
field after the header of an array object is its data pointer (`PyArrayObject_fields` in numpy/ndarraytypes.h, part of
NumPy's stable interface for C). Where that is not so, `ndarray.ctypes` is asked.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt


class _Array(ctypes.Structure):
    """The first fields of an array object."""

    data: int
    _fields_ = (("head", ctypes.c_byte * object.__basicsize__), ("data", ctypes.c_size_t))


_at = _Array.from_address


def _by_fields(array: npt.NDArray[Any]) -> int:
    """The address of the first element."""
    return _at(id(array)).data


def _by_ctypes(array: npt.NDArray[Any]) -> int:
    """The address of the first element."""
    return int(array.ctypes.data)


def _fields_are_known() -> bool:
    """True where the fields of arrays of several kinds say what `ndarray.ctypes` says."""
    whole = np.zeros((3, 4), np.float32)
    return sys.implementation.name == "cpython" and all(
        _by_fields(array) == _by_ctypes(array) for array in (whole, whole[1:, ::-1], whole[:0], np.zeros((), np.bool_))
    )


address_of = _by_fields if _fields_are_known() else _by_ctypes
