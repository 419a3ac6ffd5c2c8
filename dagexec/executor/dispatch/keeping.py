"""Replicas that threads keep for their next call for a moment, although others wait.

To put a thread to sleep and wake another takes as long as a small net's run. So a thread that has called again at once
before keeps its replica for up to `KEPT_SECONDS` of runs; then the replica goes to the request that has waited longest.
A thread that does not come back within `BACK_SECONDS` is not expected to next time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from dagexec.binding.replicas import Replica

KEPT_SECONDS = 2e-3
"""For how long a thread may go on with its replica while others wait."""

BACK_SECONDS = 200e-6
"""A thread that calls within this time calls "at once"."""

_THREADS_REMEMBERED = 4096


class _Habit:
    """How a thread has called.

    Attributes:
        since: when it got its replica.
        left: when its last run was over.
        returns: it called again at once after that.
        keeps: it kept the replica then.
    """

    __slots__ = ("keeps", "left", "returns", "since")

    def __init__(self) -> None:
        self.since = self.left = -math.inf
        self.returns = self.keeps = False


class KeptReplicas:
    """Which thread keeps which replica. Not safe by itself: its owner's lock guards it.

    Attributes:
        by_thread: the idle replicas that are kept, by the identifier of the thread.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, Replica] = {}
        self._habits: dict[int, _Habit] = {}

    def came(self, thread: int, now: float) -> None:
        """The thread asks for a replica, and waits or takes the replica that it kept."""
        habit = self._habits.get(thread)
        if habit is not None:
            habit.returns = now - habit.left <= BACK_SECONDS

    def leave(self, thread: int, replica: Replica, begun: float, now: float) -> bool:
        """The thread's run, which began at `begun`, is over while others wait. True when it keeps the replica."""
        habit = self._habits.get(thread)
        if habit is None:
            if len(self._habits) >= _THREADS_REMEMBERED:
                self._habits.clear()
            habit = self._habits[thread] = _Habit()
        habit.left = now
        if not habit.keeps:
            habit.since = begun
        habit.keeps = habit.returns and now - habit.since < KEPT_SECONDS
        if habit.keeps:
            self.by_thread[thread] = replica
        return habit.keeps

    def take_back(self, now: float) -> list[Replica]:
        """The replicas whose threads did not call at once."""
        late = [thread for thread in self.by_thread if now - self._left(thread) > BACK_SECONDS]
        for thread in late:
            habit = self._habits.get(thread)
            if habit is not None:
                habit.returns = habit.keeps = False
        return [self.by_thread.pop(thread) for thread in late]

    @staticmethod
    def seconds_kept(since: float, now: float) -> float:
        """For how long a thread has kept its replica, as far as that matters."""
        return min(now - since, KEPT_SECONDS)

    def state(self, now: float) -> Hashable:
        """All that decides what comes next, except who keeps what. Threads differ in these habits alone."""

        def seen(habit: _Habit) -> Hashable:
            back = now - habit.left <= BACK_SECONDS
            seconds = self.seconds_kept(habit.since, now) if habit.keeps else None
            return habit.returns, habit.keeps, now - habit.left if back else None, seconds

        return frozenset((thread, seen(habit)) for thread, habit in self._habits.items())

    def _left(self, thread: int) -> float:
        habit = self._habits.get(thread)
        return -math.inf if habit is None else habit.left
