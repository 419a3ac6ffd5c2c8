"""Where locks, threads and time come from.

Whatever takes part in the scheduling of runs (pools, executors, nets, devices) makes its locks and threads here. By
default they are the system's. `scheduler.exploration` installs others, under which one seed decides who goes on at
every lock, so that a schedule can be replayed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol


class Lock(Protocol):
    """What is used of `threading.Lock`. One that is acquired by one thread and released by another is a gate."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False when it could not be had in `timeout` seconds (-1: wait as long as it takes)."""

    def release(self) -> None:
        """Let the lock go. Any thread may do so."""

    def locked(self) -> bool:
        """True while somebody holds it."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Thread(Protocol):
    """What is used of `threading.Thread`, once started."""

    @property
    def name(self) -> str:
        """The thread's name."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends."""

    def is_alive(self) -> bool:
        """True until the thread ends."""


class Timer(Protocol):
    """A call to be made later."""

    def cancel(self) -> None:
        """Do not make the call. Nothing happens when it was made already."""


class Threads(ABC):
    """A source of locks, threads and time."""

    @abstractmethod
    def lock(self) -> Lock:
        """A new lock, not held."""

    @abstractmethod
    def start(self, target: Callable[[], object], name: str) -> Thread:
        """Start a daemon thread. Raises RuntimeError when the system starts no more."""

    @abstractmethod
    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""

    @abstractmethod
    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Call `function` on a thread of its own, `seconds` from now."""


class SystemThreads(Threads):
    """The system's own."""

    def lock(self) -> Lock:
        """A `threading.Lock`."""
        return threading.Lock()

    def start(self, target: Callable[[], object], name: str) -> Thread:
        """A started `threading.Thread`."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def monotonic(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """A started `threading.Timer`."""
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        return timer


_current: list[Threads] = [SystemThreads()]


def threads() -> Threads:
    """The source in force."""
    return _current[-1]


def new_gate() -> Lock:
    """A lock that is held: whoever acquires it waits until someone releases it."""
    gate = threads().lock()
    gate.acquire()
    return gate


@contextmanager
def installed(source: Threads) -> Iterator[None]:
    """Within it, `threads()` is `source`, in every thread. For one user at a time: tests and exploration."""
    _current.append(source)
    try:
        yield
    finally:
        _current.remove(source)
