"""Worker: one thread of a pool, as the pool sees it, and how it takes the pool's lock from another holder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from dagexec.platform.records import dataclass
from dagexec.scheduler.run.run import Run

_YIELDS = 100
"""How often a worker lets others run before it sleeps until the pool's lock is released."""


@dataclass(frozen=True)
class PoolStatistics:
    """A pool at one moment.

    Attributes:
        workers: its threads.
        idle: workers that wait for work.
        busy: workers inside a run, or telling the owner of one that it is over.
        runs_waiting: runs with work that no worker has taken.
        chains_waiting: the chains, or pieces of operators, that workers may take there.
        replaced: workers that died and were replaced, since the pool was made.
    """

    workers: int
    idle: int
    runs_waiting: int
    chains_waiting: int
    busy: int = 0
    replaced: int = 0


class WakeUp(Protocol):
    """How a worker is woken."""

    def wake(self, *, as_helper: bool = False) -> None:
        """Have it look for work; as a helper, beside the calling thread."""

    def leave(self) -> None:
        """It is about to wait, or to end."""


class FirstWakeUp:
    """Wakes a worker that has no thread yet: it gets one."""

    __slots__ = ("_start",)

    def __init__(self, start: Callable[[], object]) -> None:
        """`start` starts its thread, unless that was done."""
        self._start = start

    def wake(self, *, as_helper: bool = False) -> None:
        self._start()

    def leave(self) -> None:
        """It is on no core."""


class Worker:
    """One thread of a pool.

    Attributes:
        name: the thread's.
        number: of the pool's workers; -1 for a caller.
        wake_up: how to wake it; None until its thread runs.
        run: the run that it is inside and counted in; with a run of a body in an operator, the inner one.
        depth: how many nested runs it is in.
        ident: of its thread, 0 until that runs.
        has_thread: that was started.
        telling: the run whose owner it is telling that it is over.
        waiting: runs in whose operators it waits, while it helps others.
    """

    __slots__ = ("depth", "has_thread", "ident", "name", "number", "run", "telling", "waiting", "wake_up")

    def __init__(self, name: str, number: int = -1) -> None:
        self.name = name
        self.number = number
        self.depth = 0
        self.ident = 0
        self.has_thread = False
        self.wake_up: WakeUp | None = None
        self.run: Run | None = None
        self.telling: Run | None = None
        self.waiting: list[Run] = []

    @property
    def is_of_pool(self) -> bool:
        """False for a caller's thread."""
        return self.number >= 0

    def wake(self, *, as_helper: bool = False) -> None:
        """Have it look for work; as a helper, beside the calling thread."""
        if self.wake_up is not None:
            self.wake_up.wake(as_helper=as_helper)


def acquire_contended(acquire: Callable[[bool], bool]) -> None:
    """Take the pool's lock, which another thread holds, with its `acquire`.

    Its holder is usually a worker that has lost the interpreter lock within it. A thread that sleeps until the lock is
    released gets it without the interpreter lock, so that the next one has to sleep, too, and from then on the workers
    hand both locks to each other for every chain. So this lets the holder run, and takes the lock while holding the
    interpreter lock.
    """
    for _ in range(_YIELDS):
        time.sleep(0)
        if acquire(False):
            return
    acquire(True)
