"""Threads inside operators or operators side by side: schedules of a net, predicted from the times of operators.

A schedule gives every operator its threads, and the net its workers. Six kinds are known:

    one after another   one worker, an operator has as many threads as make it fastest
    on one thread       one worker, and one thread for every operator
    side by side        several workers, every operator has a worker's share of the cores
    mixed               the net is cut at the operators that are ordered with all others; each part between two of them
                        runs one way or the other, whichever is predicted to be faster
    for throughput      one thread an operator, a core for each run in flight

    by work             one worker; how many threads an operator has is decided when a run's shapes are known

An operator on more cores than its worker's share must not run beside others. In a mixed schedule control inputs put it
in order with those it could run beside, so everything that follows from the graph (hazards, chains, memory) is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagexec.core.arguments import make_argument
from dagexec.core.graph import Graph, build_graph
from dagexec.core.model import Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.simulate import Machine, predict_host

MEASURED_PRICES: Mapping[str, float] = {"one after another": 1.02, "side by side": 1.04, "mixed": 1.05}
"""By what a schedule must be faster than one without threads that wait for each other: by more than times vary."""

ESTIMATED_PRICES: Mapping[str, float] = {"one after another": 1.15, "side by side": 1.3, "mixed": 1.35}
"""The same where times of operators are estimates; threads wait longest where other processes use the cores."""

OperatorTimes = Mapping[int, Sequence[float]]
"""By number of threads, the seconds that each operator takes, in list order."""

_GAIN, _GAIN_SECONDS = 0.95, 1e-6  # what more threads must bring to an operator, as times vary


@dataclass(frozen=True)
class Schedule:
    """How a net runs.

    Attributes:
        kind: in words, for reports.
        net_type, workers: of the net.
        threads: of each operator, in list order.
        order: pairs of operators; a control input makes the second wait for the first.
        by_work: an operator takes as many of its threads as its work is worth at the shapes of a run.
    """

    kind: str
    net_type: str
    workers: int
    threads: tuple[int, ...]
    order: tuple[tuple[int, int], ...] = ()
    by_work: bool = False

    def applied(self, model: Model) -> Model:
        """`model` with these threads and control inputs."""
        net = NetDef()
        net.CopyFrom(model.net)
        for definition, threads in zip(net.op, self.threads, strict=True):
            set_threads(definition, threads, "max_threads" if self.by_work else "threads")
        for first, second in self.order:
            net.op[second].control_input.append(net.op[first].output[0])
        return replace(model, net=net)


def set_threads(definition: OperatorDef, threads: int, name: str = "threads") -> None:
    """Let the operator's primitive use `threads` threads; 1 is what is meant without the argument `name`."""
    kept = [argument for argument in definition.arg if argument.name not in ("threads", "max_threads")]
    del definition.arg[:]
    definition.arg.extend(kept)
    if threads > 1:
        definition.arg.append(make_argument(name, threads))


@dataclass(frozen=True)
class Part:
    """Operators that come one after the other in the list. With `branches`, some of them need not wait for others."""

    operators: tuple[int, ...]
    branches: bool


def parts(graph: Graph) -> tuple[Part, ...]:
    """The graph cut at the operators that are ordered with all others.

    Such an operator has all before it in the list as ancestors and all behind it as descendants: no edge of the
    transitive reduction passes it by, where operators without parents count as children of a source before the list and
    those without children as parents of a sink behind it.
    """
    count = len(graph)
    beginning, ending = [0] * (count + 1), [0] * (count + 1)  # edges that pass by begin before, and end behind
    for index in range(count):
        parents = graph.reduced_parents[index]
        beginning[parents[0] + 1 if parents else 0] += 1
        ending[index] += 1
        if not graph.reduced_children[index]:
            beginning[index + 1] += 1
    rows: list[tuple[bool, list[int]]] = []
    passing = 0
    for index in range(count):
        passing += beginning[index] - ending[index]
        if not rows or rows[-1][0] != bool(passing):
            rows.append((bool(passing), []))
        rows[-1][1].append(index)
    return tuple(Part(tuple(operators), branches) for branches, operators in rows)


@dataclass(frozen=True)
class ScheduleProblem:
    """What schedules are made for.

    Attributes:
        graph: of the net.
        times: of its operators.
        machine: what scheduling costs; its slowdown is that of one-thread operators on several cores.
        cores: how many threads may compute at once.
        workers: of the net, where that is not to be chosen.
        alone: the net type when one worker runs everything.
        together: the net type for several workers.
        held: of each operator, the seconds in which it holds the interpreter lock; empty for none.
        team_seconds: what it takes to wake the team of a worker that has computed on one thread, or nothing, before.
        prices: by kind, what predicted times are multiplied with before they are compared.
    """

    graph: Graph
    times: OperatorTimes
    machine: Machine
    cores: int
    workers: int | None = None
    alone: str = "simple"
    together: str = "dag"
    held: Sequence[float] = ()
    team_seconds: float = 0.0
    prices: Mapping[str, float] = field(default_factory=lambda: MEASURED_PRICES)


def candidates(problem: ScheduleProblem) -> dict[Schedule, float]:
    """The schedules worth a look with their predicted seconds, each different from the others.

    By these seconds and `prices` the best comes first.
    """
    found = [single_threaded(problem)] if problem.workers in (None, 1) else []
    found.append(sequential(problem))
    if problem.workers != 1 and problem.graph.operators:
        for width in sorted(width for width in problem.times if width < problem.cores):
            found += [parallel(problem, width), mixed(problem, width)]
    distinct: dict[object, Schedule] = {}
    for schedule in found:
        distinct.setdefault((schedule.workers, schedule.threads, schedule.order), schedule)
    seconds = {schedule: predicted_seconds(problem, schedule) for schedule in distinct.values()}
    priced = sorted(seconds, key=lambda schedule: seconds[schedule] * problem.prices.get(schedule.kind, 1.0))
    return {schedule: seconds[schedule] for schedule in priced}


def sequential(problem: ScheduleProblem) -> Schedule:
    """Every operator with as many threads as make it fastest, on one worker; or kept in list order on several."""
    threads = tuple(_fastest(problem.times, index, problem.cores) for index in range(len(problem.graph)))
    workers = problem.workers or 1
    if workers == 1 or problem.together == "simple":
        return Schedule("one after another", problem.alone, workers, threads)
    order = [pair for part in parts(problem.graph) for pair in _in_list_order(problem.graph, part)]
    return Schedule("one after another", problem.together, workers, threads, tuple(order))


def by_work(problem: ScheduleProblem, shared: Sequence[bool]) -> Schedule:
    """One worker; operators that may be `shared` have all cores, as far as their work is worth it in a run."""
    threads = tuple(max(problem.times) if one else 1 for one in shared)
    return Schedule("by work", problem.alone, 1, threads, by_work=True)


def single_threaded(problem: ScheduleProblem) -> Schedule:
    """Nobody else is needed, and nobody has to be woken: what small nets can be fastest with."""
    threads = (1,) * len(problem.graph)
    return Schedule("on one thread", problem.alone, 1, threads)


def parallel(problem: ScheduleProblem, width: int) -> Schedule:
    """As many workers as have `width` threads each; no operator has more."""
    threads = tuple(_fastest(problem.times, index, width) for index in range(len(problem.graph)))
    return Schedule("side by side", problem.together, problem.workers or problem.cores // width, threads)


def mixed(problem: ScheduleProblem, width: int) -> Schedule:
    """Each part of the net as `parallel` or in list order with all cores, whichever is predicted to be faster.

    That is `sequential` where no part gains from branches, after each of which the team of a worker is woken.
    """
    narrow, wide = parallel(problem, width), sequential(problem)
    threads = list(wide.threads)
    order: list[tuple[int, int]] = []
    gained = False
    for part in parts(problem.graph):
        if not part.branches:
            continue
        seconds = sum(problem.times[wide.threads[index]][index] for index in part.operators)
        if _part_seconds(problem, part, narrow) + problem.team_seconds < seconds or not _may_be_ordered(
            problem.graph, part
        ):
            gained = True
            for index in part.operators:
                threads[index] = narrow.threads[index]
        else:
            order += _in_list_order(problem.graph, part)
    if not gained:
        return wide
    return Schedule("mixed", problem.together, narrow.workers, tuple(threads), tuple(order))


def for_throughput(graph: Graph, cores: int, replicas: int, net_type: str | None) -> Schedule:
    """One thread an operator and a worker a core: runs that are in flight at once share nothing."""
    chosen = net_type or ("simple" if replicas >= cores else "dag")
    workers = min(cores, replicas) if chosen == "simple" else cores
    return Schedule("for throughput", chosen, workers, (1,) * len(graph))


def predicted_seconds(problem: ScheduleProblem, schedule: Schedule) -> float:
    """Seconds that a run takes by list scheduling; no cost of scheduling for a net that one worker runs in a loop."""
    seconds = [problem.times[threads][index] for index, threads in enumerate(schedule.threads)]
    waking = problem.team_seconds if max(schedule.threads, default=1) > 1 else 0.0
    if schedule.net_type == "simple":
        return sum(seconds) + waking
    graph = _with_order(problem.graph, schedule.order)
    machine = replace(problem.machine, workers=schedule.workers)
    return predict_host(build_plan(graph, seconds), machine, problem.held) + waking


def _part_seconds(problem: ScheduleProblem, part: Part, schedule: Schedule) -> float:
    """Seconds of one part of the net under `schedule`."""
    graph = _subgraph(problem.graph, part.operators[0], part.operators[-1] + 1)
    seconds = [problem.times[schedule.threads[index]][index] for index in part.operators]
    held = [problem.held[index] for index in part.operators] if problem.held else ()
    return predict_host(build_plan(graph, seconds), replace(problem.machine, workers=schedule.workers), held)


def _subgraph(graph: Graph, first: int, stop: int) -> Graph:
    """The graph of the operators from `first` to before `stop`: no path between two of them leaves the list there."""

    def inner(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(other - first for other in row if first <= other < stop) for row in rows[first:stop])

    return replace(
        graph,
        operators=graph.operators[first:stop],
        schemas=graph.schemas[first:stop],
        parents=inner(graph.parents),
        children=inner(graph.children),
        reduced_parents=inner(graph.reduced_parents),
        reduced_children=inner(graph.reduced_children),
        views=frozenset(index - first for index in graph.views if first <= index < stop),
    )


def _with_order(graph: Graph, order: Sequence[tuple[int, int]]) -> Graph:
    if not order:
        return graph
    net = NetDef(name=graph.name)
    net.op.extend(graph.operators)
    for first, second in order:
        net.op[second].control_input.append(net.op[first].output[0])
    return build_graph(net, lambda _name: True)


def _in_list_order(graph: Graph, part: Part) -> list[tuple[int, int]]:
    """The pairs of neighbors in the list that nothing else keeps in order."""
    pairs = zip(part.operators, part.operators[1:], strict=False)
    return [(first, second) for first, second in pairs if first not in graph.parents[second]]


def _may_be_ordered(graph: Graph, part: Part) -> bool:
    """False where an operator without outputs leaves nothing to wait for."""
    return all(graph.operators[index].output for index in part.operators)


def _fastest(times: OperatorTimes, index: int, most: int) -> int:
    """The threads, up to `most`, with which an operator is fastest; more of them only where they gain enough."""
    best = min(times)
    for threads in sorted(times):
        gained = times[best][index] - times[threads][index]
        if threads <= most and gained > max(_GAIN_SECONDS, (1 - _GAIN) * times[best][index]):
            best = threads
    return best
