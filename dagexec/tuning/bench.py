"""Bench: measures models at the shapes they are tuned for - operators by number of threads, and whole runs.

What is compared runs in turns, so that a machine that is busy for a while slows all of it. The fastest quarter of the
runs counts: disturbances only ever add. Work of one thread is timed by what the thread computed for it, so that
operators and layouts are judged alike on a machine that others use; whole runs on several threads can be judged on a
quiet one only (`Bench.quiet`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.arithmetic import operator_arithmetic
from dagexec.core.choices import measuring, postponed, seconds_left
from dagexec.core.dtypes import BOOL, FLOAT32, STRING
from dagexec.core.model import Model
from dagexec.core.processor import available_cores
from dagexec.core.proto import OperatorDef
from dagexec.core.threads import new_gate
from dagexec.core.workspace import Workspace
from dagexec.parameters import parameter_workspace
from dagexec.replicas import NetOptions, Replica, build_replicas
from dagexec.scheduler.calibration import SchedulingCosts, measure_costs
from dagexec.scheduler.plan import Plan
from dagexec.scheduler.pool import WorkerPool
from dagexec.tuning.load import free_share

logger = logging.getLogger("dagexec")

Array = npt.NDArray[Any]

_QUIET, _PROBES = 0.8, 3
_LEAST_ROUNDS, _ENOUGH_ROUNDS, _MOST_ROUNDS = 3, 25, 400
_SURVEY_SHARE = 2 / 3  # of what is left for choosing implementations, at a time
_SHORT = 0.1  # seconds: rounds that are over so soon are not enough yet
_OUT_OF_THE_RUNNING = 1.25  # slower than this times the fastest after the first rounds: not run again


@dataclass(frozen=True)
class Trial:
    """A model, and how it runs."""

    model: Model
    net_type: str = "simple"
    workers: int = 1
    intra_op_threads: int = 1


class Measures(Protocol):
    """What choices are made from."""

    def quiet(self) -> bool:
        """True when nobody else uses the machine: times of runs by the clock say what they take."""

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        """The time of a run of each trial, measured within about `seconds`; infinity for one that cannot run."""

    def operator_seconds(self, models: Sequence[Model], seconds: float) -> list[list[float]]:
        """The time of each operator of each model."""

    def slowdown(self, model: Model, cores: int, seconds: float) -> float:
        """By what a run takes longer when one goes on on each core."""

    def scheduling_costs(self, plan: Plan) -> SchedulingCosts:
        """What scheduling costs on this machine."""


def random_inputs(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array] | None:
    """Standard normal floats, zeros for all else, for every input the net needs; None where a shape is unknown.

    `shapes` are used where given; else the model's own, with 1 for an axis of any size.
    """
    random = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for name in sorted(model.needed_inputs()):
        info = model.inputs[name]
        shape = shapes.get(name, info.shape)
        if shape is None:
            return None
        sizes = tuple(1 if size is None else size for size in shape)
        meta = info.dtype or FLOAT32
        if meta is STRING:
            inputs[name] = np.full(sizes, b"", np.object_)
        elif meta.is_float:
            inputs[name] = random.standard_normal(sizes, np.float32).astype(meta.numpy)
        else:
            inputs[name] = np.zeros(sizes, bool if meta is BOOL else meta.numpy)
    return inputs


class Bench:
    """Measures with `inputs`. The parameters, and what operators derive from them, are shared by all it runs."""

    def __init__(
        self, inputs: Mapping[str, Array], search_seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """All nets together may spend `search_seconds` on choosing their operators' implementations."""
        self._inputs = inputs
        self._search_seconds = search_seconds
        self._clock = clock
        self._parameters: dict[int, tuple[Mapping[str, Array], Workspace]] = {}

    def quiet(self) -> bool:
        """True when this process gets nearly all of the cores, each time it looks."""
        return all(free_share(available_cores()) >= _QUIET for _ in range(_PROBES))

    def parameters(self, model: Model) -> Workspace:
        """The workspace of the model's parameters, which all nets on the same parameters share."""
        found = self._parameters.get(id(model.parameters))
        if found is None:
            found = self._parameters[id(model.parameters)] = (model.parameters, parameter_workspace(model))
        return found[1]

    def keep_only(self, model: Model) -> None:
        """Let go of the parameters of other models, and of what was derived from them."""
        self._parameters = {key: kept for key, kept in self._parameters.items() if kept[0] is model.parameters}

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        """The time of interleaved runs, from feeding the inputs to the end; infinity where it cannot run."""
        self._survey([trial.model for trial in trials])
        with ExitStack() as stack:
            ready = {}
            for number, trial in enumerate(trials):
                runner = _Runner(trial, self.parameters(trial.model))
                stack.callback(runner.close)
                if self._warm(runner, trial):
                    ready[number] = runner
            times = self._interleaved(ready, seconds)
        return [times.get(number, float("inf")) for number in range(len(trials))]

    def operator_seconds(self, models: Sequence[Model], seconds: float) -> list[list[float]]:
        """The time of each operator, run one after another in this thread; see `_Stopwatch` for a busy machine."""
        self._survey(models)
        with ExitStack() as stack:
            runners = []
            for model in models:
                runners.append(_Runner(Trial(model), self.parameters(model)))
                stack.callback(runners[-1].close)
                runners[-1].run(self._inputs)
            times: list[list[list[float]]] = [[[] for _ in model.net.op] for model in models]
            for _ in self._rounds(seconds):
                for runner, rows in zip(runners, times, strict=True):
                    for row, took in zip(rows, runner.run_operators(self._inputs), strict=True):
                        row.append(took)
        return [[_undisturbed(row) for row in rows] for rows in times]

    def slowdown(self, model: Model, cores: int, seconds: float) -> float:
        """The time of as many runs as cores at once over that of one alone; at least 1."""
        if cores < 2:
            return 1.0
        with WorkerPool(cores, name="tuning") as pool:
            options = NetOptions("simple", keep=_kept(model))
            replicas = build_replicas(model, options, cores, pool, self.parameters(model))
            try:
                return self._slowdown(replicas.members, pool, seconds)
            finally:
                replicas.close()

    def scheduling_costs(self, plan: Plan) -> SchedulingCosts:
        """See `scheduler.calibration.measure_costs`."""
        return measure_costs(plan, repeat=11)

    def _slowdown(self, members: Sequence[Replica], pool: WorkerPool, seconds: float) -> float:
        for replica in members:
            _feed(replica, self._inputs)
            replica.net.run()
        alone: list[float] = []
        together: list[float] = []
        for _ in self._rounds(seconds):
            for crowd, times in ((members[:1], alone), (members, together)):
                start = self._clock()
                _run_at_once(crowd, pool)
                times.append(self._clock() - start)
        return max(1.0, _undisturbed(together) / _undisturbed(alone))

    def _rounds(self, seconds: float) -> Iterator[int]:
        """Numbers of rounds, for as long as it is worth to go on."""
        start = self._clock()
        for count in range(_MOST_ROUNDS):
            passed = self._clock() - start
            if count >= _LEAST_ROUNDS and (passed > seconds or (count >= _ENOUGH_ROUNDS and passed > _SHORT)):
                return
            yield count

    def _warm(self, runner: _Runner, trial: Trial) -> bool:
        """Prepare and run twice. False for a model that cannot be run so."""
        try:
            runner.run(self._inputs)
            runner.run(self._inputs)
        except Exception as error:
            logger.info("net %r cannot be measured (%s): %s", trial.model.name, type(error).__name__, error)
            return False
        return True

    def _survey(self, models: Sequence[Model]) -> None:
        """Let the operators of all models choose how to compute: those that take longest first, each geometry once.

        The nets are prepared on parameters of their own, as weights are packed for what is chosen without measuring.
        """
        allowed = self._search_seconds * _SURVEY_SHARE
        if allowed <= 0:
            return
        parameters: dict[int, Workspace] = {}
        with measuring(allowed):
            with postponed() as measure, ExitStack() as stack:
                for model in models:
                    known = parameters.setdefault(id(model.parameters), parameter_workspace(model))
                    runner = _Runner(Trial(model), known)
                    stack.callback(runner.close)
                    try:
                        runner.prepare(self._inputs)
                    except Exception as error:
                        logger.info("net %r cannot be surveyed (%s): %s", model.name, type(error).__name__, error)
            measure()
            self._search_seconds -= allowed - min(allowed, seconds_left())

    def _interleaved(self, runners: dict[int, _Runner], seconds: float) -> dict[int, float]:
        times: dict[int, list[float]] = {number: [] for number in runners}
        running = dict(runners)
        for count in self._rounds(seconds):
            if count == _LEAST_ROUNDS and len(running) > 1:
                best = min(min(row) for row in times.values())
                running = {
                    number: runner
                    for number, runner in running.items()
                    if min(times[number]) <= best * _OUT_OF_THE_RUNNING
                }
            for number, runner in running.items():
                times[number].append(runner.timed(self._inputs))
        return {number: _undisturbed(row) for number, row in times.items()}


class _Stopwatch:
    """Times work by the clock, and by what the process computed for it where that is less.

    While others use the cores, the clock goes on but the process does not. Threads of a team that wait for each other
    spin, so a team's processor time over its threads is about the time that the work takes when nobody disturbs.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._computed = time.process_time if threads > 1 else time.thread_time
        self._clock_start = self._start = 0.0

    def start(self) -> None:
        self._start, self._clock_start = self._computed(), time.perf_counter()

    def stop(self) -> float:
        passed = time.perf_counter() - self._clock_start
        return min(passed, (self._computed() - self._start) / self._threads)


class _Clock(_Stopwatch):
    """Times work by the clock."""

    def __init__(self) -> None:
        super().__init__(1)
        self._computed = time.perf_counter


class _Runner:
    """A trial's net on `parameters`."""

    def __init__(self, trial: Trial, parameters: Workspace) -> None:
        self._trial = trial
        self._parameters = parameters
        self._pool: WorkerPool | None = None
        self._replica: Replica | None = None

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Feed the inputs and run the net once."""
        self._fed(inputs).net.run()

    def prepare(self, inputs: Mapping[str, Array]) -> None:
        """Feed the inputs and have the operators choose how to compute."""
        self._fed(inputs).net.prepared()

    def timed(self, inputs: Mapping[str, Array]) -> float:
        """Seconds that a run takes; by the clock where several threads compute."""
        trial = self._trial
        alone = trial.net_type == "simple" and all(_threads(one) == 1 for one in trial.model.net.op)
        watch = _Stopwatch(1) if alone else _Clock()
        watch.start()
        self.run(inputs)
        return watch.stop()

    def run_operators(self, inputs: Mapping[str, Array]) -> list[float]:
        """Run the operators in list order in this thread, and say what each took."""
        net = self._fed(inputs).net
        watches = [_Stopwatch(_threads(operator.definition)) for operator in net.operators]
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
        _feed(self._replica, inputs)
        return self._replica

    def _build(self) -> Replica:
        trial = self._trial
        self._pool = WorkerPool(trial.workers, name="tuning")
        options = NetOptions(trial.net_type, intra_op_threads=trial.intra_op_threads, keep=_kept(trial.model))
        return build_replicas(trial.model, options, 1, self._pool, self._parameters).members[0]

    def close(self) -> None:
        if self._replica is not None:
            self._replica.net.close()
        if self._pool is not None:
            self._pool.close()


def _feed(replica: Replica, inputs: Mapping[str, Array]) -> None:
    for name, array in inputs.items():
        replica.workspace.feed_blob(name, array)


def _kept(model: Model) -> frozenset[str]:
    """The blobs that must be there after a run, as in an executor."""
    return frozenset((*model.outputs, *model.inputs))


def _threads(definition: OperatorDef) -> int:
    return Arguments(definition, definition.type).int("threads", 1)


def _run_at_once(members: Sequence[Replica], pool: WorkerPool) -> None:
    """Run each replica on a worker of its own, and wait for all."""
    gates = [new_gate() for _ in members]
    for replica, gate in zip(members, gates, strict=True):
        pool.submit(replica.net.new_run(gate.release))
    for gate in gates:
        gate.acquire()


def _undisturbed(times: Sequence[float]) -> float:
    """The mean of the fastest quarter."""
    count = (len(times) + 3) // 4
    return sum(sorted(times)[:count]) / count
