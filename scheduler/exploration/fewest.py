"""From a schedule that fails to one with fewer preemptions that fails too.

Delta debugging over the places where a schedule leaves the one without preemptions ("Simplifying and Isolating
Failure-Inducing Input", Zeller and Hildebrandt, IEEE TSE 2002): they go in chunks, one by one, and in pairs, and
one goes while another is moved by a few steps of its thread. What is left then is held against all schedules of fewer
preemptions, as far as time allows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Generic

from dagexec.errors import DagexecError
from dagexec.scheduler.exploration.deviations import ByName, Deviation, Noting, Point
from dagexec.scheduler.exploration.exploring import ExploredSchedule, Result, Scenario, explore
from dagexec.scheduler.exploration.strategies import BoundedSearch, ReplayStrategy, Strategy

_FEW = 16
_MOVES = (-1, 1, -2, 2, -3, 3)


@dataclass(frozen=True)
class Shrunk(Generic[Result]):
    """A schedule that fails.

    Attributes:
        schedule: replays exactly.
        points: where it was decided, of which some deviate.
        tried: how many schedules were run for it.
        fewest: no schedule with fewer preemptions fails like this; all of them were tried.
    """

    schedule: ExploredSchedule[Result]
    points: tuple[Point, ...]
    tried: int
    fewest: bool

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """Where it leaves the schedule without preemptions."""
        return tuple(point.deviation for point in self.points if point.choice)

    @property
    def preemptions(self) -> int:
        """How often somebody else continued although a thread could."""
        return sum(point.preempts for point in self.points)


def noted(scenario: Scenario[Result], strategy: Strategy) -> tuple[ExploredSchedule[Result], tuple[Point, ...]]:
    """`scenario` under one schedule, and where that was decided."""
    notes = Noting(strategy)
    schedule = explore(scenario, notes)
    return schedule, tuple(notes.points)


def fewest_preemptions(
    scenario: Scenario[Result], failed: ExploredSchedule[Result], *, seconds: float = 10.0, most: int = 2000
) -> Shrunk[Result]:
    """The schedule with the fewest preemptions that fails with the same kind of error, of those that are tried.

    `seconds` of real time and `most` schedules are the budget. Raises DagexecError when `failed` does not fail any more
    under the same decisions: the scenario depends on something other than its schedule.
    """
    return _Shrinking(scenario, failed, time.monotonic() + seconds, most).run()


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

    def run(self) -> Shrunk[Result]:
        self._in_chunks()
        self._one_by_one()
        fewest = self._has_fewest()
        self._one_by_one()
        best = self._best
        return Shrunk(best.schedule, best.points, self._tried, fewest)

    @property
    def _is_spent(self) -> bool:
        return self._tried >= self._most or time.monotonic() >= self._deadline

    def _in_chunks(self) -> None:
        chunk = (len(self._best.deviations) + 1) // 2
        while chunk > 1 and not self._is_spent:
            deviations = self._best.deviations
            starts = range(0, len(deviations), chunk)
            if not any(self._is_better(deviations[:start] + deviations[start + chunk :]) for start in starts):
                chunk = (chunk + 1) // 2 if chunk > 2 else 1

    def _one_by_one(self) -> None:
        while any(map(self._is_better, _smaller(self._best.deviations))):
            pass

    def _is_better(self, deviations: Iterable[Deviation]) -> bool:
        wanted = frozenset(deviations)
        if self._is_spent or wanted in self._known:
            return False
        self._known.add(wanted)
        return self._try(ByName(wanted, timeouts=self._timeouts))

    def _try(self, strategy: Strategy) -> bool:
        self._tried += 1
        schedule, points = noted(self._scenario, strategy)
        found = Shrunk(schedule, points, self._tried, False)
        if type(schedule.failure) is not self._kind or _size(found) >= _size(self._best):
            return False
        self._best = found
        return True

    def _has_fewest(self) -> bool:
        """Look for failures of fewer preemptions; True when all such schedules were tried."""
        if not self._best.preemptions:
            return True
        search = BoundedSearch(self._best.preemptions - 1, timeouts=self._timeouts)
        while not self._is_spent:
            if self._try(search):
                return True  # those with fewer come first
            if not search.advance():
                return True
        return False


def _size(found: Shrunk[Any]) -> tuple[int, int, int]:
    return found.preemptions, len(found.deviations), len(found.schedule.trace)


def _smaller(deviations: tuple[Deviation, ...]) -> Iterator[list[Deviation]]:
    """Without one of `deviations`; of few, also without two, and without one where another one is moved a little."""
    for one in reversed(deviations):
        yield [other for other in deviations if other is not one]
    if len(deviations) > _FEW:
        return
    for pair in combinations(deviations, 2):
        yield [other for other in deviations if other not in pair]
    for gone, moved in permutations(deviations, 2):
        rest = [other for other in deviations if other is not gone and other is not moved]
        for steps in _MOVES:
            yield [*rest, moved._replace(steps=moved.steps + steps)]
