"""Which schedule a net gets: candidates by prediction, the best few of them measured, the fastest kept.

The choice is text under a key of the net, its shapes, the processor, the cores and oneDNN's version
(`core.choices`), so that the next compilation of the same net measures nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from dagexec.compiler.tuning.bench import Array, Measures, undisturbed
from dagexec.compiler.tuning.runner import Trial
from dagexec.compiler.tuning.schedule import (
    ESTIMATED_PRICES,
    MEASURED_PRICES,
    OperatorTimes,
    Schedule,
    ScheduleProblem,
    by_work,
    candidates,
    for_throughput,
    predicted_seconds,
)
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import infer_net
from dagexec.core.model import Model
from dagexec.core.proto import NetDef
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError
from dagexec.ops.kernels.sharing import pieces_of, work_seconds
from dagexec.ops.onednn.binding import library
from dagexec.scheduler.nets.options import DEFAULT_RUN_OPTIONS, RunOptions
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.simulate import Machine
from dagexec.scheduler.run.overhead import SchedulingCosts, slowdown_up_to

logger = logging.getLogger("dagexec")

Options = TypeVar("Options", bound=RunOptions)

_MEASURED_CANDIDATES = 3
_SIGNIFICANT = 1.645  # standard deviations that chance exceeds in one case of twenty
_WORTH_RUNNING, _WORTH_RUNNING_SECONDS = 1.35, 300e-6  # times the best prediction, and beyond it
_TEAM_SECONDS = 3e-6  # what several threads cost a primitive, where nothing is measured
_WAKE_TEAM_SECONDS = 50e-6  # what they cost the first of a run, as they sleep
_PARALLEL_SHARE = 0.95  # of an operator's work, likewise
_CALL_SECONDS = 2e-6  # of an operator, beside its work; of one whose shapes are not known, all
_HELD_SECONDS = {"ONEDNN": 1e-6, "": 20e-6}  # how long an operator keeps the interpreter lock, by engine
_NOMINAL = SchedulingCosts(wake_seconds=40e-6, chain_seconds=5e-6)
_NOMINAL_SLOWDOWN = 1.15
_NUMPY_LANES = 8  # of NumPy's loops and its BLAS, about


@dataclass(frozen=True)
class ScheduleConstraints:
    """What a schedule has to keep to; None is to be chosen.

    Attributes:
        cores: how many there are.
        options: its net type, workers, replicas, and the most threads for an operator.
    """

    cores: int
    options: RunOptions = DEFAULT_RUN_OPTIONS


@dataclass(frozen=True)
class CandidateTimes:
    """A candidate's times in seconds; `measured` is None for one that was not run."""

    schedule: Schedule
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Choice:
    """The schedule, and the candidates it was chosen from, the one predicted to be fastest first."""

    schedule: Schedule
    considered: tuple[CandidateTimes, ...] = ()


def choose_schedule(
    model: Model,
    constraints: ScheduleConstraints,
    measures: Measures | None,
    seconds: float,
    inputs: Mapping[str, Array] | None,
) -> Choice:
    """The schedule for `model`; without `measures` from what inference says of the cost of operators on `inputs`.

    Where that is not all that runs will be given, and one worker is chosen, each operator's threads are left to the
    time when shapes are known.
    """
    known = model.parameters.keys() | model.inputs.keys()
    graph = build_graph(model.net, known.__contains__)
    if constraints.options.first_replicas > 1:
        return Choice(_throughput(graph, constraints))
    if measures is None:
        return _by_estimates(model, graph, constraints, inputs)
    if measures.quiet():
        by_rule = _by_estimates(model, graph, constraints, inputs).schedule
        if by_rule.by_work:  # what is measured is for these shapes
            by_rule = replace(by_rule, kind="one after another", by_work=False)
        choice = _by_measurement(model, graph, constraints, measures, seconds, by_rule)
        if measures.quiet():
            return choice
    return _by_prediction(model, graph, constraints, measures, seconds)


def _by_estimates(
    model: Model, graph: Graph, constraints: ScheduleConstraints, inputs: Mapping[str, Array] | None
) -> Choice:
    alone = _estimated_seconds(graph, model, inputs)
    problem = _estimated_problem(graph, constraints, [_CALL_SECONDS if one is None else one for one in alone])
    predicted = _candidate_times(problem)
    first = predicted[0]
    if first.schedule.workers == 1 and (None in alone or _has_open_shapes(model)):
        shared = [_threads_of(graph, index, max(problem.times)) > 1 for index in range(len(graph))]
        if any(shared):
            predicted.insert(0, CandidateTimes(by_work(problem, shared), first.predicted))
    return Choice(predicted[0].schedule, tuple(predicted))


def _has_open_shapes(model: Model) -> bool:
    """True where runs may differ in the shapes of inputs."""
    shapes = (model.inputs[name].shape for name in model.needed_inputs())
    return any(shape is None or None in shape for shape in shapes)


def _by_prediction(
    model: Model, graph: Graph, constraints: ScheduleConstraints, measures: Measures, seconds: float
) -> Choice:
    """While others use the machine: from the processor time of operators on one thread.

    What is chosen runs once all the same, beside a schedule of fewer threads, to see that it is not hopeless.
    """
    logger.info("net %r: other processes use the machine: the schedule is chosen by prediction alone", model.name)
    (alone,) = measures.operator_seconds([with_threads(model, 1)], seconds * 0.3)
    predicted = _candidate_times(_estimated_problem(graph, constraints, alone))
    narrow = min(predicted, key=lambda one: max(one.schedule.threads))
    tried = [narrow, predicted[0]] if narrow is not predicted[0] else [narrow]
    trials = [Trial(one.schedule.applied(model), with_schedule(constraints.options, one.schedule)) for one in tried]
    found = measures.run_seconds(trials, 0.0)  # its operators choose how to compute
    hopeless = math.isinf(found[-1]) and math.isfinite(found[0])
    return Choice((narrow if hopeless else predicted[0]).schedule, tuple(predicted))


def _by_measurement(
    model: Model,
    graph: Graph,
    constraints: ScheduleConstraints,
    measures: Measures,
    seconds: float,
    by_rule: Schedule,
) -> Choice:
    """From the times of operators and of whole runs, among them those of the schedule that would be chosen by rule."""
    times = _measured_times(model, _widths(constraints), measures, seconds * 0.3)
    slowdown = measures.slowdown(model, constraints.cores, seconds * 0.1) if constraints.cores > 1 else 1.0
    costs = measures.scheduling_costs(build_plan(graph, times[min(times)]))
    problem = _schedule_problem(graph, constraints, times, costs, slowdown, MEASURED_PRICES)
    predicted = _candidate_times(problem)
    known = {(one.schedule.workers, one.schedule.threads, one.schedule.order) for one in predicted}
    is_new = (by_rule.workers, by_rule.threads, by_rule.order) not in known
    also = [CandidateTimes(by_rule, predicted_seconds(problem, by_rule))] if is_new else []
    return _fastest(model, constraints, predicted, also, measures, seconds * 0.6)


def _fastest(
    model: Model,
    constraints: ScheduleConstraints,
    predicted: Sequence[CandidateTimes],
    also: Sequence[CandidateTimes],
    measures: Measures,
    seconds: float,
) -> Choice:
    """The fastest of the candidates that are predicted to be best, and of `also`, by measurement; there may be one.

    What one worker runs is among them wherever it may be fastest: how long others wait is hard to predict.
    """
    limit = predicted[0].predicted * _WORTH_RUNNING + _WORTH_RUNNING_SECONDS
    tried = [
        one
        for place, one in enumerate(predicted)
        if one.predicted <= limit and (place < _MEASURED_CANDIDATES or one.schedule.workers == 1)
    ]
    tried += also
    if len(tried) == 1:
        return Choice(predicted[0].schedule, tuple(predicted))
    trials = [Trial(one.schedule.applied(model), with_schedule(constraints.options, one.schedule)) for one in tried]
    rounds = measures.run_rounds(trials, seconds)
    found = [undisturbed(times) if times else math.inf for times in rounds]
    rows = [CandidateTimes(one.schedule, one.predicted, time) for one, time in zip(tried, found, strict=True)]
    for row, time in zip(rows, found, strict=True):
        logger.info(
            "net %r: %s on %d worker(s): predicted %.3f ms, measured %.3f ms",
            model.name, row.schedule.kind, row.schedule.workers, row.predicted * 1e3, time * 1e3,
        )  # fmt: skip
    best = fastest_round([row.schedule.kind for row in rows], rounds)
    return Choice(rows[best].schedule, (*rows, *(one for one in predicted if one not in tried)))


def fastest_round(kinds: Sequence[str], rounds: Sequence[Sequence[float]]) -> int:
    """The place of the schedule to keep, of these kinds, from the times of interleaved runs; the first if none was run.

    What was given up, and has fewer runs, is out. Those whose threads wait least for each other are looked at first.
    Another has to be faster by more than its price, and in so many pairs of runs as would be by chance in one case of
    twenty (a sign test): the fastest quarter of its runs may be faster although most are slower.
    """
    prices = [MEASURED_PRICES.get(kind, 1.0) for kind in kinds]
    most = max(map(len, rounds))
    run = sorted((place for place, times in enumerate(rounds) if times and len(times) == most), key=prices.__getitem__)
    best = run[0] if run else 0
    for place in run[1:]:
        more = prices[place] / prices[best]
        gained = sum(after * more < before for before, after in zip(rounds[best], rounds[place], strict=False))
        needed = _pairs_needed(min(len(rounds[best]), len(rounds[place])))
        if gained >= needed and undisturbed(rounds[place]) * more < undisturbed(rounds[best]):
            best = place
    return best


def _pairs_needed(pairs: int) -> int:
    """In how many of so many pairs the second must be faster: by the normal distribution, in all of up to four."""
    return min(pairs, math.ceil(pairs / 2 + _SIGNIFICANT * math.sqrt(pairs) / 2))


def with_schedule(options: Options, schedule: Schedule) -> Options:
    """The options with nothing left open."""
    return replace(options, net_type=schedule.net_type, num_workers=schedule.workers)


def to_text(schedule: Schedule) -> str:
    """The schedule as text to keep."""
    return json.dumps(asdict(schedule))


def from_text(text: str, net: NetDef) -> Schedule | None:
    """The schedule that `to_text` wrote for `net`; None for something else."""
    try:
        found = json.loads(text)
        order = tuple((int(first), int(second)) for first, second in found["order"])
        threads = tuple(int(count) for count in found["threads"])
        schedule = Schedule(str(found["kind"]), str(found["net_type"]), int(found["workers"]), threads, order)
    except (ValueError, KeyError, TypeError):
        return None
    known = schedule.net_type in ("simple", "dag", "async_dag") and min(schedule.workers, *threads, 1) >= 1
    fits = len(threads) == len(net.op) and all(0 <= first < second < len(net.op) for first, second in order)
    return schedule if known and fits and all(net.op[first].output for first, _ in order) else None


def _throughput(graph: Graph, constraints: ScheduleConstraints) -> Schedule:
    options = constraints.options
    schedule = for_throughput(graph, constraints.cores, options.first_replicas, options.net_type)
    threads = tuple(_threads_of(graph, index, options.operator_threads) for index in range(len(graph)))
    workers = options.num_workers or max(1, schedule.workers // options.operator_threads)
    return Schedule(schedule.kind, schedule.net_type, workers, threads)


def _threads_of(graph: Graph, index: int, threads: int) -> int:
    return threads if graph.operators[index].engine == "ONEDNN" or graph.schemas[index].takes_threads else 1


def _widths(constraints: ScheduleConstraints) -> tuple[int, ...]:
    """The numbers of threads to try."""
    given = constraints.options.intra_op_threads
    most = given or constraints.cores
    half = {most // 2} if most >= 4 and given is None else set()
    return tuple(sorted({1, most} | half))


def _schedule_problem(
    graph: Graph,
    constraints: ScheduleConstraints,
    times: OperatorTimes,
    costs: SchedulingCosts,
    slowdown: float,
    prices: Mapping[str, float],
) -> ScheduleProblem:
    machine = Machine(
        chain_seconds=costs.chain_seconds,
        wake_seconds=costs.wake_seconds,
        slowdown=slowdown_up_to(constraints.cores, slowdown),
    )
    options = constraints.options
    single = constraints.cores == 1 and options.num_workers is None
    return ScheduleProblem(
        graph,
        times,
        machine,
        constraints.cores,
        1 if single or options.net_type == "simple" else options.num_workers,
        options.net_type or "simple",
        options.net_type or "dag",
        _held_seconds(graph, times[min(times)]),
        _WAKE_TEAM_SECONDS,
        prices,
    )


def _estimated_problem(graph: Graph, constraints: ScheduleConstraints, alone: Sequence[float]) -> ScheduleProblem:
    """What schedules are made for where one thread takes the times `alone`, and nothing else is known."""
    times = _scaled_times(graph, alone, _widths(constraints))
    return _schedule_problem(graph, constraints, times, _NOMINAL, _NOMINAL_SLOWDOWN, ESTIMATED_PRICES)


def _held_seconds(graph: Graph, alone: Sequence[float]) -> list[float]:
    """How long each operator keeps the interpreter lock: NumPy's while it computes little, a library's for the call."""
    most = [_HELD_SECONDS.get(one.engine, _HELD_SECONDS[""]) for one in graph.operators]
    return [min(seconds, limit) for seconds, limit in zip(alone, most, strict=True)]


def _candidate_times(problem: ScheduleProblem) -> list[CandidateTimes]:
    return [CandidateTimes(schedule, seconds) for schedule, seconds in candidates(problem).items()]


def _measured_times(model: Model, widths: Sequence[int], measures: Measures, seconds: float) -> dict[int, list[float]]:
    models = [with_threads(model, width) for width in widths]
    return dict(zip(widths, measures.operator_seconds(models, seconds), strict=True))


def with_threads(model: Model, threads: int) -> Model:
    """`model` with so many threads for every operator that can have several."""
    wide = [one.engine == "ONEDNN" or schema_of(one.type).takes_threads for one in model.net.op]
    schedule = Schedule("", "", 1, tuple(threads if several else 1 for several in wide))
    return schedule.applied(model)


def _estimated_seconds(graph: Graph, model: Model, inputs: Mapping[str, Array] | None) -> list[float | None]:
    """What each operator takes on one thread by the cost of its work; None where shapes are not known."""
    types = {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in model.parameters.items()}
    types |= {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in (inputs or {}).items()}
    try:
        costs = infer_net(graph, types, model.parameters).costs
    except DagexecError:
        costs = (None,) * len(graph)
    found = library()
    lanes = _NUMPY_LANES if found is None else found.isa.lanes
    seconds = [None if cost is None else work_seconds(cost, lanes) + _CALL_SECONDS for cost in costs]
    return [0.0 if index in graph.views else one for index, one in enumerate(seconds)]


def _scaled_times(graph: Graph, alone: Sequence[float], widths: Sequence[int]) -> dict[int, list[float]]:
    """Times on several threads, from those on one; no gain where threads would not find work enough."""

    def wide(index: int, width: int) -> float:
        if _threads_of(graph, index, width) == 1:
            return alone[index]
        gaining = pieces_of(alone[index], width) == width
        share = 1 - _PARALLEL_SHARE + _PARALLEL_SHARE / width if gaining else 1.0
        return alone[index] * share + _TEAM_SECONDS

    return {width: [wide(index, width) for index in range(len(graph))] for width in widths}
