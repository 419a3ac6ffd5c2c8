"""ProbabilisticConcurrencyTesting: random priorities of threads, with few points at which one is lowered.

"A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (Burckhardt, Kothari, Musuvathi and Nagarakatte,
ASPLOS 2010). Of n threads and k steps, a bug of depth d is met with probability 1 / (n k^(d-1)) at least.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies.strategy import Candidate, SampledStrategy

_DEPTHS = (2, 3, 4, 5, 6)
_PATIENCE = 10


class ProbabilisticConcurrencyTesting(SampledStrategy):
    """The candidate whose thread has the highest priority. The depth is drawn from the seed, too."""

    name = "pct"
    estimates = True

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        super().__init__(seed, timeouts=timeouts)
        self._priorities: dict[str, float] = {}
        self._changes: frozenset[int] = frozenset()
        self._least = 0.0  # every priority is above
        self._steps = self._expected = 0
        self._last, self._in_a_row = "", 0

    def learn(self, trace: Sequence[Event]) -> None:
        """How long a schedule is, and so where the changes are."""
        self._expected = max(1, len(trace))
        count = self._random.choice(_DEPTHS) - 1
        self._changes = frozenset(self._random.randrange(self._expected) for _ in range(count))

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        priorities = []
        for candidate in candidates:
            if candidate.name not in self._priorities:
                self._priorities[candidate.name] = self._random.random()
            priorities.append(self._priorities[candidate.name])
        return priorities.index(max(priorities))

    def took(self, event: Event) -> None:
        """At a change its thread goes behind all others; so does one in a loop, which would go on forever."""
        self._in_a_row = self._in_a_row + 1 if event.thread == self._last else 1
        self._last = event.thread
        if self._steps in self._changes or self._in_a_row > _PATIENCE * self._expected or event.kind == "timeout":
            self._least -= 1.0
            for name in (event.thread, f"{event.thread} (timeout)"):
                self._priorities[name] = self._least
        self._steps += 1
