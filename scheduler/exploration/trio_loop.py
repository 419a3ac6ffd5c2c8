"""trio in a controlled schedule: `trio.run` in a controlled thread, which waits where the schedule decides.

Its clock is the thread's virtual time. Before trio looks for readiness of files, an instrument comes to a decision
point, and waits there until another thread has given the loop something to do or the earliest deadline passes; trio
then finds that at once. Its order of tasks, which is random, follows from a seed. There are no files and sockets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run, _thread_cache

from dagexec.devices.sim.clock import host_time
from dagexec.platform.threads import ThreadsEndedError
from dagexec.scheduler.exploration.controlled import ControlledThreads, current_world
from dagexec.scheduler.exploration.event_loop import Wakes
from dagexec.scheduler.exploration.standard_library import REPLACEMENTS, replaced

RUN = trio.run
_RUN_SOON = trio.lowlevel.TrioToken.run_sync_soon


class _VirtualClock(trio.abc.Clock):
    """The virtual time of the thread."""

    def start_clock(self) -> None:
        """It goes already."""

    def current_time(self) -> float:
        return host_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - host_time()


class _Waits(trio.abc.Instrument):
    """Waits in the schedule before trio does."""

    def __init__(self, world: ControlledThreads) -> None:
        self.wakes = Wakes(world)
        self._token: trio.lowlevel.TrioToken | None = None

    def before_run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        _loops[self._token] = self

    def after_run(self) -> None:
        if self._token is not None:
            _loops.pop(self._token, None)

    def before_io_wait(self, timeout: float) -> None:
        assert self._token is not None
        try:
            if timeout <= 0:
                self.wakes.select(0)
                return
            seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
            self.wakes.select(None if math.isinf(seconds) else seconds)
        except ThreadsEndedError as ended:  # trio would only drop the instrument
            _RUN_SOON(self._token, _raise, ended)
        else:
            _RUN_SOON(self._token, _nothing, idempotent=True)  # so that trio does not wait again


_loops: dict[trio.lowlevel.TrioToken, _Waits] = {}


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
    """Within it, trio has threads that are not left of other schedules, and orders tasks by `seed`."""
    values = (
        (_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (_run, "_r", random.Random(seed)),
        (_thread_cache, "THREAD_CACHE", _thread_cache.ThreadCache()),
        (trio.lowlevel.TrioToken, "run_sync_soon", _run_sync_soon),
    )
    with replaced(values):
        yield


def _run_sync_soon(
    token: trio.lowlevel.TrioToken, function: Callable[..., object], *arguments: Any, idempotent: bool = False
) -> None:
    """`TrioToken.run_sync_soon`, which wakes the loop in the schedule, too."""
    _RUN_SOON(token, function, *arguments, idempotent=idempotent)
    loop = _loops.get(token)
    if loop is not None and current_world() is not None:
        loop.wakes.wake()


def _raise(error: BaseException) -> None:
    raise error


def _nothing() -> None:
    pass
