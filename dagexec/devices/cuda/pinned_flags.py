"""Flags that kernels set for the host: in pinned memory, which a CUDA device reaches by the host's own addresses.

What a kernel has written is there for a plain read of the host when the host knows that the kernel is done.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.binding import cupy
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock

if TYPE_CHECKING:
    from dagexec.devices.cuda.runtime import CudaRuntime

Array = npt.NDArray[Any]

_LINE = 64
"""Bytes from one word to the next: a line of the cache, so that devices that write at once do not meet."""

PAGE = 1 << 16
"""Bytes that are pinned at once."""

PAGE_WORDS = PAGE // _LINE


class PinnedFlag:
    """An int32 that is 0 at first; somebody else's once this is gone."""

    __slots__ = ("__weakref__", "_device", "_place", "_words")

    def __init__(self, page: Array, number: int, device: int) -> None:
        """Word `number` of a page."""
        begin = number * _LINE // 4
        self._words = page[begin : begin + 1].data
        self._place = int(page.ctypes.data) + number * _LINE
        self._device = device
        self._words[0] = 0

    @property
    def value(self) -> int:
        """What is in it now."""
        return self._words[0]

    def clear(self) -> None:
        """Make it 0."""
        self._words[0] = 0

    def on_device(self, owner: object) -> Array:
        """The word as an array that kernels can be given; `owner` lives as long as it, and has to keep this word."""
        cp = cupy()
        memory = cp.cuda.UnownedMemory(self._place, 4, owner, self._device)
        return cast(Array, cp.ndarray((1,), np.int32, memptr=cp.cuda.MemoryPointer(memory, 0)))


class PinnedFlags:
    """The words of a device: a page of pinned memory has many."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._free: deque[tuple[Array, int]] = deque()
        self._forked()
        reset_after_fork(self, PinnedFlags._forked)

    def _forked(self) -> None:
        self._lock = new_lock()

    def take(self) -> PinnedFlag:
        """A word that nobody has. Raises ResourceError when the system has no more pinned memory."""
        with self._lock:
            if not self._free:
                page = self._runtime.pinned(PAGE).view(np.int32)
                self._free.extend((page, number) for number in range(PAGE_WORDS))
            place = self._free.popleft()
        word = PinnedFlag(*place, self._runtime.device.index)
        weakref.finalize(word, self._free.append, place).atexit = False
        return word
