"""Waiting inside an operator for another thread, until the run is stopped or late at the latest.

A thread that works for a run says so (`working_for`); `wait_until` then ends when that run is stopped, by a failure
elsewhere, a cancellation or a timeout.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from dagexec.errors import RunCancelledError, RunTimeoutError
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import ThreadWait, acquire, threads


class Stoppable(Protocol):
    """The part of a run that waits need.

    Attributes:
        stopped: no more work is to be done for it; set before its waits are notified.
        waits: the waits to end when it is stopped.
    """

    @property
    def stopped(self) -> bool: ...

    @property
    def waits(self) -> list[ThreadWait]: ...


class _Work(threading.local):
    """The run that the calling thread works for, and its deadline."""

    run: Stoppable | None = None
    deadline: float = math.inf


work = _Work()


@contextmanager
def working_for(run: Stoppable | None = None, deadline: float = math.inf) -> Iterator[None]:
    """Within it, waits of this thread end when `run` is stopped, or at `deadline` of the monotonic clock.

    By default `run` is the one that the thread works for already, if any.
    """
    before = work.run, work.deadline
    work.run, work.deadline = run or work.run, min(deadline, work.deadline)
    try:
        yield
    finally:
        work.run, work.deadline = before


def check_stopped(what: str) -> None:
    """For long work: raises RunCancelledError when the run that this thread works for was stopped.

    RunTimeoutError when it is late. `what` names the work.
    """
    run = work.run
    if run is not None and run.stopped:
        raise RunCancelledError(f"{what}: the run was stopped")
    if work.deadline < math.inf and threads().monotonic() > work.deadline:
        raise RunTimeoutError(f"{what}: the run timed out")


class _Call(ThreadWait):
    """A wait in form only: notifying it makes a call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call

    def notify(self) -> None:
        self._call()


@contextmanager
def calling_when_stopped(call: Callable[[], object]) -> Iterator[None]:
    """Within it, `call` is called, from any thread, when the run that this thread works for is stopped, or was already.

    It is for a run inside that run, whose own waits it ends.
    """
    run = work.run
    if run is None:
        yield
        return
    wait = _Call(call)
    run.waits.append(wait)
    try:
        if run.stopped:
            call()
        yield
    finally:
        run.waits.remove(wait)


def wait_until(
    lock: Mutex, waits: list[ThreadWait], ready: Callable[[], bool], what: str, timeout: float | None = None
) -> bool:
    """Wait until `ready()`; False when that takes longer than `timeout` seconds. The caller holds `lock` throughout.

    Whoever changes what `ready` reads calls `notify` on each of `waits`, with the lock held. `what` names the wait in
    errors. Raises RunCancelledError when the run that the thread works for was stopped, and RunTimeoutError at its
    deadline.
    """
    now = threads().monotonic
    run = work.run
    limit = math.inf if timeout is None else now() + timeout
    deadline = min(limit, work.deadline)
    while not ready():
        if run is not None and run.stopped:
            raise RunCancelledError(f"{what}: the run was stopped while it waited")
        remaining = deadline - now() if deadline < math.inf else -1.0
        if remaining <= 0 and deadline < math.inf:
            if work.deadline <= limit:
                raise RunTimeoutError(f"{what}: the run timed out while it waited")
            return False
        _wait(lock, waits, run, min(remaining, threading.TIMEOUT_MAX))
    return True


def _wait(lock: Mutex, waits: list[ThreadWait], run: Stoppable | None, seconds: float) -> None:
    wait = ThreadWait()
    waits.append(wait)
    if run is not None:
        run.waits.append(wait)
    lock.release()
    try:
        if run is None or not run.stopped:  # a stop notifies the waits after it sets `stopped`
            wait.wait(seconds)
    finally:
        acquire(lock)
        waits.remove(wait)
        if run is not None:
            run.waits.remove(wait)
