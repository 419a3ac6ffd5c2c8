"""The moment from which a schedule could not but fail, found by trial.

The first decisions of the schedule are repeated, and then other strategies take over: nobody is preempted, or seeds
decide. Bisection finds the fewest decisions after which all of these fail.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field
from typing import Generic

from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.deviations import Point
from dagexec.scheduler.exploration.exploring import ExploredSchedule, Result, Scenario, explore
from dagexec.scheduler.exploration.strategies import Candidate, RandomStrategy, ReplayStrategy, Strategy


@dataclass(frozen=True)
class Moment(Generic[Result]):
    """When failure became inevitable.

    Attributes:
        step: number of the step that made it so; -1 when everything that was tried failed, whatever the decisions.
        possible_until: number of the last step before which some continuation does not fail: `step`, or less where the
            budget was spent.
        continuations: how many were tried after `step`; all failed.
        tried: schedules in all.
        rescue: a schedule that agrees up to `possible_until` and does not fail; None where there is none.
    """

    step: int
    possible_until: int
    continuations: int
    tried: int
    rescue: ExploredSchedule[Result] | None = field(repr=False)


class _Continued(Strategy):
    """The first decisions of a schedule, then another strategy."""

    def __init__(self, decisions: Sequence[int], then: Strategy) -> None:
        self.timeouts = then.timeouts
        self._first = ReplayStrategy(decisions)
        self._left = len(decisions)
        self._then = then

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        if self._left:
            self._left -= 1
            return self._first.choose(candidates, current)
        return self._then.choose(candidates, current)


def inevitable(
    scenario: Scenario[Result],
    failed: ExploredSchedule[Result],
    points: Sequence[Point],
    *,
    continuations: int = 12,
    seconds: float = 10.0,
) -> Moment[Result] | None:
    """The moment of `failed`, whose decisions were made at `points`; None when the budget suffices for no result.

    After a number of decisions, up to `continuations` schedules go on: the first without preemptions, others by seeds.
    `seconds` of real time are the budget.
    """
    deadline = time.monotonic() + seconds
    tried = 0

    def survivor(made: int) -> ExploredSchedule[Result] | None:
        nonlocal tried
        for number in range(continuations):
            if time.monotonic() >= deadline:
                break
            then = RandomStrategy(number, timeouts=failed.timeouts) if number else ReplayStrategy(())
            tried += 1
            schedule = explore(scenario, _Continued(failed.decisions[:made], then))
            if schedule.failure is None:
                return schedule
        return None

    rescue = survivor(0)
    if rescue is None:
        return Moment(-1, -1, continuations, tried, None) if tried == continuations else None
    possible, certain = 0, len(failed.decisions)
    while certain - possible > 1:
        middle = (possible + certain) // 2
        before = tried
        alternative = survivor(middle)
        if alternative is not None:
            possible, rescue = middle, alternative
        elif tried - before == continuations:
            certain = middle
        else:
            break
    return Moment(points[certain - 1].step, points[possible].step, continuations, tried, rescue)
