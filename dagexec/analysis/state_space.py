"""Every state of the runs of a net on so many workers, in the operators' names: what `dagexec check --exhaustive` asks.

Runs on the host are looked at in tasks and pieces, against what operators read and write; of those on devices, which
streams and events order, how chains are handed out.
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
        stops: how often a run was stopped to see what follows: once a state, and for each piece that might fail there.
        found: what the search says.
    """

    net: str
    workers: int
    tasks: int
    pieces: int
    ordered: int
    stops: int
    found: SearchResult


def search_runs(net: BaseNet, workers: int, *, seconds: float | None = None) -> Iterator[RunSpace]:
    """Look at all states of runs of `net`, for the shapes its blobs have now, and of nets that its operators run.

    All together take so many `seconds`, after which the rest is left out; after a fault, too. Raises what preparing
    raises.
    """
    until = None if seconds is None else time.perf_counter() + seconds
    for each in _nets(net):
        left = None if until is None else max(0.0, until - time.perf_counter())
        space = _search(each, workers, left)
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
    found = search(model, seconds=seconds)
    ordered = sum(map(len, before))
    return RunSpace(net.name, workers, len(graph.pieces), sum(graph.pieces), ordered, model.stops, found)


def task_names(net: BaseNet) -> list[str]:
    """Of each task of `net` for the shapes its blobs have now, its number and the operators that it computes."""
    found: list[str] = []
    for task, row in enumerate(net.tasks().shares):
        ends = dict.fromkeys(row[place][0] for place in ((0, -1) if row else ()))
        found.append(f"task {task}" + (f" ({' to '.join(_name(net, operator) for operator in ends)})" if ends else ""))
    return found


def _name(net: BaseNet, operator: int) -> str:
    definition = net.graph.operators[operator]
    return f"{definition.type} {definition.name!r}" if definition.name else f"{definition.type}, operator {operator}"
