"""asyncio under a controlled schedule, and an executor in it: cancelled or timed out anywhere, it stays usable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import pytest

import dagexec
from dagexec.binding.io_binding import Outputs
from dagexec.errors import DagexecError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import new_gate, threads
from dagexec.scheduler.exploration import EarliestFirst, explore, explore_seeds, systematic
from dagexec.scheduler.exploration.event_loop import ControlledEventLoop, run
from tests.scheduler.scenarios import X, expected, sums

FORK = [[], [0], [0]]
NET = sums(FORK)
RIGHT = expected(NET)


def is_right(outputs: Outputs) -> bool:
    """True when a run returned what SimpleNet computes."""
    return {name: array.tobytes() for name, array in outputs.items()} == RIGHT


def test_tasks_sleep_in_virtual_time() -> None:
    def scenario() -> list[tuple[str, float]]:
        woken: list[tuple[str, float]] = []

        async def sleep(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((name, asyncio.get_running_loop().time()))

        async def main() -> None:
            await asyncio.gather(sleep("day", 86_400), sleep("hour", 3600), sleep("second", 1))

        run(main)
        return woken

    for strategy in (0, 1, EarliestFirst()):
        schedule = explore(scenario, strategy)
        schedule.raise_failure()
        assert schedule.result == [("second", 1.0), ("hour", 3600.0), ("day", 86_400.0)]


def test_anyio_runs_on_it_and_its_deadlines_are_virtual() -> None:
    def scenario() -> tuple[bool, float]:
        async def main() -> tuple[bool, float]:
            with anyio.move_on_after(500) as scope:
                await anyio.sleep_forever()
            return scope.cancelled_caught, asyncio.get_running_loop().time()

        return anyio.run(main, backend_options={"loop_factory": ControlledEventLoop})

    schedule = explore(scenario, 0)
    schedule.raise_failure()
    assert schedule.result == (True, 500.0)


def test_other_threads_call_back_on_the_loop_in_an_order_the_seed_decides() -> None:
    def scenario() -> str:
        called = ""
        everybody = 3

        async def main() -> None:
            loop, done = asyncio.get_running_loop(), asyncio.Event()

            def note(name: str) -> None:
                nonlocal called
                called += name
                if len(called) == everybody:
                    done.set()

            for name in "abc":
                threads().start(lambda name=name: loop.call_soon_threadsafe(note, name), name)  # type: ignore[misc]
            await done.wait()

        run(main)
        return called

    results = {explore(scenario, seed).result for seed in range(40)}
    assert len(results) > 3
    assert {"".join(sorted(result or "")) for result in results} == {"abc"}
    for seed in range(5):
        assert explore(scenario, seed).trace == explore(scenario, seed).trace


def test_blocking_work_runs_in_a_controlled_thread() -> None:
    def scenario() -> list[object]:
        def double(number: int) -> int:
            new_gate().acquire(timeout=5)
            return 2 * number

        def fail() -> None:
            raise ValueError("in the thread")

        async def main() -> list[object]:
            loop = asyncio.get_running_loop()
            with pytest.raises(ValueError, match="in the thread"):
                await loop.run_in_executor(None, fail)
            return [await loop.run_in_executor(None, double, 21), loop.time()]

        return run(main)

    schedule = explore(scenario, 0)
    schedule.raise_failure()
    assert schedule.result == [42, 5.0]


def test_a_set_of_tasks_has_the_same_order_in_every_replay() -> None:
    def scenario() -> list[str]:
        async def main() -> list[str]:
            tasks = {asyncio.create_task(asyncio.sleep(0), name=f"t{number}") for number in range(20)}
            order = [task.get_name() for task in tasks]
            await asyncio.gather(*tasks)
            return order

        return run(main)

    assert len({tuple(explore(scenario, 0).result or ()) for _ in range(5)}) == 1


def test_a_loop_is_made_in_scenarios_only() -> None:
    with pytest.raises(DagexecError, match="in a function given to explore"):
        ControlledEventLoop()


def executor_scenario(
    body: Callable[[Executor], object], replicas: int = 1, net_type: str = "dag"
) -> Callable[[], object]:
    """`body` with an executor, which must compute the right bytes afterwards and have nothing left to do."""

    def scenario() -> object:
        with dagexec.compile(NET, optimize=False, net_type=net_type, num_workers=1, replicas=replicas) as executor:
            result = body(executor)
            assert is_right(executor.run({"x": X}))
            statistics = executor.statistics()
            assert (statistics.running, statistics.queued) == (0, 0)
        return result

    return scenario


def several_at_once(executor: Executor) -> None:
    """Three tasks on two replicas."""

    async def main() -> None:
        for outputs in await asyncio.gather(*(executor.run_async({"x": X}) for _ in range(3))):
            assert is_right(outputs)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_run_async_is_right_for_many_seeds(net_type: str) -> None:
    scenario = executor_scenario(several_at_once, replicas=2, net_type=net_type)
    explore_seeds(scenario, range(40)).raise_failure()
    assert explore(scenario, 7).trace == explore(scenario, 7).trace


def cancelled(executor: Executor) -> str:
    """A thread asks for the cancellation whenever the strategy lets it."""
    outcome = ""

    async def main() -> None:
        nonlocal outcome
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(executor.run_async({"x": X}))
        canceller = threads().start(lambda: loop.call_soon_threadsafe(task.cancel), "canceller")
        try:
            assert is_right(await task)
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
        await loop.run_in_executor(None, canceller.join)

    run(main)
    return outcome


def timed_out(executor: Executor) -> str:
    """The deadline passes whenever the strategy lets it."""

    async def main() -> str:
        try:
            assert is_right(await executor.run_async({"x": X}, timeout=1))
        except RunTimeoutError:
            return "timed out"
        return "done"

    return run(main)


@pytest.mark.slow
@pytest.mark.parametrize("body", [cancelled, timed_out])
def test_a_run_that_ends_early_at_any_point_leaves_the_executor_usable(body: Callable[[Executor], str]) -> None:
    outcomes = set()

    def noted(executor: Executor) -> None:
        outcomes.add(body(executor))

    timeouts = body is timed_out
    search = systematic(executor_scenario(noted), preemptions=1, timeouts=timeouts)
    search.raise_failure()
    assert search.exhausted
    explore_seeds(executor_scenario(noted), range(60), timeouts=timeouts).raise_failure()
    assert len(outcomes) == 2
