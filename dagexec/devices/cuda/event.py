"""CudaEvent: a mark in a stream of a CUDA device.

CUDA knows of errors of the device only. A stream that failed as it was launched to (a step raised) passes that on to
the events recorded after it, so an event keeps the failure of its stream as it was when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagexec.core.stream import Event, EventState, Stream, StreamFailure
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.completion import Completions
from dagexec.devices.cuda.device import NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, SUCCESS
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.devices.cuda.timing import StreamTimes
from dagexec.errors import DeviceError
from dagexec.platform.threads import ThreadWait


class CudaEvent(Event):
    """An event of a CUDA device. Streams of every one of them may wait for it.

    Attributes:
        native: CUDA's event, None before the event is recorded, and when the host recorded it.
        failure: what had failed on the stream when the event was recorded, or failed the device since.
    """

    __slots__ = ("_completions", "_done", "_recorded", "_times", "failure", "native", "owner", "stream")

    def __init__(self, owner: str, completions: Completions) -> None:
        """`owner` names what it stands for."""
        self.owner = owner
        self._completions = completions
        self._times: StreamTimes | None = None
        self.stream: Stream | None = None
        self.native: NativeEvent | None = None
        self.failure: StreamFailure | None = None
        self._recorded = False
        self._done = False

    def record(self, stream: Stream | None) -> None:
        """Mark the present end of `stream`. Raises DeviceError for a second time, and for a stream of another kind."""
        if self._recorded:
            raise DeviceError(f"event of {self.owner} is recorded twice in one run (state {self.query().name})")
        if stream is None:
            self._recorded = self._done = True
            return
        place = getattr(stream, "place", None)
        if place is None or stream.device.kind != "cuda":
            raise DeviceError(f"event of {self.owner} is a CUDA device's; it cannot be recorded on {stream.name}")
        place(self)

    def placed(self, times: StreamTimes, native: NativeEvent | None, failure: StreamFailure | None) -> None:
        """The event is where `native` was recorded on the stream of `times`, which had failed with `failure` then.

        None stands for a place on a device that is lost, where nothing is done any more.
        """
        self.native = native
        self.failure = failure
        self.stream = times.stream
        self._times = times
        self._done = native is None
        self._recorded = True

    @property
    def is_known_done(self) -> bool:
        """True when somebody has found the event done. Costs nothing."""
        return self._done

    @property
    def is_done(self) -> bool:
        """True when all before the event was done or skipped."""
        if not self._done and self.native is not None:
            status = self._completions.runtime.api.eventQuery(self.native.pointer)
            if status == NOT_READY:
                return False
            if status != SUCCESS:
                self._lost(cupy().cuda.runtime.CUDARuntimeError(status))
            staged_downloads.land()
            self._done = True
        return self._done

    def query(self) -> EventState:
        if not self._recorded:
            return EventState.INITIALIZED
        if not self.is_done:
            return EventState.SCHEDULED
        return EventState.SUCCESS if self.failure is None else EventState.FAILED

    def finish(self, timeout: float | None = None) -> bool:
        """Block the host until the event is done, and raise what failed before it."""
        self.check_recorded()
        if not self._done and not self.wait(timeout):
            return False
        if self._times is not None:
            self._times.report()
            observer = self._times.stream.observer
            if observer is not None:
                observer.host_waited(self)
        if self.failure is not None:
            raise self.failure.error
        return True

    def wait(self, timeout: float | None) -> bool:
        """Block the host until the event is done; False after `timeout` seconds. Raises nothing for what failed."""
        native = self.native
        assert native is not None
        if timeout is not None:
            told = ThreadWait()
            self.when_done(told.notify)
            return told.wait(max(0.0, timeout)) and self.is_done
        try:
            self._completions.runtime.api.eventSynchronize(native.pointer)
        except Exception as error:
            self._lost(error)
        staged_downloads.land()
        self._done = True
        return True

    @property
    def error(self) -> BaseException | None:
        return self.failure.error if self.failure is not None and self.is_done else None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the event is done. Raises DeviceError when it was never recorded."""
        self.check_recorded()
        if self.native is None or self.is_done:
            if self._times is not None:
                self._times.report()
            callback()
        else:
            self._completions.add(self.owner, self.native, self._times, callback)

    def reset(self) -> None:
        self._recorded = self._done = False
        self.stream = self.native = self.failure = self._times = None

    def check_recorded(self) -> None:
        """Raise DeviceError when the event was not recorded."""
        if not self._recorded:
            raise DeviceError(f"event of {self.owner} is waited for but was never recorded")

    def _lost(self, error: Any) -> None:
        self.failure = self._completions.runtime.device_failed(error, f"event of {self.owner}")
