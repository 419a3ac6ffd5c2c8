"""One thread that makes calls when their time comes, for all who need one: a thread for each call costs 0.1 ms."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush

from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock

logger = logging.getLogger("dagexec")

THREAD_NAME = "dagexec-timer"
"""Of the thread, which stays for as long as the process does."""


class TimedCall:
    """A call to be made later."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Do not make the call. Nothing happens when it was made already."""
        self._function = None

    def make(self) -> None:
        """Make the call, unless it was cancelled. What it raises is logged."""
        function, self._function = self._function, None
        if function is not None:
            try:
                function()
            except Exception:
                logger.exception("a call that was made later has failed")


class TimerThread:
    """The thread, which starts at the first call. In a forked child there is none, and no call is left to be made."""

    def __init__(self) -> None:
        self._forget()
        reset_after_fork(self, TimerThread._forget)

    def _forget(self) -> None:
        self._lock = new_lock()
        self._gate = new_lock()
        self._gate.acquire()
        self._calls: list[tuple[float, int, TimedCall]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def call(self, seconds: float, function: Callable[[], object]) -> TimedCall:
        """Have `function`, which blocks for no longer than a lock is held, called so many seconds from now.

        Raises RuntimeError when the system starts no more threads.
        """
        call = TimedCall(function)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            entry = (time.monotonic() + seconds, next(self._numbers), call)
            heappush(self._calls, entry)
            first = self._calls[0] is entry
        if first:
            self._wake()
        return call

    def _start(self) -> None:
        thread = threading.Thread(target=self._make_calls, name=THREAD_NAME, daemon=True)
        thread.start()
        self._thread = thread

    def _wake(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            return  # it was woken, and has not looked yet

    def _make_calls(self) -> None:
        while True:
            call, seconds = self._next()
            if call is None:
                self._gate.acquire(timeout=seconds)
            else:
                call.make()

    def _next(self) -> tuple[TimedCall | None, float]:
        """The call whose time has come; else None, and the seconds until there is one, -1 when there is none."""
        with self._lock:
            if not self._calls:
                return None, -1
            seconds = self._calls[0][0] - time.monotonic()
            if seconds > 0:
                return None, min(seconds, threading.TIMEOUT_MAX)
            return heappop(self._calls)[2], 0.0
