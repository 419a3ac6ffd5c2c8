"""What caches of an executor's sessions take, and a limit of it.

Caches double, so that up to half of them is room that a session has not needed yet. Where a session needs more than the
limit leaves, those that have not run for the longest time are cut to the positions they hold: they are copied, and grow
again when their session runs next. Where that is not enough, the run that needs more is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from dagexec.core.caches import Caches
from dagexec.errors import ResourceError
from dagexec.platform.threads import threads


class HasCaches(Protocol):
    """A session.

    Attributes:
        last_run: a number that grows from run to run of all sessions.
        caches: those that it has, or shares with others; None where there are none.
    """

    last_run: int

    @property
    def caches(self) -> Caches | None: ...

    def cut_caches(self) -> int:
        """Have no room for more positions than there are; the bytes saved, none during a run or where others share."""


class SessionMemory:
    """Of one executor."""

    def __init__(self, net: str, limit: int | None) -> None:
        """`net` is the name for errors, `limit` the bytes that all caches may take; None for no limit."""
        self._net, self._limit = net, limit
        self._lock = threads().lock()
        self._sessions: WeakSet[HasCaches] = WeakSet()
        self._runs = itertools.count(1)

    def add(self, session: HasCaches) -> None:
        """One more session."""
        with self._lock:
            self._sessions.add(session)

    def next_run(self) -> int:
        """The number of a run that begins."""
        return next(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches; those that sessions share are counted once."""
        with self._lock:
            return self._held()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Within the block `nbytes` more may be taken, and no other session takes any.

        Raises ResourceError when the limit does not leave so many.
        """
        with self._lock:
            if self._limit is not None:
                self._make_room(nbytes, self._limit)
            yield

    def wait(self) -> None:
        """Until no session is being cut."""
        with self._lock:
            pass

    def _held(self) -> int:
        return sum({caches.number: caches.nbytes for one in self._sessions if (caches := one.caches)}.values())

    def _make_room(self, nbytes: int, limit: int) -> None:
        excess = self._held() + nbytes - limit
        for session in sorted(self._sessions, key=lambda one: one.last_run):
            if excess <= 0:
                return
            excess -= session.cut_caches()
        if excess > 0:
            raise ResourceError(
                f"net {self._net!r}: caches of {len(self._sessions)} sessions take {self._held():,} bytes, and one "
                f"needs {nbytes:,} more; session_bytes allows {limit:,}: close sessions, or reset them"
            )
