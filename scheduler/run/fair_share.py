"""Share: what a user of a pool has had of its workers, and when the user's next run has its turn.

Start-time fair queuing (Goyal, Vin, Cheng: Start-time Fair Queuing, SIGCOMM 1996): a run's start tag is the larger of
the pool's virtual time and the finish tag of the user's run before it, and the smallest tag is served first. Tags are
seconds of workers. How long a run takes is not known when it is submitted, so it is charged what the user's earlier
runs took, and the difference when a worker has left it.
"""

from __future__ import annotations

_WEIGHT_OF_LATEST = 1 / 8


class Share:
    """One user of a pool. Guarded by the pool's lock.

    Attributes:
        name: the user's, for messages.
        seconds: what workers spent in the user's runs.
        runs: how many the user submitted.
    """

    __slots__ = ("__weakref__", "_finish", "_start", "_usual", "name", "runs", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self.runs = 0
        self._usual = 0.0  # seconds of a run
        self._start = 0.0  # the last tag: runs of one user keep their order
        self._finish = 0.0

    def enter(self, virtual_time: float) -> tuple[float, float]:
        """A run is submitted. Its start tag, and the seconds that it is charged in advance."""
        self.runs += 1
        self._start = max(virtual_time, self._start, self._finish)
        self._finish = self._start + self._usual
        return self._start, self._usual

    def charge(self, seconds: float, advance: float) -> None:
        """A worker has left one of its runs after `seconds`, of which `advance` had been charged before."""
        self.seconds += seconds
        self._finish += seconds - advance
        self._usual += (seconds - self._usual) * (_WEIGHT_OF_LATEST if self._usual else 1.0)

    def give_back(self, advance: float) -> None:
        """One of its runs ended before it began."""
        self._finish -= advance
