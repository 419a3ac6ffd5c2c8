"""What `run_async` adds to `run` in a task of asyncio, and how long the event loop goes without a turn meanwhile.

    python benchmarks/event_loop.py [--model zoo:lenet] [--calls 2000] [--callers 64] [--timeout SECONDS] [--json FILE]

The first figure is a median over calls that alternate: warm `run_async` less warm `run`, target 60 us. The gaps are
those of a task that sleeps for 0.5 ms at a time, beyond these: while the callers each call again at once, and while
the model is compiled by `compile_async`; target 5 ms. Processor time of the loop's thread for each request is beside
them, as gaps are longer on a machine that others use, and the requests that the callers have served in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path

from environment import write_report

import dagexec
from dagexec.testing import random_feeds

BEAT = 0.0005  # seconds


async def beside(work: Awaitable[object]) -> list[float]:
    """The gaps in seconds, the longest first, of a task that wants to run every `BEAT` while `work` goes on."""
    gaps: list[float] = []

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT)
            now = time.perf_counter()
            gaps.append(now - last - BEAT)
            last = now

    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    await work
    task.cancel()
    return sorted(gaps, reverse=True)


async def added(executor: dagexec.Executor, calls: int, timeout: float | None) -> dict[str, float]:
    """Medians in microseconds, and the mean processor time of the loop's thread."""
    feeds = random_feeds(executor.model, seed=0)
    alone, awaited, computed = [], [], []
    for _ in range(calls):
        start = time.perf_counter()
        executor.run(feeds)
        alone.append(time.perf_counter() - start)
        begun, start = time.thread_time(), time.perf_counter()
        await executor.run_async(feeds, timeout=timeout)
        awaited.append(time.perf_counter() - start)
        computed.append(time.thread_time() - begun)
    run, run_async = statistics.median(alone) * 1e6, statistics.median(awaited) * 1e6
    loop = statistics.mean(computed) * 1e6
    return {"run": run, "run_async": run_async, "added": run_async - run, "loop's thread": loop}


async def crowd(executor: dagexec.Executor, callers: int, calls: int, timeout: float | None) -> tuple[float, float]:
    """Processor time of the loop's thread for each request, in microseconds; and requests per second."""
    feeds = random_feeds(executor.model, seed=0)

    async def caller() -> None:
        for _ in range(calls // callers):
            await executor.run_async(feeds, timeout=timeout)

    begun, start = time.thread_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    served = calls // callers * callers
    return (time.thread_time() - begun) / served * 1e6, served / (time.perf_counter() - start)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All figures for one model."""
    async with dagexec.compile_async(options.model, warm_start=True) as executor:
        cost = await added(executor, options.calls, options.timeout)
        crowded = asyncio.ensure_future(crowd(executor, options.callers, options.calls, options.timeout))
        busy = await beside(crowded)

    async def compiling() -> None:
        async with dagexec.compile_async(options.model, warm_start=True, tuning_seconds=options.tuning):
            pass

    compiled = await beside(compiling())
    return {
        "microseconds": cost,
        "callers": options.callers,
        "processor microseconds a request": crowded.result()[0],
        "requests per second": crowded.result()[1],
        "longest gaps under callers, ms": [gap * 1e3 for gap in busy[:5]],
        "longest gaps while compiling, ms": [gap * 1e3 for gap in compiled[:5]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:lenet")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--tuning", type=float, default=0.0)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        write_report(options.json, model=options.model, calls=options.calls, **found)


if __name__ == "__main__":
    main()
