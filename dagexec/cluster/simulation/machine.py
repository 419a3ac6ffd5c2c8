"""Cores on which jobs run, and the events by which they end."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

Handler = Callable[[float, Any], None]


class Events:
    """What is to happen: at an instant, a handler is called with the instant and an argument."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Handler, Any]] = []
        self._number = count().__next__  # events of one instant happen in the order in which they were made

    def at(self, instant: float, handler: Handler, argument: Any) -> None:
        """Call `handler(instant, argument)` then."""
        heappush(self.heap, (instant, self._number(), handler, argument))


class OwnCores:
    """As many cores as there are threads: a job takes the time that it takes alone."""

    def __init__(self, events: Events) -> None:
        self._at = events.at

    def start(self, now: float, work: float, threads: int, handler: Handler, argument: Any) -> None:
        """Call `handler` with `argument` when a job of `work` seconds is done."""
        self._at(now + work, handler, argument)


class SharedCores:
    """Jobs share the cores of a machine evenly, as threads do that the system gives turns: processor sharing.

    All of them progress at the same speed, so what counts is the work that each has done since the machine began: its
    jobs end in the order of that count at their start plus their own work (the virtual time of fair queueing).
    """

    def __init__(self, events: Events, cores: int, interference: tuple[float, ...] = (1.0,)) -> None:
        self._events = events
        self._cores = cores
        self._interference = interference
        self._jobs: list[tuple[float, int, int, Handler, Any]] = []
        self._number = count().__next__
        self._threads = 0  # of all jobs
        self._speed = 1.0  # of each job
        self._done = 0.0  # work that a job would have done that was there from the start
        self._since = 0.0  # when this was true
        self._turn = 0  # of the event that ends the next job; earlier ones are void

    def start(self, now: float, work: float, threads: int, handler: Handler, argument: Any) -> None:
        """Call `handler` with `argument` when a job of `work` seconds is done, of the time that it takes alone."""
        self._advance(now)
        heappush(self._jobs, (self._done + work, self._number(), threads, handler, argument))
        self._threads += threads
        self._schedule(now)

    def stop(self, now: float, argument: Any) -> None:
        """End the jobs with this argument; their handlers are not called. Looks at all jobs."""
        self._advance(now)
        self._threads -= sum(job[2] for job in self._jobs if job[4] is argument)
        self._jobs = [job for job in self._jobs if job[4] is not argument]
        heapify(self._jobs)
        self._schedule(now)

    def _advance(self, now: float) -> None:
        self._done += (now - self._since) * self._speed
        self._since = now

    def _schedule(self, now: float) -> None:
        self._turn += 1
        if not self._jobs:
            return
        busy = min(self._threads, self._cores)
        speed = self._interference[min(busy, len(self._interference)) - 1]
        self._speed = speed * min(1.0, self._cores / self._threads)
        left = max(0.0, self._jobs[0][0] - self._done)
        self._events.at(now + left / self._speed, self._end_first, self._turn)

    def _end_first(self, now: float, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance(now)
        _, _, threads, handler, argument = heappop(self._jobs)
        self._threads -= threads
        self._schedule(now)
        handler(now, argument)


Cores = OwnCores | SharedCores
