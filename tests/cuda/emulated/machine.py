"""The machine behind the stand-ins: devices, streams, events, what was asked of them and in which order it is done.

By default whatever is asked for is done at once. With `asynchronous` it is put on the project's simulated streams,
where threads, or a seed, decide what is done when; then `races` names work that touched the same memory with nothing
between.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagexec.core.device import Device
from dagexec.core.stream import Kernel, Priority
from dagexec.devices.sim import SimRuntime, SimSettings, is_device_thread
from dagexec.devices.sim.clock import host_time, set_host_time
from dagexec.devices.sim.event import SimEvent
from tests.cuda.emulated.errors import CUDARuntimeError, EmulationError, OutOfMemoryError
from tests.cuda.emulated.memory import Block, Memories
from tests.cuda.emulated.races import Clock, Races, Touch, merge
from tests.cuda.emulated.work import EmulatedEvent, EmulatedStream, Node, Operation

LEGACY, PER_THREAD = 1, 2
_STAMP = "an event's time"


@dataclass
class Call:
    """A call of a library: its name, the calling thread, the stream it concerns, its arguments."""

    name: str
    thread: int
    stream: int | None
    arguments: tuple[Any, ...]


class DeviceState:
    """A device: its memory, its failure, its simulated runtime."""

    def __init__(self, index: int, limit: int, runtime: SimRuntime | None) -> None:
        self.index, self.limit, self.runtime = index, limit, runtime
        self.used = self.peak = 0
        self.failure: CUDARuntimeError | None = None
        self.peers: set[int] = set()
        self.null: EmulatedStream | None = None


@dataclass
class Fault:
    """The `nth` thing of `kind` whose label holds `match` fails with `status`.

    Kinds are "malloc", "launch" (the call fails), "kernel" and "copy" (the device fails later, for good).
    """

    kind: str
    match: str = ""
    nth: int = 1
    status: int = 719


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.in_host_function = False


class Machine:
    """See the module's docstring.

    Attributes:
        calls: every call, in order, when `record`.
        computes: False to have kernels and libraries take their virtual time and compute nothing.
        errors: what kernels did that they may not.
        races: see `tests.cuda.emulated.races`.
    """

    def __init__(
        self,
        devices: int = 2,
        *,
        asynchronous: bool = False,
        record: bool = True,
        memory_limit: int = 8 << 30,
        peer_access: bool = True,
        faults: Iterable[Fault] = (),
        track: bool | None = None,
        seed: int | None = None,
        computes: bool = True,
        **settings: Any,
    ) -> None:
        self.asynchronous, self.record, self.peer_access = asynchronous, record, peer_access
        self.computes = computes
        self.track = asynchronous if track is None else track
        wanted = SimSettings(seed=seed, **settings)
        self.settings = wanted
        self._driver = wanted.new_driver("emulated cuda") if asynchronous else None
        self._random = random.Random(seed)
        simulated = SimSettings(
            driver=self._driver,
            launch_seconds=wanted.launch_seconds,
            kernel_seconds=0.0 if wanted.is_unmodeled else self._seconds_of,
            copy_seconds=wanted.copy_seconds,
            copy_seconds_per_byte=wanted.copy_seconds_per_byte,
        )
        self.devices = [
            DeviceState(index, memory_limit, SimRuntime(Device("sim", index), simulated) if asynchronous else None)
            for index in range(devices)
        ]
        self.memories = Memories()
        self.calls: list[Call] = []
        self.errors: list[BaseException] = []
        self.races_found = Races()
        self.faults = list(faults)
        self.known: Clock = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(0x10000000, 0x10)
        self._handles: dict[int, Any] = {}
        self._thread = _Thread()
        self._owned_driver = wanted.driver is None

    @property
    def races(self) -> list[str]:
        """Races found so far, in words."""
        self.races_found.asked = True
        return self.races_found.found

    def _seconds_of(self, kernel: Kernel) -> float:
        """The virtual time of a kernel; the reading of a clock takes none."""
        seconds = self.settings.kernel_seconds
        if kernel.label == _STAMP or seconds is None:
            return 0.0
        return seconds(kernel) if callable(seconds) else seconds

    # Calls, handles, devices

    def called(self, name: str, stream: int | None = None, *arguments: Any) -> None:
        """A library is called. Raises what every call then raises: within a host function, after a device failed."""
        if self.record:
            self.calls.append(Call(name, threading.get_ident(), stream, arguments))
        if self._thread.in_host_function:
            raise CUDARuntimeError(800)
        failure = self.devices[self._thread.device].failure
        if failure is not None:
            raise CUDARuntimeError(failure.status) from failure.__cause__

    @property
    def device(self) -> int:
        """The calling thread's current device."""
        return self._thread.device

    @device.setter
    def device(self, index: int) -> None:
        if not 0 <= index < len(self.devices):
            raise CUDARuntimeError(101)
        self._thread.device = index

    def new_handle(self, thing: Any) -> int:
        """A number that stands for `thing`."""
        number = next(self._numbers)
        self._handles[number] = thing
        return number

    def handle(self, number: int, kind: type) -> Any:
        """What `number` stands for. Raises CUDARuntimeError for what is no handle of that kind, or was destroyed."""
        found = self._handles.get(number)
        if not isinstance(found, kind):
            raise CUDARuntimeError(400)
        return found

    def drop_handle(self, number: int) -> None:
        """`number` stands for nothing any more."""
        self._handles.pop(number, None)

    def fault(self, kind: str, label: str) -> int | None:
        """The status with which a planned fault makes this fail, None when it does not."""
        for fault in self.faults:
            if fault.kind == kind and fault.match in label:
                fault.nth -= 1
                if fault.nth == 0:
                    return fault.status
        return None

    # Memory

    def malloc(self, size: int, device: int | None) -> Block:
        """New memory of a device, or pinned memory of the host (None). Raises CUDARuntimeError when there is none."""
        if device is not None:
            state = self.devices[device]
            if self.fault("malloc", str(size)) is not None or state.used + size > state.limit:
                raise CUDARuntimeError(2)
            with self._lock:
                state.used += size
                state.peak = max(state.peak, state.used)
        block = Block(size, device)
        self.memories.add(block)
        return block

    def out_of_memory(self, size: int) -> OutOfMemoryError:
        """CuPy's error for a device that is full."""
        return OutOfMemoryError(size, self.devices[self.device].used)

    def free(self, block: Block) -> None:
        """Free memory."""
        self.memories.free(block)
        if block.device is not None:
            with self._lock:
                self.devices[block.device].used -= block.size

    def block_at(self, pointer: int) -> Block:
        """The block that begins at `pointer`. Raises CUDARuntimeError when none does."""
        block = self.memories.find(pointer)
        if block is None or block.ptr != pointer or block.freed:
            raise CUDARuntimeError(1)
        return block

    def touch(self, pointer: int, size: int, writes: bool) -> Touch | None:
        """What a copy, or a library, touches; None for pageable memory. Raises CUDARuntimeError beyond a block."""
        block = self.memories.find(pointer)
        if block is None:
            return None
        if block.freed or pointer + size > block.end or pointer < block.ptr:
            begin = pointer - block.ptr
            raise EmulationError(f"bytes {begin} to {begin + size} of a {'freed ' * block.freed}{block}")
        return Touch(block, pointer, pointer + size, writes)

    def device_touch(self, pointer: int, size: int, writes: bool, device: int) -> Touch:
        """As `touch`, of memory that `device` can reach. Raises EmulationError for other memory."""
        found = self.touch(pointer, size, writes)
        if found is None or not self.reaches(device, found.block):
            raise EmulationError(f"device {device} is given {pointer:#x}, which is not memory it can reach")
        return found

    def reaches(self, device: int, block: Block) -> bool:
        """True when kernels of `device` may touch `block`."""
        return block.device in (None, device) or block.device in self.devices[device].peers

    # Streams

    def new_stream(self, flags: int, priority: int) -> int:
        """A stream of the current device."""
        state = self.devices[self.device]
        sim = None
        if state.runtime is not None:
            sim = state.runtime.lease(Priority.HIGH if priority < 0 else Priority.NORMAL)
        stream = EmulatedStream(0, state.index, flags, priority, sim)
        stream.handle = self.new_handle(stream)
        return stream.handle

    def stream(self, handle: int) -> EmulatedStream:
        """The stream of a handle; 0 and 1 are the current device's legacy default stream."""
        if handle == PER_THREAD:
            raise EmulationError("the per-thread default stream is not emulated")
        if handle not in (0, LEGACY):
            found: EmulatedStream = self.handle(handle, EmulatedStream)
            return found
        state = self.devices[self.device]
        with self._lock:
            if state.null is None:
                state.null = EmulatedStream(0, state.index, 0, 0, state.runtime.lease() if state.runtime else None)
        return state.null

    def submit(self, handle: int, operation: Operation) -> None:
        """Have `operation` done on a stream, or captured. Raises CUDARuntimeError for a device that is not current."""
        stream = self.stream(handle)
        if stream.device != self.device:
            raise CUDARuntimeError(400)
        with stream.lock:
            if stream.capture is not None:
                if stream.capture.invalid:
                    raise CUDARuntimeError(901)
                stream.capture.add(stream, operation)
                return
            if stream.is_blocking and any(
                other.capture is not None and other.is_blocking for other in self._streams_of(stream.device)
            ):
                raise CUDARuntimeError(906)
            self._keep_legacy_order(stream)
            self._issue(stream, operation)

    def _streams_of(self, device: int) -> list[EmulatedStream]:
        found = [s for s in list(self._handles.values()) if isinstance(s, EmulatedStream) and s.device == device]
        null = self.devices[device].null
        return found if null is None else [*found, null]

    def _keep_legacy_order(self, stream: EmulatedStream) -> None:
        """The legacy default stream and blocking streams wait for each other."""
        if not stream.is_blocking:
            return
        null = self.devices[stream.device].null
        for other in self._streams_of(stream.device) if stream is null else [null]:
            if other is not None and other is not stream and other.is_blocking:
                self._wait_for_place(stream, dict(other.clock), self._place(other))

    def _place(self, stream: EmulatedStream) -> SimEvent | None:
        if stream.sim is None:
            return None
        event = SimEvent("a place in a stream")
        event.record(stream.sim)
        return event

    def _wait_for_place(self, stream: EmulatedStream, clock: Clock, place: SimEvent | None) -> None:
        merge(stream.clock, clock)
        if stream.sim is not None and place is not None:
            stream.sim.follow(place)

    def _issue(self, stream: EmulatedStream, operation: Operation) -> None:
        if self.track:
            with self._lock:
                merge(stream.clock, self.known)
            stream.count += 1
            key = stream.handle or ("default", stream.device)
            stream.clock[key] = stream.count
            operation.clock, operation.place = dict(stream.clock), (key, stream.count)
        self._start(stream, operation)

    def _start(self, stream: EmulatedStream, operation: Operation) -> None:
        if stream.sim is None:
            self._do(operation)
        else:
            stream.sim.launch(
                Kernel(partial(self._do, operation), operation.label, copied_bytes=operation.copied_bytes)
            )

    def _do(self, operation: Operation) -> None:
        state = self.devices[operation.device]
        if state.failure is not None:
            return
        status = self.fault("copy" if operation.copied_bytes else "kernel", operation.label)
        try:
            if status is not None:
                raise CUDARuntimeError(status)
            touched = operation.step() if self.computes or not operation.computes else None
        except Exception as error:
            if not self.asynchronous and not isinstance(error, CUDARuntimeError):
                raise
            failure = CUDARuntimeError(getattr(error, "status", 700))
            failure.__cause__ = error
            state.failure = failure
            if not isinstance(error, CUDARuntimeError):
                self.errors.append(error)
            return
        if self.track:
            touches = [*(operation.touches or ()), *(touched or ())]
            self.races_found.check(operation.label, operation.place, operation.clock, touches, self.known)

    def synchronize(self, stream: EmulatedStream) -> None:
        """Block until `stream` is idle. Raises what its device failed with."""
        self.refuse_capture(stream)
        if stream.sim is not None:
            stream.sim.synchronize()
        self.learn(stream.clock)
        self.raise_failure(stream.device)

    def refuse_capture(self, stream: EmulatedStream) -> None:
        """Raises CUDARuntimeError when `stream` is captured, and spoils the capture."""
        if stream.capture is not None:
            stream.capture.invalid = True
            raise CUDARuntimeError(900)

    @property
    def is_capturing(self) -> bool:
        """True while the calling thread has a capture that it began: libraries can then make no handle."""
        found = [stream.capture for stream in list(self._handles.values()) if isinstance(stream, EmulatedStream)]
        return any(capture is not None and capture.thread == threading.get_ident() for capture in found)

    def raise_failure(self, device: int) -> None:
        """Raises what `device` failed with."""
        failure = self.devices[device].failure
        if failure is not None:
            raise CUDARuntimeError(failure.status) from failure.__cause__

    def learn(self, clock: Clock) -> None:
        """The host has seen that all of `clock` is done."""
        with self._lock:
            merge(self.known, clock)

    # Events

    def record_event(self, event: EmulatedEvent, stream: EmulatedStream) -> None:
        """Mark the present end of `stream`."""
        if event.device != stream.device:
            raise CUDARuntimeError(400)
        with stream.lock:
            if stream.capture is not None:
                event.captured = (stream.capture, list(stream.last))
                return
            self._keep_legacy_order(stream)
            event.captured = None
            event.stream = stream
            if self.track:
                with self._lock:
                    merge(stream.clock, self.known)
            event.clock = dict(stream.clock)
            seconds: list[float] = []
            event.seconds = seconds
            if stream.sim is None:
                seconds.append(time.perf_counter())
                return
            if not event.flags & 2:
                sim, timed = stream.sim, not self.settings.is_unmodeled
                stamp = lambda: seconds.append(sim.time if timed else time.perf_counter())  # noqa: E731
                now = host_time()
                stream.sim.launch(Kernel(stamp, _STAMP))
                set_host_time(now)
            event.sim = SimEvent("an event")
            event.sim.record(stream.sim)

    def wait_event(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """Let what is asked of `stream` from now on wait for `event`."""
        with stream.lock:
            if event.captured is not None:
                capture, last = event.captured
                if stream.capture is None:
                    stream.capture = capture
                    stream.last = []
                    if stream not in capture.streams:
                        capture.streams.append(stream)
                elif stream.capture is not capture:
                    raise CUDARuntimeError(902)
                stream.last = sorted({*stream.last, *last})
                return
            if stream.capture is not None:
                stream.capture.invalid = True
                raise CUDARuntimeError(905)
            self._wait_for_place(stream, event.clock, event.sim)

    def is_done(self, event: EmulatedEvent) -> bool:
        """True when everything before is done. Raises what the device failed with."""
        if event.captured is not None:
            event.captured[0].invalid = True
            raise CUDARuntimeError(907)
        self.raise_failure(event.device)
        if event.sim is not None and event.sim.mark is not None and not event.sim.mark.is_reached:
            return False
        self.learn(event.clock)
        return True

    def wait_for_event(self, event: EmulatedEvent) -> None:
        """Block the host until `event` is done."""
        if event.captured is not None:
            event.captured[0].invalid = True
            raise CUDARuntimeError(907)
        if event.sim is not None:
            event.sim.finish()
        self.learn(event.clock)
        self.raise_failure(event.device)

    # Graphs

    def launch_nodes(self, nodes: list[Node], handle: int, label: str) -> None:
        """Put a graph's nodes on a stream, in an order that their dependencies allow."""
        stream = self.stream(handle)
        if stream.device != self.device:
            raise CUDARuntimeError(400)
        with stream.lock:
            self.refuse_capture(stream)
            self._keep_legacy_order(stream)
            with self._lock:
                merge(stream.clock, self.known)
            launch = next(self._numbers)
            before = dict(stream.clock)
            clocks: list[Clock] = []
            counts: dict[int, int] = {}
            operations = []
            for node in nodes:
                clock = dict(before)
                for other in node.after:
                    merge(clock, clocks[other])
                counts[node.stream] = counts.get(node.stream, 0) + 1
                key = (launch, node.stream, counts[node.stream])  # nothing but its dependencies is before a node
                clock[key] = 1
                clocks.append(clock)
                if node.operation is None:
                    operations.append(None)
                    continue
                one = node.operation
                operations.append(replace(one, clock=clock, place=(key, 1)))
            for index in self._some_order(nodes):
                found = operations[index]
                if found is not None:
                    self._start(stream, found)
            for clock in clocks:
                merge(stream.clock, clock)

    def _some_order(self, nodes: list[Node]) -> list[int]:
        if not self.asynchronous:
            return list(range(len(nodes)))
        left = {index: set(node.after) for index, node in enumerate(nodes)}
        found: list[int] = []
        while left:
            ready = [index for index, after in left.items() if not after]
            index = self._random.choice(ready)
            found.append(index)
            del left[index]
            for after in left.values():
                after.discard(index)
        return found

    # The end

    def host_function(self, function: Callable[[], object]) -> list[Touch]:
        """Call `function` as a stream does: no call of CUDA is allowed within."""
        before, self._thread.in_host_function = self._thread.in_host_function, True
        try:
            function()
        finally:
            self._thread.in_host_function = before
        return []

    def check(self) -> None:
        """Raises what was found and nobody has asked about: writes beside blocks, and races."""
        for state in self.devices:
            for stream in self._streams_of(state.index):
                if stream.sim is not None and stream.capture is None:
                    stream.sim.synchronize()
        for block in self.memories.live():
            block.check_guards()
        self.races_found.raise_unasked()

    def close(self) -> None:
        """End the threads. What is not done is abandoned."""
        for state in self.devices:
            if state.runtime is not None and not is_device_thread():
                state.runtime.close()
        if self._driver is not None and self._owned_driver:
            self._driver.close()
