"""Bench: measures models at the shapes they are tuned for - operators by number of threads, and whole runs.

What is compared runs in turns, so that a machine that is busy for a while slows all of it. The fastest quarter of the
runs counts: disturbances only ever add. Work of one thread is timed by what the thread computed for it, so that
operators and layouts are judged alike on a machine that others use; whole runs on several threads can be judged on a
quiet one only (`Bench.quiet`).

All of it ends at a deadline, whatever a candidate takes: each loop asks before each run whether it still fits, and what
is far behind the best is dropped in its first run (`tuning.runner`). What was not measured by then has no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import parameter_workspace
from dagexec.binding.replicas import Replica, build_replicas
from dagexec.compiler.tuning.machine_load import free_share
from dagexec.compiler.tuning.runner import Runner, Trial, feed, kept
from dagexec.core.choices import measuring, postponed
from dagexec.core.dtypes import FLOAT32, STRING
from dagexec.core.model import Model
from dagexec.core.shapes import element_count
from dagexec.core.workspace import Workspace
from dagexec.errors import DeadlineExceededError, ResourceError, RunTimeoutError
from dagexec.platform.deadline import Deadline, check_stop, within_deadline
from dagexec.platform.host_memory import check_fits
from dagexec.platform.processor import available_cores
from dagexec.platform.threads import new_gate
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.run.overhead import SchedulingCosts, measure_costs
from dagexec.scheduler.run.pool import WorkerPool

logger = logging.getLogger("dagexec")

Array = npt.NDArray[Any]

_QUIET, _PROBES = 0.8, 3
_MIN_ROUNDS, _ENOUGH_ROUNDS, _MAX_ROUNDS = 3, 25, 400
_SURVEY_SHARE = 2 / 3  # of what is left for choosing implementations, at a time
_SHORT = 0.1  # seconds: rounds that are over so soon are not enough yet
_OUT_OF_THE_RUNNING = 1.25  # slower than this times the fastest after the first rounds: not run again
_HOPELESS, _HOPELESS_SECONDS = 2.0, 0.05  # times the best first run, and beyond it: a first run is not finished
_UNMEASURED_SLOWDOWN = 1.15


class Measures(Protocol):
    """What choices are made from."""

    def quiet(self) -> bool:
        """True when nothing else uses the machine: times of runs by the clock say what they take."""

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        """The time of a run of each trial, measured within about `seconds`; infinity for one that cannot run."""

    def run_rounds(self, trials: Sequence[Trial], seconds: float) -> list[list[float]]:
        """The times of runs of each trial, those at the same place one after another; none for one that cannot run.

        There are fewer of what was far behind.
        """

    def operator_seconds(self, models: Sequence[Model], seconds: float) -> list[list[float]]:
        """The time of each operator of each model."""

    def slowdown(self, model: Model, cores: int, seconds: float) -> float:
        """The factor by which a run slows down when one runs on each core."""

    def scheduling_costs(self, plan: Plan) -> SchedulingCosts:
        """What scheduling costs on this machine."""


def placeholder_inputs(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array] | None:
    """Arrays with the shape and dtype of every input the net needs, which take no memory: one element, repeated.

    `shapes` are used where given; else the model's own, with 1 for an axis of any size. None where one is unknown.
    Raises ResourceError for more elements than an array can have.
    """
    inputs: dict[str, Array] = {}
    for name in sorted(model.needed_inputs()):
        info = model.inputs[name]
        shape = shapes.get(name, info.shape)
        if shape is None:
            return None
        sizes = tuple(1 if size is None else size for size in shape)
        meta = info.dtype or FLOAT32
        element: Array = np.full((), b"", np.object_) if meta is STRING else np.zeros((), meta.numpy)
        try:
            element_count(sizes)
            inputs[name] = np.broadcast_to(element, sizes)
        except (ResourceError, ValueError) as error:
            raise ResourceError(f"net {model.name!r}: input {name!r} of shape {sizes}: {error}") from None
    return inputs


def random_inputs(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array] | None:
    """What measuring feeds: standard normal floats, zeros for all else. Shapes as for `placeholder_inputs`.

    Raises ResourceError when memory does not suffice.
    """
    found = placeholder_inputs(model, shapes)
    if found is None:
        return None
    random = np.random.default_rng(0)
    for name, array in found.items():
        check_fits(array.nbytes, f"net {model.name!r}: input {name!r} of shape {array.shape}")
        if model.inputs[name].dtype is not STRING and (model.inputs[name].dtype or FLOAT32).is_float:
            found[name] = random.standard_normal(array.shape, np.float32).astype(array.dtype, copy=False)
        else:
            found[name] = array.copy()
    return found


class Bench:
    """Measures with `inputs`. The parameters, and what operators derive from them, are shared by all it runs."""

    def __init__(
        self,
        inputs: Mapping[str, Array],
        search_seconds: float,
        deadline: Deadline,
        on_stage: Callable[[str], object] = lambda _stage: None,
    ) -> None:
        """All nets together may spend `search_seconds` on choosing their operators' implementations.

        Nothing is begun after `deadline`. `on_stage` is called with what comes next.
        """
        self._inputs = inputs
        self._search_seconds = search_seconds
        self._deadline = deadline
        self._on_stage = on_stage
        self._preparing = 0.0  # seconds, the least for a net so far
        self._parameters: dict[int, tuple[Mapping[str, Array], Workspace]] = {}

    def quiet(self) -> bool:
        """True when this process gets nearly all of the cores, each time it looks. False without the time to look."""
        return all(not self._deadline.is_over and free_share(available_cores()) >= _QUIET for _ in range(_PROBES))

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
        """The time of interleaved runs, from feeding the inputs to the end.

        Infinity where it cannot run, where the first run was far behind the best, and where there was no time for it.
        """
        return [undisturbed(row) if row else float("inf") for row in self.run_rounds(trials, seconds)]

    def run_rounds(self, trials: Sequence[Trial], seconds: float) -> list[list[float]]:
        """See `Measures.run_rounds`. The first run of each counts where there is no other."""
        self._survey([trial.model for trial in trials])
        with ExitStack() as stack:
            ready: dict[int, Runner] = {}
            times: dict[int, list[float]] = {}
            for number, trial in enumerate(trials):
                self._on_stage(f"running candidate {number + 1} of {len(trials)}")
                runner = stack.enter_context(Runner(trial, self.parameters(trial.model)))
                took = self._first(runner, min((row[0] for row in times.values()), default=None))
                if took is not None:
                    ready[number], times[number] = runner, [took]
            self._interleave(ready, times, seconds)
        return [row[1:] or row for row in (times.get(number, []) for number in range(len(trials)))]

    def operator_seconds(self, models: Sequence[Model], seconds: float) -> list[list[float]]:
        """The time of each operator, run one after another in this thread; see `Stopwatch` for a busy machine.

        Infinity for all operators of a model that is far behind the first. Raises DeadlineExceededError when there is
        no time for that one, and what it raises.
        """
        self._survey(models)
        with ExitStack() as stack:
            runners: dict[int, Runner] = {}
            firsts: list[float] = []
            for number, model in enumerate(models):
                self._on_stage(f"timing operators {number + 1} of {len(models)}")
                runner = stack.enter_context(Runner(Trial(model), self.parameters(model)))
                try:
                    firsts.append(self._first_run(runner, firsts[0] if firsts else None))
                except (DeadlineExceededError, RunTimeoutError):
                    if not firsts:
                        raise DeadlineExceededError(
                            f"net {model.name!r}: not enough time to measure its operators"
                        ) from None
                else:
                    runners[number] = runner
            times: dict[int, list[list[float]]] = {number: [[] for _ in models[number].net.op] for number in runners}
            for _ in self._rounds(seconds, sum(firsts)):
                for number, runner in runners.items():
                    for row, took in zip(times[number], runner.run_operators(self._inputs), strict=True):
                        row.append(took)
        if not all(times[0]):
            raise DeadlineExceededError(f"net {models[0].name!r}: not enough time to measure its operators")
        never = [[float("inf")]]
        return [
            [undisturbed(row) for row in times.get(number, never * len(model.net.op))]
            for number, model in enumerate(models)
        ]

    def slowdown(self, model: Model, cores: int, seconds: float) -> float:
        """The time of as many runs as cores at once over that of one alone; at least 1. Without time, a guess."""
        if cores < 2:
            return 1.0
        if self._deadline.left() <= self._preparing * cores:
            return _UNMEASURED_SLOWDOWN
        self._on_stage(f"running on {cores} cores at once")
        with WorkerPool(cores, name="tuning") as pool:
            options = RunOptions(net_type="simple", replicas=cores)
            replicas = build_replicas(model, options, pool, kept(model), self.parameters(model))
            try:
                with within_deadline(self._deadline):
                    for replica in replicas.members:
                        feed(replica, self._inputs)
                        replica.net.prepared()
                return self._slowdown(replicas.members, pool, seconds)
            except DeadlineExceededError:
                return _UNMEASURED_SLOWDOWN
            finally:
                replicas.close()

    def scheduling_costs(self, plan: Plan) -> SchedulingCosts:
        """See `scheduler.run.overhead.measure_costs`."""
        return measure_costs(plan, repeat=11)

    def _slowdown(self, members: Sequence[Replica], pool: WorkerPool, seconds: float) -> float:
        alone: list[float] = []
        together: list[float] = []
        for number in self._rounds(seconds):
            for crowd, times in ((members[:1], alone), (members, together)):
                start = time.perf_counter()
                _run_at_once(crowd, pool)
                if number:  # the first to run finds nothing in the caches
                    times.append(time.perf_counter() - start)
        return max(1.0, undisturbed(together) / undisturbed(alone)) if together else _UNMEASURED_SLOWDOWN

    def _rounds(self, seconds: float, longest: float = 0.0) -> Iterator[int]:
        """Numbers of rounds, for as long as it is worth to go on, and the `longest` so far fits before the deadline."""
        start = begun = time.perf_counter()
        for count in range(_MAX_ROUNDS):
            check_stop()
            now = time.perf_counter()
            longest, begun = max(longest, now - begun), now
            if self._deadline.left() <= longest:
                return
            if count >= _MIN_ROUNDS and (now - start > seconds or (count >= _ENOUGH_ROUNDS and now - start > _SHORT)):
                return
            yield count

    def _first(self, runner: Runner, best: float | None) -> float | None:
        """The time of the first run of a candidate; None when it cannot, or not in time. `best` is of the others."""
        name = runner.trial.model.name
        try:
            return self._first_run(runner, best)
        except (DeadlineExceededError, RunTimeoutError) as error:
            logger.info("net %r: a candidate is rejected in its first run: %s", name, error)
        except Exception as error:
            logger.info("net %r cannot be measured (%s): %s", name, type(error).__name__, error)
        return None

    def _first_run(self, runner: Runner, best: float | None) -> float:
        """The time of the first run. Raises DeadlineExceededError or RunTimeoutError if it is hopeless."""
        with within_deadline(self._deadline), measuring(0):
            begun = self._deadline.left()
            if begun <= self._preparing:
                raise DeadlineExceededError("not enough time to prepare it")
            runner.prepare(self._inputs)
            left = self._deadline.left()
            self._preparing = min(self._preparing or begun, begun - left)
            longest = left if best is None else min(left, _HOPELESS * best + _HOPELESS_SECONDS)
            return runner.first(self._inputs, max(0.0, longest))

    def _survey(self, models: Sequence[Model]) -> None:
        """Let the operators of all models choose how to compute: those that take longest first, each geometry once.

        The nets are prepared on parameters of their own, as weights are packed for what is chosen without measuring.
        """
        allowed = min(self._search_seconds * _SURVEY_SHARE, self._deadline.left())
        if allowed <= 0:
            return
        self._on_stage("listing what may be measured")
        parameters: dict[int, Workspace] = {}
        with measuring(self._deadline.left()):
            with within_deadline(self._deadline), postponed() as measure, ExitStack() as stack:
                for model in models:
                    if self._deadline.left() <= self._preparing:
                        break
                    known = parameters.setdefault(id(model.parameters), parameter_workspace(model))
                    runner = stack.enter_context(Runner(Trial(model), known))
                    try:
                        runner.prepare(self._inputs)
                    except Exception as error:
                        logger.info("net %r cannot be surveyed (%s): %s", model.name, type(error).__name__, error)
            self._on_stage("measuring implementations")
            start = time.perf_counter()
            with measuring(allowed):
                measure()
            self._search_seconds -= time.perf_counter() - start

    def _interleave(self, runners: dict[int, Runner], times: dict[int, list[float]], seconds: float) -> None:
        """Add to the times of the first runs those of alternating runs of all that are not far behind."""
        running = dict(runners)
        for count in self._rounds(seconds):
            if count and len(running) > 1:
                best = min(min(times[number]) for number in running)
                limit = best * _OUT_OF_THE_RUNNING
                if count < _MIN_ROUNDS:
                    limit = best * _HOPELESS + _HOPELESS_SECONDS
                running = {number: runner for number, runner in running.items() if min(times[number]) <= limit}
            for number, runner in running.items():
                if self._deadline.left() < min(times[number]):
                    return
                times[number].append(runner.timed(self._inputs))


def _run_at_once(members: Sequence[Replica], pool: WorkerPool) -> None:
    """Run each replica on a worker of its own, and wait for all."""
    gates = [new_gate() for _ in members]
    for replica, gate in zip(members, gates, strict=True):
        pool.submit(replica.net.new_run(gate.release))
    for gate in gates:
        gate.acquire()


def undisturbed(times: Sequence[float]) -> float:
    """The mean of the fastest quarter."""
    count = (len(times) + 3) // 4
    return sum(sorted(times)[:count]) / count
