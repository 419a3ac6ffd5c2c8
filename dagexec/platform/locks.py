"""Locks for `with` that no signal leaves held.

Up to CPython 3.13 nothing comes between the `__enter__` of an interpreter's lock and the block. CPython 3.14 looks for
signals there: Ctrl-C raises behind a lock that is taken, and before the block that releases it. There these locks are
taken where it does not look; before 3.14 they are those of `threading`.
"""

from __future__ import annotations

import sys
import threading
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


class _Entered:
    """A lock of the interpreter that a loop takes.

    CPython looks for signals after each call that an expression makes, but not when a loop asks its iterator for the
    next item, which here takes the lock: it is taken, and `__enter__` returns, without such a look between.
    """

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
        ) -> None: ...

    __slots__ = ("__exit__", "_takings", "acquire", "release")

    def __init__(self, lock: Lock | threading.RLock) -> None:
        self.acquire, self.release = lock.acquire, lock.release
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]
        self._takings = iter(lock.acquire, None)  # endless: `acquire` returns True

    def __enter__(self) -> bool:
        for taken in self._takings:
            return taken
        raise AssertionError("a lock was not waited for")


class _Lock(_Entered):
    __slots__ = ("locked",)

    def __init__(self) -> None:
        lock = threading.Lock()
        super().__init__(lock)
        self.locked = lock.locked


class _RLock(_Entered):
    __slots__ = ("_is_owned",)

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self._is_owned = lock._is_owned  # type: ignore[attr-defined]  # `threading.Condition` asks so, too


def new_lock() -> Lock:
    """As `threading.Lock()`."""
    return _Lock() if _LEAVES_LOCKS_HELD else threading.Lock()


def new_rlock() -> Mutex:
    """As `threading.RLock()`."""
    return _RLock() if _LEAVES_LOCKS_HELD else threading.RLock()
