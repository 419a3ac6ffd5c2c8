"""`dagexec check --exhaustive` without its proof: states of the runs of each zoo net and light ONNX net, and of pools.

    python benchmarks/state_space.py [--workers 2,3,4] [--seconds 10] [--json benchmarks/results/state_space.json]

Two workers have as long as it takes, and the zoo's nets together at most 60 s of a processor; more workers have
`--seconds` for each net, and how far the search got is told. Fails where a fault is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from environment import write_report

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.state_space import search_runs
from dagexec.core.model import Model
from dagexec.executor.source.loading import load_model
from dagexec.scheduler.exploration.pool_states import Job, PoolStates
from dagexec.scheduler.exploration.state_search import search
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.zoo import names
from tests.models import LIGHT_MODELS, he_normal_light_model

LIMIT_SECONDS = 60.0
"""For all nets of the zoo on two workers together."""

ONE, CHAIN = TaskGraph([1], [[]], [0], [0]), TaskGraph([1, 1], [[1], []], [0, 1], [0, 1])
FORK = TaskGraph([1, 1, 1], [[1, 2], [], []], [0, 1, 1], [0, 1, 2])
PIECES = TaskGraph([1, 3], [[1], []], [0, 1], [0, 1])
POOLS: dict[str, tuple[list[Job], int, dict[str, Any]]] = {
    "two runs, 2 workers": ([Job(FORK), Job(FORK)], 2, {}),
    "two runs, 3 workers": ([Job(FORK), Job(FORK)], 3, {}),
    "a run of higher priority": ([Job(PIECES), Job(CHAIN, priority=1)], 2, {}),
    "two callers that work": ([Job(FORK, here=True), Job(CHAIN, here=True)], 2, {}),
    "a caller that works, one of higher priority": ([Job(FORK, here=True), Job(CHAIN, priority=1)], 2, {}),
    "two runs that may be cancelled": ([Job(CHAIN, stops=True), Job(CHAIN, stops=True)], 2, {}),
    "two runs, two operators fail": ([Job(FORK), Job(CHAIN)], 2, {"failures": 2}),
    "two runs, the pool is closed": ([Job(CHAIN), Job(ONE)], 2, {"shuts": True}),
    "three runs of two users": ([Job(CHAIN, user=0), Job(ONE, user=0), Job(ONE, user=1)], 2, {}),
}


def nets() -> Iterator[tuple[str, str, Callable[[], Model]]]:
    """Of each, its set, its name, and what loads it."""
    for name in names():
        yield "zoo", name, lambda name=name: load_model(f"zoo:{name}")  # type: ignore[misc]
    for name in LIGHT_MODELS:
        yield "light ONNX", name, lambda name=name: load_model(he_normal_light_model(name))  # type: ignore[misc]


def measure(load: Callable[[], Model], workers: int, seconds: float | None) -> dict[str, Any]:
    """The states of the runs of a net as it is compiled by default."""
    model = load()
    with dagexec.compile(model, net_type="dag", num_workers=workers) as executor:
        net = executor.net()
        for name, array in random_feeds(model).items():
            net.workspace.feed_blob(name, array)
        began = time.process_time()
        (space,) = search_runs(net, workers, seconds=seconds)
        took = time.process_time() - began
    row = {name: value for name, value in asdict(space).items() if name != "found"}
    return row | asdict(space.found) | {"proved": space.found.holds, "processor_s": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,3,4")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for workers in map(int, options.workers.split(",")):
        for kind, name, load in nets():
            row = measure(load, workers, None if workers == 2 else options.seconds)
            rows.append({"set": kind, "model": name} | row)
            verdict = "proved" if row["proved"] else row["fault"] or f"time was up after {row['depth']} events"
            print(
                f"{kind:10} {name:18} {workers} workers {row['tasks']:4} tasks {row['pieces']:5} pieces "
                f"{row['states']:9,} states {row['transitions']:10,} events {row['seconds']:7.2f} s  "
                f"{verdict}",
                flush=True,
            )
    pools = []
    for what, (jobs, workers, setting) in POOLS.items():
        found = search(PoolStates(jobs, workers, **setting), seconds=LIMIT_SECONDS, must_end=True)
        pools.append({"pool": what, "workers": workers} | asdict(found) | {"proved": found.holds})
        print(
            f"{what:45} {found.states:9,} states {found.transitions:10,} events {found.seconds:7.2f} s  {found.holds}"
        )
    took = sum(row["processor_s"] for row in rows if row["set"] == "zoo" and row["workers"] == 2)
    print(f"zoo on 2 workers: {took:.1f} s, limit {LIMIT_SECONDS:.0f} s")
    if options.json:
        write_report(options.json, limit_s=LIMIT_SECONDS, zoo_on_two_workers_s=took, nets=rows, pools=pools)
    if any(row["fault"] for row in [*rows, *pools]) or took > LIMIT_SECONDS:
        sys.exit(1)


if __name__ == "__main__":
    main()
