"""The executor under controlled schedules: each seed is another order of callers, workers, event loop and deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

import dagexec
from dagexec.binding.io_binding import Outputs
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.devices.sim import simulated
from dagexec.errors import ClosedError, QueueFullError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds, systematic
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.exploration.event_loop import run
from tests.held import doubled_model, rows
from tests.nets import net_of, temporary_operator
from tests.scheduler.scenarios import X, expected, sums

NET = sums([[], [0], [0]])
RIGHT = expected(NET)

PLACES = {
    "dag on cpu": {"net_type": "dag", "device": "cpu"},
    "async_dag on sim:0": {"net_type": "async_dag", "device": "sim:0"},
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    return PLACES[request.param]


def with_streams(scenario: Callable[[], None]) -> Callable[[], None]:
    """The scenario, in which the schedule decides when streams go on as well."""

    def controlled() -> None:
        with simulated("sim:0", driver=ControlledDriver()):
            scenario()

    return controlled


def is_right(outputs: Outputs) -> bool:
    return {name: array.tobytes() for name, array in outputs.items()} == RIGHT


class Ends:
    """How the requests of a scenario ended, as their callers saw it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def of(self, call: Callable[[], Outputs]) -> None:
        """Of a call that blocks."""
        try:
            assert is_right(call())
            self.counts["completed"] += 1
        except (ClosedError, QueueFullError, RunTimeoutError) as error:
            self.counts[type(error).__name__] += 1

    async def of_task(self, executor: Executor, **options: object) -> None:
        """Of a request of a task."""
        try:
            assert is_right(await executor.run_async({"x": X}, **options))  # type: ignore[arg-type]
            self.counts["completed"] += 1
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
        except (ClosedError, QueueFullError, RunTimeoutError) as error:
            self.counts[type(error).__name__] += 1


def nothing_is_left(executor: Executor) -> None:
    statistics = executor.statistics()
    assert (statistics.running, statistics.queued, statistics.awaiting_admission) == (0, 0, 0)
    assert sorted(replica.number for replica in executor._dispatcher.state.idle) == list(range(statistics.replicas))


def crowd(found: Counter[str], when_full: str, place: dict[str, str]) -> Callable[[], None]:
    """Tasks of all priorities, one cancelled, one with a deadline, a thread that blocks, and a bounded queue."""

    def scenario() -> None:
        ends = Ends()

        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with dagexec.compile(
                NET,
                optimize=False,
                num_workers=2,
                max_queued=1,
                when_full=when_full,
                **place,  # type: ignore[arg-type]
            ) as executor:
                blocking = threads().start(lambda: ends.of(lambda: executor.run({"x": X}, timeout=2)), "blocking")
                tasks = [
                    asyncio.create_task(ends.of_task(executor, priority=priority, timeout=timeout))
                    for priority, timeout in ((0, None), (1, 1), (2, None))
                ]
                canceller = threads().start(lambda: loop.call_soon_threadsafe(tasks[0].cancel), "canceller")
                await asyncio.gather(*tasks, return_exceptions=True)
                for thread in (canceller, blocking):
                    await loop.run_in_executor(None, thread.join)
                nothing_is_left(executor)
                statistics = executor.statistics()
                # a task may be cancelled between the end of its request and its own next step
                assert statistics.completed >= ends.counts["completed"]
                assert statistics.timed_out >= ends.counts["RunTimeoutError"]
                settled = statistics.completed + statistics.timed_out + statistics.cancelled + statistics.rejected
                assert settled == ends.counts.total()
                assert statistics.rejected == ends.counts["QueueFullError"]
                assert is_right(await executor.run_async({"x": X}))

        run(main)
        assert sum(ends.counts.values()) + (1 if ends.counts.total() < 4 else 0) == 4  # cancelled before it began
        found.update(ends.counts)

    return with_streams(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["wait", "reject"])
def test_a_crowd_of_callers_loses_nothing_in_any_order(when_full: str, place: dict[str, str]) -> None:
    found: Counter[str] = Counter()
    explore_seeds(crowd(found, when_full, place), range(60), timeouts=True).raise_failure()
    seen = {"completed", "cancelled", "RunTimeoutError"} | ({"QueueFullError"} if when_full == "reject" else set())
    assert set(found) == seen


def ending(found: Counter[str], end: Callable[[Executor], object], place: dict[str, str]) -> Callable[[], None]:
    """The executor ends while three threads ask for runs, whoever is first."""

    def scenario() -> None:
        ends = Ends()
        executor = dagexec.compile(NET, optimize=False, num_workers=1, max_queued=1, **place)  # type: ignore[arg-type]
        callers = [
            threads().start(lambda: ends.of(lambda: executor.run({"x": X})), f"caller {number}") for number in range(3)
        ]
        ending = threads().start(lambda: end(executor), "ending")
        for thread in (*callers, ending):
            thread.join()
        nothing_is_left(executor)
        assert ends.counts.total() == 3
        assert not any(thread.is_alive() for thread in executor._pool._crew.threads)
        found.update(ends.counts)

    return with_streams(scenario)


ENDINGS = {
    "close": lambda executor: executor.close(),
    "close twice": lambda executor: (executor.close(), executor.close()),
    "drain": lambda executor: executor.drain(),
    "drain with a deadline": lambda executor: executor.drain(timeout=1),
    "drain in a task": lambda executor: run(lambda: executor.drain_async(timeout=1)),
    "close in a task": lambda executor: run(executor.aclose),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDINGS)
def test_an_executor_ends_in_any_order_with_its_callers(way: str, place: dict[str, str]) -> None:
    found: Counter[str] = Counter()
    explore_seeds(ending(found, ENDINGS[way], place), range(40), timeouts=True).raise_failure()
    assert found["ClosedError"]
    assert set(found) <= {"completed", "ClosedError"}


@pytest.mark.slow
def test_an_executor_closes_in_every_order_of_one_preemption(place: dict[str, str]) -> None:
    found: Counter[str] = Counter()
    systematic(ending(found, ENDINGS["close"], place), preemptions=1, limit=300).raise_failure()
    assert set(found) == {"completed", "ClosedError"}


def pausing(_operator: Operator) -> None:
    """Others may go on here."""
    with threads().lock():
        pass


def in_callers_threads(found: Counter[str], end: Callable[[Executor], object], replicas: int) -> Callable[[], None]:
    """Callers, a task among them, of an executor whose replicas are prepared, so that most run what they ask for."""
    model = Model("pausing", net_of([[], [0]], op_type="Pausing"), inputs={"x": InputInfo()}, outputs=("b1",))
    feeds = {"x": X}

    def scenario() -> None:
        ends: Counter[str] = Counter()
        executor = dagexec.compile(
            model, optimize=False, net_type="simple", num_workers=replicas, replicas=replicas, warm_start={"x": X.shape}
        )

        def call() -> None:
            try:
                executor.run(feeds)
                ends["completed"] += 1
            except ClosedError:
                ends["ClosedError"] += 1

        async def task() -> None:
            try:
                await executor.run_async(feeds)
                ends["completed"] += 1
            except ClosedError:
                ends["ClosedError"] += 1

        callers = [threads().start(call, f"caller {number}") for number in range(3)]
        callers.append(threads().start(lambda: run(task), "task"))
        callers.append(threads().start(lambda: end(executor), "ending"))
        for thread in callers:
            thread.join()
        nothing_is_left(executor)
        assert executor._dispatcher.state.running == {}
        assert ends.total() == 4
        statistics = executor.statistics()
        assert statistics.completed == ends["completed"]
        assert sum(statistics.runs_per_replica) <= replicas + 4
        found.update(ends)

    return scenario


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("way", ENDINGS)
def test_runs_in_their_callers_threads_lose_nothing_in_any_order(way: str, replicas: int) -> None:
    found: Counter[str] = Counter()
    with temporary_operator("Pausing", pausing):
        scenario = in_callers_threads(found, ENDINGS[way], replicas)
        explore_seeds(scenario, range(60), timeouts=True).raise_failure()
    assert set(found) == {"completed", "ClosedError"}


@pytest.mark.slow
def test_runs_in_their_callers_threads_end_in_every_order_of_one_preemption() -> None:
    found: Counter[str] = Counter()
    with temporary_operator("Pausing", pausing):
        scenario = in_callers_threads(found, ENDINGS["close"], 1)
        systematic(scenario, preemptions=1, limit=300).raise_failure()
    assert found["completed"]


def test_requests_that_are_joined_or_cancelled_in_any_schedule_get_their_own_rows() -> None:
    """Three callers, of whom one gives up at a moment that the schedule chooses."""
    model = doubled_model()

    def scenario() -> None:
        ends: list[str] = []
        with dagexec.compile(
            model, optimize=False, net_type="dag", num_workers=2, max_batch=2, max_wait=1.0
        ) as executor:

            def ask(value: float, timeout: float | None) -> None:
                try:
                    found = executor.run({"x": rows(value, 1)}, timeout=timeout)["y"]
                    assert found.tobytes() == rows(2 * value, 1).tobytes()
                    ends.append("completed")
                except RunTimeoutError:
                    ends.append("timed out")

            callers = [
                threads().start(lambda v=value, t=timeout: ask(v, t), f"caller {value}")  # type: ignore[misc]
                for value, timeout in ((1, None), (2, 0.5), (3, None))
            ]
            for caller in callers:
                caller.join()
            nothing_is_left(executor)
        assert ends.count("completed") >= 2
        assert len(ends) == 3

    explore_seeds(scenario, range(40), timeouts=True).raise_failure()
