"""What a deployment on a local Ray cluster adds to a run, and how many requests 1, 2 and 4 replicas serve.

    python benchmarks/cluster.py [--models zoo:lenet zoo:googlenet] [--seconds 2] [--json FILE]

Round trips are of an empty task and an empty call of an actor, one at a time, and 1,000 at once for what one of many
costs. Answers of four sizes are rows of a table: what a deployment adds to each. Then for each model: the seconds of
`Executor.run` on one thread, which is what a replica computes; of `run` on a deployment of one replica, both alone; and
closed loops of clients, tasks of one event loop that ask again at once. All replicas, and the clients, share the
machine: on two cores, 4 replicas cannot serve more than 2 do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from environment import write_report

import dagexec
from dagexec.cluster import Deployment, deploy
from dagexec.core.dtypes import INT64
from dagexec.testing import random_feeds

REPLICAS = (1, 2, 4)
CLIENTS = (1, 4, 16)
SAMPLES = 200
COLUMNS = 1024
ROWS = (1, 16, 150, 1500)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Of times: the median and the 99th percentile, and the mean, in microseconds."""
    ordered = sorted(seconds)
    return {
        "p50_us": ordered[len(ordered) // 2] * 1e6,
        "p99_us": ordered[len(ordered) * 99 // 100] * 1e6,
        "mean_us": statistics.mean(ordered) * 1e6,
    }


def timed(call: Callable[[], object], seconds: float, most: int = 2000) -> list[float]:
    """Seconds of calls one after another."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < most and (not found or time.perf_counter() < end):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def round_trips(seconds: float) -> dict[str, Any]:
    """Of empty calls, with and without 600 kB to carry."""

    def nothing(_: object = None) -> None:
        return None

    class Empty:
        async def nothing(self, _: object = None) -> None:
            return None

    task: Any = ray.remote(nothing)
    actor: Any = ray.remote(Empty).remote()
    large = np.ones(150_000, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "task": task.remote,
        "actor": actor.nothing.remote,
        "actor, 600 kB": lambda: actor.nothing.remote(large),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        timed(lambda call=call: ray.get(call()), seconds / 4)  # type: ignore[misc]
        found[name] = quantiles(timed(lambda call=call: ray.get(call()), seconds))  # type: ignore[misc]
        if not name.endswith("kB"):
            start = time.perf_counter()
            ray.get([call() for _ in range(1000)])
            found[name]["of_1000_at_once_us"] = (time.perf_counter() - start) * 1e3
    ray.kill(actor)
    return found


async def closed_loop(deployment: Deployment, feeds: list[Any], clients: int, seconds: float) -> dict[str, float]:
    """Clients that ask again at once."""
    times: list[float] = []
    begin = time.perf_counter()
    end = begin + seconds

    async def client(place: int) -> None:
        own = feeds[place % len(feeds)]
        while (start := time.perf_counter()) < end:
            await deployment.run_async(own)
            times.append(time.perf_counter() - start)

    computed = time.process_time()
    await asyncio.gather(*(client(place) for place in range(clients)))
    computed = time.process_time() - computed
    return {
        "clients": clients,
        "per_second": len(times) / (time.perf_counter() - begin),
        "client_cpu_us": computed / len(times) * 1e6,
        **quantiles(times),
    }


def service_times(executor: dagexec.Executor, feeds: list[Any], seconds: float) -> list[float]:
    """Seconds of runs in this process, one after another."""
    runs = iter(range(1 << 30))
    timed(lambda: executor.run(feeds[next(runs) % len(feeds)]), seconds / 4)
    return timed(lambda: executor.run(feeds[next(runs) % len(feeds)]), seconds)


def of_model(name: str, seconds: float) -> dict[str, Any]:
    """Everything that is measured of one model."""
    with dagexec.compile(name, num_workers=1, intra_op_threads=1) as executor:
        feeds = [random_feeds(executor.model, seed=seed) for seed in range(8)]
        alone = service_times(executor, feeds, seconds)
    nbytes = sum(np.asarray(array).nbytes for array in feeds[0].values())
    found: dict[str, Any] = {
        "model": name,
        "input_bytes": nbytes,
        "executor_run": quantiles(alone),
        "service_seconds": [round(one, 7) for one in alone[-SAMPLES:]],
        "loops": [],
    }
    for replicas in REPLICAS:
        with deploy(name, replicas=replicas) as deployment:
            timed(lambda: deployment.run(feeds[0]), seconds / 4)
            if replicas == 1:
                found["deployment_run"] = quantiles(timed(lambda: deployment.run(feeds[0]), seconds))
            for clients in CLIENTS:
                asyncio.run(closed_loop(deployment, feeds, clients, seconds / 8))
                row = asyncio.run(closed_loop(deployment, feeds, clients, seconds))
                found["loops"].append({"replicas": replicas, "max_outstanding": 2, **row})
                print(
                    f"{name}, {replicas} replicas, {clients} clients: {row['per_second']:.0f} a second, "
                    f"p50 {row['p50_us'] / 1e3:.2f} ms, p99 {row['p99_us'] / 1e3:.2f} ms"
                )
    added = found["deployment_run"]["p50_us"] - found["executor_run"]["p50_us"]
    print(f"{name}: Executor.run {found['executor_run']['p50_us']:.0f} us, a deployment adds {added:.0f} us")
    return found


def table() -> dagexec.Model:
    """Chosen rows of 4 KiB each."""
    net = dagexec.NetDef(name="table", op=[dagexec.op("Gather", ["table", "ids"], ["rows"])])
    values = np.random.default_rng(0).standard_normal((max(ROWS), COLUMNS), np.float32)
    ids = dagexec.InputInfo(INT64, (None,))
    return dagexec.Model("table", net, parameters={"table": values}, inputs={"ids": ids}, outputs=("rows",))


def of_answers(seconds: float) -> list[dict[str, Any]]:
    """What answers of several sizes cost, from an executor and from a replica."""
    found: list[dict[str, Any]] = []
    model = table()
    with dagexec.compile(model, num_workers=1, intra_op_threads=1) as executor, deploy(model) as deployment:
        for rows in ROWS:
            feeds = {"ids": np.arange(rows)}
            row: dict[str, Any] = {"answer_bytes": rows * COLUMNS * 4}
            for what, runner in (("executor_run", executor), ("deployment_run", deployment)):
                timed(lambda: runner.run(feeds), seconds / 4)  # noqa: B023 - called here and now
                row[what] = quantiles(timed(lambda: runner.run(feeds), seconds))  # noqa: B023 - as above
            found.append(row)
            print(
                f"an answer of {row['answer_bytes']} bytes: Executor.run {row['executor_run']['p50_us']:.0f} us, "
                f"of a deployment {row['deployment_run']['p50_us']:.0f} us"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["zoo:lenet", "zoo:googlenet"])
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=500 << 20)
    trips = round_trips(arguments.seconds / 2)
    for what, found in trips.items():
        print(what, {name: round(value) for name, value in found.items()})
    answers = of_answers(arguments.seconds / 4)
    models = [of_model(name, arguments.seconds) for name in arguments.models]
    ray.shutdown()
    if arguments.json:
        write_report(arguments.json, ray=ray.__version__, round_trips=trips, answers=answers, models=models)


if __name__ == "__main__":
    main()
