"""Bench: measures models at the shapes they are tuned for - whole runs, and their operators and tasks.

What is compared runs in turns, so that a machine that is busy for a while slows all of it. The fastest quarter of the
runs counts: disturbances only ever add. Work of one thread is timed by what the thread computed for it, so that
operators and layouts are judged alike on a machine that others use.

All of it ends at a deadline, whatever a candidate takes: each loop asks before each run whether it still fits, and what
is far behind the best is dropped in its first run (`tuning.runner`). What was not measured by then has no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import parameter_workspace
from dagexec.compiler.tuning.runner import Runner, Trial
from dagexec.core.choices import measuring, postponed
from dagexec.core.dtypes import FLOAT32, STRING
from dagexec.core.model import Model
from dagexec.core.shapes import element_count
from dagexec.core.workspace import Workspace
from dagexec.errors import DeadlineExceededError, ResourceError, RunTimeoutError
from dagexec.platform.deadline import Deadline, check_stop, within_deadline
from dagexec.platform.host_memory import check_fits
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.run.prediction import TimedTasks

logger = logging.getLogger("dagexec")

Array = npt.NDArray[Any]

_MIN_ROUNDS, _ENOUGH_ROUNDS, _MAX_ROUNDS = 3, 25, 400
_SURVEY_SHARE = 2 / 3  # of what is left for choosing implementations, at a time
_SHORT = 0.1  # seconds: rounds that are over so soon are not enough yet
_OUT_OF_THE_RUNNING = 1.25  # slower than this times the fastest after the first rounds: not run again
_HOPELESS, _HOPELESS_SECONDS = 2.0, 0.05  # times the best first run, and beyond it: a first run is not finished


class Measures(Protocol):
    """What choices are made from."""

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        """The time of a run of each trial, measured within about `seconds`; infinity for one that cannot run."""


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
        """The time of interleaved runs, from feeding the inputs to the end; of the first where there is no other.

        Infinity where it cannot run, where the first run was far behind the best, and where there was no time for it.
        """
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
        rows = (times.get(number, [float("inf")]) for number in range(len(trials)))
        return [undisturbed(row[1:] or row) for row in rows]

    def tasks(self, model: Model, seconds: float) -> TimedTasks | None:
        """What runs are handed out as, with the shortest time of each task; None where no machine code runs.

        Raises DeadlineExceededError or RunTimeoutError when there is no time for a run, and what that raises.
        """
        self._survey([model])
        self._on_stage("timing the net's tasks")
        with Runner(Trial(model, RunOptions(net_type="dag", num_workers=1)), self.parameters(model)) as runner:
            took = self._first_run(runner, None)
            found = runner.measured_tasks()
            for _ in self._rounds(seconds, took):
                runner.run(self._inputs)
                again = runner.measured_tasks()
                if found is not None and again is not None:
                    found = replace(found, seconds=list(map(min, found.seconds, again.seconds)))
        return found

    def operator_seconds(self, model: Model, seconds: float) -> list[float]:
        """The time of each operator, run one after another in this thread; see `Stopwatch` for a busy machine.

        Raises DeadlineExceededError when there is no time for that, and what a run raises.
        """
        self._survey([model])
        self._on_stage("timing operators")
        times: list[list[float]] = [[] for _ in model.program.op]
        with Runner(Trial(model), self.parameters(model)) as runner:
            try:
                took = self._first_run(runner, None)
            except RunTimeoutError:
                took = float("inf")
            for _ in self._rounds(seconds, took):
                for row, seconds_of_one in zip(times, runner.run_operators(self._inputs), strict=True):
                    row.append(seconds_of_one)
        if not all(times):
            raise DeadlineExceededError(f"net {model.name!r}: not enough time to measure its operators")
        return [undisturbed(row) for row in times]

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
            logger.info("net %r: a candidate is rejected in its first run: %s", name, str(error))
        except Exception as error:
            logger.info("net %r cannot be measured (%s): %s", name, type(error).__name__, str(error))
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
                        logger.info("net %r cannot be surveyed (%s): %s", model.name, type(error).__name__, str(error))
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


def undisturbed(times: Sequence[float]) -> float:
    """The mean of the fastest quarter."""
    count = (len(times) + 3) // 4
    return sum(sorted(times)[:count]) / count
