"""Strategies: who continues at a decision point of a controlled schedule.

A decision is the number of a candidate. Candidate 0 is the thread that has come to the point, if it can go on; the
others follow in the order of their numbers, round from there. So a schedule of zeros has no preemption at all.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dagexec.errors import DagexecError


class Candidate(Protocol):
    """A thread or stream that can go on, or a wait that can be given up."""

    @property
    def name(self) -> str:
        """How traces name it."""

    def when(self) -> float:
        """Its virtual time in seconds: that of the thread, the start of the stream's next command, or the deadline."""


class Strategy(ABC):
    """Decides. Each schedule needs a new one, or a `BoundedSearch` that has been advanced.

    Attributes:
        timeouts: a deadline may pass although something else could go on; otherwise only when nothing can.
    """

    timeouts: bool = False

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The number of one of two or more `candidates`. With `current`, candidate 0 is the thread that asks."""


class RandomStrategy(Strategy):
    """Each candidate with the same probability, from a seed."""

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        self.seed = seed
        self.timeouts = timeouts
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        return int(self._random.random() * len(candidates))


class ReplayStrategy(Strategy):
    """The decisions of an earlier schedule again; beyond their end, no preemption."""

    def __init__(
        self, decisions: Sequence[int], choices: Sequence[int] | None = None, *, timeouts: bool = False
    ) -> None:
        """`choices`, how many candidates there were, makes sure that the scenario behaves as it did."""
        self.timeouts = timeouts
        self._decisions = tuple(decisions)
        self._choices = None if choices is None else tuple(choices)
        self._made = 0

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The next decision. Raises DagexecError when the scenario does not behave as it did then."""
        number, self._made = self._made, self._made + 1
        if number >= len(self._decisions):
            return 0
        decision = self._decisions[number]
        if decision >= len(candidates) or (self._choices is not None and self._choices[number] != len(candidates)):
            were = f"choice {decision}" if self._choices is None else f"choice {decision} of {self._choices[number]}"
            raise DagexecError(
                f"the schedule cannot be replayed: at decision {number} there are {len(candidates)} candidates, "
                f"but {were} was recorded; the scenario depends on something other than its schedule"
            )
        return decision


class EarliestFirst(Strategy):
    """The candidate of the smallest virtual time: a discrete-event simulation, to measure virtual times."""

    timeouts = True

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """Of equal times the first."""
        times = [candidate.when() for candidate in candidates]
        return times.index(min(times))


class BoundedSearch(Strategy):
    """Every schedule with at most so many preemptions, each once: all with none, then all with one, and so on.

    A preemption is a switch away from a thread that could go on; switches from one that cannot, or that ends, are free.
    Most bugs need one or two. After "Iterative Context Bounding for Systematic Testing of Multithreaded Programs"
    (Musuvathi and Qadeer, PLDI 2007).

    Attributes:
        exhausted: all were tried.
    """

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
