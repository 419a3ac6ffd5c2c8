"""What bounds a run, on traces whose answer is known, and on random ones against a count of every nanosecond."""

import heapq
import random

import networkx as nx
import pytest

from dagexec.analysis.bounds import run_bounds
from dagexec.core.graph import build_graph
from dagexec.errors import ArgumentError
from dagexec.scheduler.observe.spans import ChainSpan, Span, TracedRun
from dagexec.scheduler.observe.trace import Trace
from tests.nets import net_of

Row = tuple[str, int, int, int]
"""A worker, and when its chain was ready, began and ended, in nanoseconds."""


def traced(parents: list[list[int]], rows: list[Row], started: int = 0) -> Trace:
    """A run with a chain for each operator."""
    trace = Trace()
    graph = build_graph(net_of(parents))
    trace.runs.append(TracedRun(graph, [(index,) for index in range(len(parents))], parents, started))
    for chain, (worker, ready, start, end) in enumerate(rows):
        trace.chains.append(ChainSpan(chain, worker, ready, start, end, 0))
        trace.spans.append(Span(chain, worker, start, end))
    return trace


DIAMOND = [[], [0], [0], [1, 2]]
UNEVEN = traced(DIAMOND, [("a", 0, 0, 10), ("a", 10, 12, 32), ("b", 10, 10, 15), ("a", 32, 32, 40)])


def test_idle_time_has_the_cause_that_the_schedule_shows() -> None:
    bounds = run_bounds(UNEVEN, 2)
    nanoseconds = {name: round(value * 1e9) for name, value in vars(bounds.idle).items()}
    # 0 to 10 and 32 to 40 nothing can run beside; 10 to 12 a chain waits; 15 to 32 the other branch is done
    assert nanoseconds == {"serial": 18, "overhead": 2, "imbalance": 17}


def test_the_critical_path_goes_back_to_what_each_chain_waited_for() -> None:
    bounds = run_bounds(UNEVEN, 2)
    assert [step.chain for step in bounds.path] == [0, 1, 3]
    assert [round(step.waited * 1e9) for step in bounds.path] == [0, 2, 0]
    assert round(bounds.path_seconds * 1e9) == 38


def test_a_chain_that_waited_for_its_worker_continues_the_path_there() -> None:
    trace = traced([[], [], []], [("a", 0, 0, 10), ("a", 0, 10, 30), ("b", 0, 0, 5)])
    bounds = run_bounds(trace, 2)
    assert [(step.chain, step.for_worker) for step in bounds.path] == [(0, False), (1, True)]


@pytest.mark.parametrize(("parent_ends", "path"), [(10, [1, 2]), (25, [0, 2])])
def test_the_path_continues_at_whichever_ended_last(parent_ends: int, path: list[int]) -> None:
    rows = [("a", 0, 0, parent_ends), ("b", 0, 0, 20), ("b", parent_ends, max(parent_ends, 20), 30)]
    assert [step.chain for step in run_bounds(traced([[], [], [0]], rows), 2).path] == path


def test_what_operators_take_beside_each_other_is_over_what_they_take_alone() -> None:
    assert run_bounds(UNEVEN, 2, operator_seconds=[10e-9, 10e-9, 5e-9, 8e-9]).slowdown == pytest.approx(43 / 33)
    assert run_bounds(UNEVEN, 2).slowdown is None


def test_a_run_without_chains_is_an_error() -> None:
    trace = traced(DIAMOND, [])
    with pytest.raises(ArgumentError, match="net 'net': run 0: the trace has no chain of it"):
        run_bounds(trace, 2)


def random_run(seed: int) -> tuple[list[list[int]], list[Row], int]:
    """A random DAG on two to four workers, each of which takes a ready chain after a random delay."""
    draw = random.Random(seed)
    count, workers = draw.randint(1, 14), draw.randint(1, 4)
    parents = [sorted(draw.sample(range(index), min(index, draw.randint(0, 2)))) for index in range(count)]
    rows: list[Row | None] = [None] * count
    free = [(0, f"w{number}") for number in range(workers)]
    while None in rows:
        begun, worker = heapq.heappop(free)
        ready = {
            index: max((rows[parent][3] for parent in parents[index]), default=0)  # type: ignore[index]
            for index in range(count)
            if rows[index] is None and all(rows[parent] is not None for parent in parents[index])
        }
        index = min(ready, key=lambda one: (max(ready[one], begun), one))
        start = max(ready[index], begun) + draw.randint(0, 3)
        end = start + draw.randint(1, 12)
        rows[index] = (worker, ready[index], start, end)
        heapq.heappush(free, (end, worker))
    return parents, [row for row in rows if row is not None], workers


@pytest.mark.parametrize("seed", range(40))
def test_every_nanosecond_of_a_random_run_is_counted_once(seed: int) -> None:
    parents, rows, workers = random_run(seed)
    bounds = run_bounds(traced(parents, rows), workers)
    dag = nx.DiGraph([(parent, child) for child, row in enumerate(parents) for parent in row])
    dag.add_nodes_from(range(len(parents)))
    related = {node: nx.ancestors(dag, node) | nx.descendants(dag, node) | {node} for node in dag}
    expected = {"serial": 0, "imbalance": 0, "overhead": 0}
    end = max(row[3] for row in rows)
    for moment in range(end):
        running = [index for index, row in enumerate(rows) if row[1 + 1] <= moment < row[3]]
        waiting = sum(row[1] <= moment < row[2] for row in rows)
        for place in range(workers - len(running)):
            if not running or place < waiting:
                expected["overhead"] += 1
            elif len(running) == 1 and len(related[running[0]]) == len(parents):
                expected["serial"] += 1
            else:
                expected["imbalance"] += 1
    assert {name: round(value * 1e9) for name, value in vars(bounds.idle).items()} == expected
    assert round(bounds.seconds * 1e9) == end
    assert round((bounds.busy + bounds.idle.total) * 1e9) == workers * end
    assert round(sum(step.seconds + step.waited for step in bounds.path) * 1e9) == end
