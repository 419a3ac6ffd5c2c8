"""A trial: a model on its way to be timed, and what runs it.

Nobody knows what the first run of a net takes, and no step of it can be interrupted. So that is made in a thread that
is left behind when it takes too long; from then on its time is known, and it runs in the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt

from dagexec.binding.replicas import Replica, build_replicas
from dagexec.core.arguments import Arguments
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from dagexec.core.workspace import Workspace
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.deadline import call_with_timeout
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.run.pool import WorkerPool

Array = npt.NDArray[Any]

_GRACE = 0.1  # seconds: for a step under way when the time for a first run is over


@dataclass(frozen=True)
class Trial:
    """A model, and how it runs."""

    model: Model
    options: RunOptions = RunOptions(net_type="simple", num_workers=1)  # noqa: RUF009 - it is frozen


class Stopwatch:
    """Times work by the clock, and by what the process computed for it where that is less.

    While others use the cores, the clock continues but the process does not. Threads of a team that wait for each other
    spin, so a team's processor time over its threads is about the time that the work takes when nobody disturbs.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._computed = time.process_time if threads > 1 else time.thread_time
        self._clock_start = self._start = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._start, self._clock_start = self._computed(), time.perf_counter()

    def stop(self) -> float:
        """Seconds since `start`."""
        passed = time.perf_counter() - self._clock_start
        return min(passed, (self._computed() - self._start) / self._threads)


class _Clock(Stopwatch):
    """Times work by the clock."""

    def __init__(self) -> None:
        super().__init__(1)
        self._computed = time.perf_counter


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
        """Seconds that a run takes; by the clock where several threads compute."""
        trial = self.trial
        alone = trial.options.net_type == "simple" and all(_threads(one) == 1 for one in trial.model.net.op)
        watch = Stopwatch(1) if alone else _Clock()
        watch.start()
        self.run(inputs)
        return watch.stop()

    def run_operators(self, inputs: Mapping[str, Array]) -> list[float]:
        """Run the operators in list order in this thread, and say what each took."""
        net = self._fed(inputs).net
        watches = [Stopwatch(_threads(operator.definition)) for operator in net.operators]
        found = []
        with operator_arithmetic():
            for step, watch in zip(net.prepared().steps, watches, strict=True):
                watch.start()
                step()
                found.append(watch.stop())
        return found

    def _fed(self, inputs: Mapping[str, Array]) -> Replica:
        if self._replica is None:
            self._replica = self._build()
        feed(self._replica, inputs)
        return self._replica

    def _build(self) -> Replica:
        trial = self.trial
        self._pool = WorkerPool(trial.options.num_workers or 1, name="tuning")
        replicas = build_replicas(trial.model, trial.options, self._pool, kept(trial.model), self._parameters)
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


def feed(replica: Replica, inputs: Mapping[str, Array]) -> None:
    """Put the inputs where the replica's net reads them."""
    for name, array in inputs.items():
        replica.workspace.feed_blob(name, array)


def kept(model: Model) -> frozenset[str]:
    """The blobs that must be there after a run, as in an executor."""
    return frozenset((*model.outputs, *model.inputs))


def _threads(definition: OperatorDef) -> int:
    return Arguments(definition, definition.type).int("threads", 1)
