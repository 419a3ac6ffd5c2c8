"""The C functions by which NumPy computes functions of elements: one for each combination of element types.

They take the addresses of arrays' starts, of a count, of strides in bytes, and data of their own, and need no
interpreter lock. Where a function of elements keeps them says NumPy's interface for C, numpy/ufuncobject.h.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

_OF_NUMBERS = frozenset("?bBhHiIlLqQefdgFDG")


class Loop(NamedTuple):
    """An inner loop: its address, and its last argument."""

    function: int
    data: int


class _Function(ctypes.Structure):
    """The first fields of a PyUFuncObject, behind what all objects of Python have."""

    _fields_ = (
        ("inputs", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("arguments", ctypes.c_int),
        ("identity", ctypes.c_int),
        ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("count", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


def loop_of(ufunc: np.ufunc, dtypes: Sequence[np.dtype[Any]]) -> Loop | None:
    """The loop for arguments, inputs and then outputs, of just these types; None where there is none to be called."""
    if not all(dtype.isnative and dtype.char in _OF_NUMBERS for dtype in dtypes):
        return None
    return _loops(ufunc).get("".join(dtype.char for dtype in dtypes))


@cache
def _loops(ufunc: np.ufunc) -> Mapping[str, Loop]:
    """By the characters of the types; none of a function of whole rows, or where objects do not look as expected."""
    if sys.implementation.name != "cpython" or ufunc.signature is not None:
        return {}
    start = _Function.from_address(id(ufunc) + object.__basicsize__)
    expected = ufunc.nin, ufunc.nout, ufunc.nargs, ufunc.ntypes
    if (start.inputs, start.outputs, start.arguments, start.count) != expected or start.name != ufunc.__name__.encode():
        return {}
    loops: dict[str, Loop] = {}
    for place, types in enumerate(ufunc.types):
        function, kinds = start.functions[place], types.replace("->", "")
        may_raise = ufunc is np.power and np.dtype(kinds[0]).kind in "iu"  # for negative exponents, as Python does
        if function and not may_raise and _OF_NUMBERS.issuperset(kinds):
            loops.setdefault(kinds, Loop(function, start.data[place] or 0 if start.data else 0))
    return loops
