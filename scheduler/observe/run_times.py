"""RunTimes: what requests wait, and what feeding, running and fetching take, added up.

An executor that is given one (`compile(..., run_times=...)`) reads the clock twice more in each run. One may count for
several executors, and from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import field

from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of runs, so many: feeding, preparation included, then running, then fetching."""

    count: int = 0
    fed: float = 0.0
    ran: float = 0.0
    fetched: float = 0.0


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
        self._requests = [0, 0.0, 0.0, 0.0]
        self._waited = 0.0
        self._rows = 0
        self._runs: dict[int, list[float]] = {}

    def record(self, size: int, requests: Sequence[tuple[int, float]], fed: float, ran: float, fetched: float) -> None:
        """A run of `size` rows is over. Its `requests` had so many rows each, and waited for so many seconds."""
        with self._lock:
            runs = self._runs.get(size)
            if runs is None:
                runs = self._runs[size] = [0, 0.0, 0.0, 0.0]
            for sums, count in ((runs, 1), (self._requests, len(requests))):
                sums[0] += count
                sums[1] += count * fed
                sums[2] += count * ran
                sums[3] += count * fetched
            for rows, waited in requests:
                self._rows += rows
                self._waited += waited

    @property
    def totals(self) -> RunTotals:
        """Those so far."""
        with self._lock:
            runs = {size: _phases(sums) for size, sums in self._runs.items()}
            return RunTotals(_phases(self._requests), self._waited, self._rows, runs)


def _phases(sums: Sequence[float]) -> Phases:
    return Phases(int(sums[0]), *sums[1:])
