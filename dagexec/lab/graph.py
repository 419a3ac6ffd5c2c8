"""WorkGraph: tasks that take some time each and wait for others, in an order in which they can be done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from graphlib import CycleError as Cycle
from graphlib import TopologicalSorter

from dagexec.errors import CycleError, ResourceError, SchemaError
from dagexec.platform.records import dataclass

MOST_TASKS = 100_000
MOST_EDGES = 1_000_000
LONGEST_SECONDS = 3600.0
"""Of all tasks of a graph together, when it is run."""


@dataclass(frozen=True, slots=True)
class WorkTask:
    """A task: its name, the seconds of work on one core, and the numbers of the tasks that it waits for."""

    name: str
    seconds: float
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkGraph:
    """A task graph. `work_graph` makes one and checks it.

    Attributes:
        name: of the graph.
        tasks: each behind all that it waits for.
        optimum: where it is known, seconds of the shortest schedule, by number of workers.
    """

    name: str
    tasks: tuple[WorkTask, ...]
    optimum: Mapping[int, float] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """Seconds of all tasks together."""
        return math.fsum(task.seconds for task in self.tasks)

    @property
    def critical_path(self) -> float:
        """Seconds of the tasks along the longest path."""
        ends: list[float] = []
        for task in self.tasks:
            ends.append(task.seconds + max((ends[parent] for parent in task.parents), default=0.0))
        return max(ends, default=0.0)

    def lower_bound(self, workers: int) -> float:
        """Seconds that no schedule on `workers` beats: the optimum where it is known.

        Else the longest path, or the work shared out evenly.
        """
        return self.optimum.get(workers) or max(self.critical_path, self.work / workers)

    def taking(self, mean_seconds: float) -> WorkGraph:
        """The same in another unit of time, so that tasks with work take so many seconds on average.

        Raises ResourceError when all would take longer than an hour, SchemaError when none has any work.
        """
        working = sum(task.seconds > 0 for task in self.tasks)
        if not working:
            raise SchemaError(f"task graph {self.name!r}: no task has any work")
        if mean_seconds * working > LONGEST_SECONDS:
            raise ResourceError(
                f"task graph {self.name!r}: {working:,} tasks of {mean_seconds:g} s each take more than an hour"
            )
        scale = mean_seconds * working / self.work
        if not math.isfinite(scale):
            raise SchemaError(f"task graph {self.name!r}: tasks of {self.work:g} s together cannot be scaled")
        tasks = tuple(replace(task, seconds=task.seconds * scale) for task in self.tasks)
        return replace(self, tasks=tasks, optimum={count: scale * length for count, length in self.optimum.items()})


def check_size(where: str, tasks: int, edges: int = 0) -> None:
    """Raise ResourceError for a graph larger than any that is made here; before any of it is made."""
    if tasks > MOST_TASKS or edges > MOST_EDGES:
        raise ResourceError(
            f"{where}: {tasks:,} tasks and {edges:,} edges; at most {MOST_TASKS:,} and {MOST_EDGES:,} are allowed"
        )


def is_work(seconds: object) -> bool:
    """True for a number that can be the work of a task: finite, and not negative."""
    return (
        isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < 1e300  # NaN is not
    )


def work_graph(
    name: str, rows: Iterable[tuple[str, float, Iterable[int]]], optimum: Mapping[int, float] | None = None
) -> WorkGraph:
    """The graph of rows of name, seconds and parents by place in `rows`, in an order that they can be done in.

    Raises SchemaError naming the task that has negative or no work or an unknown parent, CycleError with the names
    along a cycle, and ResourceError for more tasks or edges than are allowed.
    """
    given: list[WorkTask] = []
    edges = 0
    for task, seconds, parents in rows:
        given.append(WorkTask(task, seconds, tuple(dict.fromkeys(parents))))
        edges += len(given[-1].parents)
        check_size(f"task graph {name!r}", len(given), edges)
    for one in given:
        if any("\ud800" <= letter <= "\udfff" for letter in one.name):
            raise SchemaError(f"task graph {name!r}: the name of task {one.name!r} is no text")
        if not is_work(one.seconds):
            raise SchemaError(
                f"task graph {name!r}: task {one.name!r}: expected seconds of 0 or more, found {one.seconds!r}"
            )
        if unknown := [parent for parent in one.parents if not 0 <= parent < len(given)]:
            raise SchemaError(f"task graph {name!r}: task {one.name!r} waits for {unknown[0]}, which is no task")
    order = _in_order(name, given)
    place = {old: new for new, old in enumerate(order)}
    tasks = (given[old] for old in order)
    return WorkGraph(
        name,
        tuple(replace(one, parents=tuple(sorted(place[parent] for parent in one.parents))) for one in tasks),
        dict(optimum or {}),
    )


def _in_order(name: str, tasks: list[WorkTask]) -> list[int]:
    """Numbers of the tasks, parents first; as given where that is such an order."""
    if all(parent < number for number, task in enumerate(tasks) for parent in task.parents):
        return list(range(len(tasks)))
    try:
        return list(TopologicalSorter({number: task.parents for number, task in enumerate(tasks)}).static_order())
    except Cycle as error:
        cycle = [tasks[number].name for number in error.args[1]]
        shown = " -> ".join(map(repr, cycle[:8])) + (" -> ..." if len(cycle) > 8 else "")
        raise CycleError(f"task graph {name!r}: tasks wait for each other in a cycle: {shown}", cycle) from None
