"""Streams and events: what a device that works on its own is asked to do, in which order, and how far it has come.

A `Stream` does what is launched on it in order, later, beside the host. An `Event` marks a place in a stream, so that
the host or another stream can wait until the stream has come that far. `dagexec.core.runtime` hands streams out.

Errors of asynchronous work are kept by the stream: the first kernel that raises makes the stream fail, whatever else
is on it is skipped, events recorded on it end FAILED, and so do streams that wait for those. `Stream.reset` makes
it usable again. Streams are leased, one user each, so that a failing run takes no other with it.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Protocol

from dagexec.core.device import Device
from dagexec.platform.records import dataclass


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
        failed: told when the device fails it, in place of its stream, which continues; None to fail the stream.
    """

    step: Callable[[], object]
    label: str
    seconds: float | None = None
    operator: object = None
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


_failures = count(1)


def new_failure(label: str, error: BaseException) -> StreamFailure:
    """`error`, raised by the kernel of this label. One of a kernel that failed on another stream is that kernel's."""
    if isinstance(error, KernelFailedError):
        label, error = error.label, error.error
    return StreamFailure(label, error, next(_failures))


class Stream(ABC):
    """A queue of work that a device does in order.

    Attributes:
        device: whose it is.
        name: "sim:0 stream 3".
        priority: see `Priority`.
        observer: who is told of what is asked of the stream from now on, and of what comes of that; or None.
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
        """As `wait`, for order only: the stream continues even when `event` FAILED. For turns at shared memory."""

    @abstractmethod
    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the host until all that was launched is done or skipped; False after `timeout` seconds.

        Raises nothing for failed work: see `failure`.
        """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True when there is nothing to do any more."""

    @property
    @abstractmethod
    def launches(self) -> int:
        """Kernels and copies that were asked of it since it was made."""

    @property
    @abstractmethod
    def is_captured(self) -> bool:
        """True while what is asked of it is kept by a Capture, not done."""

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


class EventState(enum.IntEnum):
    """How far the work before an event has come."""

    INITIALIZED = 0
    SCHEDULED = 1
    SUCCESS = 2
    FAILED = 3


class Event(ABC):
    """A mark in a stream. INITIALIZED -> SCHEDULED -> SUCCESS or FAILED; once recorded, not again before `reset`.

    Attributes:
        owner: what it stands for, in messages: "chain 3 of net 'googlenet'".
        stream: the stream it was recorded on; None before, and when the host recorded it.
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
        """Nothing else uses the streams, and nobody looks at the events: a replay may leave alone all but the first."""


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
