"""HostRuntime: the runtime of `cpu`, whose streams do what is launched before the launch returns.

So what is written for streams and events works on the host too, with nothing ever to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPUContext, Device
from dagexec.core.event import HostEvent
from dagexec.core.runtime import (
    DeviceRuntime,
    Event,
    Kernel,
    Priority,
    RuntimeStatistics,
    Stream,
    StreamFailure,
    StreamObserver,
)
from dagexec.errors import DeviceError, ShapeError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import physical_bytes

Array = npt.NDArray[Any]

_failures = count(1)


class HostStream(Stream):
    """A stream that is always idle. It fails as any other does, and passes over what is launched after a failure."""

    def __init__(self, device: Device, number: int, priority: Priority) -> None:
        self.device = device
        self.name = f"{device} stream {number}"
        self.priority = priority
        self.observer: StreamObserver | None = None
        self.launches = 0
        self.capture: HostCapture | None = None
        self._failure: StreamFailure | None = None

    def launch(self, kernel: Kernel) -> None:
        """Run `kernel`, unless the stream has failed. What it raises is the stream's failure."""
        if self.capture is not None:
            self.capture.keep(lambda: self.launch(kernel))
            return
        self.launches += 1
        observer = self.observer
        if observer is not None:
            observer.launched(self, kernel)
        if self._failure is not None:
            return
        start = perf_counter()
        try:
            kernel.step()
        except Exception as error:
            self._fail(kernel.label, error)
            return
        if observer is not None:
            observer.executed(self, kernel, start, perf_counter())

    def wait(self, event: Event) -> None:
        """Block the host until `event` is done; what made it FAILED makes the stream fail."""
        self._wait(event, False)

    def follow(self, event: Event) -> None:
        """Block the host until `event` is done, well or not."""
        self._wait(event, True)

    def _wait(self, event: Event, order_only: bool) -> None:
        if self.capture is not None:
            self.capture.check_records(self, event)
            self.capture.keep(lambda: self._wait(event, order_only))
            return
        try:
            event.finish()
        except BaseException as error:
            if event.error is None:
                raise
            if not order_only and self._failure is None:
                self._fail(f"event of {event.owner}", error)

    def captures(self, event: Event) -> bool:
        """Keep the recording of `event` while the stream is captured; False when it is not."""
        capture = self.capture
        if capture is None:
            return False
        capture.record(self, event)
        return True

    def synchronize(self, timeout: float | None = None) -> bool:
        """True."""
        return True

    @property
    def is_idle(self) -> bool:
        """True."""
        return True

    @property
    def failure(self) -> StreamFailure | None:
        """The first failure since the last reset."""
        return self._failure

    def abandon(self, error: BaseException) -> None:
        """Nothing to give up: the stream is idle."""

    def reset(self) -> None:
        """Forget the failure."""
        self._failure = None
        self.failing = False

    def _fail(self, label: str, error: BaseException) -> None:
        self._failure = StreamFailure(label, error, next(_failures))
        self.failing = True


class HostCapture:
    """What was asked of a few host streams, in order."""

    def __init__(self) -> None:
        self._commands: list[Callable[[], object]] = []
        self._recorded: set[int] = set()
        self._kept: list[Event] = []

    def keep(self, command: Callable[[], object]) -> None:
        """One more command."""
        self._commands.append(command)

    def record(self, stream: HostStream, event: Event) -> None:
        """Keep the recording of `event`."""
        self._recorded.add(id(event))
        self._kept.append(event)
        self.keep(lambda: event.record(stream))

    def check_records(self, stream: HostStream, event: Event) -> None:
        """Raise DeviceError unless the capture records `event`."""
        if id(event) not in self._recorded:
            raise DeviceError(
                f"{stream.name} is captured and waits for the event of {event.owner}, which the capture did not record"
            )

    def detach(self) -> None:
        """Nothing changes: the streams do the work."""

    def replay(self) -> None:
        """Do all of it."""
        for command in self._commands:
            command()


class HostRuntime(DeviceRuntime):
    """The host as a device."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._context = CPUContext(device)
        self._lock = ProcessLock()
        self._pools: dict[Priority, list[HostStream]] = {priority: [] for priority in Priority}
        self._streams: list[HostStream] = []
        self._leased: set[HostStream] = set()

    def lease(self, priority: Priority = Priority.NORMAL) -> HostStream:
        """A stream nobody else uses."""
        with self._lock.own:
            pool = self._pools[priority]
            if pool:
                stream = pool.pop()
            else:
                stream = HostStream(self.device, len(self._streams), priority)
                self._streams.append(stream)
            self._leased.add(stream)
            return stream

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream. Raises DeviceError for one that is not."""
        with self._lock.own:
            if not isinstance(stream, HostStream) or stream not in self._leased:
                raise DeviceError(f"{stream.name} is not leased from {self.device}")
            stream.reset()
            stream.observer = None
            self._leased.remove(stream)
            self._pools[stream.priority].append(stream)

    def event(self, owner: str) -> HostEvent:
        """A new event."""
        return HostEvent(owner)

    def allocate(self, nbytes: int) -> Array:
        """Host memory. Raises ResourceError when the system refuses it."""
        return self._context.allocate(nbytes)

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Copy now, unless the stream has failed. Raises ShapeError for other shapes or dtypes."""
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise ShapeError(
                f"a copy from a {source.dtype} array of shape {source.shape} to a {destination.dtype} array of shape "
                f"{destination.shape}: expected the same"
            )
        step = lambda: np.copyto(destination, source)  # noqa: E731
        stream.launch(Kernel(step, "copy on the host"))

    @contextmanager
    def capture(self, streams: Sequence[Stream]) -> Iterator[HostCapture]:
        """Within it, what is asked of `streams` is kept. Raises DeviceError for a stream that is captured already."""
        mine = [stream for stream in streams if isinstance(stream, HostStream)]
        for stream in streams:
            if not isinstance(stream, HostStream) or stream.capture is not None:
                raise DeviceError(f"{stream.name} is not a stream of {self.device}, or is captured already")
        capture = HostCapture()
        for stream in mine:
            stream.capture = capture
        try:
            yield capture
        finally:
            for stream in mine:
                stream.capture = None

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment. The bytes of host memory are not counted."""
        with self._lock.own:
            streams = list(self._streams)
            return RuntimeStatistics(
                streams=len(streams),
                leased=len(self._leased),
                busy=0,
                launches=sum(stream.launches for stream in streams),
                allocated_bytes=0,
                peak_bytes=0,
                limit_bytes=physical_bytes(),
            )
