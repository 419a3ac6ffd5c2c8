"""CudaStream: a stream of a CUDA device.

A kernel's step is called as it is launched: it issues the kernel's work to the current stream. What it raises is the
stream's failure at once, and later launches are skipped. An error that CUDA finds later fails the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from dagexec.core.stream import Event, Kernel, Priority, Stream, StreamFailure, StreamObserver, new_failure
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.captured_work import CapturedWork
from dagexec.devices.cuda.completion import Completions
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, device_error, is_sticky, status_of
from dagexec.devices.cuda.event import CudaEvent
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.devices.cuda.timing import DeviceTimes, StreamTimes
from dagexec.errors import DeviceError
from dagexec.platform.threads import threads

Made = TypeVar("Made")

_PRIORITIES = {Priority.NORMAL: 0, Priority.HIGH: -1}  # to CUDA the lower number is the higher priority


class CudaStream(Stream):
    """A stream of a CUDA device.

    Attributes:
        runtime: the device's.
        native: the `cupy.cuda.Stream`.
        pointer: its cudaStream_t.
        times: what an observer is to be told of when it is done.
    """

    def __init__(
        self, runtime: CudaDevice, number: int, priority: Priority, clock: DeviceTimes, completions: Completions
    ) -> None:
        """Call it with the device current."""
        self.runtime = runtime
        self.device = runtime.device
        self.name = f"{self.device} stream {number}"
        self.priority = priority
        self.native = cupy().cuda.Stream(non_blocking=True, priority=_PRIORITIES[priority])
        self.pointer: int = self.native.ptr
        self._launches = 0
        self.times = StreamTimes(clock, self, self.pointer)
        self._completions = completions
        self._index = self.device.index
        self._get_device = runtime.api.getDevice
        self._set_device = runtime.api.setDevice
        self._api = runtime.api
        self._failure: StreamFailure | None = None
        self._observer: StreamObserver | None = None
        self._capture: CapturedWork | None = None
        self._is_plain = True  # neither observed nor captured
        self._waits = 0
        self._tail: tuple[int, int, NativeEvent] | None = None  # launches and waits before the event recorded last
        self._made: dict[Hashable, object] = {}
        self._making = threads().lock()

    def launch(self, kernel: Kernel) -> None:
        """Have `kernel` issue its work to this stream. Raises DeviceError for what cannot be captured, in a capture.

        It is written without calls of ours, as every operator of a run comes through here.
        """
        self._launches += 1
        if not self._is_plain:
            self._launch_watched(kernel)
            return
        if self.failing:
            return
        here, index = current, self._index
        stream, pointer = here.stream, here.stream_pointer
        device = self._get_device()
        if device != index or index not in here.devices:
            self.runtime.bind_thread()
        here.stream, here.stream_pointer = self, self.pointer
        try:
            kernel.step()
        except Exception as error:
            self._kernel_failed(kernel, error)
        finally:
            here.stream, here.stream_pointer = stream, pointer
            if device != index:
                self._set_device(device)

    def _launch_watched(self, kernel: Kernel) -> None:
        """`launch`, on a stream that is observed or captured."""
        capture, observer = self._capture, self._observer
        if capture is not None:
            capture.kernels.append(kernel)
            self.issue(kernel)
            return
        if observer is not None:
            observer.launched(self, kernel)
        if self.failing:
            return
        try:
            begin = self.times.begin()
        except Exception as error:
            self._kernel_failed(kernel, error)
            return
        self.issue(kernel)
        if observer is not None and not self.failing:
            self.times.add(kernel, observer, *begin)

    def issue(self, kernel: Kernel) -> None:
        """Call `kernel`'s step with this stream and its device as the current ones; what it raises fails the stream."""
        here = current
        stream, pointer = here.stream, here.stream_pointer
        with self.runtime.guard():
            here.stream, here.stream_pointer = self, self.pointer
            try:
                kernel.step()
            except Exception as error:
                self._kernel_failed(kernel, error)
            finally:
                here.stream, here.stream_pointer = stream, pointer

    def _kernel_failed(self, kernel: Kernel, error: Exception) -> None:
        if is_sticky(status_of(error)):
            self.runtime.device_failed(error, kernel.label)
            return
        found = device_error(self.device, error, kernel.label)
        if self._capture is not None:
            raise DeviceError(f"{kernel.label} cannot be captured: {found}") from found
        if kernel.failed is not None:
            kernel.failed(found)
        else:
            self.fail(new_failure(kernel.label, found))

    def fail(self, failure: StreamFailure) -> None:
        """The stream has failed, unless it has before."""
        if self._failure is None:
            self._failure = failure
        self.failing = True

    def wait(self, event: Event) -> None:
        """What follows waits for `event`. A failure before the event is this stream's too, from now on."""
        self._wait(event, False)

    def follow(self, event: Event) -> None:
        """As `wait`, for order only."""
        self._wait(event, True)

    def _wait(self, event: Event, order_only: bool) -> None:
        if not isinstance(event, CudaEvent):
            self._wait_on_host(event, order_only)
            return
        if self._capture is not None:
            self._capture.wait(self.times, event)
            return
        event.check_recorded()
        native, source = event.native, event.stream
        if native is None or self.failing or source is self:
            return
        failure = event.failure
        if failure is not None and not order_only:
            self.fail(failure)
            return
        observer = self._observer
        if observer is None:
            if not event.is_known_done:
                self._waits += 1
                self._api.streamWaitEvent(self.pointer, native.pointer)
            return
        observer.waits(self, event)
        begin = self.times.begin()
        self.wait_for(native)
        self.times.add(event, observer, *begin)

    def _wait_on_host(self, event: Event, order_only: bool) -> None:
        """Wait here for an event of another kind of device."""
        if self._capture is not None:
            self._capture.wait(self.times, event)
        try:
            event.finish()
        except Exception as error:
            if event.error is None:
                raise
            if not order_only:
                self.fail(new_failure(f"event of {event.owner}", error))

    def wait_for(self, native: NativeEvent) -> None:
        """What follows waits for `native`."""
        self._waits += 1
        self._api.streamWaitEvent(self.pointer, native.pointer)

    def place(self, event: CudaEvent) -> None:
        """Record `event` here; on a stream that has failed, too, as its earlier work may be under way."""
        if self._capture is not None:
            self._capture.record(self.times, event)
            return
        native = self._mark_unless_lost()
        event.placed(self.times, native, self._failure)
        if self._observer is not None:
            self._observer.recorded(self, event)

    def mark(self) -> NativeEvent:
        """An event of CUDA, recorded at the present end of the stream. Raises DeviceError when CUDA refuses."""
        try:
            native = self.runtime.natives.take()
            self._api.eventRecord(native.pointer, self.pointer)
        except Exception as error:
            failure = self.runtime.device_failed(error, f"{self.name}: the recording of an event")
            raise failure.error from error
        self._tail = (self._launches, self._waits, native)
        return native

    def _mark_unless_lost(self) -> NativeEvent | None:
        if self.runtime.lost is None:
            try:
                return self.mark()
            except DeviceError:
                if self.runtime.lost is None:
                    raise
        return None

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the host until all is done. Raises DeviceError while the stream is captured."""
        self.check_not_captured("synchronized")
        if timeout is not None:
            event = CudaEvent(f"the end of {self.name}", self._completions)
            event.placed(self.times, self._mark_unless_lost(), None)
            if not event.is_done and not event.wait(timeout):
                return False
        else:
            try:
                self._api.streamSynchronize(self.pointer)
            except Exception as error:
                self.runtime.device_failed(error, self.name)
            staged_downloads.land()
        if self._observer is not None:
            self.times.report()
            self._observer.host_waited(self)
        return True

    def close(self) -> None:
        """Let go of the event at the end, which can be destroyed then. The stream is idle."""
        self._tail = None

    def check_not_captured(self, done: str) -> None:
        """Raise DeviceError when the stream is captured; `done` says what cannot be done to it then."""
        if self._capture is not None:
            raise DeviceError(f"{self.name} is captured: it cannot be {done}, as what was asked of it is not done")

    @property
    def observer(self) -> StreamObserver | None:
        """Who is told of what is asked of the stream from now on, and of what comes of that; or None."""
        return self._observer

    @observer.setter
    def observer(self, observer: StreamObserver | None) -> None:
        self._observer = observer
        self._is_plain = observer is None and self._capture is None

    @property
    def capture(self) -> CapturedWork | None:
        """What takes what is asked of the stream, while it is captured."""
        return self._capture

    @capture.setter
    def capture(self, capture: CapturedWork | None) -> None:
        self._capture = capture
        self._is_plain = capture is None and self._observer is None

    @property
    def launches(self) -> int:
        """Kernels and copies asked for since the stream was made."""
        return self._launches

    @property
    def is_captured(self) -> bool:
        """True while what is asked of it goes into a graph."""
        return self._capture is not None

    @property
    def is_idle(self) -> bool:
        """True when all that was asked for is done; of a stream that is captured, when nothing was before."""
        if self._capture is not None:
            return True
        tail = self._tail
        if tail is not None and tail[:2] == (self._launches, self._waits):
            return self._is_done(self._api.eventQuery(tail[2].pointer))
        return self._is_done(self._api.streamQuery(self.pointer))

    def _is_done(self, status: int) -> bool:
        if status not in (0, NOT_READY):
            self.runtime.device_failed(cupy().cuda.runtime.CUDARuntimeError(status), self.name)
        if status == NOT_READY:
            return False
        staged_downloads.land()
        return True

    @property
    def failure(self) -> StreamFailure | None:
        """The first failure since the last reset."""
        return self._failure

    def abandon(self, error: BaseException) -> None:
        """Fail with `error`, unless the stream is idle or has failed. CUDA ends no kernel: what runs continues."""
        if not self.is_idle:
            self.fail(new_failure(self.name, error))

    def reset(self) -> None:
        """Forget the failure, unless the device has failed. Raises DeviceError while there is work on the stream."""
        if not self.is_idle:
            raise DeviceError(f"{self.name} cannot be reset: it is not idle")
        self._failure = self.runtime.lost
        self.failing = self._failure is not None

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives at the first call for `key`: things that a stream has one of, such as a cuBLAS handle."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return cast(Made, self._made[key])

    def made(self) -> list[object]:
        """What `once` has made."""
        with self._making:
            return list(self._made.values())
