"""Every state of the runs of a net on a number of workers, in the operators' names, for `dagexec check --exhaustive`.

Runs on the host are examined in tasks and pieces, against the reads and writes of operators; for runs on devices, which
streams and events order, only how chains are handed out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.run_states import RunStates
from dagexec.scheduler.exploration.state_search import SearchResult, search
from dagexec.scheduler.hazards.task_order import tasks_before
from dagexec.scheduler.nets.net import BaseNet


@dataclass(frozen=True)
class RunSpace:
    """The states of the runs of one net.

    Attributes:
        net: its name.
        workers: how many may be in a run.
        tasks, pieces: that are handed out.
        ordered: pairs of tasks that touch the same memory, of which the second must find the first one ended.
        stops: how often a run was stopped to check what follows: once a state, and for each piece that might fail.
        found: the result of the search.
    """

    net: str
    workers: int
    tasks: int
    pieces: int
    ordered: int
    stops: int
    found: SearchResult


def search_runs(net: BaseNet, workers: int, *, seconds: float | None = None) -> Iterator[RunSpace]:
    """Examine all states of runs of `net`, for the shapes its blobs have now, and of nets that its operators run.

    The search of all nets ends after `seconds`, or with a fault; the rest is left out. Raises what preparing raises.
    """
    until = None if seconds is None else time.perf_counter() + seconds
    for each in _nets(net):
        remaining = None if until is None else max(0.0, until - time.perf_counter())
        space = _search(each, workers, remaining)
        yield space
        if space.found.fault is not None:
            return


def _nets(net: BaseNet) -> Iterator[BaseNet]:
    """`net`, and those in its operators that are prepared."""
    yield net
    for operator in net.operators:
        for body in operator.bodies.values():
            if isinstance(body, BaseNet) and body.is_prepared:
                yield from _nets(body)


def _search(net: BaseNet, workers: int, seconds: float | None) -> RunSpace:
    graph = net.tasks().work.graph
    before = tasks_before(net) if net.on_host else [{}] * len(graph.pieces)
    model = RunStates(graph, workers, task_names(net), before)
    result = search(model, seconds=seconds)
    ordered = sum(map(len, before))
    return RunSpace(net.name, workers, len(graph.pieces), sum(graph.pieces), ordered, model.stops, result)


def task_names(net: BaseNet) -> list[str]:
    """Of each task of `net` for the shapes its blobs have now, its number and the operators that it computes."""
    names: list[str] = []
    for task, row in enumerate(net.tasks().shares):
        ends = dict.fromkeys(row[place][0] for place in ((0, -1) if row else ()))
        names.append(f"task {task}" + (f" ({' to '.join(_name(net, operator) for operator in ends)})" if ends else ""))
    return names


def _name(net: BaseNet, operator: int) -> str:
    definition = net.graph.operators[operator]
    return f"{definition.type} {definition.name!r}" if definition.name else f"{definition.type}, operator {operator}"
