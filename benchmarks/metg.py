"""METG(50%), the smallest task worth its cost, of dagexec and of other schedulers on this machine, in turns.

    python benchmarks/metg.py [--pattern stencil_1d fft] [--rounds 3] [--json benchmarks/results/metg.json]

All run the same task graphs of Task Bench's patterns on two workers; tasks compute natively, without the interpreter
lock. A round searches once for each contender (`dagexec.lab.metg`), in a random order; the fastest of a few runs of one
size counts. dask (its threads, and `distributed` in this process) and Ray take part where they are installed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from environment import write_report

from dagexec.lab.graph import WorkGraph
from dagexec.lab.kernels import rate, run_natively
from dagexec.lab.metg import Metg, fastest, metg
from dagexec.lab.patterns import Bench, bench_graph
from dagexec.lab.running import net_metg

WORKERS, WIDTH, REPEAT = 2, 4, 5
PEERS = {"dask threads": "dask", "dask distributed": "distributed", "Ray": "ray"}
STEPS = {"dask threads": 50, "dask distributed": 20, "Ray": 20}
"""Of those that take long; others have 250."""

RunGraph = Callable[[WorkGraph, int], object]
"""Run a graph whose tasks compute so many units each."""


def work(units: int, *_parents: object) -> None:
    run_natively("compute", units)


@contextmanager
def thread_pool() -> Iterator[RunGraph]:
    """A `ThreadPoolExecutor`, to which a task is submitted by the last one that it waits for."""
    with ThreadPoolExecutor(WORKERS) as pool:

        def run(graph: WorkGraph, units: int) -> None:
            children: list[list[int]] = [[] for _ in graph.tasks]
            for number, task in enumerate(graph.tasks):
                for parent in task.parents:
                    children[parent].append(number)
            left = [len(task.parents) for task in graph.tasks]
            remaining = len(left)
            lock, end = threading.Lock(), threading.Event()

            def do(number: int) -> None:
                nonlocal remaining
                work(units)
                ready = []
                with lock:
                    for child in children[number]:
                        left[child] -= 1
                        if not left[child]:
                            ready.append(child)
                    remaining -= 1
                    if not remaining:
                        end.set()
                for child in ready:
                    pool.submit(do, child)

            for number in [number for number, count in enumerate(left) if not count]:
                pool.submit(do, number)
            end.wait()

        yield run


def dask_graph(graph: WorkGraph, units: int) -> tuple[dict[str, Any], list[str]]:
    """A graph as dask has it, and the keys of the last step."""
    tasks = {
        task.name: (partial(work, units), *(graph.tasks[parent].name for parent in task.parents))
        for task in graph.tasks
    }
    return tasks, [task.name for task in graph.tasks[-WIDTH:]]


@contextmanager
def dask_threads() -> Iterator[RunGraph]:
    from dask.threaded import get

    with ThreadPoolExecutor(WORKERS) as pool:
        yield lambda graph, units: get(*dask_graph(graph, units), pool=pool, num_workers=WORKERS)


@contextmanager
def dask_distributed() -> Iterator[RunGraph]:
    from distributed import Client

    options = {"processes": False, "n_workers": 1, "threads_per_worker": WORKERS, "dashboard_address": None}
    with Client(**options) as client:
        yield lambda graph, units: client.get(*dask_graph(graph, units))


@contextmanager
def ray_tasks() -> Iterator[RunGraph]:
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    remote = ray.remote(work)

    def run(graph: WorkGraph, units: int) -> None:
        found: list[Any] = []
        for task in graph.tasks:
            found.append(remote.remote(units, *(found[parent] for parent in task.parents)))
        ray.get(found[-WIDTH:])

    try:
        yield run
    finally:
        ray.shutdown()


OTHERS: dict[str, Callable[[], Any]] = {
    "ThreadPoolExecutor": thread_pool,
    "dask threads": dask_threads,
    "dask distributed": dask_distributed,
    "Ray": ray_tasks,
}


def search(run: RunGraph, graph: WorkGraph) -> Metg:
    """METG of a contender that is not a net."""

    def run_seconds(task_seconds: float) -> float:
        return fastest(partial(run, graph, max(1, round(task_seconds * rate("compute")))), REPEAT)

    return metg(run_seconds, len(graph.tasks), WORKERS)


def net_searches(workers: int, patterns: list[str]) -> dict[str, Metg]:
    bench = Bench(width=WIDTH, steps=250)
    return {pattern: net_metg(pattern, bench, ("dag", workers), repeat=REPEAT) for pattern in patterns}


def other_searches(name: str, patterns: list[str]) -> dict[str, Metg]:
    bench = Bench(width=WIDTH, steps=STEPS.get(name, 250))
    with OTHERS[name]() as run:
        return {pattern: search(run, bench_graph(pattern, bench)) for pattern in patterns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", nargs="*", default=["stencil_1d", "fft"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    left_out = [name for name, module in PEERS.items() if find_spec(module) is None]
    searches: dict[str, Callable[[list[str]], dict[str, Metg]]] = {
        f"dagexec, {workers} worker{'s' if workers > 1 else ''}": partial(net_searches, workers)
        for workers in (WORKERS, 1)
    }
    searches |= {name: partial(other_searches, name) for name in OTHERS if name not in left_out}
    found: dict[str, dict[str, list[Metg]]] = {pattern: {name: [] for name in searches} for pattern in options.pattern}
    for number in range(options.rounds):
        for name in random.Random(number).sample(list(searches), len(searches)):
            for pattern, one in searches[name](options.pattern).items():
                found[pattern][name].append(one)
            print(f"round {number + 1}: {name}", flush=True)
            if options.json:
                write_results(options.json, found, left_out)
    for pattern, rows in found.items():
        print(pattern)
        for name, rounds in rows.items():
            figures = row(rounds)
            print(f"  {name:20} METG(50%) {figures['metg_us']} us, of rounds {figures['rounds_us']}")
    for name in left_out:
        print(f"{name}: left out, as {PEERS[name]} is not installed")


def write_results(path: Path, found: dict[str, dict[str, list[Metg]]], left_out: list[str]) -> None:
    """Write what has been found so far: peers that take minutes may be cut short, and what came before them is kept."""
    versions = {module: version(module) for module in PEERS.values() if find_spec(module) is not None}
    results = {
        pattern: {name: row(rounds) for name, rounds in rows.items() if rounds} for pattern, rows in found.items()
    }
    write_report(path, versions=versions, left_out=left_out, workers=WORKERS, results=results)


def row(rounds: list[Metg]) -> dict[str, Any]:
    """The median of the rounds, and all of them, in microseconds; None where no task was large enough."""
    found = [None if one.seconds is None else round(1e6 * one.seconds, 3) for one in rounds]
    known = [one for one in found if one is not None]
    return {
        "metg_us": statistics.median(known) if len(known) == len(found) else None,
        "rounds_us": found,
        "trials": [[(one.task_seconds, one.granularity) for one in metg.trials] for metg in rounds],
    }


if __name__ == "__main__":
    main()
