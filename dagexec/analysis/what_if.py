"""What if there were more workers, or a device with streams: predictions from measurements here.

A prediction starts from a `CostModel`, which is measured under SimpleNet and on empty chains, never on the runtime that
is predicted. `scheduler.run.prediction` hands out pieces of operators on a virtual clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dagexec.binding.io_binding import Array
from dagexec.executor.executor import Executor
from dagexec.platform.records import dataclass
from dagexec.scheduler.observe.spans import RunSeconds
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import retimed
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.overhead import measure_costs, slowdown_up_to
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.prediction import (
    Hardware,
    OperatorTasks,
    device_bound,
    lower_bound,
    predict_device,
    predict_host,
)

LAUNCH_SECONDS = 5e-6
"""The assumed cost of launching an operator on a stream."""


_SHORTEST, _WIDEST = 50e-6, 1.25
"""Shorter runs, and runs whose quartiles lie farther apart, are not predicted."""


@dataclass(frozen=True)
class CostModel:
    """Measured seconds.

    Attributes:
        operator_seconds: of each operator, alone on the machine; medians, in list order.
        run_seconds: of a run beyond its operators: feeding, waking the first worker, fetching.
        piece_seconds: for a worker to settle a piece of an operator, or a chain, and take the next.
        wake_seconds: until an idle worker begins a task.
        slowdown: the factor on operators when 1, 2, ... cores compute.
        spread: the quartiles of the operators' total over the median run.
    """

    operator_seconds: tuple[float, ...]
    run_seconds: float = 0.0
    piece_seconds: float = 0.0
    wake_seconds: float = 0.0
    slowdown: tuple[float, ...] = (1.0,)
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def weakness(self) -> str:
        """Why predictions are not reliable; empty where they are."""
        low, high = self.spread
        if sum(self.operator_seconds) < _SHORTEST:
            return f"a run of {sum(self.operator_seconds) * 1e6:.0f} us is too short to be predicted"
        if high > _WIDEST * low:
            return f"operators took from {low:.2f} to {high:.2f} of the median run's time: the machine was busy"
        return ""

    def hardware(self, workers: int, streams: int = 0, launch_seconds: float = LAUNCH_SECONDS) -> Hardware:
        """Hardware of so many workers and streams, with the measured costs."""
        return Hardware(workers, streams, self.piece_seconds, self.wake_seconds, launch_seconds, self.slowdown)

    def predict(self, tasks: OperatorTasks, hardware: Hardware) -> float:
        """Seconds a run takes on `hardware`."""
        if hardware.streams:
            return predict_device(tasks.plan, hardware, self.operator_seconds) + self.run_seconds
        return predict_host(tasks.timed(self.operator_seconds), hardware) + self.run_seconds

    def bound(self, tasks: OperatorTasks, hardware: Hardware) -> float:
        """Seconds that no schedule on `hardware` beats."""
        if hardware.streams:
            return device_bound(retimed(tasks.plan, self.operator_seconds), hardware)
        return lower_bound(tasks.timed(self.operator_seconds), hardware.workers)


class CostProfiler:
    """Runs SimpleNet under a trace, alternately alone and on all cores at once, and makes a cost model of that.

    Times of tasks in machine code come from runs on one worker without a trace.
    """

    def __init__(
        self, simple: Executor, crowd: Executor | None, inputs: Mapping[str, Array], native: Executor | None = None
    ) -> None:
        """`crowd` has a replica of SimpleNet for each of its workers; None where there is one core.

        `native` has one worker.
        """
        self._simple = simple
        self._native = native
        self._tasks: list[Sequence[float]] = []  # seconds of each task of a native run
        self._crowd = crowd
        self._inputs = inputs
        self._alone, self._crowded = Trace(), Trace()
        self._seconds: list[float] = []  # of the runs alone, from call to result

    def run(self) -> None:
        """A run alone, and one on all cores at once."""
        start = time.perf_counter()
        self._simple.run(self._inputs, trace=self._alone)
        self._seconds.append(time.perf_counter() - start)
        crowd = self._crowd
        if crowd is not None:
            with ThreadPoolExecutor(crowd.num_workers) as callers:
                for call in [
                    callers.submit(crowd.run, self._inputs, trace=self._crowded) for _ in range(crowd.num_workers)
                ]:
                    call.result()

    def run_natively(self) -> None:
        """Run the tasks of the net of `native` again, on its last feeds: in machine code, by this thread."""
        assert self._native is not None
        with WorkerPool(1, "profile") as pool:
            run = self._native.net().new_run(lambda: None)
            pool.run_here(run)
        run.raise_error()
        if isinstance(run.machine, NativeRun):
            self._tasks.append(run.machine.task_seconds())

    def cost_model(self, tasks: OperatorTasks, simple_seconds: Sequence[float] = ()) -> CostModel:
        """The result of the runs so far; `tasks` are run without their operators for the costs of scheduling.

        `simple_seconds` are those of runs of SimpleNet without a trace, from call to result.

        Each figure is a median over runs. Medians of operators leave out interruptions by a busy machine, which runs
        include: their sum is scaled to the median of the runs' sums.
        """
        medians = self._alone.operator_seconds(len(tasks.plan.graph))
        runs = self._alone.run_seconds() or [RunSeconds(0.0, 0.0)] * len(self._seconds)
        works = [run.operators for run in runs]
        beyond = [whole - run.extent for whole, run in zip(self._seconds, runs, strict=True)]
        scale = statistics.median(works) / sum(medians) if any(medians) else 1.0
        cores = 1 if self._crowd is None else self._crowd.num_workers
        crowded = [run.operators for run in self._crowded.run_seconds()]
        groups = [crowded[first : first + cores] for first in range(0, len(crowded), cores)]
        ratios = [statistics.mean(group) / work for work, group in zip(works, groups, strict=False) if work]
        costs = measure_costs(tasks.work)
        seconds = [median * scale for median in medians]
        if self._native is not None and self._tasks and simple_seconds:
            took = [statistics.median(row) for row in zip(*self._tasks, strict=True)]
            seconds = self._native.net().tasks().operator_seconds(took, seconds)
            beyond = [max(0.0, statistics.median(simple_seconds) - sum(seconds))]
        return CostModel(
            operator_seconds=tuple(seconds),
            run_seconds=statistics.median(beyond),
            piece_seconds=costs.piece_seconds,
            wake_seconds=costs.wake_seconds,
            slowdown=slowdown_up_to(cores, statistics.median(ratios or [1.0])),
            spread=_quartiles([sum(row) for row in self._tasks] or works),
        )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third one, over the median."""
    if len(values) < 2 or not any(values):
        return 1.0, 1.0
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low / median, high / median


@dataclass(frozen=True)
class WhatIf:
    """A prediction. `streams` is 0 on the host; `speed_up` is over one worker there; no schedule beats `bound_ms`.

    `low_ms` and `high_ms` follow from the quartiles of the operators' times.
    """

    workers: int
    streams: int
    predicted_ms: float
    speed_up: float
    bound_ms: float
    low_ms: float
    high_ms: float


def what_if(
    tasks: OperatorTasks,
    cost_model: CostModel,
    workers: Sequence[int],
    streams: Sequence[int] = (),
    launch_seconds: float = LAUNCH_SECONDS,
) -> tuple[WhatIf, ...]:
    """A prediction for each of `workers` on the host, then for each of them with each of `streams`.

    Every worker has a core, and every stream computes as fast as a core here; more cores at once than were measured
    slow each other down no more than those.
    """
    alone = cost_model.predict(tasks, cost_model.hardware(1))
    rows = []
    for stream_count in (0, *streams):
        for worker_count in workers:
            hardware = cost_model.hardware(worker_count, stream_count, launch_seconds)
            seconds = cost_model.predict(tasks, hardware)
            used = hardware.streams_per_worker * worker_count if stream_count else 0
            speed_up = alone / seconds if seconds else 1.0
            bound = cost_model.bound(tasks, hardware)
            ends = [seconds * end * 1e3 for end in cost_model.spread]
            rows.append(WhatIf(worker_count, used, seconds * 1e3, speed_up, bound * 1e3, *ends))
    return tuple(rows)
