"""The worker pool: runs share it, the oldest goes first, nobody is lost when things go wrong."""

import threading

import pytest

from dagexec.core.graph import build_graph
from dagexec.core.operator import Step
from dagexec.errors import ClosedError, OperatorError, ResourceError, RunCancelledError
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task
from dagexec.scheduler.run.work import chain_work
from tests.nets import net_of, parents_from_edges
from tests.new_threads import new_threads

PATIENCE = 30


def run_of(parents: list[list[int]], step_of: dict[int, Step], finished: threading.Event) -> Run:
    """A run of a NoOp net of single-operator chains whose operators call `step_of`."""
    graph = build_graph(net_of(parents))
    plan = build_plan(graph, [1.0] * len(graph), [(index,) for index in range(len(graph))])
    steps = [tuple(step_of.get(index, lambda: None) for index in chain) for chain in plan.chains]
    return Run("test", chain_work(plan, steps), lambda chain, _step: f"operator {plan.chains[chain][0]}", finished.set)


def test_several_runs_share_one_pool() -> None:
    meeting = threading.Barrier(2)
    done = [threading.Event(), threading.Event()]
    with WorkerPool(2) as pool:
        for event in done:
            pool.submit(run_of([[]], {0: lambda: meeting.wait(PATIENCE)}, event))
        assert all(event.wait(PATIENCE) for event in done)


def test_the_oldest_run_is_served_first() -> None:
    order: list[str] = []
    busy, go_on = threading.Event(), threading.Event()
    done = [threading.Event() for _ in range(3)]

    def hold() -> None:
        busy.set()
        assert go_on.wait(PATIENCE)

    with WorkerPool(1) as pool:
        pool.submit(run_of([[]], {0: hold}, done[0]))
        assert busy.wait(PATIENCE)
        for name, event in (("first", done[1]), ("second", done[2])):
            pool.submit(run_of([[], []], dict.fromkeys((0, 1), lambda name=name: order.append(name)), event))
        statistics = pool.statistics()
        assert (statistics.runs_waiting, statistics.chains_waiting, statistics.idle) == (2, 4, 0)
        go_on.set()
        assert all(event.wait(PATIENCE) for event in done)
    assert order == ["first", "first", "second", "second"]


def test_a_stopped_run_nobody_works_on_is_over_at_once() -> None:
    busy, go_on = threading.Event(), threading.Event()
    held, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert go_on.wait(PATIENCE)

    with WorkerPool(1) as pool:
        pool.submit(run_of([[]], {0: hold}, held))
        assert busy.wait(PATIENCE)
        run = run_of([[]], {0: lambda: pytest.fail("must not run")}, waiting)
        pool.submit(run)
        pool.stop(run, RunCancelledError("not needed"))
        assert waiting.is_set()
        pool.stop(run, RunCancelledError("again"))
        go_on.set()
        assert held.wait(PATIENCE)
    with pytest.raises(RunCancelledError, match="not needed"):
        run.raise_error()


def test_stopping_a_run_that_is_over_changes_nothing() -> None:
    done = threading.Event()
    with WorkerPool(1) as pool:
        run = run_of([[]], {}, done)
        pool.submit(run)
        assert done.wait(PATIENCE)
        pool.stop(run, RunCancelledError("too late"))
    run.check_complete()
    run.raise_error()


def test_a_stopped_run_finishes_its_chain_and_starts_no_other() -> None:
    inside, go_on, done = threading.Event(), threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        ran.append(0)

    with WorkerPool(2) as pool:
        run = run_of(parents_from_edges(3, [(0, 1), (0, 2)]), {0: first, 1: lambda: ran.append(1)}, done)
        pool.submit(run)
        assert inside.wait(PATIENCE)
        pool.stop(run, RunCancelledError("enough"))
        assert not done.is_set()
        go_on.set()
        assert done.wait(PATIENCE)
    assert ran == [0]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_worker_survives_whatever_an_operator_raises(exception: type[BaseException]) -> None:
    def fail() -> None:
        raise exception("on purpose")

    with WorkerPool(1) as pool:
        for _ in range(3):
            failed, passed = threading.Event(), threading.Event()
            run = run_of([[]], {0: fail}, failed)
            pool.submit(run)
            assert failed.wait(PATIENCE)
            assert isinstance(run.error.__cause__, exception)  # type: ignore[union-attr]
            pool.submit(run_of([[]], {}, passed))
            assert passed.wait(PATIENCE)
        assert pool.statistics().workers == 1


def test_a_worker_survives_an_owner_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("owner")

    done = threading.Event()
    with WorkerPool(1) as pool:
        run = run_of([[]], {}, done)
        run.finished = fail
        pool.submit(run)
        pool.submit(run_of([[]], {}, done))
        assert done.wait(PATIENCE)
    assert "the callback at the end of a run raised" in caplog.text


def test_a_closed_pool_has_no_threads_and_takes_no_runs() -> None:
    started = new_threads()
    pool = WorkerPool(3)
    assert started() == 3
    pool.close()
    pool.close()
    assert started() == 0
    with pytest.raises(ClosedError, match="'work'"):
        pool.submit(task("work", lambda: None))


def test_threads_that_come_later_are_as_many_as_have_something_to_do() -> None:
    started = new_threads()
    meeting = threading.Barrier(2)
    with WorkerPool(4, at_once=False) as pool:
        assert (started(), pool.statistics().idle) == (0, 4)
        pool.submit(task("work", lambda: meeting.wait(PATIENCE)))
        meeting.wait(PATIENCE)
        assert started() == 1
    assert started() == 0
    with pytest.raises(ClosedError):
        pool.submit(task("work", lambda: None))


def test_closing_lets_submitted_runs_finish() -> None:
    ran: list[int] = []
    done = [threading.Event() for _ in range(20)]
    pool = WorkerPool(2)
    for number, event in enumerate(done):
        pool.submit(run_of([[], [0], [0], [1, 2]], {3: lambda number=number: ran.append(number)}, event))
    pool.close()
    assert all(event.is_set() for event in done)
    assert sorted(ran) == list(range(20))


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 4096 workers, found 0"):
        WorkerPool(0)


def test_threads_that_do_not_start_are_a_resource_error_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(ResourceError, match=r"mine: 5 workers requested; the system could only start 2: can't start"):
        WorkerPool(5, name="mine")
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


def test_an_error_that_cannot_be_shown_ends_its_run_like_any_other() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def fail() -> None:
        raise UnspeakableError

    finished = threading.Event()
    with WorkerPool(1) as pool:
        run = run_of([[]], {0: fail}, finished)
        pool.submit(run)
        assert finished.wait(PATIENCE)
        with pytest.raises(OperatorError, match="operator 0 failed: UnspeakableError"):
            run.raise_error()


def test_a_worker_goes_on_when_somebody_else_lets_go_of_the_lock() -> None:
    inside, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        inside.set()
        go_on.wait(30)

    with WorkerPool(1) as pool:
        run = task("held up", step)
        run.finished = over.set
        pool.submit(run)
        assert inside.wait(30)
        with pool.lock:
            go_on.set()
            assert not over.wait(0.05)  # longer than it asks for the lock without sleeping
        assert over.wait(30)
