"""What many callers cost: 1,000 concurrent callers of `run_async` against 8, on 8 replicas.

    python benchmarks/concurrent_requests.py [--rounds 7] [--requests 8000] [--json FILE]

Both serve the same requests, a share for each caller, in interleaved rounds; throughput is a median over the rounds.
Targets: with 1,000 callers at least 0.95 of the throughput with 8; after 10,000 more runs the process holds no more
memory than before them (Python's allocations, and the resident set).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from environment import write_report

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model

REPLICAS = 8
FEW, MANY = 8, 1000
SEEDS = 16
RUNS_FOR_MEMORY = 10_000


def ten_operators() -> Model:
    """Two parallel branches of elementwise operators on 1,000 numbers: next to nothing to compute."""
    net = dagexec.NetDef(name="ten_operators", external_input=["x"], external_output=["y"])
    for branch in "ab":
        for index, kind in enumerate(("Relu", "Sigmoid", "Tanh", "Relu")):
            net.op.add(type=kind, input=[f"{branch}{index - 1}" if index else "x"], output=[f"{branch}{index}"])
    net.op.add(type="Add", input=["a3", "b3"], output=["sum"])
    net.op.add(type="Relu", input=["sum"], output=["y"])
    return Model("ten_operators", net, inputs={"x": InputInfo(FLOAT32, (1, 1000))}, outputs=("y",))


class Load:
    """Requests to one executor from a number of tasks."""

    def __init__(self, executor: dagexec.Executor) -> None:
        self.executor = executor
        self.feeds = [random_feeds(executor.model, seed=seed) for seed in range(SEEDS)]
        self.expected = [executor.run(feeds) for feeds in self.feeds]
        self.latencies: list[float] = []

    async def caller(self, start: anyio.Event, first: int, count: int) -> None:
        await start.wait()
        for number in range(first, first + count):
            begun = time.perf_counter()
            result = await self.executor.run_async(self.feeds[number % SEEDS])
            self.latencies.append(time.perf_counter() - begun)
            for name, array in self.expected[number % SEEDS].items():
                if not np.array_equal(array, result[name]):
                    raise SystemExit("a result differs from the reference; nothing is reported")

    async def serve(self, callers: int, requests: int) -> tuple[float, float]:
        """Requests a second, and seconds of processor time a request, from the moment when all callers are there."""
        self.latencies = []
        start = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for number in range(callers):
                tasks.start_soon(self.caller, start, number, requests // callers)
            await anyio.wait_all_tasks_blocked()
            start.set()
            begun, worked = time.perf_counter(), time.process_time()
        served = len(self.latencies)
        return served / (time.perf_counter() - begun), (time.process_time() - worked) / served


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[len(latencies) * 99 // 100]


async def throughput(load: Load, rounds: int, requests: int) -> dict[str, Any]:
    found: dict[int, list[tuple[float, float, float, float]]] = {FEW: [], MANY: []}
    for number in range(rounds + 1):
        for callers in (FEW, MANY) if number % 2 else (MANY, FEW):
            rate, worked = await load.serve(callers, requests)
            if number:  # the first round warms up
                found[callers].append((rate, statistics.median(load.latencies), p99(load.latencies), worked))
    report: dict[str, Any] = {}
    for callers, rows in found.items():
        rates, medians, slowest, worked_all = zip(*rows, strict=True)
        report[f"{callers} callers"] = {
            "requests_per_second": statistics.median(rates),
            "spread": max(rates) - min(rates),
            "median_ms": statistics.median(medians) * 1e3,
            "p99_ms": statistics.median(slowest) * 1e3,
            "processor_microseconds_per_request": statistics.median(worked_all) * 1e6,
        }
    ratios = [many[0] / few[0] for few, many in zip(found[FEW], found[MANY], strict=True)]
    report["ratio"] = statistics.median(ratios)
    report["executor"] = {
        name: asdict(latencies)
        for name, latencies in (
            ("queue_wait", load.executor.statistics().queue_wait),
            ("run_time", load.executor.statistics().run_time),
        )
    }
    return report


async def memory(load: Load) -> dict[str, Any]:
    """What 10,000 runs leave behind, by callers; counted from when as many callers have been there before."""
    report: dict[str, Any] = {}
    for callers in (FEW, MANY):
        row = report[f"{callers} callers"] = {"runs": RUNS_FOR_MEMORY}
        row["resident_bytes"] = await growth(load, callers, resident_bytes)
        tracemalloc.start()
        row["python_bytes"] = await growth(load, callers, lambda: tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    return report


async def growth(load: Load, callers: int, held_bytes: Callable[[], int]) -> int:
    held = []
    for requests in (RUNS_FOR_MEMORY // 2, RUNS_FOR_MEMORY):
        await load.serve(callers, requests)
        load.latencies = []
        gc.collect()
        held.append(held_bytes())
    return held[1] - held[0]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name, model in (("ten operators", ten_operators()), ("zoo:lenet", "zoo:lenet")):
        with dagexec.compile(model, net_type="async_dag", replicas=REPLICAS) as executor:
            load = Load(executor)
            results[name] = asyncio.run(throughput(load, options.rounds, options.requests))
            results[name]["memory"] = asyncio.run(memory(load))
        print(name, json.dumps(results[name], indent=1))
    if options.json:
        write_report(options.json, replicas=REPLICAS, results=results)


if __name__ == "__main__":
    main()
