"""CudaRuntime: one CUDA device - its streams, events, memory, copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.cuda.arrays import address
from dagexec.core.cuda.binding import cupy
from dagexec.core.cuda.cudnn_handle import CudnnHandle
from dagexec.core.cuda.event import CudaEvent
from dagexec.core.cuda.stream import CudaStream
from dagexec.core.device import Device
from dagexec.core.errors import DeviceError, ResourceError, ShapeError
from dagexec.core.runtime import Capture, DeviceRuntime, Kernel, Priority, RuntimeStatistics, Stream

Array = npt.NDArray[Any]


class CudaRuntime(DeviceRuntime):
    """A CUDA device."""

    issues_at_launch = True

    def __init__(self, device: Device) -> None:
        """Raises DeviceError when there is no such device here."""
        super().__init__(device)
        count = cupy().cuda.runtime.getDeviceCount()
        if not 0 <= device.index < count:
            raise DeviceError(f"device {device} does not exist; this machine has {count}")
        self._lock = threading.Lock()
        self._streams: list[CudaStream] = []
        self._pools: dict[Priority, list[CudaStream]] = {priority: [] for priority in Priority}
        self._leased: set[CudaStream] = set()

    def guard(self) -> AbstractContextManager[object]:
        """Within it this is CUDA's current device of the calling thread; afterwards it is the one of before."""
        return cast(AbstractContextManager[object], cupy().cuda.Device(self.device.index))

    def lease(self, priority: Priority = Priority.NORMAL) -> CudaStream:
        """An idle stream of that priority."""
        with self._lock:
            pool = self._pools[priority]
            if pool:
                stream = pool.pop()
            else:
                with self.guard():
                    stream = CudaStream(self, len(self._streams), priority)
                self._streams.append(stream)
            self._leased.add(stream)
            return stream

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream. Raises DeviceError for one that is not leased, or not idle."""
        with self._lock:
            if not isinstance(stream, CudaStream) or stream not in self._leased:
                raise DeviceError(f"{stream.name} is not leased from {self.device}")
            stream.reset()
            stream.observer = None
            self._leased.remove(stream)
            self._pools[stream.priority].append(stream)

    def library_handle(self, name: str) -> CudnnHandle:
        """A new handle of cuDNN. Raises DeviceError where there is no cuDNN that serves."""
        return CudnnHandle(self, name)

    def event(self, owner: str) -> CudaEvent:
        """A new event."""
        return CudaEvent(owner, self)

    def allocate(self, nbytes: int) -> Array:
        """Device memory, as a `cupy.ndarray` of bytes. Raises ResourceError when the device cannot hold it."""
        cp = cupy()
        with self.guard():
            try:
                memory = cp.cuda.Memory(nbytes)
            except cp.cuda.memory.OutOfMemoryError as error:
                raise ResourceError(f"{self.device}: out of memory: {nbytes:,} bytes: {error}") from error
            return cast(Array, cp.ndarray((nbytes,), np.uint8, memptr=cp.cuda.MemoryPointer(memory, 0)))

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Launch a copy on `stream`. Raises ShapeError for other shapes or dtypes."""
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise ShapeError(
                f"a copy from a {source.dtype} array of shape {source.shape} to a {destination.dtype} array of shape "
                f"{destination.shape}: expected the same"
            )
        runtime = cupy().cuda.runtime
        kind, target = runtime.memcpyDefault, cast(CudaStream, stream)
        pointers = (address(destination), address(source))
        step = lambda: runtime.memcpyAsync(*pointers, source.nbytes, kind, target.pointer)  # noqa: E731
        stream.launch(Kernel(step, f"copy on {self.device}", copied_bytes=source.nbytes))

    def copy_now(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done, after what is on the calling thread's current stream."""
        if destination.shape != source.shape:
            source = np.ascontiguousarray(np.broadcast_to(source, destination.shape))
        stream = self.current_stream()
        self.copy(destination, np.ascontiguousarray(source) if isinstance(source, np.ndarray) else source, stream)
        stream.synchronize()

    def stream_in_use(self) -> Stream | None:
        """The stream the calling thread made its current one, None when it did not."""
        found: Stream | None = getattr(self._thread, "current", None)
        return found

    def set_current(self, stream: Stream) -> None:
        """Make `stream` the calling thread's current one from now on; `using` does so for a block."""
        self._thread.current = stream

    @contextmanager
    def capture(self, streams: Sequence[Stream]) -> Iterator[Capture]:
        """Not offered yet."""
        raise DeviceError(f"{self.device} cannot capture")
        yield

    def synchronize(self) -> None:
        """Block until every stream is idle."""
        for stream in list(self._streams):
            stream.synchronize()

    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment."""
        with self._lock:
            streams, leased = list(self._streams), len(self._leased)
        return RuntimeStatistics(len(streams), leased, sum(not s.is_idle for s in streams), 0, 0, 0, None)
