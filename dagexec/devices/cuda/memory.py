"""The memory of a CUDA device: blocks from CUDA that are used again when nothing on the device can still use them.

An array's memory is free when the last array on it is gone. Work that uses it may be under way by then, on any stream
of any device (a peer copies from it). So a block that was freed is set aside with an event of every stream that is
busy, recorded after it was freed, and is handed out when all of them are done: then so is all work launched before.

Finalizers may run anywhere, in a host function of CUDA as well, where CUDA must not be called. They only append to a
queue, which the next allocation works off. Nothing is freed while the interpreter ends, or in a forked child.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, device_error, is_out_of_memory
from dagexec.errors import ResourceError
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock

Array = npt.NDArray[Any]

_SMALLEST = 512
_STEPS_PER_OCTAVE = 8


def size_class(nbytes: int) -> int:
    """The size of the block for `nbytes`: of 8 sizes an octave, so that at most an eighth is left over."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = max(_SMALLEST, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS_PER_OCTAVE))
    return -(-nbytes // step) * step


class OpenCaptures:
    """The captures that are open, on all devices: their streams can neither be marked nor looked at."""

    def __init__(self) -> None:
        self.count = 0
        self._forked()
        reset_after_fork(self, OpenCaptures._forked)

    def _forked(self) -> None:
        self.lock = new_lock()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """A capture begins within it, while nobody looks at streams on account of memory."""
        with self.lock:
            yield
            self.count += 1

    @contextmanager
    def end(self) -> Iterator[None]:
        """A capture ends within it."""
        with self.lock:
            try:
                yield
            finally:
                self.count -= 1


captures = OpenCaptures()


class _Held:
    """What an array's memory belongs to; when it is gone, the block is free."""

    __slots__ = ("__weakref__",)


class _Block:
    """Memory from CUDA; `events` are to be done before it is used again."""

    __slots__ = ("asked", "events", "pointer", "size")

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer = pointer
        self.size = size
        self.asked = 0
        self.events: list[NativeEvent] = []


class CudaMemory:
    """The blocks of one device.

    Attributes:
        limit: bytes that it takes from CUDA at most; None for all that there is.
        peak: bytes of arrays at most.
    """

    def __init__(self, runtime: CudaDevice) -> None:
        self.limit: int | None = None
        self.peak = 0
        self._runtime = runtime
        self._held = 0
        self._taken = 0
        self._free: dict[int, list[_Block]] = {}
        self._aside: deque[_Block] = deque()
        self._fresh: list[_Block] = []  # freed, and not yet set aside
        self._released: deque[_Block] = deque()  # where finalizers put blocks
        self._forked()
        reset_after_fork(self, CudaMemory._forked)

    def _forked(self) -> None:
        self._lock = new_lock()

    @property
    def held(self) -> int:
        """Bytes of arrays now."""
        with self._lock:
            self._absorb()
            return self._held

    @property
    def cached(self) -> int:
        """Bytes taken from CUDA that no array has now."""
        with self._lock:
            self._absorb()
            free = [block for blocks in self._free.values() for block in blocks]
            return sum(block.size for block in (*free, *self._aside, *self._fresh))

    def _absorb(self) -> None:
        """Count what finalizers have put into the queue as freed. Call with the lock held."""
        while self._released:
            block = self._released.popleft()
            self._held -= block.asked
            self._fresh.append(block)

    def allocate(self, nbytes: int) -> Array:
        """A `cupy.ndarray` of bytes. Raises ResourceError, with the numbers, when the device cannot hold it."""
        cp, index = cupy(), self._runtime.device.index
        if nbytes == 0:
            nothing = cp.cuda.UnownedMemory(0, 0, None, index)
            return cast(Array, cp.ndarray((0,), np.uint8, memptr=cp.cuda.MemoryPointer(nothing, 0)))
        block = self._take(nbytes)
        with self._lock:
            self._absorb()
            block.asked = nbytes
            self._held += nbytes
            self.peak = max(self.peak, self._held)
        owner = _Held()
        weakref.finalize(owner, self._released.append, block).atexit = False
        memory = cp.cuda.UnownedMemory(block.pointer, nbytes, owner, index)
        return cast(Array, cp.ndarray((nbytes,), np.uint8, memptr=cp.cuda.MemoryPointer(memory, 0)))

    def _take(self, nbytes: int) -> _Block:
        size = size_class(nbytes)
        block = self._find(size) or self._new(size)
        if block is None:
            gc.collect()  # what only a reference cycle still holds is no reason to fail
            block = self._find(size)
        if block is None:
            self._wait_for_aside()
            block = self._find(size)
        if block is None:
            self.trim()
            block = self._new(size)
        if block is None:
            raise ResourceError(self._shortage(nbytes))
        return block

    def _find(self, size: int) -> _Block | None:
        """A block of this size that was used before and that nothing uses any more."""
        with self._lock:
            self._collect()
            blocks = self._free.get(size)
            return blocks.pop() if blocks else None

    def _new(self, size: int) -> _Block | None:
        """A block from CUDA; None when it has none, or the limit forbids it."""
        with self._lock:
            if self.limit is not None and self._taken + size > self.limit:
                return None
            self._taken += size
        try:
            with self._runtime.guard():
                return _Block(int(self._runtime.api.malloc(size)), size)
        except Exception as error:
            with self._lock:
                self._taken -= size
            if is_out_of_memory(error):
                return None
            raise device_error(self._runtime.device, error, f"an allocation of {size:,} bytes") from error

    def _collect(self) -> None:
        """Set aside what was freed, and make usable of what is set aside that of which the events are done.

        Call with the lock held. Nothing is done during a capture.
        """
        self._absorb()
        if self._fresh:
            with captures.lock:
                if captures.count:
                    return
                events = self._runtime.marks_of_busy_streams()
            for block in self._fresh:
                block.events = events
            self._aside.extend(self._fresh)
            self._fresh = []
        query = self._runtime.api.eventQuery
        for _ in range(len(self._aside)):
            block = self._aside.popleft()
            if all(query(event.pointer) != NOT_READY for event in block.events):
                block.events = []
                self._free.setdefault(block.size, []).append(block)
            else:
                self._aside.append(block)

    def _wait_for_aside(self) -> None:
        """Wait until what is set aside can be used."""
        with self._lock:
            self._collect()
            events = {event for block in self._aside for event in block.events}
        for event in events:
            try:
                self._runtime.api.eventSynchronize(event.pointer)
            except Exception as error:
                self._runtime.device_failed(error, "an allocation")

    def trim(self) -> None:
        """Give CUDA back what no array has. During a capture nothing is given back: that would wait for the device."""
        with self._lock:
            self._collect()
            if captures.count:
                return
            blocks = [block for row in self._free.values() for block in row]
            self._free.clear()
            self._taken -= sum(block.size for block in blocks)
        with self._runtime.guard():
            for block in blocks:
                self._runtime.api.free(block.pointer)

    def _shortage(self, nbytes: int) -> str:
        with self._runtime.guard():
            free, total = self._runtime.api.memGetInfo()
        limit = "" if self.limit is None else f", the limit is {self.limit:,}"
        return (
            f"{self._runtime.device}: out of memory: an allocation of {nbytes:,} bytes; of {total:,} bytes {free:,} "
            f"are free, arrays of this process hold {self.held:,} and {self.cached:,} are kept for later use{limit}. "
            "Use smaller batches or fewer replicas, or see who else uses the device with: nvidia-smi"
        )
