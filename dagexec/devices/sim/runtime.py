"""SimRuntime: one simulated device - its pools of streams, its memory, its copies and captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.runtime import DeviceRuntime, Priority, RuntimeStatistics, Stream
from dagexec.devices.sim.capture import SimCapture
from dagexec.devices.sim.clock import spend_host_time
from dagexec.devices.sim.copy import copy_kernel
from dagexec.devices.sim.driver import is_device_thread
from dagexec.devices.sim.event import SimEvent
from dagexec.devices.sim.faults import FaultPlan, fault_error
from dagexec.devices.sim.handle import LibraryHandle
from dagexec.devices.sim.memory import DeviceMemory, device_of
from dagexec.devices.sim.model import StreamModel
from dagexec.devices.sim.settings import SimSettings
from dagexec.devices.sim.stream import SimStream
from dagexec.errors import DeviceError, ResourceError
from dagexec.platform.forking import ProcessLock

Array = npt.NDArray[Any]


class SimRuntime(DeviceRuntime):
    """A simulated device.

    Attributes:
        settings: what it is like.
        driver: does its work.
        faults: the faults it has, counted.
    """

    def __init__(self, device: Device, settings: SimSettings | None = None) -> None:
        super().__init__(device)
        self.settings = settings or SimSettings()
        self.driver = self.settings.new_driver(str(device))
        self.faults = FaultPlan(self.settings.faults)
        self._memory = DeviceMemory(device, self.settings.memory_limit)
        self._model = StreamModel(self.settings, self.faults, self.settings.observer)
        self._lock = ProcessLock()
        self._streams: list[SimStream] = []
        self._pools: dict[Priority, list[SimStream]] = {priority: [] for priority in Priority}
        self._leased: set[SimStream] = set()

    def lease(self, priority: Priority = Priority.NORMAL) -> SimStream:
        """An idle stream of that priority; the one given back last, or a new one."""
        with self._lock.own:
            pool = self._pools[priority]
            is_new = not pool
            stream = self._new_stream(priority) if is_new else pool.pop()
            self._leased.add(stream)
        if is_new:
            self.driver.attach(stream)  # with no lock held: a driver may have its own
        return stream

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream. Raises DeviceError for one that is not leased, captured, or not idle."""
        with self._lock.own:
            if not isinstance(stream, SimStream) or stream not in self._leased:
                raise DeviceError(f"{stream.name} is not leased from {self.device}")
            if stream.capture is not None:
                raise DeviceError(f"{stream.name} is given back while it is captured")
            stream.reset()
            stream.observer = self.settings.observer
            self._leased.remove(stream)
            self._pools[stream.priority].append(stream)

    def _new_stream(self, priority: Priority) -> SimStream:
        number = len(self._streams)
        stream = SimStream(self.device, number, priority, self.driver, self._model)
        self._streams.append(stream)
        return stream

    def event(self, owner: str) -> SimEvent:
        """A new event."""
        return SimEvent(owner)

    def allocate(self, nbytes: int) -> Array:
        """A `SimArray` of bytes. Raises ResourceError beyond the memory limit, or for a fault."""
        fault = self.faults.find("allocation", str(nbytes)) if self.settings.faults else None
        if fault is not None:
            raise fault.error or ResourceError(
                f"{self.device}: out of memory: an allocation of {nbytes:,} bytes failed, a fault of kind 'allocation'"
            )
        return cast(Array, self._memory.allocate(nbytes))

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Launch a copy on `stream`. Raises ShapeError for other shapes or dtypes, DeviceError for a cuda array."""
        self._own(stream).launch(copy_kernel(destination, source))

    def copy_now(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done.

        With a current stream the copy is made on it, after what is there; raises what the stream failed with. Without
        one, nothing orders it after other work: the calling thread copies what is there, as it also does inside a
        kernel. Whoever has not waited for the work before gets its old bytes.
        """
        kernel = copy_kernel(destination, source)
        stream = None if is_device_thread() else self.stream_in_use()
        if stream is None:
            if not is_device_thread():
                self._copy_on_host(kernel.label, source.nbytes)
            kernel.step()
            return
        stream.launch(kernel)
        event = self.event(kernel.label)
        event.record(stream)
        event.finish()

    def _copy_on_host(self, label: str, nbytes: int) -> None:
        fault = self.faults.find("copy", label) if self.settings.faults else None
        if fault is not None:
            raise fault_error(fault, f"{self.device}: {label}")
        spend_host_time(self.settings.copy_seconds + self.settings.copy_seconds_per_byte * nbytes)

    def stream_in_use(self) -> Stream | None:
        """The stream the calling thread made its current one, None when it did not."""
        found: Stream | None = getattr(self._thread, "current", None)
        return found

    def set_current(self, stream: Stream) -> None:
        """Make `stream` the calling thread's current one from now on; `using` does so for a block."""
        self._thread.current = self._own(stream)

    def clear_current(self) -> None:
        """The calling thread has no current stream any more; the stream stays leased."""
        self._thread.current = None

    def library_handle(self, name: str) -> LibraryHandle:
        """A new handle that notices when two use it at once."""
        return LibraryHandle(name)

    @contextmanager
    def capture(self, streams: Sequence[Stream]) -> Iterator[SimCapture]:
        """Within it, what is asked of `streams` is kept. Raises DeviceError for a stream that is captured already."""
        capture = SimCapture([self._own(stream) for stream in streams])
        capture.begin()
        try:
            yield capture
        finally:
            capture.end()

    def synchronize(self) -> None:
        """Block until every stream is idle. Raises nothing for failed work."""
        for stream in self.streams():
            stream.synchronize()

    def streams(self) -> tuple[SimStream, ...]:
        """Every stream made so far, in order of their numbers."""
        with self._lock.own:
            return tuple(self._streams)

    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment."""
        with self._lock.own:
            streams, leased = list(self._streams), len(self._leased)
        return RuntimeStatistics(
            streams=len(streams),
            leased=leased,
            busy=sum(not stream.is_idle for stream in streams),
            launches=sum(stream.launches for stream in streams),
            allocated_bytes=self._memory.held,
            peak_bytes=self._memory.peak,
            limit_bytes=self._memory.limit,
        )

    def abandon_all(self, error: BaseException | None = None) -> None:
        """Abandon every stream, for `error` or because the device is closed."""
        for stream in self.streams():
            stream.abandon(error or DeviceError(f"{self.device} is closed"))

    def close(self, timeout: float = 60) -> None:
        """Abandon what is not done, and end the threads. Raises DeviceError when that takes over `timeout` seconds."""
        self.abandon_all()
        for stream in self.streams():
            stream.capture = None
            if not (stream.is_idle or stream.wait_until(stream.launched, timeout)):
                raise DeviceError(f"{stream.name} is still busy {timeout} seconds after it was abandoned")
            self.driver.detach(stream)
        if self.settings.driver is None:
            self.driver.close()

    def _own(self, stream: Stream) -> SimStream:
        if not isinstance(stream, SimStream) or stream.device != self.device:
            raise DeviceError(f"{stream.name} is not a stream of {self.device}")
        return stream


def place_of(destination: Array, source: Array) -> Device:
    """The simulated device that copies between the two: the destination's if it is one, else the source's."""
    device = device_of(destination)
    return device_of(source) if device == CPU else device
