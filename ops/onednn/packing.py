"""Packed weights: the forms of a constant, and memory for them in large pieces that huge pages can map.

NumPy asks for huge pages from 4 MiB on. With pages of 4 KiB a network's weights take thousands of entries of the
processor's address tables, more than it keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from dagexec.core.device import CPU
from dagexec.core.tensor import Tensor
from dagexec.ops.onednn.descriptors import Array, Descriptor, aligned_empty
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import unshared_bytes

PIECE = 16 << 20
"""Bytes of a piece. It is freed with the last of the arrays in it."""

_LINE = 64


class Pieces:
    """Gives parts of pieces; threads may ask at once."""

    def __init__(self, nbytes: int = PIECE) -> None:
        self._lock = ProcessLock()
        self._nbytes = nbytes
        self._base: weakref.ref[Array] | None = None
        self._start = 0

    def take(self, nbytes: int) -> Array:
        """`nbytes` bytes on a cache line. More than half a piece is an allocation of its own."""
        if nbytes > self._nbytes // 2:
            return aligned_empty(nbytes)
        with self._lock.own:
            base = None if self._base is None else self._base()
            if base is None or self._start + nbytes > len(base):
                base = np.empty(self._nbytes + _LINE, np.uint8)
                self._base, self._start = weakref.ref(base), -base.ctypes.data % _LINE
            part: Array = base[self._start : self._start + nbytes]
            self._start += -(-max(1, nbytes) // _LINE) * _LINE
            return part


packed_memory = Pieces()
"""Where all operators of the process put their packed weights."""


class PackedForms:
    """A constant tensor in the layouts that primitives asked for, each made once; threads may ask at the same time."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._found: list[tuple[Descriptor, Descriptor, int, Array]] = []

    def find(self, source: Descriptor, target: Descriptor) -> Array | None:
        """The tensor read as `source`, in layout `target`; None when it was not made yet."""
        with self._lock.own:
            return self._known(source, target, 0)

    def get(self, source: Descriptor, target: Descriptor, compute: Callable[[], Array], start: int = 0) -> Array:
        """What `compute` gives for what is read as `source` from byte `start` on, wanted as `target`: called once."""
        with self._lock.own:
            array = self._known(source, target, start)
            if array is None:
                array = compute()
                self._found.append((source, target, start, array))
            return array

    def made(self) -> list[tuple[Descriptor, Descriptor, Array]]:
        """Those that are read from the first byte on: source, target, and the array."""
        with self._lock.own:
            return [(source, target, array) for source, target, start, array in self._found if start == 0]

    def _known(self, source: Descriptor, target: Descriptor, start: int) -> Array | None:
        asked = source, target, start
        return next((array for *known, array in self._found if tuple(known) == asked), None)


def offer_unpacking(
    tensor: Tensor, view: Array, unpack: Callable[[Array], None], label: str, *, surely: bool = False
) -> None:
    """Let the constant `tensor` be made anew: `unpack` writes the values of `view` to an array of the same layout.

    That is done only where `view` is all of the tensor, on the host. Unless it `surely` does that, it is tried once.
    """
    constant = tensor.constant
    if constant is None or tensor.device != CPU or not _is_all_of(view, tensor.array):
        return
    layout, whole, nbytes = (view.shape, view.dtype, view.strides), tensor.shape, tensor.nbytes

    def make() -> Array:
        shape, dtype, strides = layout
        found = unshared_bytes(nbytes, f"{label}: weights").view(dtype)
        unpack(np.ndarray(shape, dtype, found, 0, strides))
        return found.reshape(whole)

    constant.can_be_made_by(make, surely=surely)


def _is_all_of(view: Array, array: Array) -> bool:
    """True when `view` has the elements of `array` in the same memory, in another order perhaps."""
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + view.itemsize
    is_inside = view.ctypes.data == array.ctypes.data and min(view.strides, default=0) >= 0
    return is_inside and view.dtype == array.dtype and view.size > 0 and view.nbytes == array.nbytes == span
