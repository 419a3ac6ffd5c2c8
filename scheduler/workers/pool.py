"""Pool: workers that any number of executors share. `compile(model, pool=pool)` makes an executor for them.

What the workers do next is decided in `dagexec.scheduler.run.pool`; here is who uses them, and when they may end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from types import TracebackType

from dagexec.errors import ClosedError, DagexecError, SettingError
from dagexec.platform import processor
from dagexec.platform.closing import Closing
from dagexec.platform.forking import ProcessLock
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.arena_budget import ArenaBudget, ArenaStatistics
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.worker import PoolStatistics
from dagexec.scheduler.workers.place import Place, default_arena_bytes

_MOST_NAMED = 4


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

    def __init__(self, workers: int | None = None, *, arena_bytes: int | None = None, name: str = "dagexec") -> None:
        """By default there are as many workers as cores. `name` is for messages and the names of threads.

        Models keep up to `arena_bytes` bytes of memory that their runs work in, by default a quarter of the machine's.
        Beyond that, those whose last run is longest ago give theirs back until their next one. Runs at one time may
        need more together. One that needs more alone ends with ResourceError, unless `arena_bytes` is left out.

        Raises SettingError for a number out of range, ResourceError when the system starts no more threads.
        """
        self.name = name
        self._lock = ProcessLock()
        self._places: dict[int, Place] = {}
        self._numbers = itertools.count()
        self._closed = False
        if arena_bytes is None:
            self._arenas = ArenaBudget(default_arena_bytes())
        elif isinstance(arena_bytes, Integral) and arena_bytes > 0:
            self._arenas = ArenaBudget(int(arena_bytes), self._too_small)
        else:
            raise SettingError(
                f"pool {name!r}: arena_bytes must be a number of bytes, 1 or more, not {arena_bytes!r:.80}"
            )
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
        return [place.model for place in self._taken()]

    def statistics(self) -> PoolStatistics:
        """What the workers do at this moment."""
        return self._workers.threads.statistics()

    def arena_statistics(self) -> ArenaStatistics:
        """The memory that runs of its models work in, at this moment."""
        return self._arenas.statistics()

    def close(self) -> None:
        """Join the workers. Idempotent.

        Raises DagexecError while executors are open on the pool, and changes nothing then: close these first.
        """
        with self._lock.own:
            taken = self._taken()
            self._closed = self._closed or not taken
        if taken:
            raise DagexecError(self._in_use(taken))
        if self._workers.process == os.getpid():
            self._workers.threads.close()

    def enter(self, model: str) -> Place:
        """A place for an executor of `model`, with workers of this process. Raises ClosedError, ResourceError."""
        number = next(self._numbers)
        with self._lock.own:
            if self._closed:
                raise ClosedError(f"net {model!r}: pool {self.name!r} of {self.workers} worker(s) is closed")
            if self._workers.process != os.getpid():
                self._places.clear()
                self._workers = _Workers(os.getpid(), WorkerPool(self.workers, name=self.name))
            leave = partial(self._places.pop, number, None)  # no lock: garbage is collected at any point of a thread
            place = self._places[number] = Place(
                model, self._workers.threads, Share(model), leave, leave, arenas=self._arenas
            )
            return place

    def _too_small(self, needed: int, budget: int) -> str:
        return f"a run needs {needed:,} bytes of arenas; pool {self.name!r} has arena_bytes={budget:,}"

    def _taken(self) -> list[Place]:
        return list(self._places.copy().values()) if self._workers.process == os.getpid() else []

    def _in_use(self, taken: Sequence[Place]) -> str:
        names = ", ".join(repr(place.model) for place in taken[:_MOST_NAMED])
        more = f" and {len(taken) - _MOST_NAMED} more" if len(taken) > _MOST_NAMED else ""
        requests = sum(place.unfinished() for place in taken)
        return (
            f"pool {self.name!r}: {len(taken)} executor(s) with {requests} unfinished request(s) are open on it: "
            f"{names}{more}; close them before the pool"
        )
