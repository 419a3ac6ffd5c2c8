"""The stand-in for `cupy.cuda.runtime`: CUDA's runtime, over a `Machine`."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cuda.emulated.errors import CUDARuntimeError, EmulationError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.races import Touch
from tests.cuda.emulated.work import Capture, EmulatedEvent, EmulatedStream, Node, Operation

_PROPERTIES = {
    "name": b"emulated device", "totalGlobalMem": 8 << 30, "sharedMemPerBlock": 49152, "warpSize": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsDim": (1024, 1024, 64), "maxGridSize": (2147483647, 65535, 65535),
    "major": 9, "minor": 0, "multiProcessorCount": 1, "clockRate": 1000000, "memoryClockRate": 1000000,
    "memoryBusWidth": 256, "l2CacheSize": 1 << 20, "concurrentKernels": 1, "asyncEngineCount": 2,
}  # fmt: skip


class PointerAttributes:
    """`cupy.cuda.runtime.PointerAttributes`."""

    def __init__(self, device: int, devicePointer: int, hostPointer: int, type: int = -1) -> None:
        self.device, self.devicePointer, self.hostPointer, self.type = device, devicePointer, hostPointer, type


class Runtime:
    """`cupy.cuda.runtime`. Names, parameters and values are the real module's; see tests/cuda/test_conformance.py."""

    CUDARuntimeError = CUDARuntimeError
    PointerAttributes = PointerAttributes
    CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_8I, CUDA_R_8U, CUDA_R_16BF = 0, 1, 2, 3, 8, 14
    cudaDevAttrMaxThreadsPerBlock = 1
    cudaDevAttrMaxGridDimX, cudaDevAttrMaxGridDimY, cudaDevAttrMaxGridDimZ = 5, 6, 7
    cudaDevAttrMaxSharedMemoryPerBlock, cudaDevAttrWarpSize, cudaDevAttrMultiProcessorCount = 8, 10, 16
    cudaDevAttrClockRate, cudaDevAttrConcurrentKernels, cudaDevAttrPciBusId = 13, 31, 33
    cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth, cudaDevAttrL2CacheSize = 36, 37, 38
    cudaDevAttrMaxThreadsPerMultiProcessor, cudaDevAttrUnifiedAddressing = 39, 41
    cudaDevAttrMaxSharedMemoryPerMultiprocessor, cudaDevAttrMaxSharedMemoryPerBlockOptin = 81, 97
    cudaDevAttrMaxBlocksPerMultiprocessor, cudaDevAttrMemoryPoolsSupported = 106, 115
    memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 0, 1, 2, 3, 4
    memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = 0, 1, 2, 3
    hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4
    streamDefault, streamNonBlocking, streamLegacy, streamPerThread = 0, 1, 1, 2
    eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4
    streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = 0, 1, 2
    streamCaptureStatusNone, streamCaptureStatusActive, streamCaptureStatusInvalidated = 0, 1, 2
    is_hip = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    # Devices

    def runtimeGetVersion(self) -> int:
        return 12090

    def driverGetVersion(self) -> int:
        return 12090

    def getDeviceCount(self) -> int:
        return len(self._machine.devices)

    def getDevice(self) -> int:
        return self._machine.device

    def setDevice(self, device: int) -> None:
        self._machine.device = device

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        self._device(device)
        known = {
            1: 1024, 5: 2147483647, 6: 65535, 7: 65535, 8: 49152, 10: 32, 13: 1000000, 16: 1, 31: 1, 33: device,
            36: 1000000, 37: 256, 38: 1 << 20, 39: 2048, 41: 1, 81: 233472, 97: 232448, 106: 32, 115: 1,
        }  # fmt: skip
        if attrib not in known:
            raise EmulationError(f"device attribute {attrib} is not emulated")
        return known[attrib]

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        self._device(device)
        return {**_PROPERTIES, "totalGlobalMem": self._machine.devices[device].limit, "pciBusID": device}

    def deviceGetPCIBusId(self, device: int) -> str:
        self._device(device)
        return f"0000:{device:02x}:00.0"

    def deviceSynchronize(self) -> None:
        machine = self._machine
        machine.called("deviceSynchronize")
        for stream in machine._streams_of(machine.device):
            machine.synchronize(stream)
        machine.raise_failure(machine.device)

    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        self._device(device)
        self._device(peerDevice)
        return int(self._machine.peer_access and device != peerDevice)

    def deviceEnablePeerAccess(self, peerDevice: int) -> None:
        if not self.deviceCanAccessPeer(self._machine.device, peerDevice):
            raise CUDARuntimeError(101)
        peers = self._machine.devices[self._machine.device].peers
        if peerDevice in peers:
            raise CUDARuntimeError(704)
        peers.add(peerDevice)

    def deviceDisablePeerAccess(self, peerDevice: int) -> None:
        peers = self._machine.devices[self._machine.device].peers
        if peerDevice not in peers:
            raise CUDARuntimeError(705)
        peers.remove(peerDevice)

    def _device(self, index: int) -> None:
        if not 0 <= index < len(self._machine.devices):
            raise CUDARuntimeError(101)

    # Memory

    def malloc(self, size: int) -> int:
        self._machine.called("malloc", None, size)
        return self._machine.malloc(size, self._machine.device).ptr if size else 0

    def free(self, ptr: int) -> None:
        self._machine.called("free", None, ptr)
        if ptr:
            self._machine.free(self._machine.block_at(ptr))

    def mallocAsync(self, size: int, stream: int) -> int:
        machine = self._machine
        machine.called("mallocAsync", stream, size)
        machine.refuse_capture(machine.stream(stream))
        if not size:
            return 0
        block = machine.malloc(size, machine.device)
        touch = [machine.device_touch(block.ptr, size, True, machine.device)]
        machine.submit(stream, Operation("mallocAsync", lambda: None, machine.device, touch))
        return block.ptr

    def freeAsync(self, ptr: int, stream: int) -> None:
        machine = self._machine
        machine.called("freeAsync", stream, ptr)
        machine.refuse_capture(machine.stream(stream))
        if ptr:
            block = machine.block_at(ptr)
            touch = [machine.device_touch(ptr, block.size, True, machine.device)]
            machine.submit(stream, Operation("freeAsync", lambda: None, machine.device, touch))
            machine.free(block)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._machine.called("hostAlloc", None, size, flags)
        return self._machine.malloc(size, None).ptr if size else 0

    def freeHost(self, ptr: int) -> None:
        self._machine.called("freeHost", None, ptr)
        if ptr:
            self._machine.free(self._machine.block_at(ptr))

    def memGetInfo(self) -> tuple[int, int]:
        state = self._machine.devices[self._machine.device]
        return state.limit - state.used, state.limit

    def pointerGetAttributes(self, ptr: int) -> PointerAttributes:
        block = self._machine.memories.find(ptr)
        if block is None or block.freed:
            return PointerAttributes(-2, 0, ptr, 0)
        if block.device is None:
            return PointerAttributes(self._machine.device, ptr, ptr, 1)
        return PointerAttributes(block.device, ptr, 0, 2)

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        self.memcpyAsync(dst, src, size, kind, 0)
        self._machine.synchronize(self._machine.stream(0))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        machine = self._machine
        machine.called("memcpyAsync", stream, dst, src, size, kind)
        self._copy(dst, src, size, kind, stream, "memcpyAsync", machine.device)

    def memcpyPeer(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int) -> None:
        self.memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, 0)
        self._machine.synchronize(self._machine.stream(0))

    def memcpyPeerAsync(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
        machine = self._machine
        machine.called("memcpyPeerAsync", stream, dst, dstDevice, src, srcDevice, size)
        for pointer, device in ((dst, dstDevice), (src, srcDevice)):
            block = machine.memories.find(pointer)
            if size and (block is None or block.device != device):
                raise EmulationError(f"memcpyPeerAsync: {pointer:#x} is not memory of device {device}")
        self._copy(dst, src, size, 3, stream, "memcpyPeerAsync", machine.device)

    def _copy(self, dst: int, src: int, size: int, kind: int, stream: int, label: str, device: int) -> None:
        machine = self._machine
        target = machine.stream(stream)
        if not size:
            return
        status = machine.fault("launch", label)
        if status is not None:
            raise CUDARuntimeError(status)
        to, of = machine.touch(dst, size, True), machine.touch(src, size, False)
        places = [None if touch is None else touch.block.device for touch in (of, to)]
        actual = 2 * (places[0] is not None) + (places[1] is not None)
        if kind not in (4, actual):
            raise CUDARuntimeError(1)
        touches = [touch for touch in (to, of) if touch is not None]
        if target.capture is not None and len(touches) < 2:
            machine.refuse_capture(target)  # pageable memory is read, or written, by the calling thread
        held: Any = None
        if of is None and to is not None:
            held = ctypes.string_at(src, size)  # staged before the call returns

        def copy() -> None:
            ctypes.memmove(dst, src if held is None else held, size)

        operation = Operation(label, copy, device, touches, copied_bytes=size)
        machine.submit(stream, operation)
        if to is None:  # pageable memory of the host is written when the call returns
            machine.synchronize(target)

    def memset(self, ptr: int, value: int, size: int) -> None:
        self.memsetAsync(ptr, value, size, 0)
        self._machine.synchronize(self._machine.stream(0))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        machine = self._machine
        machine.called("memsetAsync", stream, ptr, value, size)
        if size:
            touches = [machine.device_touch(ptr, size, True, machine.device)]
            fill: Callable[[], Any] = lambda: ctypes.memset(ptr, value & 255, size) and None  # noqa: E731
            machine.submit(stream, Operation("memsetAsync", fill, machine.device, touches))

    # Streams

    def streamCreate(self) -> int:
        return self.streamCreateWithPriority(0, 0)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self.streamCreateWithPriority(flags, 0)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        self._machine.called("streamCreateWithPriority", None, flags, priority)
        return self._machine.new_stream(flags, max(-5, min(0, priority)))

    def streamDestroy(self, stream: int) -> None:
        machine = self._machine
        machine.called("streamDestroy", stream)
        found = machine.stream(stream)
        machine.refuse_capture(found)
        machine.drop_handle(stream)

    def streamGetFlags(self, stream: int) -> int:
        return self._machine.stream(stream).flags

    def streamGetPriority(self, stream: int) -> int:
        return self._machine.stream(stream).priority

    def streamSynchronize(self, stream: int) -> None:
        self._machine.called("streamSynchronize", stream)
        self._machine.synchronize(self._machine.stream(stream))

    def streamQuery(self, stream: int) -> int:
        machine = self._machine
        try:
            machine.called("streamQuery", stream)
            found = machine.stream(stream)
            machine.refuse_capture(found)
        except CUDARuntimeError as error:
            return error.status
        failure = machine.devices[found.device].failure
        if failure is not None:
            return failure.status
        if found.sim is not None and not found.sim.is_idle:
            return 600
        machine.learn(found.clock)
        return 0

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        machine = self._machine
        machine.called("streamWaitEvent", stream, event)
        machine.wait_event(machine.stream(stream), machine.handle(event, EmulatedEvent))

    def launchHostFunc(self, stream: int, callback: Callable[[int], object], arg: int) -> None:
        machine = self._machine
        machine.called("launchHostFunc", stream)
        operator.index(arg)
        self._call_host(stream, "a host function", lambda: callback(arg))

    def streamAddCallback(
        self, stream: int, callback: Callable[[int, int, Any], object], arg: Any, flags: int = 0
    ) -> None:
        machine = self._machine
        machine.called("streamAddCallback", stream)
        machine.refuse_capture(machine.stream(stream))
        self._call_host(stream, "a callback", lambda: callback(stream, 0, arg))

    def _call_host(self, stream: int, label: str, callback: Callable[[], object]) -> None:
        """Have `callback` called when `stream` comes to it: the host knows then what is done."""
        machine = self._machine
        operation = Operation(label, list, machine.device)

        def step() -> list[Touch]:
            machine.learn(operation.clock)
            return machine.host_function(callback)

        operation.step = step
        machine.submit(stream, operation)

    # Events

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventCreateWithFlags(self, flags: int) -> int:
        machine = self._machine
        machine.called("eventCreateWithFlags", None, flags)
        event = EmulatedEvent(0, machine.device, flags)
        event.handle = machine.new_handle(event)
        return event.handle

    def eventDestroy(self, event: int) -> None:
        self._machine.called("eventDestroy", None, event)
        self._machine.handle(event, EmulatedEvent)
        self._machine.drop_handle(event)

    def eventRecord(self, event: int, stream: int) -> None:
        machine = self._machine
        machine.called("eventRecord", stream, event)
        machine.record_event(machine.handle(event, EmulatedEvent), machine.stream(stream))

    def eventQuery(self, event: int) -> int:
        return _status(lambda: self._query_event(event))

    def _query_event(self, event: int) -> None:
        machine = self._machine
        machine.called("eventQuery", None, event)
        if not machine.is_done(machine.handle(event, EmulatedEvent)):
            raise CUDARuntimeError(600)

    def eventSynchronize(self, event: int) -> None:
        self._machine.called("eventSynchronize", None, event)
        self._machine.wait_for_event(self._machine.handle(event, EmulatedEvent))

    def eventElapsedTime(self, start: int, end: int) -> float:
        machine = self._machine
        machine.called("eventElapsedTime", None, start, end)
        events = [machine.handle(one, EmulatedEvent) for one in (start, end)]
        if any(event.flags & 2 or event.stream is None for event in events):
            raise CUDARuntimeError(400)
        if not all(map(machine.is_done, events)):
            raise CUDARuntimeError(600)
        return float(events[1].seconds[0] - events[0].seconds[0]) * 1000

    # Capture and graphs

    def streamBeginCapture(self, stream: int, mode: int = 2) -> None:
        machine = self._machine
        machine.called("streamBeginCapture", stream, mode)
        found = machine.stream(stream)
        if found.handle == 0 or found.capture is not None:
            raise CUDARuntimeError(900)
        found.capture, found.last = Capture(found), []

    def streamIsCapturing(self, stream: int) -> bool:
        found = self._machine.stream(stream)
        if found.handle == 0 and any(
            other.capture is not None and other.is_blocking for other in self._machine._streams_of(found.device)
        ):
            raise CUDARuntimeError(906)
        return found.capture is not None

    def streamEndCapture(self, stream: int) -> int:
        machine = self._machine
        machine.called("streamEndCapture", stream)
        found = machine.stream(stream)
        capture = found.capture
        if capture is None:
            raise CUDARuntimeError(1)
        if capture.origin is not found:
            raise CUDARuntimeError(903)
        unjoined = capture.unjoined()
        for one in capture.streams:
            one.capture, one.last = None, []
        if capture.invalid:
            raise CUDARuntimeError(901)
        if unjoined:
            raise CUDARuntimeError(904)
        return machine.new_handle(capture)

    def graphInstantiate(self, graph: int) -> int:
        machine = self._machine
        machine.called("graphInstantiate", None, graph)
        return machine.new_handle(list(machine.handle(graph, Capture).nodes))

    def graphLaunch(self, graphExec: int, stream: int) -> None:
        machine = self._machine
        machine.called("graphLaunch", stream, graphExec)
        nodes: list[Node] = machine.handle(graphExec, list)
        machine.launch_nodes(nodes, stream, "a graph")

    def graphUpload(self, graphExec: int, stream: int) -> None:
        self._machine.called("graphUpload", stream, graphExec)
        self._machine.handle(graphExec, list)

    def graphDestroy(self, graph: int) -> None:
        self._machine.handle(graph, Capture)
        self._machine.drop_handle(graph)

    def graphExecDestroy(self, graphExec: int) -> None:
        self._machine.handle(graphExec, list)
        self._machine.drop_handle(graphExec)


def _status(query: Callable[[], None]) -> int:
    """What CuPy's queries return: they raise nothing."""
    try:
        query()
    except CUDARuntimeError as error:
        return error.status
    return 0


def bytes_of(pointer: int, size: int) -> np.ndarray[Any, Any]:
    """The bytes at an address, to read and write."""
    return np.frombuffer((ctypes.c_ubyte * size).from_address(pointer), np.uint8)


__all__ = ["EmulatedStream", "PointerAttributes", "Runtime", "bytes_of"]
