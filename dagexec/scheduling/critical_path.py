"""The chain first that the longest path to the end of the net begins with: what nets do that are given no policy.

Adam, Chandy, Dickson: A comparison of list schedules for parallel processing systems. CACM 17 (1974), there HLFET.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.policy import Chains, Policy


class CriticalPath(Policy):
    """By the longest path."""

    name = "critical_path"

    def order(self, chains: Chains) -> Sequence[int]:
        """By levels; equal ones in the order of the net."""
        return sorted(range(len(chains.levels)), key=lambda chain: -chains.levels[chain])
