"""A trial: a model on its way to be timed, and what runs it.

Nobody knows what the first run of a net takes, and no step of it can be interrupted. So that is made in a thread that
is left behind when it takes too long; from then on its time is known, and it runs in the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import numpy.typing as npt

from dagexec.binding.replicas import Replica, build_replicas
from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.deadline import call_with_timeout
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.prediction import TimedTasks

Array = npt.NDArray[Any]

_GRACE = 0.1  # seconds: for a step under way when the time for a first run is over


@dataclass(frozen=True)
class Trial:
    """A model, and how it runs."""

    model: Model
    options: RunOptions = RunOptions(net_type="simple", num_workers=1)


class Stopwatch:
    """Times work of this thread by the clock, and by what the thread computed for it where that is less.

    While others use the cores, the clock continues but the thread does not.
    """

    def __init__(self) -> None:
        self._clock_start = self._start = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._start, self._clock_start = time.thread_time(), time.perf_counter()

    def stop(self) -> float:
        """Seconds since `start`."""
        passed = time.perf_counter() - self._clock_start
        return min(passed, time.thread_time() - self._start)


class Runner:
    """A trial's net on `parameters`; close it, or use it as a context manager.

    Attributes:
        trial: what it runs.
    """

    def __init__(self, trial: Trial, parameters: Workspace) -> None:
        self.trial = trial
        self._parameters = parameters
        self._pool: WorkerPool | None = None
        self._replica: Replica | None = None
        self._in_first = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def first(self, inputs: Mapping[str, Array], seconds: float) -> float:
        """Seconds that the first run takes, after it was prepared, by the clock.

        Raises DeadlineExceededError or RunTimeoutError when it takes more than `seconds`; it may be going on then.
        """
        self.prepare(inputs)
        self._in_first = True

        def run() -> float:
            start = time.perf_counter()
            try:
                self._fed(inputs).net.run(timeout=seconds)
            finally:
                self._in_first = False
            return time.perf_counter() - start

        return call_with_timeout(run, seconds + _GRACE, self._close)

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Feed the inputs and run the net once."""
        self._fed(inputs).net.run()

    def results(self, inputs: Mapping[str, Array]) -> list[Array]:
        """The model's outputs of a run, as copies."""
        self.run(inputs)
        return [self._fed(inputs).workspace.fetch_blob(name).copy() for name in self.trial.model.outputs]

    def prepare(self, inputs: Mapping[str, Array]) -> None:
        """Feed the inputs and have the operators choose how to compute."""
        self._fed(inputs).net.prepared()

    def timed(self, inputs: Mapping[str, Array]) -> float:
        """Seconds that a run takes; by the clock where workers compute."""
        if self.trial.options.net_type != "simple":
            start = time.perf_counter()
            self.run(inputs)
            return time.perf_counter() - start
        watch = Stopwatch()
        watch.start()
        self.run(inputs)
        return watch.stop()

    def measured_tasks(self) -> TimedTasks | None:
        """See `BaseNet.measured_tasks`."""
        return None if self._replica is None else self._replica.net.measured_tasks()

    def run_operators(self, inputs: Mapping[str, Array]) -> list[float]:
        """Run the operators in list order in this thread, and say what each took."""
        net = self._fed(inputs).net
        watch, found = Stopwatch(), []
        with operator_arithmetic():
            for step in net.prepared().steps:
                watch.start()
                step()
                found.append(watch.stop())
        return found

    def _fed(self, inputs: Mapping[str, Array]) -> Replica:
        if self._replica is None:
            self._replica = self._build()
        for name, array in inputs.items():
            self._replica.workspace.feed_blob(name, array)
        return self._replica

    def _build(self) -> Replica:
        trial = self.trial
        self._pool = WorkerPool(trial.options.num_workers or 1, name="tuning")
        replicas = build_replicas(trial.model, trial.options, self._pool, _kept(trial.model), self._parameters)
        return replicas.members[0]

    def close(self) -> None:
        """Close the net; where its first run is still going on, that does so at its end."""
        if not self._in_first:
            self._close()

    def _close(self) -> None:
        if self._replica is not None:
            self._replica.net.close()
        if self._pool is not None:
            self._pool.close()


def _kept(model: Model) -> frozenset[str]:
    """The blobs that must be there after a run, as in an executor."""
    return frozenset((*model.outputs, *model.inputs))
