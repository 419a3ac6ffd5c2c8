"""From a schedule that fails to one with fewer preemptions that fails too.

Delta debugging over the points where a schedule departs from the one without preemptions ("Simplifying and Isolating
Failure-Inducing Input", Zeller and Hildebrandt, IEEE TSE 2002): deviations are left out in chunks, one by one, in
pairs, and one while another is moved by a few steps of its thread; stretches of a thread are joined. Where none of that
helps, several such changes at once are drawn at random. The rest is compared with all schedules of fewer preemptions,
as far as time allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations
from typing import Any, Generic

from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.deviations import (
    ByName,
    ByStretches,
    Deviation,
    Noting,
    Point,
    stretches,
)
from dagexec.scheduler.exploration.exploring import ExploredSchedule, Result, Scenario, explore
from dagexec.scheduler.exploration.strategies import BoundedSearch, Candidate, ReplayStrategy, Strategy

_FEW, _FEWEST = 12, 6
_MOVES = (-1, 1, -2, 2, -3, 3)
_LEFT_OUT, _MOVED = 0.15, 0.2
_PATIENCE = 300


@dataclass(frozen=True)
class Shrunk(Generic[Result]):
    """A schedule that fails.

    Attributes:
        schedule: replays exactly.
        points: its decision points, of which some deviate.
        tried: how many schedules were run for it.
        fewest: no schedule with fewer preemptions fails like this; all of them were tried.
    """

    schedule: ExploredSchedule[Result]
    points: tuple[Point, ...]
    tried: int
    fewest: bool

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """Where it departs from the schedule without preemptions."""
        return tuple(point.deviation for point in self.points if point.choice)

    @property
    def preemptions(self) -> int:
        """How often another thread continued although the current one could."""
        return sum(point.preempts for point in self.points)


def noted(scenario: Scenario[Result], strategy: Strategy) -> tuple[ExploredSchedule[Result], tuple[Point, ...]]:
    """`scenario` under one schedule, and its decision points."""
    notes = Noting(strategy)
    schedule = explore(scenario, notes)
    return schedule, tuple(notes.points)


def fewest_preemptions(
    scenario: Scenario[Result],
    failed: ExploredSchedule[Result],
    *,
    seconds: float = 10.0,
    most: int = 2000,
    most_with_fewer: int = 2000,
) -> Shrunk[Result]:
    """The schedule with the fewest preemptions, among those tried, that fails with the same kind of error.

    `seconds` of real time and `most` schedules are the budget; of the schedules with fewer preemptions than the result,
    which may be very many, at most `most_with_fewer` are tried. Raises DagexecError when `failed` does not fail again
    under the same decisions: the scenario depends on something other than its schedule.
    """
    return _Shrinking(scenario, failed, time.monotonic() + seconds, most).run(most_with_fewer)


class _Shrinking(Generic[Result]):
    def __init__(
        self, scenario: Scenario[Result], failed: ExploredSchedule[Result], deadline: float, most: int
    ) -> None:
        self._scenario = scenario
        self._kind = type(failed.failure)
        self._timeouts = failed.timeouts
        self._deadline = deadline
        self._most = most
        self._known: set[frozenset[Deviation]] = set()
        schedule, points = noted(scenario, ReplayStrategy(failed.decisions, failed.choices, timeouts=failed.timeouts))
        if type(schedule.failure) is not self._kind:
            raise DagexecError(
                f"the schedule does not fail again: expected {self._kind.__name__}, found {schedule.failure!r}; the "
                "scenario depends on something other than its schedule"
            )
        self._best = Shrunk(schedule, points, 1, False)
        self._tried = 1

    def run(self, most_with_fewer: int) -> Shrunk[Result]:
        self._in_chunks()
        self._one_by_one()
        self._at_random()
        before = self._best
        fewest = self._has_fewest(self._tried + most_with_fewer)
        if self._best is not before:
            self._one_by_one()
        best = self._best
        return Shrunk(best.schedule, best.points, self._tried, fewest)

    @property
    def _is_spent(self) -> bool:
        return self._tried >= self._most or time.monotonic() >= self._deadline

    def _in_chunks(self) -> None:
        """Leave out chunks of deviations, the last first, so that the earlier ones keep their meaning."""
        chunk = (len(self._best.deviations) + 1) // 2
        while chunk and not self._is_spent:
            before = self._best
            end = len(before.deviations)
            while end > 0:
                deviations = self._best.deviations
                self._is_better(deviations[: max(0, end - chunk)] + deviations[end:])
                end -= chunk
            if self._best is before or chunk > 1:
                chunk //= 2

    def _one_by_one(self) -> None:
        while self._any_joined() or any(map(self._is_better, _smaller(self._best.deviations))):
            pass

    def _at_random(self) -> None:
        """Draw changes until a number of them in a row brought no improvement."""
        drawn = random.Random(0)
        since = 0
        while since < _PATIENCE and self._best.preemptions > 1 and not self._is_spent:
            since += 1
            if self._try(_Changed(self._best.deviations, drawn, timeouts=self._timeouts)):
                since = 0
                self._one_by_one()

    def _any_joined(self) -> bool:
        """Join two stretches of a thread, at the earlier or the later; True once that is an improvement."""
        pieces = stretches(self._best.schedule.trace, self._best.points)
        for first, (name, thread, _) in enumerate(pieces):
            rest = range(first + 1, len(pieces))
            again = next((second for second in rest if pieces[second][:2] == (name, thread)), None)
            if again is None:
                continue
            later = pieces[:first] + pieces[first + 1 :]
            earlier = [*pieces[:first], pieces[again], *pieces[first + 1 : again], *pieces[again + 1 :]]
            for joined in (later, earlier):
                if not self._is_spent and self._try(ByStretches(joined, timeouts=self._timeouts)):
                    return True
        return False

    def _is_better(self, deviations: Iterable[Deviation]) -> bool:
        candidate = frozenset(deviations)
        if self._is_spent or candidate in self._known:
            return False
        self._known.add(candidate)
        return self._try(ByName(candidate, timeouts=self._timeouts))

    def _try(self, strategy: Strategy) -> bool:
        self._tried += 1
        schedule, points = noted(self._scenario, strategy)
        shrunk = Shrunk(schedule, points, self._tried, False)
        if type(schedule.failure) is not self._kind or _size(shrunk) >= _size(self._best):
            return False
        self._best = shrunk
        return True

    def _has_fewest(self, most: int) -> bool:
        """Look for failures with fewer preemptions; True when all such schedules were tried."""
        if not self._best.preemptions:
            return True
        search = BoundedSearch(self._best.preemptions - 1, timeouts=self._timeouts)
        while not self._is_spent and self._tried < most:
            if self._try(search):
                return True  # those with fewer come first
            if not search.advance():
                return True
        return False


class _Changed(ByName):
    """Leaves some deviations out, moves others, and lets other threads continue where nobody is preempted."""

    def __init__(self, deviations: Iterable[Deviation], drawn: random.Random, *, timeouts: bool) -> None:
        kept = [deviation for deviation in deviations if drawn.random() > _LEFT_OUT]
        moved = [
            deviation._replace(steps=deviation.steps + drawn.choice(_MOVES)) if drawn.random() < _MOVED else deviation
            for deviation in kept
        ]
        super().__init__(moved, timeouts=timeouts)
        self._drawn = drawn
        self._others = drawn.choice((0.0, 0.1, 0.3))

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        choice = super().choose(candidates, current)
        if choice == 0 and not current and self._drawn.random() < self._others:
            return self._drawn.randrange(len(candidates))
        return choice


def _size(shrunk: Shrunk[Any]) -> tuple[int, int, int]:
    return shrunk.preemptions, len(shrunk.deviations), len(shrunk.schedule.trace)


def _smaller(deviations: tuple[Deviation, ...]) -> Iterator[list[Deviation]]:
    """Without one of `deviations`; of few, also without two, and without one where another one is moved a little."""
    for removed in reversed(deviations):
        yield [other for other in deviations if other is not removed]
    for pair in combinations(deviations, 2) if len(deviations) <= _FEW else ():
        yield [other for other in deviations if other not in pair]
    for gone, moved in permutations(deviations, 2) if len(deviations) <= _FEWEST else ():
        rest = [other for other in deviations if other is not gone and other is not moved]
        for steps in _MOVES:
            yield [*rest, moved._replace(steps=moved.steps + steps)]
