"""Controlled schedules: planted bugs are found and replayed exactly; deadlocks say who waits for what."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from dagexec.errors import DagexecError, DeadlockError
from dagexec.platform.threads import new_gate, threads
from dagexec.scheduler.exploration import (
    EarliestFirst,
    RandomStrategy,
    ReplayStrategy,
    compact,
    expand,
    explore,
    explore_seeds,
    exploring,
    systematic,
)
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies import Candidate
from dagexec.scheduler.run.pool import WorkerPool
from tests.new_threads import new_threads


def lost_update() -> int:
    """Two threads add 1 to a number that each reads under the lock and writes under the lock, but not both at once."""
    lock, number = threads().lock(), [0]

    def add() -> None:
        with lock:
            seen = number[0]
        with lock:
            number[0] = seen + 1

    started = [threads().start(add, f"adder {index}") for index in range(2)]
    for thread in started:
        thread.join()
    assert number[0] == 2, f"an update is lost: {number[0]}"
    return number[0]


def check_then_act() -> None:
    """Two threads look whether a gate is open before they pass it, which only one can."""
    gate, passed = threads().lock(), []

    def pass_if_open() -> None:
        if not gate.locked():
            assert gate.acquire(blocking=False), "somebody came between"
            passed.append(threading.current_thread().name)

    for thread in [threads().start(pass_if_open, f"passer {index}") for index in range(2)]:
        thread.join()


def locks_in_two_orders() -> None:
    """Deadlocks when each of two threads has its first lock."""
    first, second = threads().lock(), threads().lock()

    def take(one: object, other: object) -> None:
        with one, other:  # type: ignore[attr-defined]
            pass

    pair = [threads().start(lambda: take(first, second), "f"), threads().start(lambda: take(second, first), "g")]
    for thread in pair:
        thread.join()


def two_locks_in_one_order() -> str:
    """Never deadlocks."""
    first, second = threads().lock(), threads().lock()
    order = ""

    def take(name: str) -> None:
        nonlocal order
        with first, second:
            order += name

    for thread in [threads().start(partial(take, name), name) for name in "fg"]:
        thread.join()
    return order


@pytest.mark.parametrize("scenario", [lost_update, check_then_act])
def test_a_race_is_found_within_two_preemptions_and_replayed_exactly(scenario: Callable[[], object]) -> None:
    found = systematic(scenario, preemptions=2)
    assert found.failed is not None
    assert isinstance(found.failed.failure, AssertionError)
    assert not found.exhausted
    again = found.failed.replay(scenario)
    assert again.trace == found.failed.trace
    assert isinstance(again.failure, AssertionError)
    with pytest.raises(AssertionError) as caught:
        again.raise_failure()
    (note,) = caught.value.__notes__
    text = note.removeprefix("schedule: decisions ")
    repeated = explore(scenario, ReplayStrategy(expand(text)))
    assert repeated.trace == again.trace


@pytest.mark.parametrize("scenario", [lost_update, check_then_act])
def test_a_race_is_not_found_without_preemptions(scenario: Callable[[], object]) -> None:
    search = systematic(scenario, preemptions=0)
    assert search.failed is None
    assert search.exhausted


def test_a_race_is_found_by_some_seed() -> None:
    found = explore_seeds(lost_update, range(100))
    assert found.failed is not None
    assert found.failed.seed == found.tried - 1
    again = explore(lost_update, found.failed.seed)
    assert again.trace == found.failed.trace


def test_one_seed_makes_one_schedule_and_others_make_others() -> None:
    traces = [explore(two_locks_in_one_order, seed).trace for seed in range(20)]
    assert traces == [explore(two_locks_in_one_order, seed).trace for seed in range(20)]
    assert len(set(traces)) > 10
    assert {explore(two_locks_in_one_order, seed).result for seed in range(20)} == {"fg", "gf"}


def test_the_chosen_candidate_says_what_its_step_begins_with() -> None:
    """A step begins with what its thread waited for, or has just let go."""
    offered: list[tuple[Event, ...]] = []

    class Noting(RandomStrategy):
        """Notes what it is asked."""

        def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
            offered.append(tuple(candidate.event for candidate in candidates))
            return super().choose(candidates, current)

    schedule = explore(two_locks_in_one_order, Noting(3))
    chosen = [offers[number] for offers, number in zip(offered, schedule.decisions, strict=True)]
    steps = iter(schedule.trace)
    assert all(event in steps for event in chosen)
    assert {("f", "begin", ""), ("main", "start", "f"), ("main", "join", "g")} <= {step[:3] for step in schedule.trace}
    taken = [(step.thread, step.kind) for step in schedule.trace if step.resource.startswith("lock 2 ")]
    assert sorted(taken) == [(thread, kind) for thread in "fg" for kind in ("acquire", "release")]


def test_a_deadlock_is_found_and_names_both_locks_and_their_holders() -> None:
    found = systematic(locks_in_two_orders)
    assert found.failed is not None
    assert isinstance(found.failed.failure, DeadlockError)
    text = str(found.failed.failure)
    for thread, lock, holder in (("f", 2, "g"), ("g", 1, "f")):
        assert f"{thread} waits for lock {lock} (test_exploration.py:" in text
        assert f"), held by {holder}, at test_exploration.py:" in text
    assert "main waits for join f" in text
    assert str(found.failed.replay(locks_in_two_orders).failure) == text


def test_no_deadlock_is_found_where_there_is_none() -> None:
    search = systematic(two_locks_in_one_order, preemptions=2)
    assert search.exhausted
    search.raise_failure()
    assert search.tried > 20


def test_the_search_tries_each_schedule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = exploring.explore

    def noting(scenario: Callable[[], object], strategy: object, first: object) -> object:
        schedule = real(scenario, strategy)  # type: ignore[arg-type]
        seen.append(schedule.decisions)
        return schedule

    monkeypatch.setattr(exploring, "explore", noting)
    search = systematic(two_locks_in_one_order, preemptions=2)
    assert len(seen) == len(set(seen)) == search.tried


def test_more_preemptions_include_the_schedules_of_fewer() -> None:
    tried = [systematic(two_locks_in_one_order, preemptions=bound).tried for bound in range(3)]
    assert tried == sorted(set(tried))


def test_the_search_stops_at_its_limit() -> None:
    search = systematic(two_locks_in_one_order, limit=5)
    assert (search.tried, search.exhausted) == (5, False)


def test_threads_that_are_left_are_unwound_and_named() -> None:
    started = new_threads()

    def scenario() -> None:
        gate = new_gate()
        threads().start(gate.acquire, "forgotten")

    schedule = explore(scenario, 1)
    assert schedule.failure is None
    assert schedule.left == ("forgotten",)
    assert started() == 0


def test_what_a_thread_does_not_catch_ends_the_schedule() -> None:
    started = new_threads()

    def fail() -> None:
        raise ValueError("on purpose")

    def scenario() -> None:
        threads().start(fail, "failing")
        new_gate().acquire()

    schedule = explore(scenario, 1)
    assert str(schedule.failure) == "on purpose"
    assert started() == 0
    with pytest.raises(ValueError, match="on purpose"):
        schedule.raise_failure()


def test_a_deadline_passes_in_virtual_time_only_when_nothing_else_can_go_on() -> None:
    def scenario() -> tuple[bool, float, bool]:
        gate, other = new_gate(), new_gate()
        threads().start(gate.release, "opener")
        opened = gate.acquire(timeout=3600)
        start = threads().monotonic()
        closed = other.acquire(timeout=3600)
        return opened, threads().monotonic() - start, closed

    for seed in range(10):
        schedule = explore(scenario, seed)
        schedule.raise_failure()
        assert schedule.result == (True, 3600.0, False)


def test_a_deadline_may_pass_at_any_time_if_the_strategy_says_so() -> None:
    def scenario() -> bool:
        gate = new_gate()
        threads().start(gate.release, "opener").join()
        other = new_gate()
        threads().start(other.release, "other opener")
        return other.acquire(timeout=1)

    results = set()
    for seed in range(20):
        schedule = explore(scenario, RandomStrategy(seed, timeouts=True))
        schedule.raise_failure()
        results.add(schedule.result)
        assert schedule.replay(scenario).trace == schedule.trace
    assert results == {True, False}


def test_timers_call_in_order_of_their_deadlines_unless_cancelled() -> None:
    def scenario() -> list[tuple[str, float]]:
        called: list[tuple[str, float]] = []
        gate = new_gate()

        def note(name: str) -> None:
            called.append((name, threads().monotonic()))

        def last() -> None:
            note("last")
            gate.release()

        threads().call_later(9, last)
        cancelled = threads().call_later(1, lambda: note("cancelled"))
        threads().call_later(2, lambda: note("first"))
        cancelled.cancel()
        gate.acquire()
        return called

    for strategy in (0, 1, EarliestFirst()):
        schedule = explore(scenario, strategy)
        schedule.raise_failure()
        assert schedule.result == [("first", 2.0), ("last", 9.0)]
        assert schedule.seconds == 9.0


def test_a_lock_carries_the_time_of_who_lets_it_go_to_who_takes_it() -> None:
    def scenario() -> float:
        gate = new_gate()

        def later() -> None:
            new_gate().acquire(timeout=5)
            gate.release()

        threads().start(later, "later")
        gate.acquire()
        return threads().monotonic()

    for strategy in (0, 1, EarliestFirst()):
        schedule = explore(scenario, strategy)
        schedule.raise_failure()
        assert schedule.result == 5.0


def test_an_owned_lock_is_released_by_its_holder_only() -> None:
    def scenario() -> None:
        lock = threads().owned_lock()
        with pytest.raises(RuntimeError, match="unlocked"):
            lock.release()
        lock.acquire()

        def take_it_away() -> None:
            with pytest.raises(RuntimeError, match="un-acquired"):
                lock.release()

        threads().start(take_it_away, "other").join()
        lock.release()

    explore(scenario, 0).raise_failure()


def test_a_thread_from_outside_is_told_how_to_start_threads() -> None:
    def scenario() -> None:
        lock = threads().lock()
        errors: list[BaseException] = []

        def use() -> None:
            try:
                lock.acquire()
            except DagexecError as error:
                errors.append(error)

        outsider = threading.Thread(target=use)
        outsider.start()
        outsider.join()
        raise errors[0]

    failure = explore(scenario, 0).failure
    assert isinstance(failure, DagexecError)
    assert "is not one of its threads: start threads with" in str(failure)


@pytest.mark.parametrize("fewer", [1, 2])
def test_a_scenario_that_depends_on_more_than_its_schedule_cannot_be_replayed(fewer: int) -> None:
    calls = []

    def scenario() -> None:
        calls.append(1)
        count = 3 if len(calls) == 1 else fewer
        for thread in [threads().start(lambda: None, f"t{index}") for index in range(count)]:
            thread.join()

    schedule = explore(scenario, ReplayStrategy([0, 0, 3, 2]))
    with pytest.raises(DagexecError, match="depends on something other than its schedule"):
        schedule.replay(scenario)


def test_a_thread_that_waits_for_something_else_is_reported_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploring, "PATIENCE", 0.05)
    uncontrolled = threading.Event()
    with pytest.raises(DeadlockError, match=r"no decision point for 0.05 s: main, at test_exploration"):
        explore(lambda: uncontrolled.wait(), 0)
    uncontrolled.set()


@pytest.mark.parametrize("decisions", [[], [0, 0], [0, 2, 0, 1], [3]])
def test_decisions_as_text_are_read_back(decisions: list[int]) -> None:
    while decisions and not decisions[-1]:
        decisions.pop()
    assert expand(compact(decisions)) == decisions


@pytest.mark.parametrize("text", ["1", "a:b", "2:1,1:1", "1:"])
def test_text_that_is_no_decisions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NUMBER:CHOICE"):
        expand(text)


@pytest.mark.slow
def test_what_a_failed_schedule_made_is_garbage_once_nobody_has_its_failure() -> None:
    """A pool that is never closed stays known to its finalizer, and knows the source of its threads."""
    made: list[weakref.ref[object]] = []

    class Owner:
        """Holds a pool."""

        def __init__(self) -> None:
            pool = WorkerPool(1)
            weakref.finalize(self, pool.close)

    def scenario() -> None:
        owner = Owner()
        made.append(weakref.ref(owner))
        raise ValueError("on purpose")

    schedule = explore(scenario, 0)
    assert str(schedule.failure) == "on purpose"
    del schedule
    gc.collect()
    assert made[0]() is None
