"""Place: the workers that an executor has, and how it gives them up.

They may be its own, another executor's, those of a `Pool`, or, where nobody asked for anything, those that the process
has for all such executors. The last ones grow with what runs on them, to as many threads as there are cores, and end
with the last executor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dagexec.core.operator import nothing_to_do
from dagexec.errors import ClosedError
from dagexec.platform import processor
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import physical_bytes
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.arena_budget import ArenaBudget
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import task


def _ask_for_no_more(_workers: int) -> None:
    """The workers are as many as somebody decided."""


@dataclass(eq=False)
class Place:
    """What one executor has of workers.

    Attributes:
        model: its model's name.
        workers: the threads.
        share: what these are charged to; None where nobody else uses them.
        leave: the executor is closed. Joins workers that nobody uses any more. Idempotent.
        drop: the executor was collected as garbage, at any point of any thread. Takes no lock and waits for nothing.
        unfinished: how many of its requests are not over.
        grow: have at least so many workers, where there may be more than were asked for. One caller at a time. Raises
            ResourceError.
        arenas: what the memory of its runs is charged to; None for no limit.
    """

    model: str
    workers: WorkerPool
    share: Share | None = None
    leave: Callable[[], object] = nothing_to_do
    drop: Callable[[], object] = nothing_to_do
    unfinished: Callable[[], int] = lambda: 0
    grow: Callable[[int], object] = _ask_for_no_more
    arenas: ArenaBudget | None = None

    def later(self, call: Callable[[], object]) -> None:
        """Have a worker call it, unless there are none any more."""
        with suppress(ClosedError):
            self.workers.submit(task("finding out which requests may be joined", call, share=self.share))

    def abandon(self, close: Callable[[], object]) -> None:
        """The executor is gone, perhaps without having been closed: its workers `close` its nets, and end.

        Garbage is collected at any point of any thread, so nothing is waited for here.
        """
        self.workers.submit_from_finalizer(task("closing the nets of an executor", close))
        self.drop()


def default_arena_bytes() -> int:
    """A quarter of the machine's memory."""
    return physical_bytes() // 4


def own_place(model: str, num_workers: int, name: str) -> Place:
    """New workers for one executor. Raises SettingError, ResourceError."""
    workers = WorkerPool(num_workers, name=name)
    return Place(model, workers, leave=workers.close, drop=workers.shut, grow=workers.grow)


def beside(place: Place) -> Place:
    """On the workers of an executor that is closed after this one, and charged to it."""
    return Place(place.model, place.workers, place.share, grow=place.grow, arenas=place.arenas)


class SharedWorkers:
    """The workers of executors that are told nothing of workers: `enter` gives each its place."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._numbers = itertools.count()
        self._process = os.getpid()
        self._workers: WorkerPool | None = None
        self._arenas = ArenaBudget(default_arena_bytes())
        self._asked: dict[int, int] = {}  # by executor, workers

    def enter(self, model: str, num_workers: int) -> Place:
        """A place for an executor whose runs have up to `num_workers`."""
        number = next(self._numbers)
        cores = processor.available_cores()
        with self._lock.own:
            if self._process != os.getpid():
                self._process, self._workers = os.getpid(), None
                self._asked.clear()
            count = min(cores, sum(self._asked.values()) + num_workers)
            if self._workers is None:
                self._workers = WorkerPool(count, name="dagexec-shared", most=cores, at_once=False)
            else:
                self._workers.grow(count)
            self._asked[number] = num_workers
            workers = self._workers
        leave, drop = partial(self._leave, number), partial(self._drop, number, workers)
        grow = partial(self._grow, workers)
        return Place(model, workers, Share(model), leave, drop, grow=grow, arenas=self._arenas)

    def _grow(self, workers: WorkerPool, count: int) -> None:
        with self._lock.own:
            if self._workers is workers:
                workers.grow(min(count, processor.available_cores()))

    def _have_threads(self) -> bool:
        return self._workers is not None and self._workers.has_threads

    def _leave(self, number: int) -> None:
        unused = self._without(number)
        if unused is not None:
            unused.close()

    def _drop(self, number: int, workers: WorkerPool) -> None:
        def leave() -> None:
            unused = self._without(number)
            if unused is not None:
                unused.shut()

        workers.submit_from_finalizer(task("leaving the shared workers", leave))

    def _without(self, number: int) -> WorkerPool | None:
        """The workers, if nobody is left to use them. As long as none has a thread they may wait for others."""
        with self._lock.own:
            if self._asked.pop(number, None) is None or self._asked or not self._have_threads():
                return None
            unused, self._workers = self._workers, None
            return unused


shared_workers = SharedWorkers()
"""Those of this process."""
