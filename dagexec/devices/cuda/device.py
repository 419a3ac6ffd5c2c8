"""CudaDevice: CUDA itself on one device - its functions, its events, and what becomes of the device when it fails.

What is made of that (`CudaStreams`, `CudaRuntime`) is in `streams` and `runtime`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from dagexec.core.device import Device
from dagexec.core.runtime import DeviceRuntime
from dagexec.core.stream import StreamFailure, new_failure
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.errors import check_device, device_error, is_sticky, status_of


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

    def __init__(self, runtime: CudaDevice) -> None:
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


class _Guard:
    """Within it a device is CUDA's current one of the calling thread; afterwards it is the one of before."""

    __slots__ = ("_before", "_runtime")

    def __init__(self, runtime: CudaDevice) -> None:
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


class CudaDevice(DeviceRuntime):
    """A CUDA device, as what works on it knows it.

    Attributes:
        api: `cupy.cuda.runtime`.
        natives: events of CUDA, to use again.
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
        self.fail_streams(self.lost)

    @abstractmethod
    def fail_streams(self, failure: StreamFailure) -> None:
        """Every stream of the device has failed with `failure`, unless it has before."""

    @abstractmethod
    def marks_of_busy_streams(self) -> list[NativeEvent]:
        """An event at the present end of every stream that is not idle, of this device and every other."""
