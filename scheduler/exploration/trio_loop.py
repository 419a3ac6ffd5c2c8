"""trio in a controlled schedule: `trio.run` in a controlled thread, which waits where the schedule decides.

Its clock is the thread's virtual time. Before trio polls for readiness of files, an instrument comes to a decision
point, and waits there until another thread has given the loop work or the earliest deadline passes; trio then finds
that at once. Its random order of tasks follows from a seed. There are no files and sockets.
"""

from __future__ import annotations

import _thread
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import trio
from trio import _threads
from trio._core import _entry_queue, _run, _thread_cache

from dagexec.devices.sim.clock import host_time
from dagexec.platform.threads import ThreadsEndedError
from dagexec.scheduler.exploration.controlled import ControlledThreads, current_world
from dagexec.scheduler.exploration.event_loop import Wakes
from dagexec.scheduler.exploration.standard_library import REPLACEMENTS, SimpleQueue, replaced

_LONGEST = 24 * 60 * 60
"""Seconds that trio waits before it looks again."""

RUN = trio.run
_RUN_SOON = _entry_queue.EntryQueue.run_sync_soon


class _VirtualClock(trio.abc.Clock):
    """The virtual time of the thread."""

    def start_clock(self) -> None:
        """It goes already."""

    def current_time(self) -> float:
        return host_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - host_time()


class _Waits(trio.abc.Instrument):
    """Waits in the schedule before trio does in the system."""

    def __init__(self, world: ControlledThreads) -> None:
        self.wakes = Wakes(world)
        self._queue: _entry_queue.EntryQueue | None = None

    def before_run(self) -> None:
        self._queue = trio.lowlevel.current_trio_token()._reentry_queue
        _loops[id(self._queue)] = self

    def after_run(self) -> None:
        _loops.pop(id(self._queue), None)

    def before_io_wait(self, timeout: float) -> None:
        assert self._queue is not None
        deadline = trio.lowlevel.current_statistics().seconds_to_next_deadline
        idle = timeout < min(deadline, _LONGEST)  # it waits for no longer, to see that all tasks are blocked
        seconds = timeout if idle else deadline
        try:
            woken = self.wakes.wait(None if math.isinf(seconds) else max(0.0, seconds))
        except ThreadsEndedError as ended:  # trio would only drop the instrument
            with suppress(trio.RunFinishedError):
                _RUN_SOON(self._queue, _raise, ended)
        else:
            if not (woken or idle):
                _RUN_SOON(self._queue, _nothing, idempotent=True)  # so that trio does not wait again


_loops: dict[int, _Waits] = {}
"""By the id of the queue in which other threads put calls."""


def run(main: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
    """`trio.run`, in a schedule if the calling thread is one of its threads."""
    world = current_world()
    if world is None:
        return RUN(main, *arguments, **options)
    instruments: Sequence[trio.abc.Instrument] = options.pop("instruments", ())
    options["clock"] = options.get("clock") or _VirtualClock()
    return RUN(main, *arguments, instruments=[_Waits(world), *instruments], **options)


REPLACEMENTS[id(RUN)] = run


@contextmanager
def trio_controlled(seed: int) -> Iterator[None]:
    """Within the block, trio's threads are of this schedule alone, and `seed` decides its order of tasks."""
    values = (
        (_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (_run, "_r", random.Random(seed)),
        (_thread_cache, "name_counter", itertools.count()),
        (_threads, "_thread_counter", itertools.count()),
        (_thread_cache, "THREAD_CACHE", _thread_cache.ThreadCache()),
        *((kind, "__init__", init) for kind, init in _INITS),
        (_entry_queue.EntryQueue, "run_sync_soon", _run_sync_soon),
    )
    with replaced(values):
        yield


def _with(kind: type, name: str, make: Callable[[], object]) -> Callable[..., None]:
    """`kind.__init__`, with another value for the attribute `name`, whose factory the class keeps."""
    init: Callable[..., None] = vars(kind)["__init__"]

    def init_with(one: object, *arguments: Any, **options: Any) -> None:
        init(one, *arguments, **options)
        object.__setattr__(one, name, make())  # some are frozen

    return init_with


_INITS = (
    (_entry_queue.EntryQueue, _with(_entry_queue.EntryQueue, "lock", _thread.RLock)),  # no decision point is under it
    (_threads.Run, _with(_threads.Run, "queue", SimpleQueue)),
    (_threads.RunSync, _with(_threads.RunSync, "queue", SimpleQueue)),
)


def _run_sync_soon(
    queue: _entry_queue.EntryQueue, function: Callable[..., object], *arguments: Any, idempotent: bool = False
) -> None:
    """`EntryQueue.run_sync_soon`, which wakes the loop in the schedule, too."""
    _RUN_SOON(queue, function, *arguments, idempotent=idempotent)
    loop = _loops.get(id(queue))
    if loop is not None and current_world() is not None:
        loop.wakes.wake()


def _raise(error: BaseException) -> None:
    raise error


def _nothing() -> None:
    pass
