"""Deviations: a schedule said by where it leaves the one without preemptions, with the names of threads.

The decision of a number means something else as soon as an earlier one is left out. "When dagexec-0 has made 12 steps,
main continues" stays what it was, as far as it can be done: where the thread does not come that far, or the other
cannot go on, nothing happens. So deviations can be left out one by one, and hold where a schedule differs a little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies import Candidate, Strategy


class Deviation(NamedTuple):
    """Who continues when a thread comes to a decision point, in place of the first candidate.

    Attributes:
        thread: who comes there, or ended there.
        steps: how many steps it has made.
        to: who continues: a thread, a stream, a timer, or "NAME (timeout)" where a wait is given up.
    """

    thread: str
    steps: int
    to: str


class Point(NamedTuple):
    """A decision point with several candidates.

    Attributes:
        step: how many steps all threads have made.
        thread: who has come there, or ended there.
        steps: how many steps it has made.
        candidates: their names.
        current: `thread` could go on, so that another choice than 0 is a preemption.
        choice: the number of the candidate who continues.
    """

    step: int
    thread: str
    steps: int
    candidates: tuple[str, ...]
    current: bool
    choice: int

    @property
    def preempts(self) -> bool:
        """Somebody else continues although `thread` could."""
        return self.current and self.choice > 0

    @property
    def deviation(self) -> Deviation:
        """What was done here."""
        return Deviation(self.thread, self.steps, self.candidates[self.choice])


class _Arrivals:
    """Who comes to decision points, read off a trace that grows."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def latest(self, trace: Sequence[Event]) -> tuple[str, int]:
        """The thread that has come to one now, and the steps it has made."""
        self._made.update(event.thread for event in islice(trace, self._made.total(), None))
        thread = trace[-1].thread if trace else "main"
        return thread, self._made[thread]


class Noting(Strategy):
    """Another strategy, and notes on the `points` at which it decided."""

    def __init__(self, strategy: Strategy) -> None:
        self.timeouts = strategy.timeouts
        self.points: list[Point] = []
        self._strategy = strategy
        self._arrivals = _Arrivals()

    def begin(self, trace: Sequence[Event]) -> None:
        super().begin(trace)
        self._strategy.begin(trace)

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        choice = self._strategy.choose(candidates, current)
        names = tuple(candidate.name for candidate in candidates)
        self.points.append(Point(len(self.trace), *self._arrivals.latest(self.trace), names, current, choice))
        return choice

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """Those of the schedule so far."""
        return tuple(point.deviation for point in self.points if point.choice)


class ByName(Strategy):
    """Deviates where it is told to, and nowhere else."""

    def __init__(self, deviations: Iterable[Deviation], *, timeouts: bool = False) -> None:
        self.timeouts = timeouts
        self._to = {(thread, steps): to for thread, steps, to in deviations}
        self._arrivals = _Arrivals()

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The candidate that is named for this point, if it is there; else the first."""
        to = self._to.get(self._arrivals.latest(self.trace))
        return next((number for number, one in enumerate(candidates) if one.name == to), 0)
