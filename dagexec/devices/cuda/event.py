"""CudaEvent: a mark in a stream of a CUDA device; and the pool of CUDA's own events that it takes one from.

CUDA knows of errors of the device only. A stream that failed as it was launched to (a step raised) passes that on to
the events recorded after it, so an event keeps the failure of its stream as it was when it was recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from dagexec.core.stream import Event, EventState, Stream, StreamFailure
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.errors import NOT_READY, SUCCESS
from dagexec.errors import DeviceError
from dagexec.platform.threads import ThreadWait

if TYPE_CHECKING:
    from dagexec.devices.cuda.runtime import CudaRuntime
    from dagexec.devices.cuda.stream import CudaStream


class NativeEvent:
    """A cudaEvent_t on loan: it goes back to its pool when the last user of it is gone.

    Streams that were made to wait for it keep what they wait for, so that it can be recorded anew at once.
    """

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: int, free: deque[int]) -> None:
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.pointer)


class NativeEvents:
    """The events of CUDA that a device has, made as they are needed and used again."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        api = cupy().cuda.runtime
        self._create = api.eventCreateWithFlags
        self._flags = {False: api.eventBlockingSync | api.eventDisableTiming, True: 0}
        self._free: dict[bool, deque[int]] = {False: deque(), True: deque()}  # a finalizer takes no lock

    def take(self, timed: bool = False) -> NativeEvent:
        """One that nothing uses. Only a `timed` one can tell times; a thread that waits for it does not sleep."""
        free = self._free[timed]
        try:
            pointer = free.pop()
        except IndexError:
            pointer = self._new(timed)
        return NativeEvent(pointer, free)

    def _new(self, timed: bool) -> int:
        try:
            with self._runtime.guard():
                return int(self._create(self._flags[timed]))
        except Exception as error:
            raise self._runtime.device_failed(error, "a new event").error from error

    def close(self) -> None:
        """Destroy those that are not on loan."""
        destroy = cupy().cuda.runtime.eventDestroy
        for free in self._free.values():
            while free:
                destroy(free.pop())


class CudaEvent(Event):
    """An event of a CUDA device. Streams of every one of them may wait for it.

    Attributes:
        native: CUDA's event, None before the event is recorded, and when the host recorded it.
        failure: what had failed on the stream when the event was recorded, or failed the device since.
    """

    __slots__ = ("_done", "_recorded", "failure", "native", "owner", "runtime", "stream")

    def __init__(self, owner: str, runtime: CudaRuntime) -> None:
        """`owner` names what it stands for."""
        self.owner = owner
        self.runtime = runtime
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

    def placed(self, stream: Stream, native: NativeEvent | None, failure: StreamFailure | None) -> None:
        """The event is where `native` was recorded on `stream`, which had failed with `failure` then.

        None stands for a place on a device that is lost, where nothing is done any more.
        """
        self.native = native
        self.failure = failure
        self.stream = stream
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
            status = self.runtime.api.eventQuery(self.native.pointer)
            if status == NOT_READY:
                return False
            if status != SUCCESS:
                self._lost(cupy().cuda.runtime.CUDARuntimeError(status))
            self.runtime.land()
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
        stream = cast("CudaStream | None", self.stream)
        if stream is not None:
            stream.host_found(self)
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
            self.runtime.api.eventSynchronize(native.pointer)
        except Exception as error:
            self._lost(error)
        self.runtime.land()
        self._done = True
        return True

    @property
    def error(self) -> BaseException | None:
        return self.failure.error if self.failure is not None and self.is_done else None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the event is done. Raises DeviceError when it was never recorded."""
        self.check_recorded()
        if self.native is None or self.is_done:
            if self.stream is not None:
                cast("CudaStream", self.stream).report_times()
            callback()
        else:
            self.runtime.completions.add(self, self.native, callback)

    def reset(self) -> None:
        self._recorded = self._done = False
        self.stream = self.native = self.failure = None

    def check_recorded(self) -> None:
        """Raise DeviceError when the event was not recorded."""
        if not self._recorded:
            raise DeviceError(f"event of {self.owner} is waited for but was never recorded")

    def _lost(self, error: Any) -> None:
        self.failure = self.runtime.device_failed(error, f"event of {self.owner}")
