"""The stand-ins for CuPy's classes around the runtime: devices, streams, events, graphs, memory."""

from __future__ import annotations

import threading
from typing import Any

from tests.cuda.emulated.errors import CUDARuntimeError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.runtime import Runtime


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


class Classes:
    """CuPy's classes, of one machine."""

    def __init__(self, machine: Machine, runtime: Runtime) -> None:
        self._machine, self._runtime = machine, runtime
        self.current = _Current()
        self.Device = _device_class(machine, runtime)
        self.Stream, self.ExternalStream = _stream_classes(self, machine, runtime)
        self.Event = _event_class(self, machine, runtime)
        self.Graph = _graph_class(self, runtime)
        self.Memory, self.PinnedMemory = _memory_classes(self, machine, runtime)

    def get_current_stream(self, device: int | None = None) -> Any:
        """CuPy's own current stream of the calling thread."""
        index = self._machine.device if device is None else device
        return self.current.streams.get(index) or self.Stream(null=True)

    def get_elapsed_time(self, start_event: Any, end_event: Any) -> float:
        return self._runtime.eventElapsedTime(start_event.ptr, end_event.ptr)


def _device_class(machine: Machine, runtime: Runtime) -> type[Any]:
    class Device:
        def __init__(self, device: int | None = None) -> None:
            self.id = machine.device if device is None else int(device)
            if not 0 <= self.id < len(machine.devices):
                raise CUDARuntimeError(101)
            self._before: list[int] = []

        def __enter__(self) -> Device:
            self._before.append(machine.device)
            machine.device = self.id
            return self

        def __exit__(self, *_error: object) -> None:
            machine.device = self._before.pop()

        def use(self) -> None:
            machine.device = self.id

        def synchronize(self) -> None:
            with self:
                runtime.deviceSynchronize()

        @property
        def attributes(self) -> dict[str, Any]:
            return {"MultiProcessorCount": 1, "WarpSize": 32, "MaxThreadsPerBlock": 1024}

        @property
        def compute_capability(self) -> str:
            return "90"

        @property
        def mem_info(self) -> tuple[int, int]:
            with self:
                return runtime.memGetInfo()

        @property
        def pci_bus_id(self) -> str:
            return runtime.deviceGetPCIBusId(self.id)

    return Device


def _stream_classes(classes: Classes, machine: Machine, runtime: Runtime) -> tuple[type[Any], type[Any]]:
    current = classes.current

    class BaseStream:
        def __init__(self, ptr: int, device_id: int) -> None:
            self.ptr, self.device_id = ptr, device_id
            self._before: list[Any] = []

        def __enter__(self) -> BaseStream:
            device = machine.device if self.device_id < 0 else self.device_id
            self._before.append((device, current.streams.get(device)))
            current.streams[device] = self
            return self

        def __exit__(self, *_error: object) -> None:
            device, before = self._before.pop()
            current.streams[device] = before

        def use(self) -> BaseStream:
            current.streams[machine.device if self.device_id < 0 else self.device_id] = self
            return self

        @property
        def done(self) -> bool:
            return runtime.streamQuery(self.ptr) == 0

        @property
        def is_non_blocking(self) -> bool:
            return bool(runtime.streamGetFlags(self.ptr) & 1)

        @property
        def priority(self) -> int:
            return runtime.streamGetPriority(self.ptr)

        def synchronize(self) -> None:
            runtime.streamSynchronize(self.ptr)

        def record(self, event: Any | None = None) -> Any:
            event = event or classes.Event()
            runtime.eventRecord(event.ptr, self.ptr)
            return event

        def wait_event(self, event: Any) -> None:
            runtime.streamWaitEvent(self.ptr, event.ptr)

        def add_callback(self, callback: Any, arg: Any) -> None:
            runtime.streamAddCallback(self.ptr, lambda _ptr, status, a: callback(self, status, a), arg)

        def launch_host_func(self, callback: Any, arg: Any) -> None:
            runtime.launchHostFunc(self.ptr, callback, arg)

        def begin_capture(self, mode: int | None = None) -> None:
            runtime.streamBeginCapture(self.ptr, 2 if mode is None else mode)

        def end_capture(self) -> Any:
            return classes.Graph._of(runtime.streamEndCapture(self.ptr))

        def is_capturing(self) -> bool:
            return runtime.streamIsCapturing(self.ptr)

    class Stream(BaseStream):
        def __init__(
            self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
        ) -> None:
            self._owned = not (null or ptds)
            pointer = runtime.streamCreateWithPriority(int(non_blocking), priority or 0) if self._owned else 0
            super().__init__(2 if ptds else pointer, machine.device if self._owned else -1)

        def __del__(self) -> None:
            if getattr(self, "_owned", False):
                machine.drop_handle(self.ptr)

    class ExternalStream(BaseStream):
        def __init__(self, ptr: int, device_id: int = -1) -> None:
            super().__init__(ptr, machine.device if device_id < 0 else device_id)

    return Stream, ExternalStream


def _event_class(classes: Classes, machine: Machine, runtime: Runtime) -> type[Any]:
    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            self.ptr = runtime.eventCreateWithFlags(int(block) | 2 * disable_timing | 4 * interprocess)

        def __del__(self) -> None:
            if hasattr(self, "ptr"):
                machine.drop_handle(self.ptr)

        @property
        def done(self) -> bool:
            return runtime.eventQuery(self.ptr) == 0

        def record(self, stream: Any = None) -> None:
            runtime.eventRecord(self.ptr, (stream or classes.get_current_stream()).ptr)

        def synchronize(self) -> None:
            runtime.eventSynchronize(self.ptr)

    return Event


def _graph_class(classes: Classes, runtime: Runtime) -> type[Any]:
    class Graph:
        graph: int
        graphExec: int

        @classmethod
        def _of(cls, graph: int) -> Graph:
            made = cls()
            made.graph, made.graphExec = graph, runtime.graphInstantiate(graph)
            return made

        def launch(self, stream: Any = None) -> None:
            runtime.graphLaunch(self.graphExec, (stream or classes.get_current_stream()).ptr)

        def upload(self, stream: Any = None) -> None:
            runtime.graphUpload(self.graphExec, (stream or classes.get_current_stream()).ptr)

    return Graph


def _memory_classes(classes: Classes, machine: Machine, runtime: Runtime) -> tuple[type[Any], type[Any]]:
    class Memory:
        def __init__(self, size: int) -> None:
            self.size, self.device_id, self.ptr = size, machine.device, 0
            try:
                self.ptr = runtime.malloc(size)
            except CUDARuntimeError as error:
                raise machine.out_of_memory(size) if error.status == 2 else error from None

        @property
        def device(self) -> Any:
            return classes.Device(self.device_id)

        def __del__(self) -> None:
            if getattr(self, "ptr", 0):
                machine.free(machine.block_at(self.ptr))

    class PinnedMemory:
        def __init__(self, size: int, flags: int = 0) -> None:
            self.size = size
            self.ptr = runtime.hostAlloc(size, flags)

        def __del__(self) -> None:
            if getattr(self, "ptr", 0):
                machine.free(machine.block_at(self.ptr))

    return Memory, PinnedMemory
