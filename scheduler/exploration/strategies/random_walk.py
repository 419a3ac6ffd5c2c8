"""RandomStrategy: the random walk, at least as good as bounds on preemptions on the benchmark SCTBench.

"Concurrency Testing Using Controlled Schedulers: An Empirical Study" (Thomson, Donaldson and Betts, TOPC 2016).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy


class RandomStrategy(Strategy):
    """Each candidate with the same probability, from a seed."""

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        self.seed = seed
        self.timeouts = timeouts
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        return int(self._random.random() * len(candidates))
