"""SimRuntime: one simulated device - its streams, its memory, its copies and captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.runtime import DeviceRuntime, RuntimeStatistics, runtime_of
from dagexec.core.stream import Priority, Stream
from dagexec.devices.sim.capture import SimCapture
from dagexec.devices.sim.clock import spend_host_time
from dagexec.devices.sim.copy import copy_kernel
from dagexec.devices.sim.driver import is_device_thread
from dagexec.devices.sim.event import SimEvent
from dagexec.devices.sim.faults import FaultPlan, fault_error
from dagexec.devices.sim.handle import LibraryHandle
from dagexec.devices.sim.memory import DeviceMemory, device_of, unwrapped
from dagexec.devices.sim.model import StreamModel
from dagexec.devices.sim.settings import SimSettings
from dagexec.devices.sim.stream import SimStream
from dagexec.devices.stream_pool import StreamPool
from dagexec.errors import DeviceError, ResourceError

Array = npt.NDArray[Any]

MAX_DEVICES = 64


class SimRuntime(DeviceRuntime):
    """A simulated device.

    Attributes:
        settings: what it is like.
        driver: does its work.
        faults: the faults it has, counted.
    """

    in_host_memory = True

    def __init__(self, device: Device, settings: SimSettings | None = None) -> None:
        """Raises DeviceError for an index of 64 or more."""
        if not 0 <= device.index < MAX_DEVICES:
            raise DeviceError(f"device {device} does not exist; simulated devices are sim:0 to sim:{MAX_DEVICES - 1}")
        super().__init__(device)
        self.settings = settings or SimSettings()
        self.driver = self.settings.new_driver(str(device))
        self.faults = FaultPlan(self.settings.faults)
        self._memory = DeviceMemory(device, self.settings.memory_limit)
        self._model = StreamModel(self.settings, self.faults, self.settings.observer)
        self._streams = StreamPool(device, self._new_stream)

    def lease(self, priority: Priority = Priority.NORMAL) -> SimStream:
        """An idle stream of that priority; the one given back last, or a new one."""
        return self._streams.lease(priority)

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream. Raises DeviceError for one that is not leased, captured, or not idle."""
        self._streams.give_back(stream)

    def streams(self) -> tuple[SimStream, ...]:
        """Every stream made so far."""
        return self._streams.all()

    def _new_stream(self, number: int, priority: Priority) -> SimStream:
        stream = SimStream(self.device, number, priority, self.driver, self._model)
        self.driver.attach(stream)
        return stream

    def event(self, owner: str) -> SimEvent:
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
        if device_of(destination) == device_of(source) == CPU:  # strings stay on the host
            np.copyto(destination, source)
            return
        if destination.shape != source.shape:
            source = np.broadcast_to(unwrapped(source), destination.shape)
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

    def host_view(self, array: Array) -> Array:
        """The NumPy array inside a `SimArray`, for steps that run as kernels."""
        return unwrapped(array)

    def _copy_on_host(self, label: str, nbytes: int) -> None:
        fault = self.faults.find("copy", label) if self.settings.faults else None
        if fault is not None:
            raise fault_error(fault, f"{self.device}: {label}")
        spend_host_time(self.settings.copy_seconds + self.settings.copy_seconds_per_byte * nbytes)

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

    def statistics(self) -> RuntimeStatistics:
        return self._streams.statistics(self._memory)

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


def sim_runtime(device: Device) -> SimRuntime:
    """The runtime of the simulated `device` now in force. Raises DeviceError for another kind."""
    runtime = runtime_of(device)
    if not isinstance(runtime, SimRuntime):
        raise DeviceError(f"{device} is not a simulated device")
    return runtime
