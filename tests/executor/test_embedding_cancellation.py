"""A request that is no longer wanted: cancelled, late, of a coroutine dropped or a loop closed. Its run ends first."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import numpy as np
import pytest
import trio

from dagexec.errors import RunTimeoutError
from dagexec.executor.requests.waiting import TaskWait
from dagexec.platform.threads import ThreadWait
from tests.executor.held_executor import BACKENDS, after_cancel, held_executor
from tests.held import PATIENCE, Held, rows


async def test_an_operator_that_fails_after_the_await_was_cancelled_is_attached_to_the_cancellation(held: Held) -> None:
    held.failing = {1}
    notes: list[str] = []

    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)
        async with anyio.create_task_group() as tasks:

            async def one() -> None:
                try:
                    await executor.run_async({"x": rows(1)})
                except anyio.get_cancelled_exc_class() as error:
                    notes.extend(getattr(error, "__notes__", []))
                    raise

            tasks.start_soon(one)
            await anyio.to_thread.run_sync(held.wait_inside)
            tasks.cancel_scope.cancel()
        assert executor.statistics().cancelled == 1
    [note] = notes
    assert "secondary error" in note
    assert "told to fail at 1" in note


def test_a_timeout_comes_first_and_what_fails_afterwards_is_attached(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.failing = {1}
    wait = ThreadWait.wait

    def over_once_inside(self: ThreadWait, seconds: float = -1) -> bool:
        if seconds < 0 or threading.current_thread() is not threading.main_thread():
            return wait(self, seconds)
        held.wait_inside()
        return False

    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)
        with monkeypatch.context() as patch:
            patch.setattr(ThreadWait, "wait", over_once_inside)
            with pytest.raises(RunTimeoutError, match="not done within") as caught:
                executor.run({"x": rows(1)}, timeout=1000)
        [note] = caught.value.__notes__
        assert "secondary error" in note
        assert "told to fail at 1" in note


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 1000.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_coroutine_dropped_in_the_middle_says_nothing_and_stops_its_run(
    backend: str, timeout: float | None, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    async def main() -> None:
        coroutine = executor.run_async({"x": rows(1)}, timeout=timeout)
        step = coroutine.send(None)
        await anyio.to_thread.run_sync(held.wait_inside)
        dropped.append(coroutine)
        del coroutine, step

    dropped: list[object] = []
    with held_executor(held) as executor:
        anyio.run(main, backend=backend)
        dropped.clear()  # where no event loop runs any more
        gc.collect()
        held.go_on.release()
        while executor.statistics().running:
            pass
        assert executor.statistics().cancelled == 1
    assert unraisable == []


@pytest.mark.slow
def test_a_loop_that_is_closed_under_its_tasks_prints_only_what_asyncio_does(
    held: Held, capfd: pytest.CaptureFixture[str]
) -> None:
    with held_executor(held) as executor, ThreadPoolExecutor(1) as threads:
        loop = asyncio.new_event_loop()
        task = loop.create_task(executor.run_async({"x": rows(1)}, timeout=1000))
        loop.run_until_complete(asyncio.sleep(0))
        held.wait_inside()
        behind = threads.submit(executor.run, {"x": rows(2)})
        while not executor.statistics().queued:
            pass
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task
        gc.collect()
        held.go_on.release(2)
        np.testing.assert_array_equal(behind.result(PATIENCE)["y"], [2, 2, 2])
        while executor.statistics().running:
            pass
    assert "NoEventLoopError" not in capfd.readouterr().err


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_cancelled_twice_still_waits_for_its_run(held: Held) -> None:
    with held_executor(held) as executor:
        task = asyncio.create_task(executor.run_async({"x": rows(1)}))
        await anyio.to_thread.run_sync(held.wait_inside)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
        assert executor.statistics().running == 1
        held.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.statistics().running == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_while_a_timed_out_run_ends_is_not_swallowed(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over_inside(_wait: TaskWait, timeout: float | None = None) -> bool:
        assert timeout is not None
        await anyio.to_thread.run_sync(held.wait_inside)
        return False

    with held_executor(held) as executor:
        told = asyncio.Event()
        after_cancel(executor, told.set)
        monkeypatch.setattr(TaskWait, "wait", over_inside)
        task = asyncio.create_task(executor.run_async({"x": rows(1)}, timeout=PATIENCE))
        await told.wait()
        task.cancel()
        await asyncio.sleep(0)
        held.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.statistics().timed_out == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_timeout_works_around_a_run(held: Held) -> None:
    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)

        async def time_out_inside() -> None:
            await anyio.to_thread.run_sync(held.wait_inside)
            limit.reschedule(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(time_out_inside())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    await executor.run_async({"x": rows(1)})
        assert executor.statistics().cancelled == 1


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_scope_of_trio_works_around_a_run(held: Held) -> None:
    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)

        async def time_out_inside() -> None:
            await trio.to_thread.run_sync(held.wait_inside)
            scope.deadline = trio.current_time()

        async with trio.open_nursery() as tasks:
            with trio.CancelScope() as scope:
                tasks.start_soon(time_out_inside)
                await executor.run_async({"x": rows(1)})
        assert scope.cancelled_caught
        assert executor.statistics().cancelled == 1
