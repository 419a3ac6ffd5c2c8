"""The stand-ins for `cupy.cuda.runtime`, `cupy.cuda.driver` and streams: whatever is launched is done at once."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

from tests.cuda.emulated.arrays import Memory, MemoryPointer, UnownedMemory, ndarray
from tests.cuda.emulated.compiler import EmulatedKernel, build

DEVICES = 2
_numbers = itertools.count(1)
_kernels: dict[int, EmulatedKernel] = {}


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime."""


class OutOfMemoryError(MemoryError):
    """The device has no memory left."""


class _Thread(threading.local):
    device = 0


_thread = _Thread()


class Runtime:
    """`cupy.cuda.runtime`."""

    cudaDevAttrMultiProcessorCount = 16
    memcpyDefault = 4
    CUDARuntimeError = CUDARuntimeError

    def getDeviceCount(self) -> int:
        return DEVICES

    def getDevice(self) -> int:
        return _thread.device

    def setDevice(self, index: int) -> None:
        if not 0 <= index < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _thread.device = index

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return {16: 1}[attribute]

    def memcpyAsync(self, destination: int, source: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(destination, source, size)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        pass


class Driver:
    """`cupy.cuda.driver`."""

    def launchKernel(self, function: int, *numbers: int) -> None:
        grid, block, (shared, _stream, parameters, _extra) = numbers[:3], numbers[3:6], numbers[6:]
        kernel = _kernels[function]
        kernel.run(kernel.copied(parameters), grid, block, shared)


class Device:
    """`cupy.cuda.Device`, as a context manager."""

    def __init__(self, index: int) -> None:
        self.id = index
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(_thread.device)
        Runtime().setDevice(self.id)
        return self

    def __exit__(self, *_error: object) -> None:
        _thread.device = self._before.pop()


class Stream:
    """`cupy.cuda.Stream`."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self.ptr = next(_numbers)
        self.done = True

    def synchronize(self) -> None:
        pass


class Event:
    """`cupy.cuda.Event`."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = next(_numbers)
        self.done = True

    def record(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class RawModule:
    """`cupy.RawModule`."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._library = build(code)

    def get_function(self, name: str) -> Any:
        number = next(_numbers)
        _kernels[number] = EmulatedKernel(self._library, name)
        kernel = type("Function", (), {"ptr": number})()
        return type("RawKernel", (), {"kernel": kernel})()


class _Namespace:
    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


def new_cupy() -> Any:
    """A module `cupy`."""
    memory = _Namespace(OutOfMemoryError=OutOfMemoryError)
    cuda = _Namespace(
        runtime=Runtime(), driver=Driver(), Device=Device, Stream=Stream, Event=Event, Memory=Memory,
        UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, memory=memory,
    )  # fmt: skip
    return _Namespace(__version__="14.2.0", cuda=cuda, ndarray=ndarray, RawModule=RawModule)
