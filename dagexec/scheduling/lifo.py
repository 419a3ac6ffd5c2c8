"""Last in, first out: the chain that became ready last, whose input is still in a cache. Goes deep before it goes wide.

Blumofe, Leiserson: Space-efficient scheduling of multithreaded computations. SIAM Journal on Computing 27 (1998): why
depth first keeps what is in memory at a time small.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.policy import Policy, RunState


class Lifo(Policy):
    """The newest."""

    name = "lifo"

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int:
        """The one that became ready last."""
        return ready[-1]
