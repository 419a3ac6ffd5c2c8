"""What a call of another process costs before that computes anything: Ray, Dask, MPI, and Python's own means.

    python benchmarks/round_trips.py [--rounds 5] [--dask-python VENV/bin/python] [--json FILE]

Each contender calls a function that returns the size of an array that it is given: one call after the other (a round
trip), and many at once (time a call). One worker process, on this machine. Contenders take turns in fresh processes,
and numbers are medians over the rounds. Dask is measured by the Python of an environment that has `distributed` and
NumPy, as it is no dependency of dagexec.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"8 bytes": 2, "600 KB": 150_528}
"""Payloads, and how many float32 they have; the larger one is an image of 224 x 224."""

Call = Callable[[np.ndarray], Any]
CallMany = Callable[[Sequence[np.ndarray]], Any]


def size(array: np.ndarray) -> int:
    return array.nbytes


@contextmanager
def pipe() -> Iterator[tuple[Call, CallMany]]:
    """multiprocessing.Pipe: pickled, written and read by the calling thread."""
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=answer, args=(theirs,))
    process.start()

    def call(array: np.ndarray) -> None:
        ours.send(array)
        ours.recv()

    def call_many(arrays: Sequence[np.ndarray]) -> None:
        sent = 0
        for received in range(len(arrays)):
            while sent < min(len(arrays), received + 4):  # more might fill the pipe in both directions
                ours.send(arrays[sent])
                sent += 1
            ours.recv()

    yield call, call_many
    ours.send(None)
    process.join()


def answer(connection: Connection) -> None:
    while (array := connection.recv()) is not None:
        connection.send(size(array))


@contextmanager
def process_pool() -> Iterator[tuple[Call, CallMany]]:
    """concurrent.futures.ProcessPoolExecutor: two threads of its own and a pipe."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield (
            lambda array: pool.submit(size, array).result(),
            lambda arrays: [future.result() for future in [pool.submit(size, array) for array in arrays]],
        )


@contextmanager
def ray_actor() -> Iterator[tuple[Call, CallMany]]:
    """A method of an actor of Ray, by `ray.get`."""
    import ray

    with local_ray():

        @ray.remote(num_cpus=1)
        class Worker:
            def size(self, array: np.ndarray) -> int:
                return array.nbytes

        worker: Any = Worker.remote()  # type: ignore[attr-defined]
        yield (
            lambda array: ray.get(worker.size.remote(array)),
            lambda arrays: ray.get([worker.size.remote(array) for array in arrays]),
        )


@contextmanager
def ray_actor_asyncio() -> Iterator[tuple[Call, CallMany]]:
    """The same, awaited in an event loop."""
    import ray

    with local_ray():

        @ray.remote(num_cpus=1)
        class Worker:
            async def size(self, array: np.ndarray) -> int:
                return array.nbytes

        worker: Any = Worker.remote()  # type: ignore[attr-defined]
        with asyncio.Runner() as runner:

            async def call(array: np.ndarray) -> None:
                await worker.size.remote(array)

            async def call_many(arrays: Sequence[np.ndarray]) -> None:
                await asyncio.gather(*(worker.size.remote(array) for array in arrays))

            yield lambda array: runner.run(call(array)), lambda arrays: runner.run(call_many(arrays))


@contextmanager
def ray_task() -> Iterator[tuple[Call, CallMany]]:
    """A task of Ray, placed by its scheduler."""
    import ray

    with local_ray():
        task: Any = ray.remote(num_cpus=1)(size)
        yield (
            lambda array: ray.get(task.remote(array)),
            lambda arrays: ray.get([task.remote(array) for array in arrays]),
        )


@contextmanager
def local_ray() -> Iterator[None]:
    import os

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


@contextmanager
def dask() -> Iterator[tuple[Call, CallMany]]:
    """A task of Dask, through its scheduler in this process."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield (
            lambda array: client.submit(size, array, pure=False).result(),
            lambda arrays: client.gather([client.submit(size, array, pure=False) for array in arrays]),
        )


CONTENDERS: dict[str, Callable[[], Any]] = {
    "multiprocessing pipe": pipe,
    "process pool": process_pool,
    "Ray actor": ray_actor,
    "Ray actor, asyncio": ray_actor_asyncio,
    "Ray task": ray_task,
    "Dask task": dask,
    "MPI": lambda: None,  # two ranks of one program: `mpi_rank`
}


def measure(call: Call, call_many: CallMany, calls: int) -> dict[str, dict[str, float]]:
    """For each payload: quantiles of a round trip, and time a call of many at once, in microseconds."""
    found = {}
    for name, count in SIZES.items():
        arrays = [np.full(count, number, np.float32) for number in range(16)]
        for number in range(50):
            call(arrays[number % 16])
        trips = []
        for number in range(calls):
            begun = time.perf_counter()
            call(arrays[number % 16])
            trips.append((time.perf_counter() - begun) * 1e6)
        begun = time.perf_counter()
        call_many([arrays[number % 16] for number in range(calls)])
        many = (time.perf_counter() - begun) * 1e6 / calls
        found[name] = {"p50_us": statistics.median(trips), "p99_us": sorted(trips)[calls * 99 // 100], "many_us": many}
    return found


def mpi_rank(calls: int) -> dict[str, dict[str, float]] | None:
    """Rank 0 measures, rank 1 answers; buffers go without pickling, and a rank that waits keeps its core busy."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    reply = np.zeros(1, np.int64)
    if world.rank == 0:

        def call(array: np.ndarray) -> None:
            world.Send(array, 1)
            world.Recv(reply, 1)

        def call_many(arrays: Sequence[np.ndarray]) -> None:
            sends = [world.Isend(array, 1) for array in arrays]
            for _ in arrays:
                world.Recv(reply, 1)
            MPI.Request.Waitall(sends)

        return measure(call, call_many, calls)
    for count in SIZES.values():
        array = np.zeros(count, np.float32)
        for _ in range(50 + 2 * calls):
            world.Recv(array, 0)
            reply[0] = array.nbytes
            world.Send(reply, 0)
    return None


def child(name: str, calls: int) -> None:
    if name == "MPI":
        found = mpi_rank(calls)
    else:
        with CONTENDERS[name]() as (call, call_many):
            found = measure(call, call_many, calls)
    if found is not None:
        print("found:" + json.dumps(found))


def command(name: str, calls: int, dask_python: Path | None) -> list[str] | None:
    """How to run a contender; None if that is not there."""
    arguments = [__file__, "--child", name, "--calls", str(calls)]
    if name == "Dask task":
        return [str(dask_python), *arguments] if dask_python else None
    if name == "MPI":
        mpiexec = Path(sys.executable).with_name("mpiexec")
        options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
        return [str(mpiexec), *options, sys.executable, *arguments] if mpiexec.exists() else None
    return [sys.executable, *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--dask-python", type=Path)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CONTENDERS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.calls)
        return
    from environment import write_report

    rows: dict[str, list[dict[str, dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for name in options.only or CONTENDERS:
            arguments = command(name, options.calls, options.dask_python)
            if arguments is None:
                print(f"{name}: not there")
                continue
            ran = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("found:")]
            if ran.returncode or not lines:
                raise SystemExit(f"{name} failed:\n{ran.stderr[-2000:]}")
            rows.setdefault(name, []).append(json.loads(lines[0].removeprefix("found:")))
    table = {
        name: {
            payload: {key: statistics.median(row[payload][key] for row in found) for key in found[0][payload]}
            for payload in SIZES
        }
        for name, found in rows.items()
    }
    for name, found_of in table.items():
        for payload, numbers in found_of.items():
            print(f"{name:22} {payload:8}", "  ".join(f"{key} {value:8.0f}" for key, value in numbers.items()))
    if options.json:
        write_report(options.json, rounds=options.rounds, calls=options.calls, round_trips=table)


if __name__ == "__main__":
    main()
