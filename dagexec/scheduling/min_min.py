"""Min-min: of all ready chains, the one that can be done first. With equal workers, that is the shortest.

Ibarra, Kim: Heuristic algorithms for scheduling independent tasks on nonidentical processors. JACM 24 (1977), there
algorithm D.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.policy import Chains, Policy


class MinMin(Policy):
    """The shortest."""

    name = "min_min"

    def order(self, chains: Chains) -> Sequence[int]:
        """By seconds, ascending; equal ones in the order of the net."""
        return sorted(range(len(chains.seconds)), key=lambda chain: chains.seconds[chain])
