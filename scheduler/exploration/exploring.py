"""Running a scenario under controlled schedules: one, many from seeds, or all with few preemptions.

A *scenario* is a function that makes what it needs (pools, nets, executors), uses it, and returns something or raises.
It must behave the same whenever the same decisions are made: no real time, no randomness without a seed, no threads
but those of `dagexec.platform.threads`.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice, pairwise
from typing import Generic, TypeVar

from dagexec.errors import DagexecError, DeadlockError
from dagexec.platform.records import dataclass
from dagexec.platform.threads import installed, threads
from dagexec.scheduler.exploration.controlled import ControlledThreads
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.notes import Notes
from dagexec.scheduler.exploration.strategies import (
    BoundedSearch,
    RandomStrategy,
    ReplayStrategy,
    Sampling,
    Strategy,
    sampling,
)
from dagexec.scheduler.exploration.strategies.reduction import BEGIN, CutError, Reduction
from dagexec.scheduler.exploration.watching import watched_by, watching

Result = TypeVar("Result")
Scenario = Callable[[], Result]

PATIENCE = 60.0
"""Seconds of real time in which a thread has to come to a decision point."""

_COLLECT_EVERY = 200


@dataclass(frozen=True)
class ExploredSchedule(Generic[Result]):
    """The outcome of a scenario under one schedule.

    Attributes:
        decisions: the candidate chosen wherever there were several; they repeat the schedule.
        choices: how many candidates there were.
        trace: the steps, by thread and action.
        result: what the scenario returned; None when it did not.
        failure: what it or another thread raised, or DeadlockError; None when all went well.
        left: threads that had not ended when the scenario had; they were unwound.
        strategy: the name of the strategy.
        seed: of the strategy; None for those without.
        timeouts: whether deadlines could pass although something else could go on.
        seconds: virtual time at the end of the scenario.
    """

    decisions: tuple[int, ...]
    choices: tuple[int, ...]
    trace: tuple[Event, ...] = field(repr=False)
    result: Result | None
    failure: BaseException | None
    left: tuple[str, ...]
    strategy: str
    seed: int | None
    timeouts: bool
    seconds: float

    def replay(self, scenario: Scenario[Result]) -> ExploredSchedule[Result]:
        """`scenario` under the same decisions. Raises DagexecError when it comes to others."""
        again = explore(scenario, ReplayStrategy(self.decisions, self.choices, timeouts=self.timeouts))
        if (again.decisions, again.choices) != (self.decisions, self.choices):
            raise DagexecError(
                f"the schedule cannot be replayed: it has {len(again.decisions)} decisions and had "
                f"{len(self.decisions)}; the scenario depends on something other than its schedule"
            ) from again.failure
        return again

    def raise_failure(self) -> None:
        """Raise the failure, if there is one, with a note that says how to repeat it."""
        if self.failure is not None:
            self.failure.add_note(self.how_to_repeat())
            raise self.failure

    def how_to_repeat(self) -> str:
        """The seed if there is one, and the decisions other than 0 by their number."""
        seed = "" if self.seed is None else f"seed {self.seed} of {self.strategy}, "
        return f"schedule: {seed}decisions {compact(self.decisions) or 'all 0'}"


@dataclass(frozen=True)
class Exploration(Generic[Result]):
    """The outcome of a scenario under many schedules.

    Attributes:
        tried: how many.
        exhausted: it was a search, and no schedule within its bounds is left.
        failed: the first schedule that failed; None when none did.
        steps: in all schedules together.
        seconds: of real time.
        different: how many schedules differed from all before.
        handovers: after each schedule, how many distinct handovers, pairs of a step of one thread and the next step of
            another, had occurred. Where this number stops growing, further schedules show little that is new.
        by_strategy: the number of schedules of each strategy.
        cut: further schedules that a search gave up, as the rest of them had been tried.
        new_by_strategy: for each strategy, how many handovers occurred first under it.
    """

    tried: int
    exhausted: bool
    failed: ExploredSchedule[Result] | None
    steps: int
    seconds: float
    different: int
    handovers: tuple[int, ...] = field(repr=False)
    by_strategy: Mapping[str, int]
    new_by_strategy: Mapping[str, int]
    cut: int = 0

    def raise_failure(self) -> None:
        """Raise what the first failing schedule raised."""
        if self.failed is not None:
            self.failed.raise_failure()


def explore(
    scenario: Scenario[Result],
    strategy: Strategy | int = 0,
    first: Sequence[Event] | None = None,
    notes: Notes | None = None,
) -> ExploredSchedule[Result]:
    """Run `scenario` once, in a world of its own; an integer is a seed of the portfolio.

    Some strategies estimate from the trace of a `first` schedule; without one, it is run before. `notes`, if there are
    any, take down what happens.

    Raises DeadlockError (rather than return it) when a thread reaches no decision point for `PATIENCE` seconds of real
    time: it waits for something that is not under control.
    """
    if isinstance(strategy, int):
        strategy = sampling("portfolio", strategy)
    if strategy.estimates:
        strategy.learn(first_trace(scenario, strategy) if first is None else first)
    world = ControlledThreads(strategy, notes)
    outcome: list[Result] = []
    seconds = [0.0]

    def body() -> None:
        outcome.append(scenario())
        seconds[0] = threads().monotonic()

    collecting = gc.isenabled()
    gc.disable()  # finalizers would come at times that no seed decides
    try:
        with installed(world), watched_by(strategy.watch):
            world.begin(body)
            try:
                _wait_for_end(world)
            finally:
                world.finish(PATIENCE)
    finally:
        if collecting:
            gc.enable()
    failure = world.failure
    world.let_go()
    return ExploredSchedule(
        decisions=tuple(world.decisions),
        choices=tuple(world.choices),
        trace=tuple(world.trace),
        result=outcome[0] if outcome else None,
        failure=failure,
        left=world.left,
        strategy=strategy.name,
        seed=strategy.seed,
        timeouts=strategy.timeouts,
        seconds=seconds[0],
    )


def first_trace(scenario: Scenario[Result], strategy: Strategy) -> Sequence[Event]:
    """The trace of some schedule, for strategies that estimate."""
    return explore(scenario, RandomStrategy(0, timeouts=strategy.timeouts)).trace


def explore_seeds(
    scenario: Scenario[Result], seeds: Iterable[int], *, strategy: Sampling = "portfolio", timeouts: bool = False
) -> Exploration[Result]:
    """Run `scenario` once for each seed, up to the first failure. Raises ValueError for a strategy of no such name."""
    return explore_all(scenario, (sampling(strategy, seed, timeouts=timeouts) for seed in seeds))


def systematic(
    scenario: Scenario[Result], preemptions: int = 2, limit: int = 10_000, *, timeouts: bool = False
) -> Exploration[Result]:
    """Run `scenario` under every schedule of at most `preemptions` preemptions, but no more than `limit` of them.

    Stops at the first failure. Raises ValueError for a negative bound.
    """
    search = BoundedSearch(preemptions, timeouts=timeouts)

    def strategies() -> Iterable[Strategy]:
        for _ in range(limit):
            yield search
            if not search.advance():
                return

    exploration = explore_all(scenario, strategies())
    return replace(exploration, exhausted=search.exhausted and exploration.failed is None)


def reduction(
    scenario: Scenario[Result], limit: int = 10_000, *, race_free: bool = False, timeouts: bool = False
) -> Exploration[Result]:
    """Run `scenario` under every schedule, but only one of those that differ in the order of independent steps.

    All that is not watched (see `watching`) counts as one thing, over which any two steps that use it conflict. With
    `race_free` locks are taken to guard it: two steps conflict over it only if they hold a lock in common. At most
    `limit` schedules are begun. Stops at the first failure.
    """
    tree = Reduction(race_free=race_free, timeouts=timeouts)
    with watching():
        exploration = explore_all(scenario, islice(tree.strategies(), limit))
    return replace(exploration, exhausted=tree.exhausted and exploration.failed is None)


def search_begins() -> None:
    """Marks where the search of `reduction` begins; what a scenario does before, as starting threads, has one order.

    Elsewhere it does nothing.
    """
    threads().point(BEGIN)


def explore_all(scenario: Scenario[Result], strategies: Iterable[Strategy]) -> Exploration[Result]:
    """Run `scenario` once for each of `strategies`, up to the first failure."""
    start = time.perf_counter()
    steps = 0
    failed = None
    different: set[int] = set()
    met: set[tuple[object, object]] = set()
    cut = 0
    handovers: list[int] = []
    tried: Counter[str] = Counter()
    new: Counter[str] = Counter()
    first: Sequence[Event] | None = None
    for strategy in strategies:
        if first is None and strategy.estimates:
            first = first_trace(scenario, strategy)
        schedule = explore(scenario, strategy, first)
        steps += len(schedule.trace)
        if isinstance(schedule.failure, CutError):
            cut += 1
            continue
        different.add(hash(schedule.decisions))
        met.update((step[:3], next_[:3]) for step, next_ in pairwise(schedule.trace) if step.thread != next_.thread)
        tried[strategy.name] += 1
        new[strategy.name] += len(met) - (handovers[-1] if handovers else 0)
        handovers.append(len(met))
        if schedule.failure is not None:
            failed = schedule
            break
        if len(handovers) % _COLLECT_EVERY == 0:
            gc.collect()
    seconds = time.perf_counter() - start
    return Exploration(len(handovers), False, failed, steps, seconds, len(different), tuple(handovers), tried, new, cut)


def compact(decisions: Iterable[int]) -> str:
    """Decisions as text: `number:choice` for those that are not 0, separated by commas."""
    return ",".join(f"{number}:{choice}" for number, choice in enumerate(decisions) if choice)


def expand(text: str) -> list[int]:
    """The decisions of a text made by `compact`. Raises ValueError for any other text."""
    decisions: list[int] = []
    for part in filter(None, text.split(",")):
        number, _, choice = part.partition(":")
        if not (number.isdecimal() and choice.isdecimal()) or int(number) < len(decisions):
            raise ValueError(f"{part!r} is not NUMBER:CHOICE with a number above those before it")
        decisions += [0] * (int(number) - len(decisions)) + [int(choice)]
    return decisions


def _wait_for_end(world: ControlledThreads) -> None:
    """Wait until the schedule has ended, as long as it makes steps."""
    steps = -1
    while not world.over.acquire(timeout=PATIENCE):
        if len(world.trace) == steps:
            raise DeadlockError(
                f"no decision point for {PATIENCE:g} s: {world.stuck()}; it is computing, or waiting for something "
                "that the schedule does not control"
            )
        steps = len(world.trace)
