"""Of several runs on one pool the one of the highest priority goes on, from the next chain boundary."""

import os
import threading
from collections.abc import Callable

from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import task
from tests.scheduler.run.test_pool import PATIENCE, run_of


class Held:
    """A step that waits until it is let go, and a note of when it has begun."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)


def noting(order: list[str], name: str) -> Callable[[], None]:
    return lambda: order.append(name)


def test_the_waiting_run_of_the_highest_priority_is_served_first_and_of_equal_ones_the_oldest() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(5)]
    with WorkerPool(1) as pool:
        pool.submit(run_of([[]], {0: held}, done[0]))
        assert held.begun.wait(PATIENCE)
        for event, (name, priority) in zip(done[1:], [("a", 0), ("b", 2), ("c", -1), ("d", 2)], strict=True):
            run = run_of([[], []], dict.fromkeys((0, 1), noting(order, name)), event)
            run.priority = priority
            pool.submit(run)
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["b", "b", "d", "d", "a", "a", "c", "c"]


def test_a_run_is_left_for_one_of_higher_priority_at_the_end_of_the_chain_and_goes_on_after_it() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(2)]
    with WorkerPool(1) as pool:
        low = run_of([[], [0], [0], [1, 2]], {0: held} | {i: noting(order, f"low {i}") for i in (1, 2, 3)}, done[0])
        pool.submit(low)
        assert held.begun.wait(PATIENCE)
        high = run_of([[], [0]], {i: noting(order, f"high {i}") for i in (0, 1)}, done[1])
        high.priority = 1
        pool.submit(high)
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["high 0", "high 1", "low 1", "low 2", "low 3"]
    for run in (low, high):
        run.check_complete()
        run.raise_error()


def test_a_run_is_not_left_for_one_of_equal_priority() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(2)]
    with WorkerPool(1) as pool:
        first = run_of([[], [0], [0]], {0: held, 1: noting(order, "first"), 2: noting(order, "first")}, done[0])
        second = run_of([[]], {0: noting(order, "second")}, done[1])
        first.priority = second.priority = 3
        pool.submit(first)
        assert held.begun.wait(PATIENCE)
        pool.submit(second)
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["first", "first", "second"]


def test_a_run_that_gets_more_ready_chains_calls_workers_from_runs_of_lower_priority() -> None:
    """The low run holds a worker; the high one has one chain at first, and two once that is done."""
    order: list[str] = []
    low_held, high_held, done = Held(), Held(), [threading.Event() for _ in range(2)]
    meeting = threading.Barrier(2)
    with WorkerPool(2) as pool:
        low = run_of([[], [0]], {0: low_held, 1: noting(order, "low")}, done[0])
        high = run_of([[], [0], [0]], {0: high_held} | {i: lambda: meeting.wait(PATIENCE) for i in (1, 2)}, done[1])
        high.priority = 1
        high.finished = lambda: (order.append("high"), done[1].set())  # type: ignore[func-returns-value]
        pool.submit(low)
        pool.submit(high)
        assert low_held.begun.wait(PATIENCE)
        assert high_held.begun.wait(PATIENCE)
        high_held.go_on.set()
        while pool.statistics().chains_waiting != 1:  # the second chain waits for the other worker
            os.sched_yield()
        low_held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert sorted(order) == ["high", "low"]


def test_a_stopped_run_does_not_go_on_because_another_had_to_go_first() -> None:
    held, done = Held(), [threading.Event() for _ in range(2)]
    ran: list[str] = []
    with WorkerPool(1) as pool:
        low = run_of([[], [0]], {0: held, 1: noting(ran, "low")}, done[0])
        pool.submit(low)
        assert held.begun.wait(PATIENCE)
        urgent = task("urgent", noting(ran, "urgent"), priority=1)
        urgent.finished = done[1].set
        pool.submit(urgent)
        pool.stop(low, RuntimeError("enough"))
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert ran == ["urgent"]
    assert str(low.error) == "enough"


def test_users_of_a_pool_take_turns_however_many_runs_each_has_submitted() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(9)]
    many, few = Share("many"), Share("few")
    for share in (many, few):
        share.charge(1.0, 0.0)  # a run of either is expected to take a second
    with WorkerPool(1) as pool:
        pool.submit(run_of([[]], {0: held}, done[0]))
        assert held.begun.wait(PATIENCE)
        for event, share in zip(done[1:], [many] * 6 + [few] * 2, strict=True):
            run = run_of([[]], {0: noting(order, share.name)}, event)
            run.share = share
            pool.submit(run)
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["many", "few", "many", "few", "many", "many", "many", "many"]
    assert (many.runs, few.runs) == (6, 2)


def test_priority_goes_before_shares() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(4)]
    spent, new = Share("spent"), Share("new")
    spent.charge(9.0, 0.0)
    with WorkerPool(1) as pool:
        pool.submit(run_of([[]], {0: held}, done[0]))
        assert held.begun.wait(PATIENCE)
        for event, share, priority in zip(done[1:], (spent, new, spent), (0, 0, 1), strict=True):
            run = run_of([[]], {0: noting(order, f"{share.name} {priority}")}, event)
            run.share, run.priority = share, priority
            pool.submit(run)
        held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["spent 1", "new 0", "spent 0"]
