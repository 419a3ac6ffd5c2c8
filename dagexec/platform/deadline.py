"""Deadlines: one moment by which all parts of some work have to be done.

A deadline is made where the time is granted, and passed down. Loops check it before each turn. `within_deadline`
reaches code that knows nothing of it: that calls `check_deadline` between two pieces of work, such as preparing two
operators. Native code looks at no clock: `call_with_timeout` makes a call that may take any time in a thread of its
own, and abandons that when it is late.

Work that is no longer wanted ends in the same places: within `stoppable`, `check_stop` raises once it is told to.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

from dagexec.errors import DeadlineExceededError
from dagexec.platform.locks import new_lock
from dagexec.platform.threads import ThreadWait, threads

T = TypeVar("T")


class Deadline:
    """A moment on a monotonic clock. Threads may share it."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        """`seconds` from now; infinity for none."""
        self._end = time.perf_counter() + seconds

    def left(self) -> float:
        """Seconds until it is over; negative afterwards."""
        return self._end - time.perf_counter()

    @property
    def is_over(self) -> bool:
        """True from that moment on."""
        return self.left() <= 0

    def within(self, seconds: float) -> Deadline:
        """`seconds` from now, or this moment if that is sooner."""
        return Deadline(min(seconds, self.left()))

    def expire(self) -> None:
        """End it now, for all who check it."""
        self._end = -math.inf


_deadline: ContextVar[Deadline | None] = ContextVar("_deadline", default=None)


@contextmanager
def within_deadline(deadline: Deadline) -> Iterator[None]:
    """Within the block, `check_deadline` raises DeadlineExceededError once `deadline` is over."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


class StopRequested(BaseException):
    """Raised in work that is no longer wanted: it releases what it has, and ends.

    No `Exception`, so that it passes handlers of candidates or operators that fail.
    """


_stop: ContextVar[threading.Event | None] = ContextVar("_stop", default=None)


@contextmanager
def stoppable(stop: threading.Event) -> Iterator[None]:
    """Within the block, `check_stop` raises StopRequested once `stop` is set, from any thread."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def check_stop() -> None:
    """Raises StopRequested when the caller's work is no longer wanted."""
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise StopRequested


def check_deadline() -> None:
    """Raises DeadlineExceededError when the deadline of the caller is over, and what `check_stop` raises."""
    check_stop()
    deadline = _deadline.get()
    if deadline is not None and deadline.is_over:
        raise DeadlineExceededError("the time limit has passed")


def call_with_timeout(call: Callable[[], T], seconds: float, late: Callable[[], object] = lambda: None) -> T:
    """The result of `call`, made in a thread of its own; after `seconds` raises DeadlineExceededError and abandons it.

    The thread is held to a deadline and ends when `call` does; it must only work on what is its own, and `late` is
    called when both have ended, to clean up. The wait for it can be interrupted. Raises what `call` raises.
    """
    attempted = _Attempt(call, seconds, late)
    try:
        return attempted.result(seconds)
    finally:
        attempted.leave()


class _Attempt(Generic[T]):
    """A call under way in a thread of its own."""

    def __init__(self, call: Callable[[], T], seconds: float, late: Callable[[], object]) -> None:
        self._call = call
        self._late = late
        self._deadline = Deadline(seconds)
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._lock = new_lock()
        self._parties = 2  # that have not ended: the thread, and its waiter
        self._heard = False
        self._ended = ThreadWait()
        context = copy_context()
        threads().start(lambda: context.run(self._work), "attempt")

    def result(self, seconds: float) -> T:
        """Wait for it. Raises DeadlineExceededError when it takes longer than `seconds`."""
        if not self._ended.wait(min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            raise DeadlineExceededError(f"it takes longer than {seconds:.3f} s")
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._found[0]

    def leave(self) -> None:
        """Stop waiting for it."""
        self._deadline.expire()
        self._end()

    def _work(self) -> None:
        try:
            with within_deadline(self._deadline):
                self._found.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.notify()
            self._end()

    def _end(self) -> None:
        """One of the parties has ended; the last of them cleans up after a call that was abandoned."""
        with self._lock:
            self._parties -= 1
            is_last = self._parties == 0
        if is_last and not self._heard:
            self._late()
