"""Memory for weights, in pieces that huge pages can map.

With pages of 4 KiB a network's weights take thousands of entries of the processor's address tables, more than it keeps.
The system clears what is touched first, which may take several times as long as to write to it. So weights that are
packed leave their memory to the next ones of that size (`recycling`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.platform.addresses import address_of
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import give_back_pages, unshared_bytes

Array = npt.NDArray[Any]

PIECE = 16 << 20
"""Bytes of a piece. It is freed with the last of the arrays in it."""

_LINE = 64


class _Part(weakref.ref[Array]):
    """An array, and where it is in a piece."""

    __slots__ = ("nbytes", "piece", "start")

    piece: weakref.ref[Array]
    start: int
    nbytes: int


class Pieces:
    """Gives parts of pieces; threads may ask at once."""

    def __init__(self, nbytes: int = PIECE) -> None:
        self._lock = ProcessLock()
        self._nbytes = nbytes
        self._piece: weakref.ref[Array] | None = None
        self._start = 0
        self._parts: dict[int, _Part] = {}  # by their ids, while their arrays live
        self._left: deque[_Part] = deque()  # by arrays, since `_sort` was called last
        self._free: dict[int, list[_Part]] = {}  # by bytes

    def take(self, nbytes: int, what: str = "weights") -> Array:
        """`nbytes` bytes on a cache line. More than half a piece is a piece of its own.

        Raises ResourceError, saying `what` they are, when they are not to be had.
        """
        with self._lock.own:
            self._sort()
            free = self._free.get(nbytes)
            while free:
                part = free.pop()
                piece = part.piece()
                if piece is not None:
                    return self._given(piece, part.start, nbytes)
            if nbytes > self._nbytes // 2:
                return self._given(unshared_bytes(nbytes, what), 0, nbytes)
            piece = None if self._piece is None else self._piece()
            if piece is None or self._start + nbytes > len(piece):
                piece = unshared_bytes(self._nbytes, what)
                self._piece, self._start = weakref.ref(piece), 0
            start, self._start = self._start, self._start + -(-max(1, nbytes) // _LINE) * _LINE
            return self._given(piece, start, nbytes)

    def _given(self, piece: Array, start: int, nbytes: int) -> Array:
        """An array that views are views of, and not of the whole piece, so that it lives as long as they."""
        array = np.frombuffer(piece.data[start : start + nbytes], np.uint8)
        part = _Part(array, self._left.append)  # no function of Python, in which an interruption would be lost
        part.piece, part.start, part.nbytes = weakref.ref(piece), start, nbytes
        self._parts[id(part)] = part
        return array

    def _sort(self) -> None:
        """Let parts be taken whose arrays are gone."""
        while self._left:
            part = self._left.popleft()
            del self._parts[id(part)]
            self._free.setdefault(part.nbytes, []).append(part)

    @contextmanager
    def recycling(self, arrays: Iterable[Array]) -> Iterator[None]:
        """Within it, what is in pieces of these arrays' and free may be taken, with the last of them, too.

        Then pages go back to the system that nobody has taken.
        """
        pieces = [_piece_of(array) for array in arrays]
        del arrays
        try:
            yield
        finally:
            pieces.clear()
            with self._lock.own:
                self._sort()
                living = {nbytes: [(part, part.piece()) for part in parts] for nbytes, parts in self._free.items()}
                self._free = {}
                for nbytes, parts in living.items():
                    kept = [(part, piece) for part, piece in parts if piece is not None]
                    for part, piece in kept:
                        give_back_pages(address_of(piece) + part.start, nbytes)
                    self._free |= {nbytes: [part for part, _ in kept]} if kept else {}


def _piece_of(array: Array) -> object:
    """What the memory that `array` views is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    base: object = array.base
    return base.obj if isinstance(base, memoryview) else base


weight_memory = Pieces()
"""Where the process has large parameters, and operators their packed weights."""
