"""Strategies that sample: their choices follow from the seed, and their distributions are those of their papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb

import pytest

from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import ControlledThreads, Sampling, Strategy, explore, explore_seeds, sampling
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies import SelectivelyUniformWalk
from tests.scheduler.exploration.test_exploration import check_then_act, locks_in_two_orders, lost_update

NAMES: tuple[Sampling, ...] = ("portfolio", "surw", "pos", "pct", "random")


def one_short_and_one_long(length: int) -> Callable[[], int]:
    """How many of the long thread's sections came before the one of the short thread."""

    def scenario() -> int:
        lock, order = threads().lock(), list[str]()

        def sections(name: str, count: int) -> None:
            for _ in range(count):
                with lock:
                    order.append(name)

        pair = [threads().start(lambda: sections("short", 1), "s"), threads().start(lambda: sections("l", length), "l")]
        for thread in pair:
            thread.join()
        return order.index("short")

    return scenario


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scenario", [lost_update, check_then_act, locks_in_two_orders])
def test_each_strategy_finds_small_races_and_its_seed_repeats_them(
    name: Sampling, scenario: Callable[[], object]
) -> None:
    found = explore_seeds(scenario, range(200), strategy=name)
    assert found.failed is not None
    assert found.failed.seed is not None
    again = explore(scenario, sampling(name, found.failed.seed))
    assert (again.trace, again.decisions, again.strategy) == (
        found.failed.trace,
        found.failed.decisions,
        found.failed.strategy,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_deadline_that_may_pass_at_any_time_is_sampled_too(name: Sampling) -> None:
    def scenario() -> bool:
        gate = threads().lock()
        gate.acquire()
        threads().start(gate.release, "opener")
        return gate.acquire(timeout=1)

    results = {explore(scenario, sampling(name, seed, timeouts=True)).result for seed in range(60)}
    assert results == {True, False}


def test_a_name_of_no_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="expected portfolio, random, pos, surw, pct for a strategy, found 'best'"):
        sampling("best", 0)  # type: ignore[arg-type]


def test_the_portfolio_gives_each_strategy_its_turn() -> None:
    found = explore_seeds(lambda: None, range(10))
    assert dict(found.by_strategy) == {"random": 3, "pos": 3, "surw": 2, "pct": 2}


@pytest.mark.slow
def test_surw_meets_all_places_of_a_short_thread_alike_and_the_random_walk_does_not() -> None:
    """A random walk delays the short thread past all ten sections of the long one in 2^-10 of the schedules."""
    length, count = 10, 400
    scenario = one_short_and_one_long(length)
    places = {
        name: Counter(explore(scenario, sampling(name, seed)).result for seed in range(count))
        for name in ("surw", "random")
    }
    assert places["random"][length] < count * comb(length, 0) / 2**5
    uniform = count / (length + 1)
    assert min(places["surw"][place] for place in range(length + 1)) > uniform / 4


def test_surw_counts_what_a_thread_will_start() -> None:
    """The weights of main and its two children: 2, then 4 and 6."""
    trace = [Event("main", "acquire", "lock")] * 2
    trace += [Event("main", "start", name) for name in ("a", "b")]
    trace += [Event("a", "acquire", "lock")] * 4 + [Event("b", "acquire", "lock")] * 6
    strategy = SelectivelyUniformWalk(0)
    strategy.learn(trace)
    assert strategy._weight("main") == 12
    strategy.took(Event("a", "begin"))
    assert strategy._weight("main") == 8


def test_a_thread_that_waits_in_a_loop_does_not_go_on_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under priorities it would never let the other one open what it waits for."""
    monkeypatch.setattr("dagexec.scheduler.exploration.controlled.MAX_STEPS", 5000)

    def scenario() -> None:
        opened = []
        threads().start(lambda: opened.append(True), "opener")
        while not opened:
            threads().point("look again")

    for name in NAMES:
        explore_seeds(scenario, range(8), strategy=name).raise_failure()


def test_strategies_are_told_of_every_step() -> None:
    class Noting(Strategy):
        """Notes the steps."""

        def __init__(self) -> None:
            self.steps: list[Event] = []

        def choose(self, candidates: Sequence[object], current: bool) -> int:
            return 0

        def took(self, event: Event) -> None:
            self.steps.append(event)

    strategy = Noting()
    schedule = explore(lost_update, strategy)
    assert tuple(strategy.steps) == schedule.trace
    assert len(schedule.decisions) < len(schedule.trace)
    assert not ControlledThreads(strategy).trace
