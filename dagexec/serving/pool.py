"""Pool: workers that any number of executors share. `compile(model, pool=pool)` makes an executor for them.

What the workers do next is decided in `dagexec.scheduler.run.pool`; here is who uses them, and when they may end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol
from weakref import WeakValueDictionary

from dagexec.errors import ClosedError, DagexecError
from dagexec.platform import processor
from dagexec.platform.closing import Closing
from dagexec.platform.forking import ProcessLock
from dagexec.scheduler.run.pool import PoolStatistics, WorkerPool

_MOST_NAMED = 4


class User(Protocol):
    """What a pool has to know of an executor that runs on it."""

    @property
    def name(self) -> str:
        """The model's."""
        ...

    def unfinished(self) -> int:
        """How many of its requests are not over."""
        ...


@dataclass(frozen=True)
class _Workers:
    """The threads of one process."""

    process: int
    threads: WorkerPool


class Pool(Closing):
    """Worker threads for any number of executors.

        with dagexec.Pool(workers=2) as pool:
            with dagexec.compile("a.onnx", pool=pool) as a, dagexec.compile("b.onnx", pool=pool) as b:
                ...

    Runs of a higher priority go first, whichever model they are of. Among runs of one priority, models get equal shares
    of the workers' time, as far as they ask for it. In a child made by `os.fork`, the pool gets threads of its own as
    soon as an executor is compiled for it, or reopened.
    """

    def __init__(self, workers: int | None = None, *, name: str = "dagexec") -> None:
        """By default there are as many workers as cores. `name` is for messages and the names of threads.

        Raises SettingError for a number out of range, ResourceError when the system starts no more threads.
        """
        self.name = name
        self._lock = ProcessLock()
        self._users: WeakValueDictionary[int, User] = WeakValueDictionary()
        self._numbers = itertools.count()
        self._closed = False
        count = processor.available_cores() if workers is None else workers
        self._workers = _Workers(os.getpid(), WorkerPool(count, name=name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool. An `error` from within the block goes before that of executors that were left open."""
        try:
            self.close()
        except DagexecError as left_open:
            if error is None:
                raise
            error.add_note(str(left_open))

    @property
    def workers(self) -> int:
        """How many threads it has."""
        return self._workers.threads.num_workers

    @property
    def models(self) -> Sequence[str]:
        """Names of the models whose executors are open on it."""
        return [user.name for user in self._open_users()]

    def statistics(self) -> PoolStatistics:
        """What the workers do at this moment."""
        return self._workers.threads.statistics()

    def close(self) -> None:
        """Join the workers. Idempotent.

        Raises DagexecError while executors are open on the pool, and changes nothing then: close these first.
        """
        with self._lock.own:
            users = self._open_users()
            if users:
                raise DagexecError(self._in_use(users))
            self._closed = True
        if self._workers.process == os.getpid():
            self._workers.threads.close()

    def threads(self, model: str) -> WorkerPool:
        """The workers of this process, for an executor of `model`. Raises ClosedError, ResourceError."""
        with self._lock.own:
            if self._closed:
                raise ClosedError(f"net {model!r}: pool {self.name!r} of {self.workers} worker(s) is closed")
            if self._workers.process != os.getpid():
                self._users.clear()
                self._workers = _Workers(os.getpid(), WorkerPool(self.workers, name=self.name))
            return self._workers.threads

    def enter(self, user: User) -> Callable[[], object]:
        """`user` runs on the workers from now on, until it calls what is returned, or is gone."""
        number = next(self._numbers)
        self._users[number] = user
        return partial(self._users.pop, number, None)

    def _open_users(self) -> list[User]:
        return list(self._users.values()) if self._workers.process == os.getpid() else []

    def _in_use(self, users: Sequence[User]) -> str:
        names = ", ".join(repr(user.name) for user in users[:_MOST_NAMED])
        more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
        requests = sum(user.unfinished() for user in users)
        return (
            f"pool {self.name!r}: {len(users)} executor(s) with {requests} unfinished request(s) are open on it: "
            f"{names}{more}; close them before the pool"
        )
