"""RandomStrategy: the random walk, as good as bounds on preemptions on a benchmark of known bugs, and simpler.

"Concurrency Testing Using Controlled Schedulers: An Empirical Study" (Thomson, Donaldson and Betts, TOPC 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduler.exploration.strategies.strategy import Candidate, SampledStrategy


class RandomStrategy(SampledStrategy):
    """Each candidate with the same probability, from a seed."""

    name = "random"

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        return int(self._random.random() * len(candidates))
