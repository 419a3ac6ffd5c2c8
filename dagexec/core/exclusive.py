"""What operators on a device take turns to use: memory for one stream at a time, and states of a device library.

A mutex of the host is not enough there. It is let go when the work has been launched, not when it has been done; so
each turn also waits, on the device, for the event that the turn before has recorded. Nobody blocks the host for it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from dagexec.core.device import Device
from dagexec.core.errors import DeviceError
from dagexec.core.runtime import Array, DeviceRuntime, Event, Kernel, Stream, runtime_of
from dagexec.core.threads import threads

STATES_PER_DEVICE = 4

_turns = itertools.count()
_watched = threading.local()


@dataclass
class WatchedTurns:
    """Names of the turns that a thread is taking at this moment, and of all it has taken since it is watched."""

    held: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)


def watch_turns() -> WatchedTurns:
    """Watch the turns that the calling thread takes from now on, until it is called again. For checks."""
    turns = _watched.turns = WatchedTurns()
    return turns


class TurnLock:
    """The lock of what is used in turns, by its name; tells `watch_turns` who holds it. Used as a context manager."""

    __slots__ = ("_lock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threads().lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        turns: WatchedTurns | None = getattr(_watched, "turns", None)
        if turns is not None:
            turns.held.add(self.name)
            turns.taken.add(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        turns: WatchedTurns | None = getattr(_watched, "turns", None)
        if turns is not None:
            turns.held.discard(self.name)
        self._lock.release()

    def locked(self) -> bool:
        """True while somebody holds it."""
        return self._lock.locked()


class StreamMutex:
    """Turns of streams at something they share, such as working memory.

    Attributes:
        name: what it guards, in messages, traces and proofs: "shared buffer of sim:0".
    """

    def __init__(self, name: str, runtime: DeviceRuntime) -> None:
        self.name = name
        self._runtime = runtime
        self._lock = TurnLock(name)
        self._last: Event | None = None

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[Stream]:
        """What is launched on `stream` in the block runs alone, after earlier turns, whether these failed or not.

        The lock is held while the block launches, not while the device works.
        """
        with self._lock:
            if self._last is not None and self._last.stream is not stream:
                stream.follow(self._last)
            try:
                yield stream
            finally:
                event = self._runtime.event(f"turn {next(_turns)} at the {self.name}")
                event.record(stream)
                self._last = event


class LibraryState:
    """The state of a device library (as cuDNN's): a handle, a stream to use it on, a workspace, and a mutex.

    A handle must not be used by two threads at once, and the workspace by one piece of work at a time. What users
    launch runs on the state's own stream, between two events: `before` lets it wait for the user's stream, and `after`
    lets that go on. A user's failing kernel fails the user's stream, not the state's, which others use too.

    Attributes:
        name: "library state 0 of sim:0".
        stream: the state's own.
        handle: the library's. Use it within `use` only.
        user: the stream whose work the state's stream is doing at this moment.
    """

    def __init__(self, runtime: DeviceRuntime, index: int) -> None:
        """Raises DeviceError when the device has no library."""
        self.name = f"library state {index} of {runtime.device}"
        self.stream = runtime.lease()
        self.handle = runtime.library_handle(self.name)
        self.user: Stream | None = None
        self._runtime = runtime
        self._workspace = runtime.allocate(0)
        self._lock = TurnLock(self.name)

    def workspace(self, nbytes: int) -> Array:
        """At least `nbytes` of the state's memory. Use it within `use` only, for work on the state's stream.

        It grows on demand, and waits for the state's stream then, which may still use what it had.
        Raises ResourceError when the device cannot hold it.
        """
        if self._workspace.nbytes < nbytes:
            self.stream.synchronize()
            self._workspace = self._runtime.allocate(0)
            self._workspace = self._runtime.allocate(nbytes)
        return self._workspace

    @contextmanager
    def use(self, stream: Stream) -> Iterator[Callable[[Kernel], None]]:
        """Within it the state is the caller's alone. Gives a function that launches on the state's stream.

        It all comes after what was launched on `stream` before, and before what is launched there afterwards.
        """
        outcome = _Outcome(self, stream)
        with self._lock:
            if self.stream.failure is not None and self.stream.is_idle:
                self.stream.reset()  # somebody abandoned it
            turn = next(_turns)
            before = self._runtime.event(f"before turn {turn} at the {self.name}")
            before.record(stream)
            self.stream.observer = stream.observer
            self.stream.follow(before)
            try:
                with self.handle:
                    yield lambda kernel: self.stream.launch(outcome.watching(kernel))
            finally:
                after = self._runtime.event(f"after turn {turn} at the {self.name}")
                after.record(self.stream)
                stream.wait(after)
                stream.launch(Kernel(outcome.report, f"end of turn {turn} at the {self.name}", 0.0))


class _Outcome:
    """Takes a failure from the state's stream to its user's."""

    def __init__(self, state: LibraryState, user: Stream) -> None:
        self._state = state
        self._user = user
        self._error: BaseException | None = None

    def watching(self, kernel: Kernel) -> Kernel:
        """`kernel`, passed over when the user's stream has failed, its error kept for `report`."""

        def step() -> None:
            if self._error is None and self._user.failure is None:
                self._state.user = self._user
                try:
                    kernel.step()
                except BaseException as error:
                    self._error = error
                finally:
                    self._state.user = None

        return Kernel(step, kernel.label, kernel.seconds, kernel.operator, kernel.copied_bytes)

    def report(self) -> None:
        """Raise, on the user's stream, what a kernel raised on the state's."""
        if self._error is not None:
            raise self._error


def library_state(device: Device, index: int) -> LibraryState:
    """State `index` of `device`, made at its first use.

    Raises DeviceError unless the index is one of 0 to `STATES_PER_DEVICE` - 1, and for a device without a library.
    """
    if not 0 <= index < STATES_PER_DEVICE:
        raise DeviceError(f"library state {index} of {device}: expected 0 to {STATES_PER_DEVICE - 1}")
    runtime = runtime_of(device)
    return runtime.once(("library state", index), lambda: LibraryState(runtime, index))
