"""When kernels ran on a CUDA device: events with timing around what is launched on a stream that has an observer.

Nothing waits for them. `StreamTimes.report` tells the observers of what is done by then; it is called whenever somebody
has found a stream, or an event on it, done: `Stream.synchronize`, `Event.finish`, and before callbacks of `when_done`.

Times are seconds of `time.perf_counter`. CUDA tells the milliseconds between two events, as a 32-bit float; so they
count from an event of which the time is known, and that is renewed every second.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from dagexec.core.stream import Event, Kernel, Stream, StreamObserver
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, SUCCESS
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock, new_rlock
from dagexec.platform.records import dataclass

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


class DeviceTimes:
    """The clock of a device."""

    def __init__(self, runtime: CudaDevice) -> None:
        self.runtime = runtime
        self._origin: _Origin | None = None
        self._clock: Any = None
        self._forked()
        reset_after_fork(self, DeviceTimes._forked)

    def _forked(self) -> None:
        self._lock = new_lock()

    def origin(self) -> _Origin:
        """What times count from at present. Call it before the start of what is timed."""
        origin = self._origin
        if origin is None or perf_counter() - origin.seconds > RENEWED_AFTER:
            with self._lock:
                origin = self._origin = self._new_origin()
        return origin

    def _new_origin(self) -> _Origin:
        """Mark a stream that is idle, and look at the clock: the device is there at once."""
        runtime = self.runtime
        if self._clock is None:
            with runtime.guard():
                self._clock = cupy().cuda.Stream(non_blocking=True)
        native = runtime.natives.take(timed=True)
        before = perf_counter()
        runtime.api.eventRecord(native.pointer, self._clock.ptr)
        runtime.api.eventSynchronize(native.pointer)
        return _Origin(native, (before + perf_counter()) / 2)


class StreamTimes:
    """What was launched on one stream and not yet reported, in order.

    Attributes:
        stream, pointer: the stream, and its cudaStream_t.
    """

    def __init__(self, clock: DeviceTimes, stream: Stream, pointer: int) -> None:
        self.stream = stream
        self.pointer = pointer
        self._clock = clock
        self._timed: deque[_Timed] = deque()
        self._lock = new_rlock()  # whoever reports holds it: what came first is told of first

    def begin(self) -> tuple[_Origin, NativeEvent]:
        """What times count from at present, and an event with timing at the present end of the stream."""
        return self._clock.origin(), self._mark()

    def add(self, what: Kernel | Event, observer: StreamObserver, origin: _Origin, start: NativeEvent) -> None:
        """`what` was launched just now, after `begin` gave `origin` and `start`; `observer` wants to know of it."""
        self._timed.append(_Timed(what, observer, origin, start, self._mark()))

    def _mark(self) -> NativeEvent:
        runtime = self._clock.runtime
        native = runtime.natives.take(timed=True)
        runtime.api.eventRecord(native.pointer, self.pointer)
        return native

    def report(self) -> None:
        """Tell observers of what is done and was not reported yet."""
        if not self._timed:
            return
        api = self._clock.runtime.api
        with self._lock:
            while self._timed:
                status = api.eventQuery(self._timed[0].end.pointer)
                if status == NOT_READY:
                    return
                timed = self._timed.popleft()
                if status == SUCCESS:
                    self._report(timed)

    def _report(self, timed: _Timed) -> None:
        elapsed = self._clock.runtime.api.eventElapsedTime
        start = timed.origin.seconds + elapsed(timed.origin.native.pointer, timed.start.pointer) / 1e3
        end = start + elapsed(timed.start.pointer, timed.end.pointer) / 1e3
        if isinstance(timed.what, Kernel):
            timed.observer.executed(self.stream, timed.what, start, end)
        else:
            timed.observer.waited(self.stream, timed.what, start, end)
