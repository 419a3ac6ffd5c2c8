"""Locks for `with` that no signal leaves held.

Up to CPython 3.13 nothing comes between the `__enter__` of an interpreter's lock and the block. CPython 3.14 looks for
signals there: Ctrl-C raises behind a lock that is taken, and before the block that releases it. There these locks know
whether they were taken when an error comes, and let go; before 3.14 they are those of `threading`.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol


class Mutex(Protocol):
    """What is used of a lock that is released by the thread which took it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False when it could not be had in `timeout` seconds (-1: wait as long as it takes)."""

    def release(self) -> None:
        """Let the lock go."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Lock(Mutex, Protocol):
    """What is used of `threading.Lock`: any thread may release it. One released by another thread is a gate."""

    def locked(self) -> bool:
        """True while it is held."""


_LEAVES_LOCKS_HELD: bool = sys.version_info >= (3, 14)
_ONCE = (True,)


def _enter(acquire: Callable[[bool], bool], release: Callable[[], None]) -> bool:
    """Take a lock. Calls of C end before signals are looked for, so `taken` tells what has happened."""
    taken: list[bool] = []
    try:
        taken.extend(map(acquire, _ONCE))
    except BaseException:
        if taken:
            release()
        raise
    return True


class _Lock:
    """A lock of the interpreter; `__exit__` is its own, which releases before signals are looked for."""

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
        ) -> None: ...

    __slots__ = ("__exit__", "acquire", "locked", "release")

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]

    def __enter__(self) -> bool:
        return _enter(self.acquire, self.release)


class _RLock(_thread.RLock):  # type: ignore[misc]  # only typeshed has it final
    """One that its holder may take again."""

    def __enter__(self) -> bool:  # type: ignore[override]
        return _enter(self.acquire, self.release)


class _OwnedLock(_thread.RLock):  # type: ignore[misc]
    """One that its holder does not take again: held is taken, which is found in half the time."""

    def __enter__(self) -> bool:  # type: ignore[override]
        try:
            self.acquire()
        except BaseException:
            if self._is_owned():  # type: ignore[attr-defined]  # `threading.Condition` asks so, too
                self.release()
            raise
        return True


def new_lock() -> Lock:
    """As `threading.Lock()`."""
    return _Lock() if _LEAVES_LOCKS_HELD else threading.Lock()


def new_rlock() -> Mutex:
    """As `threading.RLock()`."""
    return _RLock() if _LEAVES_LOCKS_HELD else threading.RLock()


def new_owned_lock() -> Mutex:
    """As `threading.RLock()`, for a lock that its holder does not take again."""
    return _OwnedLock() if _LEAVES_LOCKS_HELD else threading.RLock()
