"""Memory for packed weights: many small tensors in large pieces, which the system can map with huge pages.

NumPy asks for huge pages from 4 MiB on. With pages of 4 KiB a network's weights take thousands of entries of the
processor's address tables, more than it keeps.
"""

from __future__ import annotations

import weakref

import numpy as np

from dagexec.ops.onednn.primitive import Array, aligned_empty
from dagexec.platform.forking import ProcessLock

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
