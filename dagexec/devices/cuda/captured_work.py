"""CapturedWork: what streams of a CUDA device put into a graph while `capture` has them."""

from __future__ import annotations

from dagexec.core.stream import Event, Kernel
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.event import CudaEvent
from dagexec.devices.cuda.timing import StreamTimes
from dagexec.errors import DeviceError


class CapturedWork:
    """Kernels and events of a graph.

    Attributes:
        kernels: those that have issued their work to the graph; they keep the memory that they work on.
        events: by its id each event that is recorded in the graph, where, and as what event of CUDA.
    """

    def __init__(self, runtime: CudaDevice) -> None:
        self.kernels: list[Kernel] = []
        self.events: dict[int, tuple[CudaEvent, StreamTimes, NativeEvent]] = {}
        self._runtime = runtime

    def record(self, times: StreamTimes, event: CudaEvent) -> None:
        """Record `event` on the stream of `times`. Raises DeviceError for the second time of an event."""
        if id(event) in self.events:
            raise DeviceError(f"event of {event.owner} is recorded twice in one capture")
        native = self._runtime.natives.take()
        self._runtime.api.eventRecord(native.pointer, times.pointer)
        self.events[id(event)] = (event, times, native)
        event.stream = times.stream  # for those who ask whether they need to wait for it

    def wait(self, times: StreamTimes, event: Event) -> None:
        """Let the stream of `times` wait. Raises DeviceError for an event that is recorded outside the capture."""
        _event, source, native = self.events.get(id(event), (None, None, None))
        if native is None:
            raise DeviceError(
                f"{times.stream.name} is captured and waits for the event of {event.owner}, which the capture did not "
                "record: a replay could not wait for it; wait before the capture, or capture its stream too"
            )
        if source is not times:
            self._runtime.api.streamWaitEvent(times.pointer, native.pointer)
