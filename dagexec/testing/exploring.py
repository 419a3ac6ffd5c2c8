"""explore: a function of an application under many schedules of its own threads and tasks.

Before each schedule a line that says which one it is goes to a file, which is gone when all is done: what is there
after the process has died repeats the death.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dagexec.analysis.story import explain
from dagexec.scheduler.exploration import Exploration, Strategy, explore_all
from dagexec.scheduler.exploration.functions import Backend, controlled
from dagexec.scheduler.exploration.strategies import sampling

_EXPLAINING_SECONDS = 10.0

Returned = TypeVar("Returned")
Function = Callable[[], Returned] | Callable[[], Coroutine[Any, Any, Returned]]


def explore(
    function: Function[Returned], schedules: int = 100, *, seed: int | None = None, backend: Backend = "asyncio"
) -> Exploration[Returned]:
    """Call `function` under so many schedules, those of seeds 0, 1, 2, ..., or only under that of `seed`.

    Its threads, locks, queues, executors, timers and sleeps are the schedule's, those of dagexec as well, and so are
    asyncio and trio; a coroutine function runs on `backend`. What it uses must be made within it.

    Raises what the first failing schedule raised, with notes that tell its story and how to repeat it: what `function`
    raises, what one of its threads raises and does not catch, DeadlockError when nothing can go on, and DagexecError
    for what a schedule cannot control (connections, processes). Raises ValueError when there is nothing to run.
    """
    if schedules < 1:
        raise ValueError(f"schedules must be at least 1, found {schedules}")
    name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
    seeds = range(schedules) if seed is None else (seed,)
    return explore_seeds_of(function, seeds, backend, lambda number: f"explore({name}, seed={number})")


def explore_seeds_of(
    function: Function[Returned],
    seeds: Iterable[int],
    backend: Backend,
    repeat: Callable[[int], str],
    folder: Path | None = None,
) -> Exploration[Returned]:
    """`explore`, where `repeat` says how a seed is run again; the file is in `folder` (default: for temporary ones)."""
    running = 0

    def strategies() -> Iterator[Strategy]:
        nonlocal running
        for running in seeds:
            write(repeat(running))
            yield sampling("portfolio", running)

    def scenario() -> Returned:
        return controlled(function, backend=backend, seed=running)()

    with _noted(Path(folder or tempfile.gettempdir(), f"dagexec-explore-{os.getpid()}.txt")) as write:
        try:
            found = explore_all(scenario, strategies())
            if found.failed is not None and found.failed.failure is not None:
                _, *lines = explain(scenario, found.failed, seconds=_EXPLAINING_SECONDS).lines()
                found.failed.failure.add_note("\n".join(lines))
            found.raise_failure()
        except BaseException as error:
            error.add_note(f"again: {repeat(running)}")
            raise
    return found


@contextmanager
def _noted(path: Path) -> Iterator[Callable[[str], None]]:
    """What writes a line to `path`, in place of the one before; at the end the file is gone."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    longest = 0

    def write(line: str) -> None:
        nonlocal longest
        longest = max(longest, len(line))
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, f"{line:<{longest}}\n".encode())  # in one call, so that there is always a whole line

    try:
        yield write
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
