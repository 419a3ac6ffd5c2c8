"""RunTimes: what requests wait, and what feeding, running and fetching take, added up.

An executor that is given one (`compile(..., run_times=...)`) reads the clock twice more in each run. One may count for
several executors, and from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import field

from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of runs, so many: feeding, preparation included, then running, then fetching."""

    count: int = 0
    fed: float = 0.0
    ran: float = 0.0
    fetched: float = 0.0

    def plus(self, count: int, fed: float, ran: float, fetched: float) -> Phases:
        """With `count` times a run of these seconds."""
        return Phases(
            self.count + count, self.fed + count * fed, self.ran + count * ran, self.fetched + count * fetched
        )


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Of all requests that completed.

    Attributes:
        requests: for each of them, what its run took; one that was joined has all of it.
        waited: seconds until they got a replica, those included that they waited for others to join.
        rows: of all requests, where they may be joined; else how many there are.
        runs: by the rows of a run.
    """

    requests: Phases = field(default_factory=Phases)
    waited: float = 0.0
    rows: int = 0
    runs: dict[int, Phases] = field(default_factory=dict)


class RunTimes:
    """Adds up; `totals` are those so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = RunTotals()

    def record(self, size: int, requests: Iterable[tuple[int, float]], fed: float, ran: float, fetched: float) -> None:
        """A run of `size` rows is over. Its `requests` had so many rows each, and waited for so many seconds."""
        with self._lock:
            before = self._totals
            of_requests, waited, rows = before.requests, before.waited, before.rows
            for own_rows, own_wait in requests:
                of_requests = of_requests.plus(1, fed, ran, fetched)
                waited += own_wait
                rows += own_rows
            runs = {**before.runs, size: before.runs.get(size, Phases()).plus(1, fed, ran, fetched)}
            self._totals = RunTotals(of_requests, waited, rows, runs)

    @property
    def totals(self) -> RunTotals:
        """Those so far."""
        with self._lock:
            return self._totals
