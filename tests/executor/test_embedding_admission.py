"""Who is served when: priorities, a bounded queue, replicas in turn, and the statistics that tell."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.binding.replicas import Replica
from dagexec.errors import ClosedError, DagexecError, OperatorError, QueueFullError, RunTimeoutError
from dagexec.executor.requests.queue import MAX_OVERTAKEN
from dagexec.executor.requests.request import Request
from dagexec.platform.threads import ThreadWait
from tests.held import PATIENCE, Held, doubled_model, rows

BACKENDS = ["asyncio", "trio"]


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def wait_until(executor: dagexec.Executor, **counts: int) -> None:
    """Look at the statistics until they are so; other threads get there by themselves."""
    while any(getattr(executor.statistics(), name) != count for name, count in counts.items()):
        pass


def in_order(
    executor: dagexec.Executor, callers: ThreadPoolExecutor, priorities: list[int]
) -> list[Future[dict[str, np.ndarray]]]:
    """Requests 1, 2, ... from threads, each in the queue before the next is made."""
    futures = []
    for number, priority in enumerate(priorities, start=1):
        futures.append(callers.submit(executor.run, {"x": rows(number)}, priority=priority))
        wait_until(executor, queued=number)
    return futures


def test_queued_requests_of_higher_priority_go_first(held: Held, callers: ThreadPoolExecutor) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        first = callers.submit(executor.run, {"x": rows(0)})
        held.wait_inside()
        futures = in_order(executor, callers, [0, -1, 3, 0, 3])
        for _ in range(6):
            held.go_on.release()
        for future in [first, *futures]:
            future.result(PATIENCE)
    assert held.seen == [0, 3, 5, 1, 4, 2]


def test_a_request_of_low_priority_is_not_kept_waiting_for_ever(held: Held, callers: ThreadPoolExecutor) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        futures = [callers.submit(executor.run, {"x": rows(0)})]
        held.wait_inside()
        futures += in_order(executor, callers, [-5] + [1] * (MAX_OVERTAKEN + 5))
        for _ in futures:
            held.go_on.release()
        for future in futures:
            future.result(PATIENCE)
    assert held.seen.index(1) == MAX_OVERTAKEN + 1


def test_chains_of_a_more_urgent_run_go_before_those_of_another(held: Held, callers: ThreadPoolExecutor) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, replicas=3) as executor:
        first = callers.submit(executor.run, {"x": rows(0)})
        held.wait_inside()
        others = []
        for number, priority in ((1, 0), (2, 7)):
            others.append(callers.submit(executor.run, {"x": rows(number)}, priority=priority))
            while executor.statistics().pool.chains_waiting < number:
                pass
        for _ in range(3):
            held.go_on.release()
        for future in (first, *others):
            future.result(PATIENCE)
    assert held.seen == [0, 2, 1]


def test_a_full_queue_rejects_and_says_limit_and_counts(held: Held, callers: ThreadPoolExecutor) -> None:
    with dagexec.compile(
        doubled_model("Held"), optimize=False, num_workers=1, max_queued=2, when_full="reject"
    ) as executor:
        futures = [callers.submit(executor.run, {"x": rows(0)})]
        held.wait_inside()
        futures += in_order(executor, callers, [0, 0])
        with pytest.raises(QueueFullError, match=r"'doubled'.*1 run\(s\) in flight on 1 .* 2 queued, limit 2"):
            executor.run({"x": rows(9)}, priority=100)

        async def one_more() -> None:
            await executor.run_async({"x": rows(9)})

        for backend in BACKENDS:
            with pytest.raises(QueueFullError) as caught:
                anyio.run(one_more, backend=backend)
            assert (caught.value.limit, caught.value.queued, caught.value.running) == (2, 2, 1)
            assert isinstance(caught.value, DagexecError)
        for _ in range(4):
            held.go_on.release()
        for future in futures:
            future.result(PATIENCE)
        executor.run({"x": rows(4)})
        assert (executor.statistics().completed, executor.statistics().rejected) == (4, 3)
    assert held.seen == [0, 1, 2, 4]


def test_without_a_queue_only_as_many_run_as_there_are_replicas(held: Held, callers: ThreadPoolExecutor) -> None:
    with dagexec.compile(
        doubled_model("Held"), optimize=False, num_workers=2, replicas=2, max_queued=0, when_full="reject"
    ) as executor:
        futures = [callers.submit(executor.run, {"x": rows(0)}) for _ in range(2)]
        held.wait_inside(2)
        with pytest.raises(QueueFullError, match=r"2 run\(s\) in flight on 2 replica\(s\), 0 queued, limit 0"):
            executor.run({"x": rows(0)})
        held.go_on.release(2)
        for future in futures:
            future.result(PATIENCE)


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_full_queue_makes_callers_wait_for_admission(limit: int, held: Held) -> None:
    async with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, max_queued=limit) as executor:
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(executor.run_async, {"x": rows(number)})
                await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(held.wait_inside)
            statistics = executor.statistics()
            assert (statistics.running, statistics.queued, statistics.awaiting_admission) == (1, limit, 4 - limit)
            held.go_on.release(5)
        assert executor.statistics().completed == 5
    assert held.seen == [0, 1, 2, 3, 4]


async def test_waiting_for_admission_can_be_cancelled_and_counts_for_the_timeout(held: Held) -> None:
    async with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, max_queued=1) as executor:
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(executor.run_async, {"x": rows(number)})
                await anyio.wait_all_tasks_blocked()
            with pytest.raises(RunTimeoutError):
                await executor.run_async({"x": rows(2)}, timeout=0.001)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(executor.run_async, {"x": rows(3)})
                    await anyio.wait_all_tasks_blocked()
                    assert executor.statistics().awaiting_admission == 1
                    scope.cancel()
            statistics = executor.statistics()
            assert (statistics.awaiting_admission, statistics.timed_out, statistics.cancelled) == (0, 1, 1)
            held.go_on.release(2)
        assert executor.statistics().completed == 2
    assert held.seen == [0, 1]


async def test_a_queued_request_that_is_cancelled_lets_one_in_from_the_door(held: Held) -> None:
    async with (
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, max_queued=1) as executor,
        anyio.create_task_group() as tasks,
    ):
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def one(number: int) -> None:
            with scopes[number]:
                await executor.run_async({"x": rows(number)})

        for number in range(3):
            tasks.start_soon(one, number)
            await anyio.wait_all_tasks_blocked()
        scopes[1].cancel()
        await anyio.wait_all_tasks_blocked()
        assert (executor.statistics().queued, executor.statistics().awaiting_admission) == (1, 0)
        held.go_on.release(2)
    assert held.seen == [0, 2]


def test_idle_replicas_are_used_in_turn() -> None:
    with dagexec.compile(doubled_model(), optimize=False, replicas=3) as executor:
        for _ in range(9):
            executor.run({"x": rows(1)})
        assert executor.statistics().runs_per_replica == (3, 3, 3)


def test_statistics_tell_what_goes_on_and_how_requests_ended(held: Held, callers: ThreadPoolExecutor) -> None:
    held.failing = {5}
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=2, replicas=1) as executor:
        at_rest = executor.statistics()
        assert (at_rest.median_latency, at_rest.queue_wait.median, at_rest.run_time.p99) == (None, None, None)
        assert (at_rest.busy_workers, at_rest.streams) == (0, None)
        first = callers.submit(executor.run, {"x": rows(5)}, timeout=PATIENCE)
        held.wait_inside()
        [second] = in_order(executor, callers, [0])
        with pytest.raises(RunTimeoutError):
            executor.run({"x": rows(3)}, timeout=0)
        busy = executor.statistics()
        assert (busy.running, busy.queued, busy.busy_workers) == (1, 1, 1)
        held.go_on.release(2)
        with pytest.raises(OperatorError, match="told to fail at 5"):
            first.result(PATIENCE)
        second.result(PATIENCE)
        statistics = executor.statistics()
    counts = asdict(statistics)
    assert {name: counts[name] for name in ("completed", "failed", "cancelled", "timed_out", "rejected")} == {
        "completed": 1,
        "failed": 1,
        "cancelled": 0,
        "timed_out": 1,
        "rejected": 0,
    }
    assert statistics.queue_wait.median is not None
    assert statistics.run_time.median is not None
    assert statistics.median_latency == statistics.queue_wait.median + statistics.run_time.median
    json.dumps(counts)


def test_queue_wait_and_run_time_are_told_apart(
    held: Held, callers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        clock = [100.0]
        monkeypatch.setattr(executor._dispatcher, "_now", lambda: clock[0])
        first = callers.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        [second] = in_order(executor, callers, [0])
        clock[0] = 105.0  # the first has run for 5 seconds, the second has waited for 5
        held.go_on.release()
        first.result(PATIENCE)
        held.wait_inside()
        clock[0] = 107.0
        held.go_on.release()
        second.result(PATIENCE)
        statistics = executor.statistics()
        assert (statistics.queue_wait.median, statistics.queue_wait.p99) == (5.0, 5.0)
        assert (statistics.run_time.median, statistics.run_time.p99) == (5.0, 5.0)
        assert (statistics.median_latency, statistics.p99_latency) == (7.0, 7.0)
        assert sorted(executor._dispatcher.state.times) == [(0.0, 5.0), (5.0, 2.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_queued": -1}, "max_queued must be 0 or more, or None, not -1"), ({"when_full": "drop"}, "not 'drop'")],
)
def test_an_admission_that_is_none_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dagexec.compile(doubled_model(), optimize=False, **options)  # type: ignore[arg-type]


def test_a_request_of_a_closed_executor_is_told_so_even_where_the_queue_is_full() -> None:
    executor = dagexec.compile(doubled_model(), optimize=False, max_queued=0, when_full="reject")
    executor.close()
    with pytest.raises(ClosedError, match="the executor is closed"):
        executor.run({"x": rows(1)})


@pytest.mark.parametrize("priority", [0.5, "high", None])
def test_a_priority_that_is_no_integer_is_refused_before_anything_is_queued(priority: object) -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        with pytest.raises(TypeError, match="integer"):
            executor.run({"x": rows(1)}, priority=priority)  # type: ignore[arg-type]
        executor.run({"x": rows(1)}, priority=np.int64(3))  # type: ignore[arg-type]


def test_the_queue_is_full_again_as_soon_as_it_can_be_and_never_fuller(held: Held, callers: ThreadPoolExecutor) -> None:
    """One stops waiting: nobody is admitted. One leaves the queue for a replica: the next one is admitted."""
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, max_queued=1) as executor:
        futures = []
        for number, counts in enumerate([(1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 2)]):
            futures.append(callers.submit(executor.run, {"x": rows(number)}))
            wait_until(executor, **dict(zip(("running", "queued", "awaiting_admission"), counts, strict=True)))
        with pytest.raises(RunTimeoutError):
            executor.run({"x": rows(9)}, timeout=0)
        statistics = executor.statistics()
        assert (statistics.queued, statistics.awaiting_admission) == (1, 2)
        held.go_on.release()
        futures[0].result(PATIENCE)
        statistics = executor.statistics()
        assert (statistics.queued, statistics.awaiting_admission) == (1, 1)
        held.go_on.release(3)
        for future in futures:
            future.result(PATIENCE)
    assert held.seen == [0, 1, 2, 3]


def test_what_ends_a_request_first_is_what_its_caller_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told twice to end, while its replica is being fed."""
    feeding, go_on = threading.Event(), threading.Event()
    feed = Replica.feed

    def feed_slowly(replica: Replica, feeds: Mapping[str, np.ndarray], *results: object) -> None:
        feeding.set()
        assert go_on.wait(PATIENCE)
        feed(replica, feeds, *results)

    monkeypatch.setattr(Replica, "feed", feed_slowly)
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1) as executor:
        wait = ThreadWait()
        request = Request({"x": rows(1)}, ["y"], notify=wait.notify)
        executor._pooled.submit(request, start_here=False)
        assert feeding.wait(PATIENCE)
        assert executor._dispatcher.cancel(request, RunTimeoutError("first"))
        assert executor._dispatcher.cancel(request, ClosedError("second"))
        go_on.set()
        assert wait.wait(PATIENCE)
        with pytest.raises(RunTimeoutError, match="first"):
            request.outcome()
        assert executor.statistics().timed_out == 1


async def test_of_requests_to_be_fed_the_most_urgent_is_fed_first(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[float] = []
    feed = Replica.feed

    def note(replica: Replica, feeds: Mapping[str, np.ndarray], *results: object) -> None:
        fed.append(float(feeds["x"].flat[0]))
        feed(replica, feeds, *results)

    monkeypatch.setattr(Replica, "feed", note)
    async with (
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, replicas=3) as executor,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(executor.run_async, {"x": rows(1)})
        await anyio.to_thread.run_sync(held.wait_inside)
        for number, priority in ((2, 0), (3, 5)):
            tasks.start_soon(partial(executor.run_async, {"x": rows(number)}, priority=priority))
            await anyio.wait_all_tasks_blocked()
        held.go_on.release(3)
    assert fed == [1, 3, 2]
