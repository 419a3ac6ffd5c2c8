"""The adversary: a search for task graphs on which one policy loses most against another.

In the manner of PISA (Coleman and Krishnamachari, arXiv 2403.07120): simulated annealing over small graphs, whose steps
change the seconds of a task, or add or remove an edge. What is sought is a large ratio of the makespans that are
predicted, with the plan that the net of the graph would have, at no cost of scheduling. The seed alone decides what is
found: the length of a search is a number of steps, as one of seconds would find something else on each machine.
"""

from __future__ import annotations

import math
from random import Random

from dagexec.analysis.rounds import Limits
from dagexec.analysis.statistics import Verdict, verdicts
from dagexec.core.graph import build_graph
from dagexec.lab.graph import WorkGraph, work_graph
from dagexec.lab.nets import work_net
from dagexec.lab.running import run_graph
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.plan import build_plan, with_policy
from dagexec.scheduler.run.prediction import predict_makespan
from dagexec.scheduling.policy import Policy, name_of

SHORTEST, LONGEST = 0.1, 1.0
"""Seconds of a task; a thousandth is the unit."""

_RESTARTS = 4
_HOT, _COLD = 0.05, 0.001  # temperatures: of the logarithm of the ratio, what a step may well lose
_WIDTH = 0.2  # of the change of a task's seconds
_DENSITY = 0.3  # of the first graphs: the share of pairs that have an edge


@dataclass(frozen=True)
class Loss:
    """What a policy loses on a graph: its makespan, and that of the one that it is held against."""

    graph: WorkGraph
    seconds: float
    against_seconds: float

    @property
    def ratio(self) -> float:
        """Above 1 where the policy loses."""
        return self.seconds / self.against_seconds


def predicted_loss(graph: WorkGraph, policy: Policy, against: Policy, workers: int) -> Loss:
    """What is predicted for so many workers at no cost of scheduling. Raises PolicyError where a policy fails."""
    plan = build_plan(build_graph(work_net(graph)), [task.seconds for task in graph.tasks])
    mine, other = (predict_makespan(with_policy(plan, one, workers), workers) for one in (policy, against))
    return Loss(graph, mine, other)


def find_loss(policy: Policy, against: Policy, workers: int, *, tasks: int, steps: int, seed: int) -> Loss:
    """The worst graph of so many tasks, at least 2, that `steps` steps came by. Raises PolicyError."""
    random, name = Random(seed), f"{name_of(policy)}-{name_of(against)}"
    worst: Loss | None = None
    for restart in range(_RESTARTS):
        candidate = _State.drawn(tasks, random)
        current, state = predicted_loss(candidate.graph(name), policy, against, workers), candidate
        worst = current if worst is None or current.ratio > worst.ratio else worst
        count = (steps - restart + _RESTARTS - 1) // _RESTARTS
        for step in range(count):
            candidate = state.changed(random)
            found = predicted_loss(candidate.graph(name), policy, against, workers)
            temperature = _HOT * (_COLD / _HOT) ** (step / count)
            gain = math.log(found.ratio / current.ratio)
            if gain >= 0 or random.random() < math.exp(gain / temperature):
                current, state = found, candidate
                worst = current if current.ratio > worst.ratio else worst
    assert worst is not None
    return worst


def measured_loss(
    graph: WorkGraph, policy: str, against: str, workers: int, *, kind: str, task_seconds: float, limits: Limits
) -> Verdict:
    """What is said of `policy` beside `against` after runs of the graph in turns, scaled to so long a task on average.

    Raises SettingError for an unknown policy or kind of work, and ValueError for fewer than 8 rounds.
    """
    rows = run_graph(graph.taking(task_seconds), kind, [(f"dag:{name}", workers) for name in (against, policy)], limits)
    return verdicts({row.net_type: row.samples for row in rows}, f"dag:{against}")[f"dag:{policy}"]


@dataclass(frozen=True)
class _State:
    """Thousandths of seconds of each task, and edges, each from the smaller number to the larger."""

    units: tuple[int, ...]
    edges: frozenset[tuple[int, int]]

    @staticmethod
    def drawn(tasks: int, random: Random) -> _State:
        units = tuple(_units(random.uniform(SHORTEST, LONGEST)) for _ in range(tasks))
        pairs = ((first, then) for then in range(tasks) for first in range(then))
        return _State(units, frozenset(pair for pair in pairs if random.random() < _DENSITY))

    def changed(self, random: Random) -> _State:
        """Another time of a task, or an edge that was not there, or one fewer."""
        if random.random() < 0.5:
            task = random.randrange(len(self.units))
            units = _units(self.units[task] / 1000 + random.gauss(0.0, _WIDTH))
            return _State((*self.units[:task], units, *self.units[task + 1 :]), self.edges)
        first, then = sorted(random.sample(range(len(self.units)), 2))
        return _State(self.units, self.edges ^ {(first, then)})

    def graph(self, name: str) -> WorkGraph:
        parents: list[list[int]] = [[] for _ in self.units]
        for first, then in self.edges:
            parents[then].append(first)
        return work_graph(name, [(f"task{task}", units / 1000, parents[task]) for task, units in enumerate(self.units)])


def _units(seconds: float) -> int:
    return round(1000 * min(max(seconds, SHORTEST), LONGEST))
