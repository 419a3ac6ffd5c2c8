"""METG: the smallest task that a system still does with half of its efficiency (Slaughter and others, SC 2020).

The granularity of a run is what all workers together take for a task, its costs included; the efficiency is the part of
that which is the task's own work. A search halves or doubles tasks until the efficiency crosses the target, narrows
that down, and gives the granularity there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dagexec.platform.records import dataclass

SHORTEST, LONGEST = 10e-9, 10e-3
"""Seconds of the tasks that are tried."""

_BISECTIONS = 3

_ENOUGH_SECONDS = 0.5


@dataclass(frozen=True)
class Trial:
    """Tasks of one size: the seconds of work of each, those that it took of the workers, and their ratio."""

    task_seconds: float
    granularity: float
    efficiency: float


@dataclass(frozen=True)
class Metg:
    """What a search has found.

    Attributes:
        seconds: the granularity at the target; None where no task that was tried was large enough.
        trials: the runs, by size of the tasks.
    """

    seconds: float | None
    trials: tuple[Trial, ...]


def metg(
    run_seconds: Callable[[float], float], tasks: int, workers: int, *, target: float = 0.5, start: float = 10e-6
) -> Metg:
    """Search with `run_seconds`, which gives how long a graph of so many `tasks` of the given seconds takes.

    The first tasks take `start` seconds. Where even the shortest keep the target, their granularity is the answer.
    """
    trials: dict[float, Trial] = {}

    def trial(task_seconds: float) -> Trial:
        granularity = run_seconds(task_seconds) * workers / tasks
        found = trials[task_seconds] = Trial(task_seconds, granularity, task_seconds / granularity)
        return found

    good: Trial | None = None
    bad: Trial | None = None
    size = start
    while good is None or bad is None:
        if not SHORTEST <= size <= LONGEST:
            break
        found = trial(size)
        if found.efficiency >= target:
            good, size = found, size / 2
        else:
            bad, size = found, size * 2
    for _ in range(_BISECTIONS if good is not None and bad is not None else 0):
        assert good is not None
        assert bad is not None
        found = trial(math.sqrt(good.task_seconds * bad.task_seconds))
        if found.efficiency >= target:
            good = found
        else:
            bad = found
    ordered = tuple(trials[size] for size in sorted(trials))
    if good is None or bad is None:
        return Metg(None if good is None else good.granularity, ordered)
    return Metg(_crossing(bad, good, target), ordered)


def fastest(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of so many runs, or of fewer where they take long; one before does not count."""
    run()
    seconds: list[float] = []
    while len(seconds) < repeat and sum(seconds) < _ENOUGH_SECONDS:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _crossing(bad: Trial, good: Trial, target: float) -> float:
    """The granularity at the target, on a straight line of the efficiency over the granularity's logarithm."""
    share = (target - bad.efficiency) / (good.efficiency - bad.efficiency)
    return bad.granularity * math.exp(share * math.log(good.granularity / bad.granularity))
