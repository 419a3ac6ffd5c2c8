"""Deviations: a schedule described by where it departs from the one without preemptions, with the names of threads.

The number of a decision changes its meaning as soon as an earlier decision is left out. "When dagexec-0 has made 12
steps, main continues" keeps its meaning; where the thread does not get that far, or the other cannot go on, it has no
effect. So deviations can be left out one by one, and hold where a schedule differs a little.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies import Candidate, Strategy


class Deviation(NamedTuple):
    """Which thread continues at a decision point, in place of the first candidate.

    Attributes:
        thread: the thread that reaches the point, or ends there.
        steps: the number of steps that it has made.
        to: the candidate that continues: a thread, a stream, a timer, or "NAME (timeout)" where a wait is given up.
    """

    thread: str
    steps: int
    to: str


class Point(NamedTuple):
    """A decision point with several candidates.

    Attributes:
        step: the number of steps that all threads have made.
        thread: the thread that has reached it, or ended there.
        steps: the number of steps that this thread has made.
        candidates: their names.
        current: `thread` could go on, so that any choice but 0 is a preemption.
        choice: the number of the candidate that continues.
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
    """The threads that reach decision points, read from a growing trace."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def made(self, trace: Sequence[Event]) -> Counter[str]:
        """How many steps each thread has made."""
        self._made.update(event.thread for event in islice(trace, self._made.total(), None))
        return self._made

    def latest(self, trace: Sequence[Event]) -> tuple[str, int]:
        """The thread that reached a decision point last, and the steps it has made."""
        thread = trace[-1].thread if trace else "main"
        return thread, self.made(trace)[thread]


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
        """The deviations of the schedule so far."""
        return tuple(point.deviation for point in self.points if point.choice)


class ByName(Strategy):
    """Deviates where it is told to, and nowhere else."""

    def __init__(self, deviations: Iterable[Deviation], *, timeouts: bool = False) -> None:
        self.timeouts = timeouts
        self._to = {(thread, steps): to for thread, steps, to in deviations}
        self._arrivals = _Arrivals()

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The candidate that a deviation names for this point, if it is there; otherwise the first."""
        to = self._to.get(self._arrivals.latest(self.trace))
        return next((number for number, candidate in enumerate(candidates) if candidate.name == to), 0)


class Stretch(NamedTuple):
    """Consecutive steps of one thread.

    Attributes:
        name: the name of the candidate that goes on.
        thread: the thread whose steps they are.
        until: the number of steps it has made at the end, including those before.
    """

    name: str
    thread: str
    until: int


class ByStretches(Strategy):
    """One stretch after another, as far as their threads can go on; then no preemption."""

    def __init__(self, stretches: Iterable[Stretch], *, timeouts: bool = False) -> None:
        self.timeouts = timeouts
        self._left = deque(stretches)
        self._arrivals = _Arrivals()

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The candidate of the first stretch that is not over; a stretch whose thread cannot go on is given up."""
        names = [candidate.name for candidate in candidates]
        made = self._arrivals.made(self.trace)
        while self._left:
            if made[self._left[0].thread] < self._left[0].until and self._left[0].name in names:
                return names.index(self._left[0].name)
            self._left.popleft()
        return 0


def stretches(trace: Sequence[Event], points: Iterable[Point]) -> list[Stretch]:
    """The stretches of a schedule."""
    chosen = {point.step: point.candidates[point.choice] for point in points}
    result: list[Stretch] = []
    counts: Counter[str] = Counter()
    for step, event in enumerate(trace):
        counts[event.thread] += 1
        name = chosen.get(step, event.thread)
        if result and result[-1].name == name:
            result.pop()
        result.append(Stretch(name, event.thread, counts[event.thread]))
    return result
