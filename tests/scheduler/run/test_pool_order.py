"""Which chain a worker takes, whom it wakes and for whom it leaves: each by an interleaving that is forced."""

import os
import threading
from functools import partial

import pytest

from dagexec.errors import WorkerLostError
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.worker import Worker
from tests.scheduler.run.test_pool import PATIENCE, run_of
from tests.scheduler.run.test_pool_failures import runs_well
from tests.scheduler.run.test_pool_priority import Held, noting


def order_on_one_worker(parents: list[list[int]]) -> list[int]:
    """The operators of a run as one worker runs them."""
    order: list[int] = []
    done = threading.Event()
    with WorkerPool(1) as pool:
        pool.submit(run_of(parents, {index: partial(order.append, index) for index in range(len(parents))}, done))
        assert done.wait(PATIENCE)
    return order


def all_idle(pool: WorkerPool) -> None:
    """Wait until every worker is."""
    while pool.statistics().idle != pool.num_workers:
        os.sched_yield()


def test_a_worker_goes_on_with_the_most_urgent_ready_chain_and_not_with_its_own_child() -> None:
    """0 -> 1 beside 2 -> 3 -> 4: after 2, operator 0 is as far from the end as 3 and comes first in the list."""
    assert order_on_one_worker([[], [0], [], [2], [3]]) == [2, 0, 3, 1, 4]


def test_a_worker_takes_waiting_chains_the_most_urgent_first() -> None:
    """Of four paths to the end, operators that only one path leaves are ready at once."""
    assert order_on_one_worker([[], [], [], []]) == [0, 1, 2, 3]
    assert order_on_one_worker([[], [], [0, 1], [0, 1], [2]]) == [0, 1, 2, 3, 4]
    assert order_on_one_worker([[], [0], [0], [0], [3]]) == [0, 3, 1, 2, 4]


def test_no_more_workers_enter_a_run_than_it_has_places() -> None:
    order: list[str] = []
    held, done = Held(), [threading.Event() for _ in range(2)]
    with WorkerPool(2) as pool:
        narrow = run_of([[], [], [0]], {0: held} | {i: noting(order, "narrow") for i in (1, 2)}, done[0])
        narrow.width = 1
        pool.submit(narrow)
        assert held.begun.wait(PATIENCE)
        pool.submit(run_of([[]], {0: noting(order, "other")}, done[1]))
        assert done[1].wait(PATIENCE)
        held.go_on.set()
        assert done[0].wait(PATIENCE)
    assert order == ["other", "narrow", "narrow"]


def test_a_pool_grows() -> None:
    with WorkerPool(1, most=3) as pool:
        for count in (3, 2):
            pool.grow(count)
            assert (pool.num_workers, pool.statistics().workers) == (3, 3)
        all_idle(pool)


def test_a_worker_that_nobody_woke_because_its_waker_died_is_woken_by_the_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wake, main = Worker.wake, threading.current_thread()

    def die_instead(worker: Worker) -> None:
        """The first worker that wakes another one dies after it took that one from the idle list."""
        if threading.current_thread() is main:
            wake(worker)
        else:
            monkeypatch.setattr(Worker, "wake", wake)
            raise SystemExit

    with WorkerPool(2) as pool:
        all_idle(pool)
        monkeypatch.setattr(Worker, "wake", die_instead)
        done = threading.Event()
        run = run_of([[], []], {}, done)
        pool.submit(run)
        assert done.wait(PATIENCE)
        with pytest.raises(WorkerLostError):
            run.raise_error()
        assert pool.statistics().replaced == 1
        assert runs_well(pool)


@pytest.mark.unrecorded
def test_a_worker_that_is_woken_is_not_woken_again_in_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker wakes a helper for its first spare chain and one for the second; neither gets up in between."""
    wake, main = Worker.wake, threading.current_thread()
    woken: list[Worker] = []

    def note(worker: Worker, **_options: bool) -> None:
        wake(worker) if threading.current_thread() is main else woken.append(worker)

    with WorkerPool(3) as pool:
        all_idle(pool)
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "wake", note)
            done = threading.Event()
            pool.submit(run_of([[], [0], [0], [0]], {}, done))
            assert done.wait(PATIENCE)
        assert len(woken) == 2
        assert woken[0] is not woken[1]
        for worker in woken:
            worker.wake()
        assert runs_well(pool)


@pytest.mark.parametrize("busy", [False, True], ids=["an idle worker", "a worker that is busy meanwhile"])
def test_a_run_is_found_again_when_it_has_ready_chains_after_it_had_none(busy: bool) -> None:
    """Its two last chains wait for each other. The other worker has looked at it while no chain of it was ready."""
    root, beside = Held(), Held()
    meeting, met = threading.Barrier(2), threading.Event()
    done = [threading.Event() for _ in range(2)]

    def meet() -> None:
        met.set()
        meeting.wait(PATIENCE)

    with WorkerPool(2) as pool:
        run = run_of([[], [0], [0]], {0: root} | dict.fromkeys((1, 2), meet), done[0])
        pool.submit(run)
        assert root.begun.wait(PATIENCE)
        pool.submit(run_of([[]], {0: beside}, done[1]))
        assert beside.begun.wait(PATIENCE)
        assert not run.listed
        if busy:
            root.go_on.set()
            assert met.wait(PATIENCE)
            beside.go_on.set()
        else:
            beside.go_on.set()
            while not pool.statistics().idle:
                os.sched_yield()
            root.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    run.raise_error()


def test_a_run_that_was_to_give_way_does_not_for_an_older_one_of_its_priority() -> None:
    """The urgent run has been taken by another worker when the younger run's worker looks up."""
    order: list[str] = []
    old_held, young_held, urgent_held = Held(), Held(), Held()
    done = [threading.Event() for _ in range(3)]
    with WorkerPool(2) as pool:
        old = run_of([[], [0]], {0: old_held, 1: noting(order, "old")}, done[0])
        young = run_of([[], [0]], {0: young_held, 1: noting(order, "young")}, done[1])
        urgent = run_of([[]], {0: urgent_held}, done[2])
        urgent.priority = 1
        for run, held in ((old, old_held), (young, young_held)):
            pool.submit(run)
            assert held.begun.wait(PATIENCE)
        pool.submit(urgent)
        old_held.go_on.set()  # its worker leaves it for the urgent run; the old run waits again
        assert urgent_held.begun.wait(PATIENCE)
        young_held.go_on.set()
        assert done[1].wait(PATIENCE)
        urgent_held.go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["young", "old"]


def test_the_first_error_of_a_run_is_kept_and_a_later_one_is_its_note() -> None:
    meeting, first_failed, done = threading.Barrier(2), threading.Event(), threading.Event()

    def fail_first() -> None:
        meeting.wait(PATIENCE)
        raise ValueError("the first")

    def fail_later() -> None:
        meeting.wait(PATIENCE)
        assert first_failed.wait(PATIENCE)
        raise ValueError("the later")

    with WorkerPool(2) as pool:
        run = run_of([[], []], {0: fail_first, 1: fail_later}, done)
        run.on_stop = first_failed.set  # called with the error kept
        pool.submit(run)
        assert done.wait(PATIENCE)
    with pytest.raises(Exception, match="the first") as caught:
        run.raise_error()
    assert any("the later" in note for note in caught.value.__notes__)
