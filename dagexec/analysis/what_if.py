"""What if there were more workers, or a device with streams: predictions from what was measured here.

`CostModel` is what a prediction starts from, all of it measured under SimpleNet and on empty chains, none of it on
the runtime that is predicted. `scheduler.run.prediction` hands out pieces of operators on a virtual clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dagexec.binding.io_binding import Array
from dagexec.scheduler.observe.trace import RunSeconds, Trace
from dagexec.scheduler.plan.plan import retimed
from dagexec.scheduler.run.overhead import measure_costs, slowdown_up_to
from dagexec.scheduler.run.prediction import (
    Hardware,
    OperatorTasks,
    device_bound,
    lower_bound,
    predict_device,
    predict_host,
)
from dagexec.serving.executor import Executor

LAUNCH_SECONDS = 5e-6
"""What launching an operator on a stream is taken to cost, where nobody says."""


@dataclass(frozen=True)
class CostModel:
    """Measured seconds.

    Attributes:
        operator_seconds: of each operator, alone on the machine; medians, in list order.
        run_seconds: of a run beyond its operators: feeding, waking the first worker, fetching.
        piece_seconds: for a worker to settle a piece of an operator, or a chain, and take the next.
        wake_seconds: until an idle worker begins what it is given.
        slowdown: by what the operators take longer when 1, 2, ... cores compute.
    """

    operator_seconds: tuple[float, ...]
    run_seconds: float = 0.0
    piece_seconds: float = 0.0
    wake_seconds: float = 0.0
    slowdown: tuple[float, ...] = (1.0,)

    def hardware(self, workers: int, streams: int = 0, launch_seconds: float = LAUNCH_SECONDS) -> Hardware:
        """So many workers and streams with the costs that were measured."""
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
    """Runs SimpleNet under a trace, in turn alone and on all cores at once, and makes a cost model of that."""

    def __init__(self, simple: Executor, crowd: Executor | None, inputs: Mapping[str, Array]) -> None:
        """`crowd` has a replica of SimpleNet for each of its workers; None where there is one core."""
        self._simple = simple
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

    def cost_model(self, tasks: OperatorTasks) -> CostModel:
        """What the runs so far say; `tasks` are run without their operators for the costs of scheduling.

        Each figure is a median over runs. Medians of operators leave out what a busy machine interrupts, which runs do
        not: their sum is brought to the median of the runs' sums.
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
        return CostModel(
            operator_seconds=tuple(seconds * scale for seconds in medians),
            run_seconds=statistics.median(beyond),
            piece_seconds=costs.piece_seconds,
            wake_seconds=costs.wake_seconds,
            slowdown=slowdown_up_to(cores, statistics.median(ratios or [1.0])),
        )


@dataclass(frozen=True)
class WhatIf:
    """A prediction. `streams` is 0 on the host; `speed_up` is over one worker there; no schedule beats `bound_ms`."""

    workers: int
    streams: int
    predicted_ms: float
    speed_up: float
    bound_ms: float


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
            rows.append(WhatIf(worker_count, used, seconds * 1e3, speed_up, bound * 1e3))
    return tuple(rows)
