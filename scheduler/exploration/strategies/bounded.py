"""BoundedSearch: every schedule with few preemptions.

"Iterative Context Bounding for Systematic Testing of Multithreaded Programs" (Musuvathi and Qadeer, PLDI 2007).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dagexec.errors import DagexecError
from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy


class BoundedSearch(Strategy):
    """Every schedule with at most so many preemptions, each once: all with none, then all with one, and so on.

    A preemption is a switch away from a thread that could go on; switches from one that cannot, or that ends, are free.
    Most bugs need one or two.

    Attributes:
        exhausted: all were tried.
    """

    name = "systematic"

    def __init__(self, preemptions: int = 2, *, timeouts: bool = False) -> None:
        """Raises ValueError for a negative bound."""
        if preemptions < 0:
            raise ValueError(f"preemptions must be at least 0, found {preemptions}")
        self.preemptions = preemptions
        self.timeouts = timeouts
        self.exhausted = False
        self._waiting: list[deque[_Branch]] = [deque() for _ in range(preemptions + 1)]
        self._branch = _Branch((), 0, 0)
        self._spent = 0
        self._path: list[_Made] = []

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """As the branch says, then no preemption. Raises DagexecError when the scenario does not repeat itself."""
        number, branch = len(self._path), self._branch
        choice = 0
        if number <= branch.position and branch.path:
            before = branch.path[number]
            if before[1:] != (len(candidates), current):
                raise DagexecError(
                    f"the scenario cannot be searched: decision {number} has {len(candidates)} candidates now but had "
                    f"{before[1]} after the same decisions; it depends on something other than its schedule"
                )
            choice = branch.choice if number == branch.position else before[0]
        self._path.append((choice, len(candidates), current))
        return choice

    def advance(self) -> bool:
        """Make it the strategy of the next schedule; False when all were tried."""
        self._put_branches()
        for spent, waiting in enumerate(self._waiting):
            if waiting:
                self._branch, self._spent, self._path = waiting.popleft(), spent, []
                return True
        self.exhausted = True
        return False

    def _put_branches(self) -> None:
        """The schedules that leave this one behind its own branch, by the preemptions they take."""
        path = tuple(self._path)
        for position in range(self._branch.position + 1 if self._branch.path else 0, len(path)):
            _, choices, current = path[position]
            if self._spent + current <= self.preemptions:
                branches = (_Branch(path, position, choice) for choice in range(1, choices))
                self._waiting[self._spent + current].extend(branches)


_Made = tuple[int, int, bool]
"""A decision that was made: the choice, how many there were, and whether others than 0 are preemptions."""


class _Branch(NamedTuple):
    """A schedule that follows another one's path up to a position, and chooses something else there."""

    path: tuple[_Made, ...]
    position: int
    choice: int
