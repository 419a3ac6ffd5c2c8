"""How an executor ends: it is drained, closed, left by a task that was cancelled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import dagexec
from dagexec.errors import ClosedError
from tests.executor.held_executor import after_cancel, held_executor
from tests.held import PATIENCE, Held, rows


def queued_behind(executor: dagexec.Executor, held: Held, threads: ThreadPoolExecutor, count: int) -> list[object]:
    """One request inside a held operator and `count` in the queue behind it, from threads."""
    futures = [threads.submit(executor.run, {"x": rows(0)})]
    held.wait_inside()
    for number in range(1, count + 1):
        futures.append(threads.submit(executor.run, {"x": rows(number)}))
        while executor.statistics().queued + executor.statistics().awaiting_admission < number:
            pass
    return futures  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["drain", "close", "drain_async", "aclose"])
def test_a_drain_serves_what_is_queued_and_admits_no_more(way: str, held: Held) -> None:
    def finish() -> object:
        if way == "drain":
            return executor.drain(timeout=PATIENCE)
        if way == "close":
            return executor.close(drain=True)
        return anyio.run(executor.drain_async if way == "drain_async" else lambda: executor.aclose(drain=True))

    with held_executor(held, max_queued=2) as executor, ThreadPoolExecutor(8) as threads:
        futures = queued_behind(executor, held, threads, 3)
        assert executor.statistics().awaiting_admission == 1
        draining = threads.submit(finish)
        with pytest.raises(ClosedError, match="was closed"):
            futures.pop().result(PATIENCE)  # type: ignore[attr-defined]
        with pytest.raises(ClosedError, match="the executor is closed"):
            executor.run({"x": rows(9)})
        held.go_on.release(3)
        for future in futures:
            future.result(PATIENCE)  # type: ignore[attr-defined]
        assert draining.result(PATIENCE) is (True if way.startswith("drain") else None)
        assert executor.statistics().completed == 3
    assert held.seen == [0, 1, 2]


@pytest.mark.parametrize("way", ["drain", "drain_async"])
def test_a_drain_that_takes_too_long_gives_up_the_queue_and_stops_runs(way: str, held: Held) -> None:
    with held_executor(held) as executor, ThreadPoolExecutor(8) as threads:
        futures = queued_behind(executor, held, threads, 2)
        after_cancel(executor, held.go_on.release)
        drain = executor.drain if way == "drain" else lambda timeout: anyio.run(executor.drain_async, timeout)
        assert threads.submit(drain, 0.01).result(PATIENCE) is False
        for future in futures:
            with pytest.raises(ClosedError, match="the executor was closed"):
                future.result(PATIENCE)  # type: ignore[attr-defined]
        assert (executor.statistics().cancelled, executor.statistics().completed) == (3, 0)
    assert held.seen == [0]


async def test_leaving_an_async_with_block_that_was_cancelled_still_closes(held: Held) -> None:
    with held_executor(held) as executor:
        with anyio.CancelScope() as scope:
            async with executor, anyio.create_task_group() as tasks:
                tasks.start_soon(executor.run_async, {"x": rows(1)})
                await anyio.to_thread.run_sync(held.wait_inside)
                scope.cancel()
                held.go_on.release()
        assert scope.cancelled_caught
        with pytest.raises(ClosedError):
            await executor.run_async({"x": rows(1)})


async def test_a_cancelled_drain_leaves_an_executor_that_can_be_closed(held: Held) -> None:
    with held_executor(held) as executor:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.run_async, {"x": rows(1)})
            await anyio.to_thread.run_sync(held.wait_inside)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await executor.drain_async()
            assert scope.cancelled_caught
            held.go_on.release()
        assert executor.statistics().completed == 1
        await executor.aclose()


def test_closing_from_several_threads_at_once_with_runs_in_flight(held: Held) -> None:
    with held_executor(held) as executor, ThreadPoolExecutor(8) as threads:
        running, queued = queued_behind(executor, held, threads, 1)
        closing = [threads.submit(executor.close) for _ in range(4)]
        with pytest.raises(ClosedError):
            queued.result(PATIENCE)  # type: ignore[attr-defined]
        assert not any(future.done() for future in closing)
        held.go_on.release()
        running.result(PATIENCE)  # type: ignore[attr-defined]
        for future in closing:
            future.result(PATIENCE)
