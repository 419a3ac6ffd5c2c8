"""Overhead: what scheduling costs on this machine, measured on tasks that compute nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.platform.threads import new_gate
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task
from dagexec.scheduler.run.work import Work, emptied

if not TYPE_CHECKING:
    statistics = LazyModule("statistics")
else:
    import statistics


WORTH_SHARING = 200e-6
"""Seconds of a run: sharing one takes some 20 us, and a sleeping worker starts after some 60 us."""


@dataclass(frozen=True)
class SchedulingCosts:
    """Seconds until an idle worker begins a task, and for a worker to settle a piece and take the next."""

    wake_seconds: float
    piece_seconds: float


def slowdown_up_to(cores: int, measured: float) -> tuple[float, ...]:
    """The slowdown for 1 to `cores` busy cores, growing linearly from none to `measured` for all of them."""
    if cores < 2:
        return (1.0,)
    return tuple(1 + (max(measured, 1.0) - 1) * busy / (cores - 1) for busy in range(cores))


def measure_costs(work: Work, repeat: int = 51) -> SchedulingCosts:
    """Run the tasks of `work` `repeat` times without their operators, on one worker; medians."""
    work = emptied(work)
    wakes, runs = [], []
    with WorkerPool(1, name="overhead") as pool:
        for _ in range(repeat):
            wakes.append(_wake_seconds(pool))
            runs.append(_run_seconds(pool, work))
    wake = statistics.median(wakes)
    return SchedulingCosts(wake, max(0.0, statistics.median(runs) - wake) / sum(work.graph.pieces))


def _wake_seconds(pool: WorkerPool) -> float:
    gate = new_gate()
    begun: list[float] = []

    def begin() -> None:
        begun.append(time.perf_counter())
        gate.release()

    start = time.perf_counter()
    pool.submit(task("wake-up", begin))
    gate.acquire()
    return begun[0] - start


def _run_seconds(pool: WorkerPool, work: Work) -> float:
    gate = new_gate()
    ended: list[float] = []

    def finished() -> None:
        ended.append(time.perf_counter())
        gate.release()

    run = Run("overhead", work, lambda _chain, _step: "", finished)
    start = time.perf_counter()
    pool.submit(run)
    gate.acquire()
    return ended[0] - start
