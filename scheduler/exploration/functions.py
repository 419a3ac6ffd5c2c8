"""Functions of an application as scenarios, with the standard library and trio under the schedule's control."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dagexec.errors import DagexecError
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.exploration import event_loop
from dagexec.scheduler.exploration.controlled import current_world
from dagexec.scheduler.exploration.standard_library import standard_library_controlled

if not TYPE_CHECKING:
    trio_loop = LazyModule("dagexec.scheduler.exploration.trio_loop")  # trio is no dependency
else:
    from dagexec.scheduler.exploration import trio_loop

Returned = TypeVar("Returned")
Backend = Literal["asyncio", "trio"]


def controlled(
    function: Callable[[], Returned] | Callable[[], Coroutine[Any, Any, Returned]],
    *,
    backend: Backend = "asyncio",
    seed: int = 0,
) -> Callable[[], Returned]:
    """A scenario that calls `function`: its threads, locks, queues, time, asyncio and trio are the schedule's.

    A coroutine function runs on `backend`. `seed` is that of `random`, NumPy's global generator and trio's order of
    tasks. Outside of a schedule the scenario raises DagexecError. Raises ValueError for another backend.
    """
    if backend not in ("asyncio", "trio"):
        raise ValueError(f"backend must be 'asyncio' or 'trio', found {backend!r}")

    def scenario() -> Returned:
        world = current_world()
        if world is None:
            raise DagexecError("a controlled function is a scenario: give it to explore_all or systematic")
        if "trio" in sys.modules or backend == "trio":
            world.cleanup.enter_context(trio_loop.trio_controlled(seed))
        world.cleanup.enter_context(standard_library_controlled(seed))
        if not inspect.iscoroutinefunction(function):
            return cast(Callable[[], Returned], function)()
        main = cast(Callable[[], Coroutine[Any, Any, Returned]], function)
        return event_loop.run(main) if backend == "asyncio" else cast(Returned, trio_loop.run(main))

    return scenario
