"""DeviceRuntime: what the scheduler needs of a device that works on its own - streams, events, memory, copies, capture.

A `Stream` does what is launched on it in order, later, beside the host. An `Event` marks a place in a stream, so that
the host or another stream can wait until the stream has come that far. `runtime_of(device)` gives the one runtime of a
device; `cpu` is `dagexec.devices.host`, `sim` is `dagexec.devices.sim`.

Errors of asynchronous work are kept by the stream: the first kernel that raises makes the stream fail, whatever else
is on it is passed over, events recorded on it end FAILED, and so do streams that wait for those. `Stream.reset` makes
it usable again. Streams are leased, one user each, so that a failing run takes no other with it.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy.typing as npt

from dagexec.core.device import Device
from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock, reset_after_fork
from dagexec.platform.threads import threads

if TYPE_CHECKING:
    from dagexec.core.event import EventState
    from dagexec.core.operator import Operator

Array = npt.NDArray[Any]
Made = TypeVar("Made")


class Priority(enum.IntEnum):
    """Of two streams with work that could go on, the device prefers the HIGH one."""

    NORMAL = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work for a stream.

    Attributes:
        step: does the work; on `cuda` it issues it to the current stream.
        label: how messages and traces name it.
        seconds: the time it is estimated to take; None when that is not known.
        operator: the operator whose step it is, None for what belongs to none.
        copied_bytes: bytes it brings from one device to another, 0 when it computes.
        failed: told when the device fails it, in place of its stream, which goes on; None to fail the stream.
    """

    step: Callable[[], object]
    label: str
    seconds: float | None = None
    operator: Operator | None = None
    copied_bytes: int = 0
    failed: Callable[[BaseException], object] | None = None


class KernelFailedError(Exception):
    """Raised in a step for a kernel that failed on another stream: the failure of this stream is that kernel's."""

    def __init__(self, label: str, error: BaseException) -> None:
        super().__init__(label, error)
        self.label = label
        self.error = error


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """Why a stream failed: the label of the kernel that raised, and what it raised.

    `number` counts the failures of a process, so that the first of several can be told.
    """

    label: str
    error: BaseException
    number: int


class Stream(ABC):
    """A queue of work that a device does in order.

    Attributes:
        device: whose it is.
        name: "sim:0 stream 3".
        priority: see `Priority`.
        observer: who is told of what is asked of the stream from now on, and of what comes of that; None for nobody.
        failing: there is a `failure`. To look at before every chain, so it has to cost nothing.
        alone: its device does one thing at a time, so that a kernel cannot wait for any other work of it.
    """

    device: Device
    name: str
    priority: Priority
    observer: StreamObserver | None = None
    failing: bool = False
    alone: bool = False

    @abstractmethod
    def launch(self, kernel: Kernel) -> None:
        """Have `kernel` done after all that was launched before. Does not wait for it.

        Raises DeviceError when the launch itself fails.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let what is launched from now on start only when `event`, which has been recorded, is done.

        The host does not block when the event is of the same kind of device. Raises DeviceError for an event that was
        never recorded.
        """

    @abstractmethod
    def follow(self, event: Event) -> None:
        """As `wait`, for order only: the stream goes on even when `event` FAILED. For turns at shared memory."""

    @abstractmethod
    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the host until all that was launched is done or passed over; False after `timeout` seconds.

        Raises nothing for failed work: see `failure`.
        """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True when there is nothing to do any more."""

    @property
    @abstractmethod
    def failure(self) -> StreamFailure | None:
        """What made the stream fail first, None while nothing has."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Give up what the stream still holds: it fails with `error`, and a kernel that hangs is ended if it can be."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the failure. The stream must be idle (DeviceError otherwise)."""


class Event(ABC):
    """A mark in a stream. INITIALIZED -> SCHEDULED -> SUCCESS or FAILED; once recorded, not again before `reset`.

    Attributes:
        owner: what it stands for, in messages: "chain 3 of net 'googlenet'".
        stream: the stream it was recorded on; None before, and for an event of the host.
    """

    owner: str
    stream: Stream | None

    @abstractmethod
    def record(self, stream: Stream | None) -> None:
        """Mark this place of `stream` (None: the host). Raises DeviceError when it was recorded already."""

    @abstractmethod
    def query(self) -> EventState:
        """The state now, without blocking."""

    @abstractmethod
    def finish(self, timeout: float | None = None) -> bool:
        """Block the host until the event is SUCCESS or FAILED; False after `timeout` seconds.

        Raises DeviceError when it was never recorded, or the error of the work before it when it FAILED.
        """

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What failed before the event, None unless it is FAILED."""

    @abstractmethod
    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when the event is SUCCESS or FAILED, at once if it is.

        It is called with no lock held, on a thread that belongs to the device: it must be short and must not wait.
        """

    @abstractmethod
    def reset(self) -> None:
        """Back to INITIALIZED, for the next run."""


def wait_for(event: Event, waiter: Stream | None) -> None:
    """Let `waiter` (a stream, or None for the calling host thread) wait for `event`, blocking the host only if need be.

    A stream waits for an event of its own kind of device without the host; it needs no wait for its own past. For any
    other pair the host waits.
    """
    if waiter is None or event.stream is None or event.stream.device.kind != waiter.device.kind:
        event.finish()
    elif event.stream is not waiter:
        waiter.wait(event)


class Capture(Protocol):
    """Launches, records and waits that were captured instead of done."""

    def replay(self) -> None:
        """Launch all of it again, on the streams it was captured on, at the cost of one launch."""

    def detach(self) -> None:
        """Nobody else uses the streams, and nobody looks at the events: a replay may leave alone all but the first."""


@dataclass(frozen=True)
class RuntimeStatistics:
    """A moment of a device: streams made and leased, and bytes of memory held, at most held, and allowed."""

    streams: int
    leased: int
    busy: int
    launches: int
    allocated_bytes: int
    peak_bytes: int
    limit_bytes: int | None


class StreamObserver(Protocol):
    """Told what happens on the streams of a device. Times are seconds on the device's clock (virtual on `sim`).

    The first four are called by the host thread that asks, the last two by whoever does the device's work.
    """

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        """`kernel` was put on `stream`."""

    def recorded(self, stream: Stream, event: Event) -> None:
        """`event` was recorded at the present end of `stream`."""

    def waits(self, stream: Stream, event: Event) -> None:
        """What follows on `stream` waits for `event`."""

    def host_waited(self, event: Event | Stream) -> None:
        """The calling thread has found `event`, or all of a stream, done."""

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """`kernel` has run."""

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        """`stream` stood still for `event` from `start` to `end`."""


class _AtWork(threading.local):
    """What a thread of a device is doing.

    Attributes:
        stream: whose work it does; None on a thread of the host.
    """

    stream: Stream | None = None


at_work = _AtWork()


class DeviceRuntime(ABC):
    """One device: its streams, events and memory.

    Attributes:
        issues_at_launch: `Stream.launch` calls a kernel's step at once, on the calling thread, and that issues the work
            which the device does later; otherwise the step is the work, and is called when the stream has come to it.
    """

    device: Device
    issues_at_launch: bool = False

    def __init__(self, device: Device) -> None:
        self.device = device
        self._thread = threading.local()
        self._made: dict[Hashable, object] = {}
        self._renew()
        reset_after_fork(self, DeviceRuntime._renew)

    def _renew(self) -> None:
        self._making = threads().lock()

    @abstractmethod
    def lease(self, priority: Priority = Priority.NORMAL) -> Stream:
        """An idle stream nobody else uses, from the pool of that priority; a new one when the pool has none."""

    @abstractmethod
    def give_back(self, stream: Stream) -> None:
        """Return a leased stream to its pool. It must be idle; a failure is forgotten."""

    def current_stream(self) -> Stream:
        """The calling thread's current stream of this device; a stream of its own if none was set."""
        found: Stream | None = getattr(self._thread, "current", None)
        if found is None:
            found = self._thread.current = self.lease()
        return found

    @contextmanager
    def using(self, stream: Stream) -> Iterator[Stream]:
        """Within it, `stream` is the calling thread's current one."""
        if stream.device != self.device:
            raise DeviceError(f"{stream.name} cannot be the current stream of {self.device}")
        before = getattr(self._thread, "current", None)
        self._thread.current = stream
        try:
            yield stream
        finally:
            self._thread.current = before

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives at the first call for `key`: things that a device has one of, made when they are needed."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return cast(Made, self._made[key])

    def library_handle(self, name: str) -> AbstractContextManager[object]:
        """A new handle of the device's library of operators; entering it marks a use, which must be the only one.

        Raises DeviceError when the device has no such library.
        """
        raise DeviceError(f"{self.device} has no library of operators; {name} cannot be made")

    @abstractmethod
    def event(self, owner: str) -> Event:
        """A new event. `owner` names what it stands for in messages."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """Device memory, as bytes. Raises ResourceError, with the numbers, when the device cannot hold it."""

    @abstractmethod
    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Copy on `stream`: within the device, from the host or another device of this kind, or to the host.

        The arrays have the same shape and dtype. The host is free to go on; it must leave both alone until the stream
        has come so far.
        """

    @abstractmethod
    @contextmanager
    def capture(self, streams: Sequence[Stream]) -> Iterator[Capture]:
        """Within it, what is asked of `streams` is kept, not done; the Capture can replay it afterwards.

        Raises DeviceError when one of them waits for work outside the capture.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every stream of the device is idle."""

    @abstractmethod
    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment."""


def _host_runtime(device: Device) -> DeviceRuntime:
    from dagexec.devices.host import HostRuntime

    return HostRuntime(device)


def _sim_runtime(device: Device) -> DeviceRuntime:
    from dagexec.devices.sim import new_runtime

    return new_runtime(device)


def _cuda_runtime(device: Device) -> DeviceRuntime:
    from dagexec.devices.cuda.runtime import CudaRuntime

    return CudaRuntime(device)


_factories: dict[str, Callable[[Device], DeviceRuntime]] = {
    "cpu": _host_runtime,
    "sim": _sim_runtime,
    "cuda": _cuda_runtime,
}
_runtimes: dict[Device, DeviceRuntime] = {}
_runtimes_lock = ProcessLock()


def register_runtime(kind: str, factory: Callable[[Device], DeviceRuntime]) -> None:
    """Make `factory(device)` the source of the runtime of each device of `kind`; it is asked once a device."""
    _factories[kind] = factory


def runtime_of(device: Device) -> DeviceRuntime:
    """The runtime of `device`. Raises DeviceError when there is no such device here."""
    found = _runtimes.get(device)
    if found is not None:
        return found
    factory = _factories.get(device.kind)
    if factory is None:
        raise DeviceError(f"device {device} has no runtime here; kinds that have one: {', '.join(sorted(_factories))}")
    with _runtimes_lock.own:
        found = _runtimes.get(device)
        if found is None:
            found = _runtimes[device] = factory(device)
        return found


def installed_runtime(device: Device) -> DeviceRuntime | None:
    """The runtime of `device` if it has been made."""
    return _runtimes.get(device)


def install_runtime(device: Device, runtime: DeviceRuntime | None) -> None:
    """Make `runtime` the one of `device` from now on; with None, a new one is made when it is needed."""
    with _runtimes_lock.own:
        if runtime is None:
            _runtimes.pop(device, None)
        else:
            _runtimes[device] = runtime
