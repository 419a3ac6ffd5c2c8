"""CudaStreams: a CUDA device with its streams, events and memory; what copies and captures are made on."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, cast

import numpy.typing as npt

from dagexec.core.device import Device
from dagexec.core.stream import Priority, Stream, StreamFailure, new_failure
from dagexec.devices.cuda.arrays import stand_in
from dagexec.devices.cuda.completion import Completions
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.errors import NOT_READY
from dagexec.devices.cuda.event import CudaEvent
from dagexec.devices.cuda.in_flight import ArraysInFlight, staged_downloads
from dagexec.devices.cuda.memory import CudaMemory
from dagexec.devices.cuda.staging import Staging
from dagexec.devices.cuda.stream import CudaStream
from dagexec.devices.cuda.timing import DeviceTimes
from dagexec.devices.stream_pool import StreamPool
from dagexec.errors import DeviceError
from dagexec.platform.forking import reset_after_fork

Array = npt.NDArray[Any]

devices: weakref.WeakSet[CudaStreams] = weakref.WeakSet()


class CudaStreams(CudaDevice):
    """A CUDA device with streams.

    Attributes:
        memory, staging, times, completions: see their modules.
    """

    def __init__(self, device: Device) -> None:
        """Raises DeviceError, with the command that mends it, when there is no such device here."""
        super().__init__(device)
        self.memory = CudaMemory(self)
        self.staging = Staging(self)
        self.times = DeviceTimes(self)
        self.completions = Completions(self)
        self._in_flight = ArraysInFlight()
        self._streams = StreamPool(device, self._new_stream)
        self._to_give_back: deque[CudaStream] = deque()
        reset_after_fork(self, CudaStreams._forked)
        devices.add(self)

    def _forked(self) -> None:
        """In a child made by `os.fork` CUDA does not work."""
        error = DeviceError(
            f"{self.device}: CUDA does not work in a process made by os.fork; start it with: "
            "multiprocessing.get_context('spawn')"
        )
        self._lose(new_failure(str(self.device), error))

    def lease(self, priority: Priority = Priority.NORMAL) -> CudaStream:
        """An idle stream of that priority; the one given back last, or a new one. Raises DeviceError after a loss."""
        self._check_works()
        self._take_back()
        return self._streams.lease(priority)

    def _new_stream(self, number: int, priority: Priority) -> CudaStream:
        with self.guard():
            return CudaStream(self, number, priority, self.times, self.completions)

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
        return CudaEvent(owner, self.completions)

    def fail_streams(self, failure: StreamFailure) -> None:
        for stream in self.streams():
            stream.fail(failure)

    def _check_works(self) -> None:
        if self.lost is not None:
            raise DeviceError(str(self.lost.error)) from self.lost.error

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
        marks: list[NativeEvent] = []
        for runtime in tuple(devices):
            if runtime.lost is None:
                with runtime.guard():
                    pointers = [0, *(stream.pointer for stream in runtime.streams())]
                    marks += [runtime._mark(p) for p in pointers if runtime.api.streamQuery(p) == NOT_READY]
        return marks

    def _mark(self, pointer: int) -> NativeEvent:
        native = self.natives.take()
        self.api.eventRecord(native.pointer, pointer)
        return native

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
