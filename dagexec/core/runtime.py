"""DeviceRuntime: what operators, tensors and nets need of a device - memory, copies, and streams where it has them.

`runtime_of(device)` gives the one runtime of a device. Kinds of devices are subclasses, in
`dagexec.devices`, which registers them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import Device, has_kind, name_kind, use_plugins
from dagexec.core.dtypes import TypeMeta
from dagexec.core.stream import Capture, Event, Priority, Stream
from dagexec.errors import DeviceError, ShapeError
from dagexec.platform.forking import ProcessLock, reset_after_fork
from dagexec.platform.plugins import PluginGroup
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

Array = npt.NDArray[Any]
Made = TypeVar("Made")


@dataclass(frozen=True)
class RuntimeStatistics:
    """A moment of a device: streams made and leased, and bytes of memory held, at most held, and allowed."""

    streams: int = 0
    leased: int = 0
    busy: int = 0
    launches: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    limit_bytes: int | None = None


class DeviceRuntime(ABC):
    """One device: its memory, the ways in and out of it, and its streams.

    A device whose work is done when a call returns, as the host's is, has no streams: what asks for one raises
    DeviceError. Any other kind overrides `lease` and what follows it.

    Attributes:
        in_host_memory: its memory is the host's, so that `host_view` gives arrays which NumPy can work on.
        issues_at_launch: `Stream.launch` calls a kernel's step at once, on the calling thread, and that issues the work
            which the device does later; otherwise the step is the work, and is called when the stream has come to it.
    """

    device: Device
    in_host_memory: bool = False
    issues_at_launch: bool = False

    def __init__(self, device: Device) -> None:
        self.device = device
        self._thread = threading.local()
        self._made: dict[Hashable, object] = {}
        self._renew()
        reset_after_fork(self, DeviceRuntime._renew)

    def _renew(self) -> None:
        self._making = threads().lock()

    # Memory

    @abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """Device memory, as bytes, until the last array on it is gone. Raises ResourceError, with the numbers, when the
        device cannot hold it."""

    @abstractmethod
    def copy_now(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done: within the device, from or to the host or another device of this kind.

        The dtypes are the same, and `source` broadcasts to the shape of `destination`. On a device with streams the
        copy comes after what the calling thread's current stream has been requested; where the thread has none, nothing
        orders it after other work. Within the step of a kernel it is part of the kernel.
        """

    def host_view(self, array: Array) -> Array:
        """`array` as the steps of operators see it."""
        return array

    def stand_in(self, nbytes: int) -> Array:
        """What stands for device memory that is not there yet, while a step is made; it must never be touched."""
        return np.empty(nbytes, np.uint8)  # never touched, so it takes no memory

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives at the first call for `key`: things that a device has one of, made when they are needed."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return cast(Made, self._made[key])

    def made(self) -> list[object]:
        """What `once` has made so far."""
        with self._making:
            return list(self._made.values())

    @abstractmethod
    def statistics(self) -> RuntimeStatistics:
        """Counts at this moment."""

    # Streams

    def lease(self, priority: Priority = Priority.NORMAL) -> Stream:
        """An idle stream nothing else uses, from the pool of that priority; a new one when the pool has none."""
        raise self._has_none("streams")

    def give_back(self, stream: Stream) -> None:
        """Return a leased stream to its pool. It must be idle; a failure is forgotten.

        Raises DeviceError for one that is not leased, captured, or not idle.
        """
        raise self._has_none("streams")

    def streams(self) -> Sequence[Stream]:
        """Every stream made so far, in the order they were made."""
        return ()

    def event(self, owner: str) -> Event:
        """A new event. `owner` names what it stands for in messages."""
        raise self._has_none("events")

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Copy on `stream`: within the device, from the host or another device of this kind, or to the host.

        The arrays have the same shape and dtype (ShapeError otherwise). The host is free to go on; it must leave both
        alone until the stream has come so far.
        """
        raise self._has_none("streams")

    def capture(self, streams: Sequence[Stream]) -> AbstractContextManager[Capture]:
        """Within it, what is asked of `streams` is kept, not done; the Capture can replay it afterwards.

        Raises DeviceError when one of them waits for work outside the capture, and for one that is captured already.
        """
        raise self._has_none("streams")

    def library_handle(self, name: str) -> AbstractContextManager[object]:
        """A new handle of the device's library of operators; entering it marks a use, which must be the only one.

        Raises DeviceError when the device has no such library.
        """
        raise DeviceError(f"{self.device} has no library of operators; {name} cannot be made")

    def _has_none(self, what: str) -> DeviceError:
        return DeviceError(f"{self.device} has no {what}: its work is done when a call returns")

    def synchronize(self) -> None:
        """Block until every stream of the device is idle. Raises nothing for failed work."""
        for stream in self.streams():
            stream.synchronize()

    def stream_in_use(self) -> Stream | None:
        """The stream that the calling thread made its current one, None when it did not."""
        found: Stream | None = getattr(self._thread, "current", None)
        return found

    def current_stream(self) -> Stream:
        """The calling thread's current stream of this device; a stream of its own if none was set."""
        found = self.stream_in_use()
        if found is None:
            found = self._thread.current = self.lease()
        return found

    @contextmanager
    def using(self, stream: Stream) -> Iterator[Stream]:
        """Within it, `stream` is the calling thread's current one."""
        if stream.device != self.device:
            raise DeviceError(f"{stream.name} cannot be the current stream of {self.device}")
        before = self.stream_in_use()
        self._thread.current = stream
        try:
            yield stream
        finally:
            self._thread.current = before


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: "cuda", as in `cuda:0`.
        number: the `device_type` of a DeviceOption.
        new_runtime: makes the runtime of a device of this kind. Raises DeviceError when there is no such device here.
        holds: whether its operators work on tensors of an element type; None: on any but strings.
    """

    name: str
    number: int
    new_runtime: Callable[[Device], DeviceRuntime]
    holds: Callable[[TypeMeta], bool] | None = None


_kinds: dict[str, DeviceKind] = {}


def register_kind(kind: DeviceKind) -> None:
    """Let devices of this kind be named, and used: all that dagexec needs to know of one."""
    _kinds[kind.name] = kind
    name_kind(kind.name, kind.number)  # which lets other threads use it


def _kind_of_plugin(name: str, kind: object) -> DeviceKind:
    if not isinstance(kind, DeviceKind) or kind.name != name:
        raise DeviceError(f"expected a dagexec.devices.DeviceKind called {name!r}, found {kind!r:.200}")
    for other in _kinds.values():
        if other is not kind and (other.name == name or other.number == kind.number):
            raise DeviceError(f"the kind of devices {other.name!r}, number {other.number}, is there already")
    register_kind(kind)
    return kind


PLUGINS = PluginGroup("devices", _kind_of_plugin)
use_plugins(PLUGINS)


def kind_of(device: Device) -> DeviceKind:
    """The kind of a device. Raises DeviceError when there is none of that name."""
    if not has_kind(device.kind) or (kind := _kinds.get(device.kind)) is None:
        raise DeviceError(f"device {device} is not available here; available kinds: {', '.join(_kinds)}")
    return kind


_runtimes: dict[Device, DeviceRuntime] = {}
_runtimes_lock = ProcessLock()


def runtime_of(device: Device) -> DeviceRuntime:
    """The runtime of `device`, made when first asked for. Raises DeviceError when there is no such device here."""
    found = _runtimes.get(device)
    if found is not None:
        return found
    kind = kind_of(device)
    with _runtimes_lock.own:
        found = _runtimes.get(device)
        if found is None:
            found = _runtimes[device] = kind.new_runtime(device)
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


def check_copy(destination: Array, source: Array) -> None:
    """Raise ShapeError unless shapes and dtypes are equal."""
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise ShapeError(
            f"a copy from a {source.dtype} array of shape {source.shape} to a {destination.dtype} array of shape "
            f"{destination.shape}: expected the same"
        )
