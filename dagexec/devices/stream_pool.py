"""StreamPool: the streams of a device, made as they are needed and leased to one user each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dagexec.core.device import Device
from dagexec.core.runtime import RuntimeStatistics
from dagexec.core.stream import Priority, Stream
from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock

S = TypeVar("S", bound=Stream)


class _Memory(Protocol):
    """The bytes of a device's memory that are held, were held at most, and are allowed."""

    peak: int
    limit: int | None

    @property
    def held(self) -> int: ...


class StreamPool(Generic[S]):
    """Streams of one device. Of those of a priority that are free, the one given back last is leased first."""

    def __init__(self, device: Device, make: Callable[[int, Priority], S]) -> None:
        """`make(number, priority)` makes a stream. It is called with no lock held."""
        self._device = device
        self._make = make
        self._lock = ProcessLock()
        self._numbers = 0
        self._made: list[S] = []
        self._free: dict[Priority, list[S]] = {priority: [] for priority in Priority}
        self._leased: dict[Stream, S] = {}

    def lease(self, priority: Priority) -> S:
        """An idle stream nothing else uses, a new one when none is free."""
        with self._lock.own:
            if self._free[priority]:
                stream = self._free[priority].pop()
                self._leased[stream] = stream
                return stream
            number, self._numbers = self._numbers, self._numbers + 1
        stream = self._make(number, priority)
        with self._lock.own:
            self._made.append(stream)
            self._leased[stream] = stream
        return stream

    def give_back(self, stream: Stream) -> None:
        """Make a leased stream free, as new. Raises DeviceError for one that is not leased, captured, or not idle."""
        with self._lock.own:
            if stream not in self._leased:
                raise DeviceError(f"{stream.name} is not leased from {self._device}")
            if stream.is_captured:
                raise DeviceError(f"{stream.name} is captured: it cannot be given back")
            stream.reset()
            stream.observer = None
            self._free[stream.priority].append(self._leased.pop(stream))

    def all(self) -> tuple[S, ...]:
        """Every stream made so far, in the order they were made."""
        return tuple(self._made)

    def statistics(self, memory: _Memory) -> RuntimeStatistics:
        """Counts at this moment, those of the device's memory among them."""
        with self._lock.own:
            streams, leased = self.all(), len(self._leased)
        return RuntimeStatistics(
            streams=len(streams),
            leased=leased,
            busy=sum(not stream.is_idle for stream in streams),
            launches=sum(stream.launches for stream in streams),
            allocated_bytes=memory.held,
            peak_bytes=memory.peak,
            limit_bytes=memory.limit,
        )
