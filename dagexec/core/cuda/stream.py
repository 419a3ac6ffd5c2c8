"""CudaStream: a stream of a CUDA device."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from dagexec.core.cuda.binding import cupy
from dagexec.core.cuda.current import launching_on
from dagexec.core.errors import DeviceError
from dagexec.core.runtime import Event, Kernel, Priority, Stream, StreamFailure

if TYPE_CHECKING:
    from dagexec.core.cuda.runtime import CudaRuntime

_failures = count(1)


class CudaStream(Stream):
    """A stream of a CUDA device.

    Attributes:
        pointer: the cudaStream_t.
    """

    def __init__(self, runtime: CudaRuntime, number: int, priority: Priority) -> None:
        self.runtime = runtime
        self.device = runtime.device
        self.name = f"{self.device} stream {number}"
        self.priority = priority
        self.native = cupy().cuda.Stream(non_blocking=True, priority=-1 if priority is Priority.HIGH else 0)
        self.pointer: int = self.native.ptr
        self._failure: StreamFailure | None = None

    def launch(self, kernel: Kernel) -> None:
        """Have `kernel` issue its work to this stream. What it raises is the stream's failure."""
        if self._failure is not None:
            return
        try:
            with self.runtime.guard(), launching_on(self):
                kernel.step()
        except Exception as error:
            self._failure = StreamFailure(kernel.label, error, next(_failures))
            self.failing = True

    def wait(self, event: Event) -> None:
        """What follows waits for `event`."""
        self.follow(event)

    def follow(self, event: Event) -> None:
        """As `wait`, for order only."""
        cupy().cuda.runtime.streamWaitEvent(self.pointer, event.pointer)  # type: ignore[attr-defined]

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until all is done."""
        self.native.synchronize()
        return True

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do any more."""
        return bool(self.native.done)

    @property
    def failure(self) -> StreamFailure | None:
        """The first failure since the last reset."""
        return self._failure

    def abandon(self, error: BaseException) -> None:
        """Fail with `error`."""
        self._failure = StreamFailure("the work left on it", error, next(_failures))
        self.failing = True

    def reset(self) -> None:
        """Forget the failure. Raises DeviceError unless the stream is idle."""
        if not self.is_idle:
            raise DeviceError(f"{self.name} is not idle")
        self._failure = None
        self.failing = False
