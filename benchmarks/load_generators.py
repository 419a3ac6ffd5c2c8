"""Loads from threads and tasks: callers that ask again as soon as they are answered, and arrivals that nothing stops.

A closed loop asks what a server can answer. An open one, arrivals of a Poisson process, asks what a user waits for:
its latencies count from the moment at which an arrival was planned, so that a server which falls behind cannot have
the arrivals wait for it (no "coordinated omission").
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

Call = Callable[[], object]

_JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class Latencies:
    """What a number of requests took, in seconds: the half of them, and all but one of a hundred, at most."""

    p50: float
    p99: float
    requests: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        """Raises ValueError for none."""
        if not seconds:
            raise ValueError("no request was answered")
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(float(p50), float(p99), len(seconds))


@dataclass(frozen=True)
class ClosedLoop:
    """Requests a second of callers that each ask again at once, and how long one request took."""

    rate: float
    latencies: Latencies


def closed_loop(call: Call, callers: int, seconds: float) -> ClosedLoop:
    """Have `callers` threads call for `seconds`, at least once each, after one call each that is not counted.

    Raises what a call raised.
    """
    times: list[list[float]] = [[] for _ in range(callers)]
    ready = threading.Barrier(callers + 1)
    stop = threading.Event()

    def caller(number: int) -> None:
        clock, mine = time.perf_counter, times[number]
        try:
            try:
                call()
            finally:
                ready.wait()
            over, begun = False, clock()
            while not over:
                over = stop.is_set()
                call()
                ended = clock()
                mine.append(ended - begun)
                begun = ended
        except BaseException:
            stop.set()
            raise

    with _Threads(callers, caller) as threads:
        ready.wait()
        begun = time.perf_counter()
        stop.wait(seconds)
        answered = sum(map(len, times))
        elapsed = time.perf_counter() - begun
        stop.set()
        threads.join()
    return ClosedLoop(answered / elapsed, Latencies.of(list(itertools.chain.from_iterable(times))))


def closed_loop_of_tasks(call: Callable[[], Awaitable[object]], tasks: int, seconds: float) -> ClosedLoop:
    """As `closed_loop`, from tasks of one event loop of asyncio."""
    times: list[float] = []

    async def caller(until: float) -> None:
        clock = time.perf_counter
        begun = clock()
        while begun < until:
            await call()
            ended = clock()
            times.append(ended - begun)
            begun = ended

    async def main() -> float:
        await asyncio.gather(*(call() for _ in range(tasks)))
        begun = time.perf_counter()
        await asyncio.gather(*(caller(begun + seconds) for _ in range(tasks)))
        return time.perf_counter() - begun

    elapsed = asyncio.run(main())
    return ClosedLoop(len(times) / elapsed, Latencies.of(times))


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process of `rate` a second, from 0 on: gaps are exponential and independent."""
    random = np.random.default_rng(seed)
    count = max(1, round(rate * seconds))
    return list(np.cumsum(random.exponential(1 / rate, count)))


def open_loop(call: Call, moments: Sequence[float], callers: int = 64) -> Latencies:
    """Call at each of `moments` (seconds from now), from as many threads; a call that is late counts from its moment.

    Raises what a call raised.
    """
    turns = itertools.count()  # next() of it is one step under the interpreter lock
    times: list[list[float]] = [[] for _ in range(callers)]
    begun = time.perf_counter() + 0.05

    def caller(number: int) -> None:
        clock, mine = time.perf_counter, times[number]
        while (turn := next(turns)) < len(moments):
            planned = begun + moments[turn]
            ahead = planned - clock()
            if ahead > 0:
                time.sleep(ahead)
            call()
            mine.append(clock() - planned)

    with _Threads(callers, caller) as threads:
        threads.join()
    return Latencies.of(list(itertools.chain.from_iterable(times)))


class _Threads:
    """So many threads with a body; the first thing that one raised is raised when they are joined."""

    def __init__(self, count: int, body: Callable[[int], None]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(body, n), daemon=True) for n in range(count)]

    def __enter__(self) -> _Threads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def join(self) -> None:
        """Wait for all. Raises TimeoutError for one that does not end."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
            if thread.is_alive():
                raise TimeoutError(f"a caller has not come back within {_JOIN_SECONDS} seconds")
        if self._errors:
            raise self._errors[0]

    def _guarded(self, body: Callable[[int], None], number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            self._errors.append(error)
