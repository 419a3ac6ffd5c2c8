"""EarliestFirst: discrete-event simulation."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy


class EarliestFirst(Strategy):
    """The candidate of the smallest virtual time: a discrete-event simulation, to measure virtual times."""

    name = "earliest first"
    timeouts = True

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """Of equal times the first."""
        times = [candidate.when() for candidate in candidates]
        return times.index(min(times))
