"""What a simulation found."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

WARM_UP = 0.1


@dataclass(frozen=True)
class Outcome:
    """Requests by number, in the order in which they came.

    The first tenth is left out of throughput and latencies: at the start nothing waits.

    Attributes:
        arrived: when each came, in seconds.
        answered: when its client had the answer; NaN if it was refused or failed.
        refused: requests that found the queue full.
        failed: requests that lost two replicas.
        retried: requests that lost a replica.
        replica_utilization: share of the time that a replica computes.
        front_end_utilization: share of the time that a front end computes.
        events: how many there were.
    """

    arrived: NDArray[np.float64]
    answered: NDArray[np.float64]
    refused: int
    failed: int
    retried: int
    replica_utilization: float
    front_end_utilization: float
    events: int

    @cached_property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds from request to answer of those that were answered, sorted."""
        latencies = (self.answered - self.arrived)[self._first :]
        return np.sort(latencies[~np.isnan(latencies)])

    @property
    def _first(self) -> int:
        return int(WARM_UP * len(self.arrived))

    @property
    def throughput(self) -> float:
        """Answers a second, as long as requests come."""
        begin, end = self.arrived[self._first], self.arrived.max()
        with np.errstate(invalid="ignore"):
            served = np.count_nonzero((self.answered > begin) & (self.answered <= end))
        return float(served / (end - begin)) if end > begin else 0.0

    def latency(self, share: float) -> float:
        """The latency in seconds that this share of the answers does not exceed: 0.99 is the p99; NaN without any."""
        if not len(self.latencies):
            return float("nan")
        return float(self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))])

    def summary(self) -> dict[str, float]:
        """Throughput, latencies and counts by name, with the unit at its end."""
        return {
            "requests_per_second": self.throughput,
            "mean_ms": float(self.latencies.mean()) * 1e3 if len(self.latencies) else float("nan"),
            **{f"p{100 * share:g}_ms": self.latency(share) * 1e3 for share in (0.5, 0.95, 0.99)},
            "requests": len(self.arrived),
            "refused": self.refused,
            "failed": self.failed,
            "retried": self.retried,
            "replica_utilization": self.replica_utilization,
            "front_end_utilization": self.front_end_utilization,
        }
