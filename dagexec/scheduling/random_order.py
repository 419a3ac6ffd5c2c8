"""Random priorities: what any order gives that knows nothing. A policy that does not beat it has learned nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from dagexec.scheduling.policy import Chains, Policy


class RandomOrder(Policy):
    """By dice."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        """The same seed gives the same order."""
        self.seed = seed

    def order(self, chains: Chains) -> Sequence[int]:
        """Any."""
        found = list(range(len(chains.names)))
        Random(self.seed).shuffle(found)
        return found
