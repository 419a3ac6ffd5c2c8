"""Work stealing: a worker takes the newest chain that it made ready itself, or steals the oldest of another's.

Blumofe, Leiserson: Scheduling multithreaded computations by work stealing. JACM 46 (1999).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from dagexec.scheduling.policy import Policy, RunState


class WorkStealing(Policy):
    """From one's own end of one's own deque, else from the other end of a victim's."""

    name = "work_stealing"

    def __init__(self, seed: int = 0) -> None:
        """Victims are drawn, in every run from the same seed."""
        self.seed = seed

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int:
        """What waits for nothing belongs to nobody, and is there to be stolen."""
        own = [chain for chain in ready if state.released_by[chain] == worker]
        if own:
            return own[-1]
        if state.own is None:
            state.own = Random(self.seed)
        victim = state.own.choice(sorted({state.released_by[chain] for chain in ready}))
        return next(chain for chain in ready if state.released_by[chain] == victim)
