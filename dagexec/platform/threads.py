"""Where locks, threads and time come from.

Whatever takes part in the scheduling of runs (pools, executors, nets, devices) makes its locks and threads here. By
default they are the system's. `scheduler.exploration` installs others, under which one seed decides who continues at
every lock, so that a schedule can be replayed.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from dagexec.platform.locks import Lock, Mutex, new_lock, new_rlock
from dagexec.platform.timer_thread import TimerThread


class ThreadsEndedError(BaseException):
    """Raised in a thread whose source of threads is no more: it unwinds and does nothing else.

    No `Exception`, so that it passes whatever handles those.
    """


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
    """A source of locks, threads and time.

    Attributes:
        concurrent: threads run side by side, so it matters on which cores they are.
    """

    concurrent: bool = True

    @abstractmethod
    def lock(self) -> Lock:
        """A new lock, not held."""

    @abstractmethod
    def owned_lock(self) -> Mutex:
        """A new lock that only the thread which holds it can release: RuntimeError in any other.

        Its holder does not take it again before it has released it.
        """

    @abstractmethod
    def holds(self, lock: Mutex) -> bool:
        """True when the calling thread holds this owned lock."""

    @abstractmethod
    def start(self, target: Callable[[], object], name: str) -> Thread:
        """Start a daemon thread. Raises RuntimeError when the system starts no more."""

    @abstractmethod
    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""

    @abstractmethod
    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Call `function` on a thread of its own, `seconds` from now."""

    @abstractmethod
    def point(self, doing: str) -> None:
        """A place where another thread may go on before the caller, who is about to be `doing` something, does."""

    @abstractmethod
    def note(self, what: object) -> None:
        """What the calling thread does now, for whoever tells the story of a schedule."""

    def call_briefly(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Call `function`, which blocks for no longer than a lock is held, `seconds` from now.

        Raises RuntimeError when the system starts no more threads.
        """
        return self.call_later(seconds, function)


class SystemThreads(Threads):
    """The system's own."""

    lock = staticmethod(new_lock)

    def owned_lock(self) -> Mutex:
        """A `threading.RLock`, which costs what a `threading.Lock` does."""
        return new_rlock()

    def holds(self, lock: Mutex) -> bool:
        return bool(lock._is_owned())  # type: ignore[attr-defined]  # `threading.Condition` asks so, too

    def start(self, target: Callable[[], object], name: str) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    monotonic = staticmethod(time.monotonic)

    def point(self, doing: str) -> None:
        """Threads go on as they like."""

    def note(self, what: object) -> None:
        """Nobody listens."""

    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        return timer

    def call_briefly(self, seconds: float, function: Callable[[], object]) -> Timer:
        return _timer_thread.call(seconds, function)


_timer_thread = TimerThread()

_current: list[Threads] = [SystemThreads()]


def threads() -> Threads:
    """The source in force."""
    return _current[-1]


def new_gate() -> Lock:
    """A lock that is held: whoever acquires it waits until someone releases it."""
    gate = threads().lock()
    gate.acquire()
    return gate


def is_interruptible() -> bool:
    """True in the main thread, where Ctrl-C may come at any call."""
    return threading.current_thread() is threading.main_thread()


_SLICE = 0.25


def acquire(lock: Mutex, seconds: float = -1) -> bool:
    """Take `lock`; False when it could not be had within `seconds` (-1: as long as it takes).

    The main thread looks up every quarter of a second: a signal that comes after Python has looked for signals and
    before the thread sleeps does not wake it, and Ctrl-C would go unheard until the next one.
    """
    if not threads().concurrent or threading.current_thread() is not threading.main_thread():
        return lock.acquire(timeout=seconds)
    now = threads().monotonic
    deadline = math.inf if seconds < 0 else now() + seconds
    while not lock.acquire(timeout=max(0.0, min(_SLICE, deadline - now()))):
        if now() >= deadline:
            return False
    return True


class ThreadWait:
    """The wait of a thread until another calls `notify`; more than once does no harm."""

    __slots__ = ("_gate", "_notified")

    def __init__(self) -> None:
        self._gate = new_gate()
        self._notified = False

    def notify(self) -> None:
        """Let the thread go on."""
        self._notified = True  # first: a wait that Ctrl-C ends may have taken what is released here
        try:
            self._gate.release()
        except RuntimeError:
            return  # it was told before

    def wait(self, seconds: float = -1) -> bool:
        """Block until `notify` is called; False when it was not within `seconds` (-1: as long as it takes)."""
        return self._notified or acquire(self._gate, seconds)


@contextmanager
def installed(source: Threads) -> Iterator[None]:
    """Within it, `threads()` is `source`, in every thread. For one user at a time: tests and exploration."""
    _current.append(source)
    try:
        yield
    finally:
        _current.remove(source)
