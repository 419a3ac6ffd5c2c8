"""Memory of the host that does not move (pinned), from which and to which a CUDA device copies beside the host."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, device_error
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock

Array = npt.NDArray[Any]

CHUNK = 1 << 22
"""Bytes that are staged at once: the host fills one block while the device empties another."""

MAX_STAGED = 1 << 28
"""Bytes of staging blocks that may be under way before the host waits for the oldest."""


class PinnedMemory:
    """A block of pinned memory, seen by NumPy; back with whoever made it when the last array on it is gone."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def is_pinned(array: Array) -> bool:
    """True for an array in memory of `CudaRuntime.pinned`."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, PinnedMemory)


class StagingBlock:
    """Pinned memory of a size that a copy goes through.

    Attributes:
        pointer, array: where it is, and its bytes.
    """

    __slots__ = ("array", "pointer")

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.array: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


class Staging:
    """The pinned memory of one device.

    Attributes:
        runtime: the device's.
    """

    def __init__(self, runtime: CudaDevice) -> None:
        self.runtime = runtime
        self._free: dict[int, deque[StagingBlock]] = {}
        self._unpinned: dict[int, deque[int]] = {}  # memory of arrays that are gone, by size
        self._busy: deque[tuple[NativeEvent, StagingBlock]] = deque()
        self._busy_bytes = 0
        self._forked()
        reset_after_fork(self, Staging._forked)

    def _forked(self) -> None:
        self._lock = new_lock()

    def pinned(self, nbytes: int) -> Array:
        """Pinned bytes. Raises ResourceError when the system has no more."""
        size = _rounded(nbytes)
        free = self._unpinned.setdefault(size, deque())
        try:
            pointer = free.pop()
        except IndexError:
            pointer = self._pin(size)
        memory = PinnedMemory(pointer, nbytes)
        weakref.finalize(memory, free.append, pointer).atexit = False
        return np.asarray(memory)

    def take(self, nbytes: int) -> StagingBlock:
        """A block of at least `nbytes` that nothing uses."""
        size = _rounded(nbytes)
        while True:
            with self._lock:
                oldest = self._collect()
                free = self._free.setdefault(size, deque())
                found = free.pop() if free else None
            if found is not None:
                return found
            if oldest is None:
                return StagingBlock(self._pin(size), size)
            try:
                self.runtime.api.eventSynchronize(oldest.pointer)
            except Exception as error:
                raise self.runtime.device_failed(error, "a copy").error from error

    def _collect(self) -> NativeEvent | None:
        """Make usable what copies are done with; what to wait for when too much is under way. The lock is held."""
        query = self.runtime.api.eventQuery
        while self._busy and query(self._busy[0][0].pointer) != NOT_READY:
            block = self._busy.popleft()[1]
            self._busy_bytes -= block.array.nbytes
            self.give(block)
        return self._busy[0][0] if self._busy_bytes > MAX_STAGED else None

    def give(self, block: StagingBlock) -> None:
        """Nothing uses `block` any more. Takes no lock, so that a host function can call it."""
        self._free.setdefault(block.array.nbytes, deque()).append(block)

    def give_after(self, block: StagingBlock, native: NativeEvent) -> None:
        """Nothing uses `block` any more once `native` is done."""
        with self._lock:
            self._busy.append((native, block))
            self._busy_bytes += block.array.nbytes

    def close(self) -> None:
        """Unpin what nothing uses."""
        with self._lock:
            self._collect()
            pointers = [block.pointer for free in self._free.values() for block in free]
            pointers += [pointer for free in self._unpinned.values() for pointer in free]
            self._free, self._unpinned = {}, {}
        for pointer in pointers:
            self.runtime.api.freeHost(pointer)

    def _pin(self, size: int) -> int:
        api = self.runtime.api
        try:
            with self.runtime.guard():
                return int(api.hostAlloc(size, api.hostAllocPortable))
        except Exception as error:
            raise device_error(self.runtime.device, error, f"{size:,} bytes of pinned memory of the host") from error


def _rounded(nbytes: int) -> int:
    """The next power of two, at least 64 KiB."""
    return max(1 << 16, 1 << max(0, nbytes - 1).bit_length())
