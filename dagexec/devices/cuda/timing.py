"""When kernels ran on a CUDA device: events with timing around what is launched on a stream that has an observer.

Nothing waits for them. `DeviceTimes.report` tells the observers of what is done by then; it is called whenever somebody
has found a stream, or an event on it, done: `Stream.synchronize`, `Event.finish`, and before callbacks of `when_done`.

Times are seconds of `time.perf_counter`. CUDA tells the milliseconds between two events, as a 32-bit float; so they
count from an event of which the time is known, and that is renewed every second.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dagexec.core.stream import Event, Kernel, StreamObserver
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.errors import NOT_READY, SUCCESS
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.records import dataclass

if TYPE_CHECKING:
    from dagexec.devices.cuda.event import NativeEvent
    from dagexec.devices.cuda.runtime import CudaRuntime
    from dagexec.devices.cuda.stream import CudaStream

RENEWED_AFTER = 1.0
"""Seconds that times count from one event: a 32-bit float then tells them to a tenth of a microsecond."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """An event, and the seconds of `time.perf_counter` when the device came to it."""

    native: NativeEvent
    seconds: float


@dataclass(frozen=True, slots=True)
class _Timed:
    """A kernel, or a wait for an event, between two events."""

    what: Kernel | Event
    observer: StreamObserver
    origin: _Origin
    start: NativeEvent
    end: NativeEvent


class StreamTimes:
    """What was launched on one stream and not yet reported, in order."""

    __slots__ = ("lock", "timed")

    def __init__(self) -> None:
        self.timed: deque[_Timed] = deque()
        self.lock = threading.RLock()  # whoever reports holds it: what came first is told of first


class DeviceTimes:
    """The clock of a device."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._origin: _Origin | None = None
        self._clock: Any = None
        self._forked()
        reset_after_fork(self, DeviceTimes._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    def mark(self, stream: CudaStream) -> NativeEvent:
        """An event with timing, recorded at the present end of `stream`."""
        native = self._runtime.natives.take(timed=True)
        self._runtime.api.eventRecord(native.pointer, stream.pointer)
        return native

    def add(
        self, stream: CudaStream, what: Kernel | Event, observer: StreamObserver, start: NativeEvent, origin: _Origin
    ) -> None:
        """`what` was launched on `stream` just now, after `start`, and `observer` wants to know of it."""
        stream.times.timed.append(_Timed(what, observer, origin, start, self.mark(stream)))

    def origin(self) -> _Origin:
        """What times count from at present. Call it before the start of what is timed."""
        origin = self._origin
        if origin is None or perf_counter() - origin.seconds > RENEWED_AFTER:
            with self._lock:
                origin = self._origin = self._new_origin()
        return origin

    def _new_origin(self) -> _Origin:
        """Mark a stream that is idle, and look at the clock: the device is there at once."""
        runtime = self._runtime
        if self._clock is None:
            with runtime.guard():
                self._clock = cupy().cuda.Stream(non_blocking=True)
        native = runtime.natives.take(timed=True)
        before = perf_counter()
        runtime.api.eventRecord(native.pointer, self._clock.ptr)
        runtime.api.eventSynchronize(native.pointer)
        return _Origin(native, (before + perf_counter()) / 2)

    def report(self, stream: CudaStream) -> None:
        """Tell observers of what is done on `stream` and was not reported yet."""
        times, api = stream.times, self._runtime.api
        with times.lock:
            while times.timed:
                status = api.eventQuery(times.timed[0].end.pointer)
                if status == NOT_READY:
                    return
                timed = times.timed.popleft()
                if status == SUCCESS:
                    self._report(stream, timed)

    def _report(self, stream: CudaStream, timed: _Timed) -> None:
        elapsed = self._runtime.api.eventElapsedTime
        start = timed.origin.seconds + elapsed(timed.origin.native.pointer, timed.start.pointer) / 1e3
        end = start + elapsed(timed.start.pointer, timed.end.pointer) / 1e3
        if isinstance(timed.what, Kernel):
            timed.observer.executed(stream, timed.what, start, end)
        else:
            timed.observer.waited(stream, timed.what, start, end)
