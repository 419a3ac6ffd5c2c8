"""First in, first out: the chain that became ready first. The baseline of Graham's bound.

Graham: Bounds on multiprocessing timing anomalies. SIAM Journal on Applied Mathematics 17 (1969).
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.policy import Policy, RunState


class Fifo(Policy):
    """The oldest."""

    name = "fifo"

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int:
        """The one that became ready first."""
        return ready[0]
