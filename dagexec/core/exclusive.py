"""Things that operators on a device use in turns: memory for one stream at a time, and states of a device library.

A mutex of the host is not enough: it is released when the work has been launched, not when it is done. So each turn
also waits, on the device, for the event that the previous turn recorded. The host is never blocked for it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import field
from types import TracebackType

from dagexec.core.device import Device
from dagexec.core.runtime import Array, DeviceRuntime, runtime_of
from dagexec.core.stream import Event, EventState, Kernel, KernelFailedError, Stream
from dagexec.errors import DeviceError
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

STATES_PER_DEVICE = 4

_turns = itertools.count()
_watched = threading.local()


@dataclass
class WatchedTurns:
    """Names of the turns that a thread is in now, and of all that it took since it is watched."""

    held: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)


def watch_turns() -> WatchedTurns:
    """Watch the turns of the calling thread from now on, until the next call. For checks."""
    turns = _watched.turns = WatchedTurns()
    return turns


class TurnLock:
    """A named lock for something used in turns; `watch_turns` sees who holds it. Used as a context manager."""

    __slots__ = ("__weakref__", "_lock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._renew()
        reset_after_fork(self, TurnLock._renew)

    def _renew(self) -> None:
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
        """True while it is held."""
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
        self._ends: dict[Stream, Event] = {}  # of the last turn on each stream

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[Stream]:
        """What is launched on `stream` in the block runs alone, after earlier turns, whether these failed or not.

        The lock is held while the block launches, not while the device works. The turn follows the last turn of every
        stream, not just the previous one: a stream that fails skips its waits for earlier turns.
        """
        with self._lock:
            for other, end in self._ends.items():
                if other is not stream:
                    stream.follow(end)
            try:
                yield stream
            finally:
                event = self._runtime.event(f"turn {next(_turns)} at the {self.name}")
                try:
                    event.record(stream)
                except BaseException:
                    stream.synchronize()  # without an event, no later turn could wait for this one
                    raise
                self._ends[stream] = event

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Within it no turn is launched: for work that is captured, which is ordered within the capture."""
        with self._lock:
            yield


class LibraryState:
    """The state of a device library (as cuDNN's): a handle, a stream to use it on, a workspace, and a mutex.

    A handle must not be used by two threads at once, and the workspace by one piece of work at a time. What users
    launch runs on the state's own stream, between two events: `before` lets it wait for the user's stream, and `after`
    lets that go on. A user's failing kernel fails the user's stream, not the state's, which others use too.

    Where a device issues work at once (`issues_at_launch`) nothing can be skipped later: work launched for a user that
    fails is waited for.

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
        self._table = threads().lock()  # of the following two and `user`; nothing is called under it
        self._line: deque[_Outcome] = deque()  # turns that are not known to be over, in order
        self._callbacks: list[Callable[[], object]] = []

    def workspace(self, nbytes: int) -> Array:
        """At least `nbytes` of the state's memory. Use it within `use` only, for work on the state's stream.

        It grows on demand, and then waits for the state's stream, which may still use the old memory.
        Raises ResourceError when the device cannot hold it.
        """
        if self._workspace.nbytes < nbytes:
            self.stream.synchronize()
            self._workspace = self._runtime.allocate(0)
            self._workspace = self._runtime.allocate(nbytes)
        return self._workspace

    def reserve(self, nbytes: int) -> None:
        """Let the workspace grow to `nbytes` now, so that later uses need not wait. Not within `use`.

        Raises ResourceError when the device cannot hold it.
        """
        with self._lock:
            self.workspace(nbytes)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[Callable[[Kernel], None]]:
        """Within it the state is the caller's alone. Gives a function that launches on the state's stream.

        That work follows all that was launched on `stream` before, and precedes all that is launched there later.
        """
        outcome = _Outcome(self, stream)
        with self._lock:
            with self._table:
                self._first()
                self._line.append(outcome)
            if self.stream.failure is not None:  # it was abandoned
                if self.stream.is_idle:
                    self.stream.reset()
                elif self._runtime.issues_at_launch:
                    self._forget(outcome)
                    raise DeviceError(f"the {self.name} cannot be used: it hangs in work that was given up")
            turn = next(_turns)
            before = self._runtime.event(f"before turn {turn} at the {self.name}")
            try:
                before.record(stream)
            except BaseException:
                self._forget(outcome)
                raise
            self.stream.observer = stream.observer
            self.stream.follow(before)
            try:
                with self.handle:
                    yield lambda kernel: self.stream.launch(outcome.watching(kernel))
            finally:
                after = self._runtime.event(f"after turn {turn} at the {self.name}")
                try:
                    after.record(self.stream)
                except BaseException:
                    self._forget(outcome)
                    raise
                outcome.after = after
                stream.wait(after)
                stream.launch(Kernel(outcome.report, f"end of turn {turn} at the {self.name}", 0.0))

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Within it the handle is the caller's alone, for work that is captured on the caller's own stream."""
        with self._lock, self.handle:
            yield

    def take_workspace(self) -> Array:
        """The workspace, once it is idle, for work captured with it; the state gets another when it needs it."""
        with self._lock:
            self.stream.synchronize()
            workspace, self._workspace = self._workspace, self._runtime.allocate(0)
            return workspace

    def give_up(self, users: Collection[Stream], callback: Callable[[], object]) -> None:
        """Skip the work of `users` here that is not done; call `callback` once none of it runs any more.

        A stream that fails skips its wait for the state's stream too. So when it is idle, work that was launched for it
        may still be queued here, and would run when the stream has been reset and has other work. It may also hang:
        `abandon` ends that, and `callback` is called then.
        """
        with self._table:
            for outcome in self._line:
                if outcome.user in users:
                    outcome.given_up = True
            first = self._first()
            if self._runtime.issues_at_launch:
                after = next((turn.after for turn in reversed(self._line) if turn.user in users and turn.after), None)
            else:
                after = first.after if first is not None and first.user in users else None
            working = after is None and self.user in users
            if working:
                self._callbacks.append(callback)
        if after is not None:
            after.when_done(callback)
        elif not working:
            callback()

    def abandon(self, users: Collection[Stream]) -> None:
        """End work that hangs here if it is of `users`, or was given up. Work queued behind it fails with it."""
        with self._table:
            first = self._first()
            stuck = first is not None and (first.given_up or first.user in users)
        if stuck:
            self.stream.abandon(DeviceError(f"the {self.name} was given up: what it was working on was stopped"))

    def _first(self) -> _Outcome | None:
        """The current turn of the state's stream, None when there is none. Call with `_table` held."""
        line = self._line
        while line and line[0].after is not None and line[0].after.query() in (EventState.SUCCESS, EventState.FAILED):
            line.popleft()
        return line[0] if line else None

    def _forget(self, outcome: _Outcome) -> None:
        """The turn of `outcome` has no end to wait for: its work is skipped."""
        with self._table:
            outcome.given_up = True
            self._line.remove(outcome)

    def _begin(self, outcome: _Outcome) -> bool:
        """Whether a kernel of `outcome` is to run, on the device's thread; it runs from here to `_end`."""
        with self._table:
            if outcome.given_up or outcome.error is not None or outcome.user.failure is not None:
                return False
            self.user = outcome.user
            return True

    def _end(self) -> None:
        with self._table:
            self.user = None
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Outcome:
    """Takes a failure from the state's stream to its user's."""

    def __init__(self, state: LibraryState, user: Stream) -> None:
        self.user = user
        self.after: Event | None = None
        self.given_up = False
        self.error: KernelFailedError | None = None
        self._state = state

    def watching(self, kernel: Kernel) -> Kernel:
        """`kernel`, skipped when the user's stream has failed, its error kept for `report`."""

        def step() -> None:
            if not self._state._begin(self):
                return
            try:
                kernel.step()
            except BaseException as error:
                failed(error)
            finally:
                self._state._end()

        def failed(error: BaseException) -> None:
            self.error = KernelFailedError(kernel.label, error)

        return Kernel(step, kernel.label, kernel.seconds, kernel.operator, kernel.copied_bytes, failed)

    def report(self) -> None:
        """Raise on the user's stream the error of a kernel on the state's stream."""
        if self.error is not None:
            raise self.error


def library_state(device: Device, index: int) -> LibraryState:
    """State `index` of `device`, made at its first use.

    Raises DeviceError unless the index is one of 0 to `STATES_PER_DEVICE` - 1, and for a device without a library.
    """
    if not 0 <= index < STATES_PER_DEVICE:
        raise DeviceError(f"library state {index} of {device}: expected 0 to {STATES_PER_DEVICE - 1}")
    runtime = runtime_of(device)
    return runtime.once(("library state", index), lambda: LibraryState(runtime, index))
