"""PartialOrderSampling: a random priority for each event, drawn anew where events race.

"Partial Order Aware Concurrency Sampling" (Yuan, Yang and Gu, CAV 2018). A random walk delays one thread for long only
with a probability that shrinks with every step; a priority stays until something that races with its event happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies.strategy import Candidate, SampledStrategy


class PartialOrderSampling(SampledStrategy):
    """The candidate whose next event has the highest priority, from a seed."""

    name = "pos"

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        super().__init__(seed, timeouts=timeouts)
        self._priorities: dict[Event, float] = {}  # of events that wait to happen

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        priorities = []
        for candidate in candidates:
            event = candidate.event
            if event not in self._priorities:
                self._priorities[event] = self._random.random()
            priorities.append(self._priorities[event])
        return priorities.index(max(priorities))

    def took(self, event: Event) -> None:
        """It is over, and what raced with it has a new chance."""
        self._priorities = {
            other: priority
            for other, priority in self._priorities.items()
            if other.thread != event.thread and other.resource != event.resource
        }
