"""Where workers run: each on a core of its own, for as long as it has something to do.

Two threads that hand the interpreter lock to each other look to some kernels as if they belonged on one core. The
woken one is put where the waker runs, and on small virtual machines it takes milliseconds until an idle core pulls it
away; for that long two workers run one after the other. So a worker that begins to work stays on the core it wakes up
on, and whoever wakes it rules out the cores that other working workers of this process hold. A worker that goes to wait
lets its core go: nothing is pinned while it has no work, and the kernel chooses anew the next time.

Linux only, and only for pools of at least two workers and no more than cores; otherwise the system is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

from dagexec.core.threads import Threads, threads

_lock = threading.RLock()  # a pool dropped as garbage is shut at any point of a thread
_held: set[int] = set()


class WakeUp:
    """The wake-up of one worker thread, and the core it holds; made by the thread itself."""

    __slots__ = ("_allowed", "_core", "_gate", "_thread")

    def __init__(self, *, placed: bool, source: Threads | None = None) -> None:
        """With `placed`, the worker holds a core while it works; else the system puts it where it likes."""
        self._gate = (source or threads()).lock()
        self._gate.acquire()
        self._thread = threading.get_native_id()
        self._allowed = os.sched_getaffinity(0) if placed and current_core is not None else set()
        self._core: int | None = None

    def wait(self) -> None:
        """Let the core go and block until another thread calls `wake`; then hold the core woken up on."""
        self.leave()
        self._gate.acquire()
        if self._allowed and current_core is not None:
            core = current_core()
            with _lock:
                if core not in _held:
                    _held.add(core)
                    self._core = core
            if self._core is not None:
                _restrict(0, {core})

    def wake(self) -> None:
        """Let the worker go on, on a core that no other working worker holds. One that is not waiting will not wait."""
        if self._allowed:
            with _lock:
                free = self._allowed - _held
            _restrict(self._thread, free or self._allowed)
        try:
            self._gate.release()
        except RuntimeError:
            return  # woken already, by two who both found that a worker had died

    def leave(self) -> None:
        """Let the core go: the worker is about to wait, or to end."""
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
    """The C library's sched_getcpu, called without letting go of the interpreter lock; None where there is none."""
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
    _lock = threading.RLock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_holders)
