"""The state of a child made by `os.fork`: the parent's memory, copied when written to, and a single thread.

Work of the parent's other threads stays as it was at that moment, and nobody continues it:

- an object whose threads are gone, or that shares a lock with them, is reset (`reset_after_fork`);
- a lock that guards a few assignments is free in the child (`ProcessLock`);
- a fork waits for longer work that must not be found half done (`without_fork`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dagexec.platform.locks import Lock, new_lock

_Owner = TypeVar("_Owner")

MAX_WAIT = 10.0
"""Seconds that a fork waits for other threads in such blocks."""

LEFT_BEHIND = "the process was forked, and the threads stayed in the parent; make it anew in the child"
"""Why an object with threads does nothing in a child."""

_resets: dict[object, tuple[weakref.ref[object], Callable[[object], None]]] = {}


def reset_after_fork(owner: _Owner, reset: Callable[[_Owner], None]) -> None:
    """In a child that `os.fork` makes while `owner` lives, call `reset(owner)`.

    The child has none of the parent's other threads, and locks that one of them held stay held for good.
    """
    key = object()
    # the callback, pop(key, dead reference), is no function of Python: Ctrl-C in one would be swallowed
    _resets[key] = weakref.ref(owner, partial(_resets.pop, key)), reset  # type: ignore[assignment]


class ProcessLock:
    """A lock that is free in a child made by `os.fork`: `with lock.own:`.

    For a few assignments, of which a child can bear any part. There may be many: each costs nothing at a fork, and is
    renewed when it is first used afterwards.
    """

    __slots__ = ("_lock", "_process")

    def __init__(self) -> None:
        self._lock = new_lock()
        self._process = _process

    @property
    def own(self) -> Lock:
        """The lock of this process, to be taken at once.

        It is the interpreter's own type, as Ctrl-C may come between any two calls of a context manager in Python.
        """
        if self._process is not _process:
            with _renewing:
                if self._process is not _process:
                    self._lock = new_lock()
                    self._process = _process
        return self._lock


_process = object()  # a different one in every child
_renewing = new_lock()
_barring_fork: list[int] = []  # threads, once for each block they are in
_changed = threading.Condition()


class without_fork:  # noqa: N801 - it reads as what holds within it
    """A fork that another thread asks for waits until the block is over: for loading libraries and modules.

    The block must not take a time that the user decides on, nor wait for a thread that could fork.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _barring_fork.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _barring_fork.remove(threading.get_ident())
        with _changed:
            _changed.notify_all()


def _await_others() -> None:
    """Before a fork: wait for other threads in blocks `without_fork`, but not forever."""
    me = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: all(thread == me for thread in _barring_fork), MAX_WAIT)


def _in_child() -> None:
    global _process, _renewing, _changed
    _process, _renewing, _changed = object(), new_lock(), threading.Condition()
    me = threading.get_ident()
    _barring_fork[:] = [thread for thread in _barring_fork if thread == me]
    for reference, reset in tuple(_resets.values()):
        owner = reference()
        if owner is not None:
            reset(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_await_others, after_in_child=_in_child)
