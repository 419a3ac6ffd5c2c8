"""StreamModel: what a simulated stream adds to its commands - virtual time, faults, and telling an observer.

See `dagexec.devices.sim.clock` for the times.
"""

from __future__ import annotations

from dagexec.core.stream import Event, Kernel, StreamObserver
from dagexec.devices.sim.clock import host_time, host_waited_until, spend_host_time
from dagexec.devices.sim.command_queue import NEVER, CommandQueue, Mark, Outcome, TimedWait, Wait
from dagexec.devices.sim.event import SimEvent, mark_of
from dagexec.devices.sim.faults import Fault, FaultPlan, fault_error
from dagexec.devices.sim.settings import SimSettings
from dagexec.errors import DeviceError


class StreamModel:
    """What streams of one device and one observer have in common.

    Attributes:
        settings: of the device.
        faults: of the device.
        observer: is notified of what happens; or None.
    """

    def __init__(self, settings: SimSettings, faults: FaultPlan, observer: StreamObserver | None) -> None:
        self.settings = settings
        self.faults = faults
        self.observer = observer

    def observed_by(self, observer: StreamObserver | None) -> StreamModel | None:
        """The same with another observer; None when there would be nothing left to do."""
        if observer is None and self.settings.is_unmodeled:
            return None
        return StreamModel(self.settings, self.faults, observer)

    def launch(self, stream: CommandQueue, kernel: Kernel) -> None:
        """Put `kernel` on `stream`. Raises what a fault of the launch says."""
        self.pay_launch(stream, kernel.label)
        self.issue(stream, kernel)

    def pay_launch(self, stream: CommandQueue, label: str) -> None:
        """Spend the host's time of a launch. Raises what a fault of the launch says."""
        fault = self._fault("launch", label)
        if fault is not None:
            raise fault_error(fault, f"{stream.name}: the launch of {label}")
        spend_host_time(self.settings.launch_seconds)

    def issue(self, stream: CommandQueue, kernel: Kernel) -> None:
        """Put `kernel`, whose launch is paid for, on `stream`."""
        hang = self._fault("hang", kernel.label)
        if hang is not None:
            stream.command(Wait(Mark(stream, NEVER, Outcome()), order_only=True))
        fault = self._fault("copy" if kernel.copied_bytes else "kernel", kernel.label)
        if self.observer is not None:
            self.observer.launched(stream, kernel)
        stream.enqueue(_Timed(self, stream, kernel, host_time(), fault))

    def wait(self, stream: CommandQueue, event: Event, order_only: bool) -> None:
        """Let `stream` wait, unless it is for its own past."""
        mark = mark_of(event)
        if mark is None or mark.stream is None or mark.stream is stream:
            return
        if self.observer is not None:
            self.observer.waits(stream, event)
        stream.command(TimedWait(mark, order_only, event, self.observer))

    def record(self, stream: CommandQueue, event: SimEvent) -> None:
        """Record `event` at the end of `stream`. Raises what a fault of the event says."""
        fault = self._fault("event", event.owner)
        if fault is not None:
            raise fault_error(fault, f"{stream.name}: the recording of the event of {event.owner}")
        mark = Mark(stream, stream.launched + 1, stream.outcome_from_here())
        event.recorded_at(mark)
        if self.observer is not None:
            self.observer.recorded(stream, event)
        stream.command(_Record(stream, mark))

    def host_found(self, event: Event, mark: Mark) -> None:
        """The calling host thread found `event` done: its time is at least the event's, or of what failed before."""
        failed = mark.stream if mark.failure is not None else None
        host_waited_until(mark.time if failed is None else failed.time)
        if self.observer is not None:
            self.observer.host_waited(event)

    def host_found_idle(self, stream: CommandQueue) -> None:
        """The calling host thread found `stream` idle: its time is at least the stream's."""
        host_waited_until(stream.time)
        if self.observer is not None:
            self.observer.host_waited(stream)

    def seconds_of(self, kernel: Kernel) -> float:
        """What `kernel` takes. Raises DeviceError when the settings' function gives no time."""
        settings = self.settings
        if kernel.copied_bytes:
            return settings.copy_seconds + settings.copy_seconds_per_byte * kernel.copied_bytes
        seconds = settings.kernel_seconds
        if seconds is None:
            return kernel.seconds or 0.0
        seconds = seconds(kernel) if callable(seconds) else seconds
        if not 0 <= seconds < float("inf"):
            raise DeviceError(f"kernel_seconds says that {kernel.label} takes {seconds} seconds")
        return seconds

    def _fault(self, kind: str, label: str) -> Fault | None:
        return self.faults.find(kind, label) if self.settings.faults else None


class _Timed:
    """A command: a kernel, the host's time when it was launched, and the fault it has."""

    __slots__ = ("_fault", "_kernel", "_model", "_stream", "issued", "label")

    def __init__(
        self, model: StreamModel, stream: CommandQueue, kernel: Kernel, issued: float, fault: Fault | None
    ) -> None:
        self.label = kernel.label
        self.issued = issued
        self._model = model
        self._stream = stream
        self._kernel = kernel
        self._fault = fault

    def step(self) -> None:
        """Run it."""
        stream, model = self._stream, self._model
        start = max(stream.time, self.issued)
        end = stream.time = start + model.seconds_of(self._kernel)
        if self._fault is not None:
            error = fault_error(self._fault, f"{stream.name}: {self.label}")
            if self._kernel.failed is None:
                raise error
            self._kernel.failed(error)
            return
        self._kernel.step()
        if model.observer is not None:
            model.observer.executed(stream, self._kernel, start, end)


class _Record:
    """A command: take down the time for a mark."""

    __slots__ = ("_stream", "mark")
    label = "the recording of an event"

    def __init__(self, stream: CommandQueue, mark: Mark) -> None:
        self.mark = mark
        self._stream = stream

    def step(self) -> None:
        """The stream is there."""
        self.mark.time = self._stream.time
