"""CudaRuntime: one CUDA device - its streams, events, memory, copies, captures.

stream, event  what is asked of the device in order, and marks in that
completion     callbacks when events are done
timing         when kernels ran
memory         device memory; staging, pinned memory of the host
copies         copies; capture, CUDA graphs
errors         what CUDA says is wrong, and what mends it
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import Device
from dagexec.core.runtime import DeviceRuntime, RuntimeStatistics, check_copy, runtime_of
from dagexec.core.stream import Priority, Stream, StreamFailure, new_failure
from dagexec.devices.cuda.arrays import is_on_device, stand_in
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.capture import CudaCapture
from dagexec.devices.cuda.completion import Completions
from dagexec.devices.cuda.copies import broadcast_to, copy_kernel, fetch, forget_peers, issue
from dagexec.devices.cuda.cudnn_handle import CudnnHandle
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.errors import NOT_READY, check_device, device_error, is_sticky, status_of
from dagexec.devices.cuda.event import CudaEvent, NativeEvent, NativeEvents
from dagexec.devices.cuda.in_flight import ArraysInFlight, staged_downloads
from dagexec.devices.cuda.memory import CudaMemory, captures
from dagexec.devices.cuda.staging import Staging
from dagexec.devices.cuda.stream import CudaStream
from dagexec.devices.cuda.timing import DeviceTimes
from dagexec.devices.stream_pool import StreamPool
from dagexec.errors import DeviceError
from dagexec.platform.forking import reset_after_fork

Array = npt.NDArray[Any]

_runtimes: weakref.WeakSet[CudaRuntime] = weakref.WeakSet()


class _Guard:
    """Within it a device is CUDA's current one of the calling thread; afterwards it is the one of before."""

    __slots__ = ("_before", "_runtime")

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._before = -1

    def __enter__(self) -> None:
        self._before = self._runtime.api.getDevice()
        self._runtime.bind_thread()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._runtime.device.index:
            self._runtime.api.setDevice(self._before)


class CudaRuntime(DeviceRuntime):
    """A CUDA device.

    Attributes:
        api: `cupy.cuda.runtime`.
        natives: events of CUDA, to use again.
        memory, staging, times, completions: see their modules.
        land: takes what copies have brought to the host to its place; for who finds something done.
        lost: why nothing works on the device any more, None while it works.
    """

    issues_at_launch = True

    def __init__(self, device: Device) -> None:
        """Raises DeviceError, with the command that mends it, when there is no such device here."""
        super().__init__(device)
        check_device(device)
        self.api: Any = cupy().cuda.runtime
        self.lost: StreamFailure | None = None
        self.natives = NativeEvents(self)
        self.memory = CudaMemory(self)
        self.staging = Staging(self)
        self.times = DeviceTimes(self)
        self.completions = Completions(self)
        self.land = staged_downloads.land
        self._in_flight = ArraysInFlight()
        self._streams = StreamPool(device, self._new_stream)
        self._to_give_back: deque[CudaStream] = deque()
        self._graphs: deque[tuple[int, int]] = deque()
        reset_after_fork(self, CudaRuntime._forked)
        _runtimes.add(self)

    def _forked(self) -> None:
        """In a child made by `os.fork` CUDA does not work."""
        error = DeviceError(
            f"{self.device}: CUDA does not work in a process made by os.fork; start it with: "
            "multiprocessing.get_context('spawn')"
        )
        self._lose(new_failure(str(self.device), error))

    # Threads and devices

    def guard(self) -> AbstractContextManager[None]:
        """Within it this is CUDA's current device of the calling thread; afterwards it is the one of before."""
        return _Guard(self)

    def bind_thread(self) -> None:
        """Make this CUDA's current device of the calling thread, with a context: the driver's calls need one."""
        index = self.device.index
        self.api.setDevice(index)
        if index not in current.devices:
            self.api.memGetInfo()  # the cheapest call of the runtime that makes the device's context the thread's
            current.devices = current.devices | {index}

    # Streams

    def lease(self, priority: Priority = Priority.NORMAL) -> CudaStream:
        """An idle stream of that priority; the one given back last, or a new one. Raises DeviceError after a loss."""
        self._check_works()
        self._take_back()
        return self._streams.lease(priority)

    def _new_stream(self, number: int, priority: Priority) -> CudaStream:
        with self.guard():
            return CudaStream(self, number, priority)

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream. Raises DeviceError for one that is not leased, captured, or not idle."""
        self._streams.give_back(stream)

    def give_back_later(self, stream: CudaStream) -> None:
        """As `give_back`, once the stream is idle: some later lease sees to it."""
        self._to_give_back.append(stream)

    def _take_back(self) -> None:
        for _ in range(len(self._to_give_back)):
            try:
                stream = self._to_give_back.popleft()
            except IndexError:
                return
            if stream.is_idle:
                self.give_back(stream)
            else:
                self._to_give_back.append(stream)

    def streams(self) -> tuple[CudaStream, ...]:
        """Every stream made so far."""
        return self._streams.all()

    def event(self, owner: str) -> CudaEvent:
        return CudaEvent(owner, self)

    def library_handle(self, name: str) -> AbstractContextManager[object]:
        """A new handle of cuDNN. Raises DeviceError, with the command that mends it, where none serves."""
        return CudnnHandle(self, name)

    # Failures

    def device_failed(self, error: BaseException, label: str) -> StreamFailure:
        """CUDA has found `error` by way of `label`: every stream of the device fails, if nothing works there any more.

        The failure to go by.
        """
        found = new_failure(label, device_error(self.device, error, label))
        if is_sticky(status_of(error)):
            self._lose(found)
        return self.lost or found

    def _lose(self, failure: StreamFailure) -> None:
        if self.lost is None:
            self.lost = failure
        for stream in self.streams():
            stream.fail(self.lost)

    def _check_works(self) -> None:
        if self.lost is not None:
            raise DeviceError(str(self.lost.error)) from self.lost.error

    # Memory and copies

    def allocate(self, nbytes: int) -> Array:
        """Device memory, as a `cupy.ndarray` of bytes. Raises ResourceError when the device cannot hold it."""
        self._check_works()
        return self.memory.allocate(nbytes)

    def stand_in(self, nbytes: int) -> Array:
        """See DeviceRuntime: of an address that no memory of a device has."""
        return cast(Array, stand_in(nbytes, self.device.index))

    def pinned(self, nbytes: int) -> Array:
        """Bytes of the host that do not move: copies from and to them can be captured, and need no staging."""
        return self.staging.pinned(nbytes)

    def marks_of_busy_streams(self) -> list[NativeEvent]:
        """An event at the present end of every stream that is not idle, of this device and every other."""
        marks: list[NativeEvent] = []
        for runtime in tuple(_runtimes):
            if runtime.lost is None:
                with runtime.guard():
                    pointers = [0, *(stream.pointer for stream in runtime.streams())]
                    marks += [runtime._mark(p) for p in pointers if runtime.api.streamQuery(p) == NOT_READY]
        return marks

    def _mark(self, pointer: int) -> NativeEvent:
        native = self.natives.take()
        self.api.eventRecord(native.pointer, pointer)
        return native

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Launch a copy on `stream`. Raises ShapeError for other shapes or dtypes.

        Memory of the host that is not pinned is read now, and written when the stream is there.
        """
        self._own(stream).launch(copy_kernel(self, destination, source))

    def copy_now(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done.

        With a current stream the copy is made on it, after what is there; raises what the stream failed with. Without
        one, nothing orders it after other work: whoever has not waited for the work before gets its old bytes. Within
        a kernel's step the copy is part of the kernel, and nothing is waited for.
        """
        if destination.shape != source.shape:
            source = broadcast_to(source, tuple(destination.shape))
        check_copy(destination, source)
        if current.stream is not None:
            issue(self, destination, source)
            return
        if not (is_on_device(destination) or is_on_device(source)):  # strings stay on the host
            np.copyto(destination, source)
            return
        stream = self.stream_in_use()
        if stream is not None:
            self._copy_on(self._own(stream), destination, source)
            return
        own = self.lease()
        try:
            self._copy_on(own, destination, source)
        finally:
            own.synchronize()
            self.give_back(own)

    def _copy_on(self, stream: CudaStream, destination: Array, source: Array) -> None:
        stream.check_not_captured("used for a copy that is waited for")
        if is_on_device(source) and not is_on_device(destination):
            fetch(self, destination, source, stream)
            return
        kernel = copy_kernel(self, destination, source)
        stream.launch(kernel)
        event = self.event(kernel.label)
        event.record(stream)
        event.finish()

    def uses(self, array: Array, stream: CudaStream, *, writes: bool) -> NativeEvent:
        """What was put on `stream` last writes to, or reads, an array of the host: keep it until it is done.

        The event that stands for it. Not for a stream that is captured: a capture keeps what it uses.
        """
        native = stream.mark()
        self._in_flight.add(array, native, self.api.eventQuery, writes=writes)
        return native

    def finish_in_flight(self, source: Array) -> None:
        """Block until nothing writes to `source`, an array of the host, any more."""
        for native in self._in_flight.on(source, self.api.eventQuery):
            try:
                self.api.eventSynchronize(native.pointer)
            except Exception as error:
                raise self.device_failed(error, "a copy").error from error
        staged_downloads.land()

    # Captures

    @contextmanager
    def capture(self, streams: Sequence[Stream]) -> Iterator[CudaCapture]:
        """Within it, what is asked of `streams` is captured. Raises DeviceError for a stream that is captured already.

        What is raised within ends the capture; the streams can be used again.
        """
        self._destroy_graphs()
        members = [self._own(stream) for stream in streams]
        capture = CudaCapture(self, members)
        self._prepare_libraries(members)
        capture.begin()
        try:
            yield capture
        except BaseException:
            capture.cancel()
            raise
        capture.end()

    def _prepare_libraries(self, streams: Sequence[CudaStream]) -> None:
        """Let libraries make now what they make at the first use on a stream or thread: that cannot be captured."""
        for thing in self.made():
            prepare = getattr(thing, "before_capture", None)
            if prepare is not None:
                prepare(streams)

    def keep_graph(self, capture: CudaCapture, graph: int, executable: int) -> None:
        """Destroy a graph when its capture is gone, and nothing is under way that may be part of it."""
        weakref.finalize(capture, self._graphs.append, (graph, executable)).atexit = False

    def _destroy_graphs(self) -> None:
        if not self._graphs or self.lost is not None:
            return
        with captures.lock:
            if captures.count or self.marks_of_busy_streams():
                return
        with self.guard():
            while self._graphs:
                graph, executable = self._graphs.popleft()
                self.api.graphExecDestroy(executable)
                self.api.graphDestroy(graph)

    # The whole device

    def statistics(self) -> RuntimeStatistics:
        return self._streams.statistics(self.memory)

    def close(self) -> None:
        """Wait for what is under way, end the threads, and close what `once` has made, here and for streams."""
        if self.lost is None:
            self.synchronize()
        self.completions.close()
        staged_downloads.forget(self)
        made = [*self.made(), *(thing for stream in self.streams() for thing in stream.made())]
        for thing in made:
            closing = getattr(thing, "close", None)
            if closing is not None:
                closing()
        if self.lost is None:
            self._destroy_graphs()
            self.memory.trim()
            self.staging.close()
            for stream in self.streams():
                stream.close()
            self.natives.close()
        forget_peers()
        _runtimes.discard(self)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device != self.device:
            raise DeviceError(f"{stream.name} is not a stream of {self.device}")
        return stream


def cuda_runtime(device: Device) -> CudaRuntime:
    """The runtime of a CUDA device. Raises DeviceError when there is no such device here."""
    runtime = runtime_of(device)
    if not isinstance(runtime, CudaRuntime):
        raise DeviceError(f"{device} is not a CUDA device")
    return runtime
