"""CudaRuntime: one CUDA device, with copies, captures and libraries.

device         CUDA itself on a device, its events, its failures
streams        what is asked of the device in order; stream, event: one, and marks in that
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
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import Device
from dagexec.core.runtime import RuntimeStatistics, check_copy, runtime_of
from dagexec.core.stream import Stream
from dagexec.devices.cuda.arrays import is_on_device
from dagexec.devices.cuda.capture import CudaCapture
from dagexec.devices.cuda.copies import broadcast_to, copy_kernel, fetch, forget_peers, issue
from dagexec.devices.cuda.cudnn_handle import CudnnHandle
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.devices.cuda.memory import captures
from dagexec.devices.cuda.stream import CudaStream
from dagexec.devices.cuda.streams import CudaStreams, devices
from dagexec.errors import DeviceError

Array = npt.NDArray[Any]


class CudaRuntime(CudaStreams):
    """A CUDA device."""

    def __init__(self, device: Device) -> None:
        """Raises DeviceError, with the command that mends it, when there is no such device here."""
        super().__init__(device)
        self._graphs: deque[tuple[int, int]] = deque()

    def library_handle(self, name: str) -> AbstractContextManager[object]:
        """A new handle of cuDNN. Raises DeviceError, with the command that mends it, where none serves."""
        return CudnnHandle(self, name)

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
        # to be destroyed when the capture is gone, and nothing is under way that may be part of it
        weakref.finalize(capture, self._graphs.append, capture.end()).atexit = False

    def _prepare_libraries(self, streams: Sequence[CudaStream]) -> None:
        """Let libraries make now what they make at the first use on a stream or thread: that cannot be captured."""
        for thing in self.made():
            prepare = getattr(thing, "before_capture", None)
            if prepare is not None:
                prepare(streams)

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
        staged_downloads.forget(self.staging)
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
        devices.discard(self)

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
