"""CudaEvent: an event of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagexec.core.cuda.binding import cupy
from dagexec.core.errors import DeviceError
from dagexec.core.event import EventState
from dagexec.core.runtime import Event, Stream

if TYPE_CHECKING:
    from dagexec.core.cuda.runtime import CudaRuntime


class CudaEvent(Event):
    """A mark in a stream of a CUDA device, without timing."""

    def __init__(self, owner: str, runtime: CudaRuntime) -> None:
        self.owner = owner
        self.stream: Stream | None = None
        with runtime.guard():
            self._native = cupy().cuda.Event(block=True, disable_timing=True)
        self.pointer: int = self._native.ptr

    def record(self, stream: Stream | None) -> None:
        """Mark this place of `stream`."""
        if self.stream is not None:
            raise DeviceError(f"event of {self.owner} is recorded twice in one run")
        if stream is None:
            raise DeviceError(f"event of {self.owner} is one of a CUDA device: it is recorded on a stream")
        self._native.record(stream.native)  # type: ignore[attr-defined]
        self.stream = stream

    def query(self) -> EventState:
        """The state now."""
        if self.stream is None:
            return EventState.INITIALIZED
        return EventState.SUCCESS if self._native.done else EventState.SCHEDULED

    def finish(self, timeout: float | None = None) -> bool:
        """Block until the event is done."""
        self._native.synchronize()
        return True

    @property
    def error(self) -> BaseException | None:
        """What failed before the event."""
        failure = None if self.stream is None else self.stream.failure
        return None if failure is None else failure.error

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when it is done."""
        self._native.synchronize()
        callback()

    def reset(self) -> None:
        """Back to INITIALIZED."""
        self.stream = None
