"""SimStream: what the host asks of a simulated stream, put into a `CommandQueue` whose work a driver does later.

Launching appends to a deque, and the driver is told only when the stream was parked, so a launch costs a fraction of a
microsecond. A stream is launched to by one host thread at a time, as whoever leased it sees to.

Latencies, faults and observers are the business of a `StreamModel` (`dagexec.devices.sim.model`), which puts other
commands in the queue; a stream without one has only kernels and waits there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dagexec.core.device import Device
from dagexec.core.stream import Event, Kernel, Priority, StreamObserver
from dagexec.devices.sim.command_queue import CommandQueue, Driver, Mark, Wait
from dagexec.devices.sim.event import SimEvent, mark_of
from dagexec.devices.sim.model import StreamModel
from dagexec.errors import DeviceError


class Route(Protocol):
    """Where commands go that a stream does not take itself."""

    def launch(self, stream: SimStream, kernel: Kernel) -> None:
        """As `Stream.launch`."""

    def wait(self, stream: SimStream, event: Event, order_only: bool) -> None:
        """As `Stream.wait`; with `order_only`, as `Stream.follow`."""

    def record(self, stream: SimStream, event: SimEvent) -> None:
        """As `Event.record`."""


class SimStream(CommandQueue):
    """A stream of a simulated device.

    Attributes:
        model: sees to latencies, faults and observers; None when there are none.
    """

    def __init__(self, device: Device, number: int, priority: Priority, driver: Driver, model: StreamModel) -> None:
        super().__init__(device, number, priority, driver)
        self.model = model.observed_by(model.observer)
        self._device_model = model
        self._capture: Route | None = None
        self._route: Route | None = self.model

    def launch(self, kernel: Kernel) -> None:
        if self._route is not None:
            self._route.launch(self, kernel)
            return
        self.launched += 1
        self._append(kernel)
        if self.parked:
            self.driver.notify(self)

    def launch_all(self, kernels: Sequence[Kernel]) -> None:
        """Append `kernels`, whose launch was paid for already."""
        if self.model is not None:
            for kernel in kernels:
                self.model.issue(self, kernel)
            return
        self.launched += len(kernels)
        self._queue.extend(kernels)
        if self.parked:
            self.driver.notify(self)

    def wait(self, event: Event) -> None:
        """Append a wait, unless the event is this stream's own past or was reached. A host event is waited for here."""
        if self._route is not None or not isinstance(event, SimEvent):
            self._wait(event, False)
            return
        source, position = event.stream, event.position
        passed = source is not None and 0 <= position <= source.done and event.outcome.failed_after >= position
        if passed or source is self:
            return
        self._wait(event, False)

    def follow(self, event: Event) -> None:
        """`wait`, but a failure before the event does not pass on."""
        self._wait(event, True)

    def _wait(self, event: Event, order_only: bool) -> None:
        if self._route is not None:
            self._route.wait(self, event, order_only)
            return
        mark = mark_of(event)
        if mark is None or mark.stream is self or (mark.is_reached and (order_only or mark.failure is None)):
            return
        self.command(Wait(mark, order_only))

    def place(self, event: SimEvent) -> None:
        """Mark the present end of the stream as where `event` is."""
        if self._route is not None:
            self._route.record(self, event)
            return
        event.stream = self
        event.outcome = self.outcome_from_here() if self.failing else self.outcome
        event.position = self.launched

    @property
    def observer(self) -> StreamObserver | None:
        """Who is told of what is asked of the stream from now on; set to None, it is the device's observer again."""
        return None if self.model is None else self.model.observer

    @observer.setter
    def observer(self, observer: StreamObserver | None) -> None:
        model = self.model
        wanted = self._device_model.observer if observer is None else observer
        if wanted is not (None if model is None else model.observer):
            self.model = self._device_model.observed_by(wanted)
            self._route = self.model if self._capture is None else self._capture

    @property
    def capture(self) -> Route | None:
        """Where commands go while they are captured."""
        return self._capture

    @capture.setter
    def capture(self, capture: Route | None) -> None:
        self._capture = capture
        self._route = self.model if capture is None else capture

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the host until the stream is idle. Raises DeviceError while it is captured."""
        if self._capture is not None:
            raise DeviceError(f"{self.name} is captured: what was asked of it is not done, nobody can wait for it")
        if self.done < self.launched and not self.wait_until(self.launched, timeout):
            return False
        if self.model is not None:
            self.model.host_found_idle(self)
        return True

    @property
    def is_timed(self) -> bool:
        return self.model is not None

    def host_found(self, event: Event, mark: Mark) -> None:
        if self.model is not None:
            self.model.host_found(event, mark)

    @property
    def launches(self) -> int:
        """Kernels and copies among the commands asked for."""
        return self.launched - self._not_launches

    @property
    def is_captured(self) -> bool:
        """True while commands are kept, not done."""
        return self._capture is not None
