"""BlobsQueue under every order that a few preemptions allow: nobody waits for ever, no record is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.schema import TensorType
from dagexec.errors import QueueClosedError, QueueTimeoutError, RunCancelledError, RunTimeoutError, ShapeError
from dagexec.platform.blocking import working_for
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore, explore_seeds, systematic
from dagexec.scheduler.exploration.strategies import EarliestFirst
from dagexec.scheduler.run.run import Run, task

Array = npt.NDArray[Any]


def one(value: float) -> list[Array]:
    return [np.array([value], np.float32)]


def number(record: list[Array]) -> float:
    return float(record[0][0])


def passes(scenario: Callable[[], object], *, timeouts: bool = False) -> None:
    """Under all schedules of two preemptions, as far as 1,000 go, and under 150 random ones."""
    for found in (systematic(scenario, limit=1000, timeouts=timeouts), explore_seeds(scenario, range(150))):
        if found.failed is not None:
            raise AssertionError(found.failed) from found.failed.failure


def test_records_come_in_order_and_are_copies() -> None:
    queue = BlobsQueue(2, 2)
    x = np.arange(3.0)
    queue.enqueue([x, np.array([b"s"], object)])
    x[:] = 9
    queue.enqueue([x, np.array([b"t"], object)])
    first, second = queue.dequeue(), queue.dequeue()
    assert first[0].tolist() == [0, 1, 2]
    assert second[0].tolist() == [9, 9, 9]
    assert (first[1].tolist(), second[1].tolist()) == ([b"s"], [b"t"])
    assert queue.statistics().dequeued == 2


def test_records_of_another_kind_are_refused() -> None:
    queue = BlobsQueue(2, 1, names=["data"], types=[TensorType((2,), FLOAT32)], name="queue 'q'")
    with pytest.raises(ShapeError, match=r"queue 'q': data must be float32\[2\], found float64\[2\]"):
        queue.enqueue([np.zeros(2)])
    with pytest.raises(ShapeError, match="has 1 blobs, found 2"):
        queue.enqueue([np.zeros(2), np.zeros(2)])
    with pytest.raises(ValueError, match="capacity"):
        BlobsQueue(0)
    with pytest.raises(ValueError, match="2 names"):
        BlobsQueue(1, 1, names=["a", "b"])


def test_a_record_that_could_not_be_taken_stays_the_first() -> None:
    queue = BlobsQueue(2)
    queue.enqueue(one(1))
    queue.enqueue(one(2))
    with pytest.raises(ZeroDivisionError):
        queue.dequeue_into(lambda _record: 1 / 0)
    assert [number(queue.dequeue()) for _ in range(2)] == [1, 2]


def test_a_closed_queue_gives_what_it_has_and_says_why_it_was_closed() -> None:
    queue = BlobsQueue(2)
    queue.enqueue(one(1))
    why = OSError("no more data")
    queue.close(why)
    queue.close()
    with pytest.raises(QueueClosedError, match="closed by OSError: no more data, no record is taken"):
        queue.enqueue(one(2))
    assert number(queue.dequeue()) == 1
    with pytest.raises(QueueClosedError, match="there are no more records") as caught:
        queue.dequeue()
    assert caught.value.__cause__ is why


@pytest.mark.slow
def test_producers_and_consumers_lose_nothing_and_double_nothing() -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        found: list[float] = []

        def produce(first: int) -> None:
            for value in (first, first + 1):
                queue.enqueue(one(value))

        def consume() -> None:
            for _ in range(2):
                found.append(number(queue.dequeue()))

        started = [threads().start(lambda first=first: produce(first), f"produce {first}") for first in (0, 10)]
        started += [threads().start(consume, f"consume {k}") for k in range(2)]
        for thread in started:
            thread.join()
        assert sorted(found) == [0, 1, 10, 11], found

    passes(scenario)


@pytest.mark.slow
def test_one_consumer_gets_each_producers_records_in_order() -> None:
    def scenario() -> None:
        queue = BlobsQueue(2)
        started = [
            threads().start(lambda first=first: [queue.enqueue(one(first + k)) for k in range(2)], f"from {first}")
            for first in (0, 10)
        ]
        found = [number(queue.dequeue()) for _ in range(4)]
        for thread in started:
            thread.join()
        for first in (0, 10):
            assert [value for value in found if first <= value < first + 10] == [first, first + 1]

    passes(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_close_ends_every_wait(full: bool) -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        ends: list[str] = []
        if full:
            queue.enqueue(one(0))

        def use() -> None:
            try:
                queue.enqueue(one(1)) if full else queue.dequeue()
            except QueueClosedError:
                ends.append("closed")

        started = [threads().start(use, f"user {k}") for k in range(2)]
        queue.close()
        for thread in started:
            thread.join()
        assert ends == ["closed"] * 2
        statistics = queue.statistics()
        assert (statistics.enqueuing, statistics.dequeuing) == (0, 0)

    passes(scenario)


def test_a_record_is_either_taken_or_refused_when_the_queue_is_closed_meanwhile() -> None:
    def scenario() -> int:
        queue = BlobsQueue(2)
        taken: list[int] = []

        def produce() -> None:
            try:
                queue.enqueue(one(5))
                taken.append(1)
            except QueueClosedError:
                pass

        producer = threads().start(produce, "producer")
        queue.close()
        found = 0
        try:
            while True:
                queue.dequeue()
                found += 1
        except QueueClosedError:
            pass
        producer.join()
        assert found == len(taken)
        return found

    explored = systematic(scenario)
    assert explored.failed is None, explored.failed


def test_a_timeout_ends_a_wait_and_takes_nothing() -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        with pytest.raises(QueueTimeoutError, match=r"still empty after 2\.5 s"):
            queue.dequeue(timeout=2.5)
        assert threads().monotonic() >= 2.5
        queue.enqueue(one(1))
        with pytest.raises(QueueTimeoutError, match=r"still full \(1 records\) after 0 s"):
            queue.enqueue(one(2), timeout=0)
        assert number(queue.dequeue()) == 1

    schedule = explore(scenario, EarliestFirst())
    assert schedule.failure is None, schedule.failure


def a_run() -> Run:
    return task("a run", lambda: None)


@pytest.mark.slow
def test_stopping_the_run_ends_the_wait_of_its_operator_and_of_no_other() -> None:
    def scenario() -> None:
        queue, run = BlobsQueue(1), a_run()
        ends: list[object] = []

        def wait_for_the_run() -> None:
            with working_for(run), working_for(deadline=threads().monotonic() + 60):  # as a net in a net
                try:
                    queue.dequeue()
                except RunCancelledError:
                    ends.append("stopped")

        started = threads().start(wait_for_the_run, "of the run")
        other = threads().start(lambda: ends.append(number(queue.dequeue())), "of nobody")
        run.stop(ValueError("elsewhere"))
        started.join()
        assert ends == ["stopped"]
        queue.enqueue(one(3))
        other.join()
        assert ends == ["stopped", 3.0]
        assert run.waits == []

    passes(scenario)


def test_the_deadline_of_a_run_ends_the_wait() -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        with working_for(deadline=threads().monotonic() + 3), pytest.raises(RunTimeoutError, match="to dequeue"):
            queue.dequeue(timeout=60)
        with working_for(deadline=threads().monotonic() + 60), pytest.raises(QueueTimeoutError):
            queue.dequeue(timeout=3)

    schedule = explore(scenario, EarliestFirst())
    assert schedule.failure is None, schedule.failure


def test_exploration_reports_two_that_wait_for_each_other() -> None:
    def scenario() -> None:
        first, second = BlobsQueue(1), BlobsQueue(1)

        def relay(source: BlobsQueue, target: BlobsQueue) -> None:
            target.enqueue(source.dequeue())

        one_way = threads().start(lambda: relay(first, second), "one way")
        threads().start(lambda: relay(second, first), "the other way")
        one_way.join()

    found = explore_seeds(scenario, range(3))
    assert found.failed is not None
    assert "one way" in str(found.failed.failure)


@pytest.mark.parametrize("counts", [(1 << 62, 1), (1, 1 << 62), (0, 1), (1, -1)])
def test_a_queue_has_bounds_so_that_a_model_cannot_ask_for_all_memory(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected a capacity from 1 to 1,048,576 and from 1 to 65,536 blobs; found"):
        BlobsQueue(*counts)
