"""A failing schedule shrinks to the fewest preemptions, and the moment is found from which it could only fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from dagexec.errors import DagexecError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import (
    ExploredSchedule,
    RandomStrategy,
    ReplayStrategy,
    explore,
    explore_seeds,
    systematic,
)
from dagexec.scheduler.exploration.deviations import ByName, Deviation, Noting
from dagexec.scheduler.exploration.fewest import fewest_preemptions
from dagexec.scheduler.exploration.inevitable import inevitable
from tests.scheduler.exploration.test_exploration import check_then_act, locks_in_two_orders, lost_update
from tests.scheduler.exploration.test_exploration_device import CROSS, WithoutWaits, device_scenario
from tests.scheduler.exploration.test_exploration_pool import LateLookPool, TwoStepPool, stop_scenario
from tests.scheduler.scenarios import DIAMOND, pool_scenario


def failing(scenario: Callable[[], object], seeds: int) -> Iterator[ExploredSchedule[object]]:
    """The failing schedules of some seeds."""
    return (one for one in (explore(scenario, seed) for seed in range(seeds)) if one.failure is not None)


@pytest.mark.parametrize(
    "scenario", [lost_update, check_then_act, pytest.param(locks_in_two_orders, marks=pytest.mark.slow)]
)
def test_every_failing_schedule_of_a_race_shrinks_to_its_one_preemption(scenario: Callable[[], object]) -> None:
    assert systematic(scenario, preemptions=0).failed is None
    for failed in itertools.islice(failing(scenario, 100), 5):
        shrunk = fewest_preemptions(scenario, failed)
        assert (shrunk.preemptions, shrunk.fewest) == (1, True)
        assert type(shrunk.schedule.failure) is type(failed.failure)
        assert shrunk.schedule.replay(scenario).trace == shrunk.schedule.trace
        assert len(shrunk.deviations) == sum(map(bool, shrunk.schedule.decisions)) <= 2  # which adder begins is free


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "preemptions"),
    [
        (stop_scenario(LateLookPool, [[]]), 4),
        (pool_scenario(DIAMOND, 2, TwoStepPool), 1),
        (device_scenario(CROSS, net_class=WithoutWaits), 1),
    ],
)
def test_dozens_of_deviations_shrink_to_as_few_preemptions_as_any_schedule_needs(
    scenario: Callable[[], object], preemptions: int
) -> None:
    failed = explore_seeds(scenario, range(2000)).failed
    assert failed is not None
    assert sum(map(bool, failed.decisions)) > 2 * preemptions
    shrunk = fewest_preemptions(scenario, failed, seconds=100)
    assert (shrunk.preemptions, shrunk.fewest) == (preemptions, True)
    fewer = systematic(scenario, preemptions=preemptions - 1)
    assert fewer.exhausted
    assert shrunk.schedule.replay(scenario).trace == shrunk.schedule.trace


def test_a_small_budget_gives_a_schedule_that_fails_and_replays() -> None:
    scenario = pool_scenario(DIAMOND, 2, TwoStepPool)
    failed = next(failing(scenario, 200))
    shrunk = fewest_preemptions(scenario, failed, most=4)
    assert shrunk.tried == 4
    assert not shrunk.fewest
    assert str(shrunk.schedule.replay(scenario).failure) == str(failed.failure)


def test_what_does_not_fail_again_is_not_shrunk() -> None:
    runs = itertools.count()

    def scenario() -> None:
        assert next(runs), "only the first time"

    with pytest.raises(DagexecError, match="does not fail again: expected AssertionError, found None"):
        fewest_preemptions(scenario, explore(scenario))


def test_deviations_make_the_same_schedule_and_hold_where_others_are_left_out() -> None:
    for failed in itertools.islice(failing(lost_update, 100), 5):
        notes = Noting(ReplayStrategy(failed.decisions))
        explore(lost_update, notes)
        assert explore(lost_update, ByName(notes.deviations)).decisions == failed.decisions
    nowhere = [Deviation("adder 0", 99, "main"), Deviation("main", 1, "nobody")]
    assert explore(lost_update, ByName(nowhere)).trace == explore(lost_update, ReplayStrategy(())).trace


def test_a_preemption_is_a_switch_from_a_thread_that_could_go_on() -> None:
    for seed in range(20):
        notes = Noting(RandomStrategy(seed))
        trace = explore(lost_update, notes).trace
        for point in notes.points:
            before = trace[point.step - 1].thread if point.step else "main"
            assert point.thread == before
            could = point.candidates[0] == before
            assert point.preempts == (could and trace[point.step].thread != before)


def test_threads_of_one_name_are_told_apart() -> None:
    def scenario() -> None:
        for thread in [threads().start(lambda: None, "twin") for _ in range(2)]:
            thread.join()

    assert {event.thread for event in explore(scenario).trace} == {"main", "twin", "twin (2)"}


def continuations(scenario: Callable[[], object], made: tuple[int, ...]) -> Iterator[ExploredSchedule[object]]:
    """All schedules that begin with these decisions."""
    schedule = explore(scenario, ReplayStrategy(made))
    yield schedule
    for number in range(len(made), len(schedule.choices)):
        for choice in range(1, schedule.choices[number]):
            yield from continuations(scenario, (*schedule.decisions[:number], choice))


@pytest.mark.parametrize("scenario", [check_then_act, locks_in_two_orders])
def test_after_the_inevitable_moment_every_schedule_fails_and_before_it_some_does_not(
    scenario: Callable[[], object],
) -> None:
    failed = next(failing(scenario, 100))
    shrunk = fewest_preemptions(scenario, failed)
    moment = inevitable(scenario, shrunk.schedule, shrunk.points)
    assert moment is not None
    assert moment.possible_until == moment.step
    made = [point.step for point in shrunk.points].index(moment.step)
    decisions = shrunk.schedule.decisions
    assert all(one.failure is not None for one in continuations(scenario, decisions[: made + 1]))
    assert any(one.failure is None for one in continuations(scenario, decisions[:made]))
    assert moment.rescue is not None
    assert moment.rescue.failure is None
    assert moment.rescue.decisions[:made] == decisions[:made]


def test_the_read_of_the_second_thread_dooms_an_update() -> None:
    shrunk = fewest_preemptions(lost_update, next(failing(lost_update, 100)))
    moment = inevitable(lost_update, shrunk.schedule, shrunk.points)
    assert moment is not None
    event = shrunk.schedule.trace[moment.step]
    assert (event.thread, event.kind) == (shrunk.deviations[0].to, "acquire")


def test_what_fails_whatever_is_decided_was_lost_from_the_start() -> None:
    def scenario() -> None:
        threads().start(lambda: None, "other").join()
        raise ValueError("on purpose")

    shrunk = fewest_preemptions(scenario, explore(scenario, 1))
    moment = inevitable(scenario, shrunk.schedule, shrunk.points, continuations=5)
    assert moment is not None
    assert (moment.step, moment.continuations, moment.tried, moment.rescue) == (-1, 5, 5, None)


def test_without_time_no_moment_is_claimed() -> None:
    shrunk = fewest_preemptions(lost_update, next(failing(lost_update, 100)))
    assert inevitable(lost_update, shrunk.schedule, shrunk.points, seconds=0) is None
