"""The BLAS behind NumPy computes with one thread while nets live: workers share the cores, and bytes stay the same.

Some of its kernels round differently with more threads. There is one setting for the process: every net (or executor)
demands it for as long as it lives, and the earlier setting comes back when the last one ends.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

from dagexec.platform.forking import without_fork
from dagexec.platform.lazy import LazyModule
from dagexec.platform.locks import new_rlock

if not TYPE_CHECKING:
    threadpoolctl = LazyModule("threadpoolctl")
else:
    import threadpoolctl


_lock = new_rlock()  # a net collected as garbage releases its demand at any point of a thread
_tickets = itertools.count()
_demands: set[int] = set()
_before: list[tuple[object, int]] = []
_found: tuple[int, list[object]] = (0, [])


class OneBlasThread:
    """A demand for a single BLAS thread, in force until `release`."""

    def __init__(self) -> None:
        with without_fork(), _lock:
            self._ticket = next(_tickets)
            _demands.add(self._ticket)
            _apply()

    def release(self) -> None:
        """Withdraw the demand. Idempotent."""
        with without_fork(), _lock:
            if self._ticket in _demands:
                _demands.remove(self._ticket)
                _apply()


def _apply() -> None:
    """Put the demands in force, or restore the earlier setting when there is none. Call with the lock held.

    And not during a fork: OpenBLAS holds a lock while it starts and ends threads, which a child would wait for.
    """
    if not _demands:
        for library, threads in _before:
            _set(library, threads)
        _before.clear()
        return
    if not _before:
        _before.extend((library, library.num_threads) for library in _libraries())  # type: ignore[attr-defined]
    for library, _ in _before:
        _set(library, 1)


def _libraries() -> list[object]:
    """The BLAS libraries of the process. They are looked up again after imports, which may load libraries.

    That reads the list of all mapped files, which takes a millisecond or more, several times as long as making a small
    net.
    """
    global _found
    modules = len(sys.modules)
    if _found[0] != modules:
        _found = modules, threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    return _found[1]


def _set(library: object, threads: int) -> None:
    """Set the threads of a library, whichever thread asks.

    threadpoolctl 3.7 lets only the first thread that sets a number of OpenBLAS threads do so, and ignores all others.
    Nets are made and closed by many.
    """
    setter = getattr(library, "_real_set_num_threads", None) or library.set_num_threads  # type: ignore[attr-defined]
    setter(threads)


def _reset_lock() -> None:
    """In a child made by `os.fork`: the lock's holder is a thread of the parent."""
    global _lock
    _lock = new_rlock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)
