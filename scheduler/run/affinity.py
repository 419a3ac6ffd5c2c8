"""Affinity: the core on which a worker wakes up, one that no other busy worker was woken on.

Some kernels put a woken thread on the core of its waker, and on small virtual machines it takes milliseconds until an
idle core pulls it away; for that long two workers share a core. So the waker of a worker excludes the cores that other
busy workers of this process hold, and the worker holds the core it wakes up on until it waits again.

The choice is made with the thread's affinity mask, which every thread and process that it starts inherits for life: a
subprocess, or the workers of an executor inside an operator. So the mask is narrow only from the wake-up until the
worker is awake. While it works, and while it waits, it may run wherever the process may.

Linux only, and only for pools of at least two workers and no more than cores; otherwise the system is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

from dagexec.platform.locks import new_rlock
from dagexec.platform.threads import Threads, threads
from dagexec.scheduler.run.engine import Bell

_lock = new_rlock()  # a pool may be collected as garbage, and closed, at any point of a thread
_held: set[int] = set()


class CoreWakeUp:
    """The wake-up of one worker thread, and the core it holds; made by the thread itself."""

    __slots__ = ("_allowed", "_bell", "_core", "_gate", "_narrowed", "_thread", "_waiting")

    def __init__(self, *, placed: bool, source: Threads | None = None, bell: Bell | None = None) -> None:
        """With `placed`, the worker is woken on a core that nobody holds; otherwise the system chooses.

        With a `bell` it listens to that before it sleeps.
        """
        self._bell = bell
        self._gate = (source or threads()).lock()
        self._gate.acquire()
        self._thread = threading.get_native_id()
        self._allowed = os.sched_getaffinity(0) if placed and current_core is not None else set()
        self._core: int | None = None
        self._waiting = False  # its mask may be narrowed; guarded by the lock, as is the next
        self._narrowed = False

    def wait(self) -> None:
        """Release the core and block until another thread calls `wake`; then hold the core it wakes up on."""
        self.leave()
        if self._bell is not None:
            self._bell.listen()
        if not self._allowed or current_core is None:
            self._gate.acquire()
            return
        if not self._gate.acquire(blocking=False):
            with _lock:
                self._waiting = True
            self._gate.acquire()
        with _lock:
            self._waiting = False
            narrowed, self._narrowed = self._narrowed, False
            core = current_core()
            if core not in _held:
                _held.add(core)
                self._core = core
        if narrowed:
            _restrict(0, self._allowed)

    def wake(self, *, as_helper: bool = False) -> None:
        """Let the worker go on, on a core that no other busy worker holds. One that is not waiting will not wait.

        `as_helper` of the calling thread, which goes on computing on its core.
        """
        if self._allowed and current_core is not None:
            with _lock:  # once it is awake, no thread narrows its mask any more
                free = self._allowed - _held
                if as_helper:
                    free.discard(current_core())
                if self._waiting and free and len(free) < len(self._allowed):
                    self._narrowed = True
                    _restrict(self._thread, free)
        try:
            self._gate.release()
        except RuntimeError:
            return  # woken already, by two threads that both found that a worker had died
        if self._bell is not None:
            self._bell.ring()

    def leave(self) -> None:
        """Release the core: the worker is about to wait, or to end."""
        if self._core is not None:
            with _lock:
                _held.discard(self._core)
            self._core = None


def _restrict(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return  # a container's rules may forbid it, or the cores may have changed; the worker runs all the same


def _find_current_core() -> Callable[[], int] | None:
    """The C library's sched_getcpu, called without releasing the interpreter lock; None where there is none."""
    if not sys.platform.startswith("linux") or not hasattr(os, "sched_setaffinity"):
        return None
    try:
        function = ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    function.argtypes = ()
    return function


current_core = _find_current_core()
"""Gives the core the calling thread runs on; None where that cannot be told."""


def _forget_holders() -> None:
    """In a child made by `os.fork`: the threads that held cores, and maybe the lock, are the parent's."""
    global _lock
    _lock = new_rlock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_holders)
