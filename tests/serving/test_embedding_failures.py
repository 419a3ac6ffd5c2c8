"""What can happen to a request that is under way, and how an executor ends: nothing is lost, nothing runs on unseen."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import anyio
import numpy as np
import pytest
import trio

import dagexec
from dagexec import NetDef
from dagexec.binding.replicas import Replica
from dagexec.core.model import Model
from dagexec.core.operator import Operator
from dagexec.errors import (
    ClosedError,
    DagexecError,
    OperatorError,
    RunCancelledError,
    RunTimeoutError,
    WorkerLostError,
)
from dagexec.platform.threads import ThreadWait
from dagexec.scheduler.run.run import Run
from dagexec.serving.requests import Request
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import temporary_operator
from tests.ops.running import operator_def

BACKENDS = ["asyncio", "trio"]


@contextmanager
def held_executor(held: Held, **options: object) -> Iterator[dagexec.Executor]:
    """An executor of held operators. Afterwards it must have all its replicas, serve on each, and leave no thread."""
    before = set(threading.enumerate())
    executor = dagexec.compile(doubled_model("Held"), optimize=False, num_workers=2, **options)  # type: ignore[arg-type]
    with executor:
        yield executor
        if executor._dispatcher.state.shut:
            return
        assert len(executor._dispatcher.state.idle) == executor.statistics().replicas
        held.failing.clear()
        while held.go_on.acquire(blocking=False):
            pass
        for _ in range(executor.statistics().replicas):
            held.go_on.release()
            np.testing.assert_array_equal(executor.run({"x": rows(0)}, timeout=PATIENCE)["y"], [2, 2, 2])
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert {name for name in left if not name.startswith(("AnyIO", "Trio"))} == set()


def requests_alive() -> list[Request]:
    """Every request in this process that something still refers to."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Request)]


def after_cancel(executor: dagexec.Executor, action: Callable[[], object]) -> None:
    """Have `action` called whenever a request has been told to end early."""
    cancel = executor._dispatcher.cancel

    def cancel_and_act(*arguments: object) -> bool:
        found = cancel(*arguments)  # type: ignore[arg-type]
        action()
        return found

    executor._dispatcher.cancel = cancel_and_act  # type: ignore[method-assign]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_that_fails_after_the_await_was_cancelled_is_attached_to_the_cancellation(
    backend: str, held: Held
) -> None:
    held.failing = {1}
    notes: list[str] = []

    async def main() -> None:
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

    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)
        anyio.run(main, backend=backend)
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
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("timeout", [None, 1000.0])
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


def test_a_task_cancelled_twice_still_waits_for_its_run(held: Held) -> None:
    async def main() -> None:
        task = asyncio.create_task(executor.run_async({"x": rows(1)}))
        await asyncio.to_thread(held.wait_inside)
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

    with held_executor(held) as executor:
        asyncio.run(main())


def test_a_cancellation_while_a_timed_out_run_ends_is_not_swallowed(held: Held) -> None:
    async def main() -> None:
        told = asyncio.Event()
        after_cancel(executor, told.set)
        task = asyncio.create_task(executor.run_async({"x": rows(1)}, timeout=0.001))
        await told.wait()
        task.cancel()
        await asyncio.sleep(0)
        held.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await task

    with held_executor(held) as executor:
        asyncio.run(main())
        assert executor.statistics().timed_out == 1


def test_asyncio_timeout_and_trio_scopes_work_around_a_run(held: Held) -> None:
    async def on_asyncio() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await executor.run_async({"x": rows(1)})

    async def on_trio() -> None:
        with trio.move_on_after(0.001) as scope:
            await executor.run_async({"x": rows(1)})
        assert scope.cancelled_caught

    with held_executor(held) as executor:
        after_cancel(executor, held.go_on.release)
        asyncio.run(on_asyncio())
        while held.go_on.acquire(blocking=False):
            pass  # what was released for a run that was cancelled before it began
        trio.run(on_trio)
        assert executor.statistics().cancelled == 2


def test_ctrl_c_stops_the_run_and_every_thread_stays(held: Held) -> None:
    with held_executor(held, replicas=2) as executor, ThreadPoolExecutor(1) as threads:
        after_cancel(executor, held.go_on.release)

        def interrupt() -> None:
            held.wait_inside()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.run({"x": rows(1)})
        interrupting.result(PATIENCE)
        assert (executor.statistics().cancelled, executor.statistics().running) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("queued", [False, True])
def test_ctrl_c_at_any_point_of_run_loses_no_replica_and_no_worker(queued: bool, held: Held) -> None:
    """The caller is served at once, or waits in the queue behind other runs."""
    with held_executor(held, replicas=2) as executor, ThreadPoolExecutor(2) as threads:

        def run() -> None:
            others = [threads.submit(executor.run, {"x": rows(1)}) for _ in range(2)] if queued else []
            held.wait_inside(len(others))
            if not queued:
                held.go_on.release()
            try:
                interrupted_at_points.look(lambda: executor.run({"x": rows(1)}, timeout=0.01 if queued else PATIENCE))
            except RunTimeoutError:
                pass
            finally:
                if queued:
                    assert executor.statistics().queued == 0
                    held.go_on.release(2)
                for other in others:
                    other.result(PATIENCE)
                while executor.statistics().running:
                    pass
                free = sorted(replica.number for replica in executor._dispatcher.state.idle)
                assert free == [0, 1], f"point {interrupted_at_points.point}"
                while held.go_on.acquire(blocking=False):
                    pass
                while held.inside.acquire(blocking=False):
                    pass

        interrupted_at_points = InterruptedAtPoints("dagexec/")
        interrupted_at_points(run)


def test_ctrl_c_while_a_feed_fails_leaves_other_callers_alone(held: Held) -> None:
    """Whoever feeds in vain gives the replica to the next in the queue, but does not feed for that one."""
    with held_executor(held) as executor, ThreadPoolExecutor(1) as threads:
        others: list[Future[dict[str, np.ndarray]]] = []
        feeders: list[threading.Thread] = []
        feed = Replica.feed

        def fail_with_another_behind(replica: Replica, feeds: Mapping[str, np.ndarray], *results: object) -> None:
            feeders.append(threading.current_thread())
            if others:
                feed(replica, feeds, *results)
                return
            others.append(threads.submit(executor.run, {"x": rows(2)}))
            while not executor.statistics().queued:
                pass
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Replica, "feed", fail_with_another_behind)
            with pytest.raises(KeyboardInterrupt):
                executor.run({"x": rows(1)})
            held.go_on.release()
            np.testing.assert_array_equal(others[0].result(PATIENCE)["y"], [2, 2, 2])
        assert feeders[0] is threading.main_thread()
        assert feeders[1] is not threading.main_thread()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_operator_that_runs_its_own_executor_is_told(asynchronous: bool) -> None:
    found: list[dagexec.Executor] = []

    def ask_itself(operator: Operator) -> None:
        del operator
        if asynchronous:
            anyio.run(found[0].run_async, {})
        else:
            found[0].run({})

    with temporary_operator("AskItself", ask_itself):
        net = NetDef(name="asking", op=[operator_def("AskItself", [], ["y"])])
        with dagexec.compile(Model(name="asking", net=net, outputs=("y",)), optimize=False, replicas=2) as executor:
            found[:] = [executor]
            with pytest.raises(OperatorError, match="cannot run the executor that runs it; it would wait for"):
                executor.run({})


def test_an_operator_may_run_another_executor() -> None:
    with dagexec.compile(doubled_model(), optimize=False) as inner:

        def ask(operator: Operator) -> None:
            operator.y(0)[...] = inner.run({"x": rows(3)})["y"][0, 0]

        with temporary_operator("Ask", ask):
            net = NetDef(name="asking", op=[operator_def("Ask", [], ["y"])])
            with dagexec.compile(Model(name="asking", net=net, outputs=("y",)), optimize=False) as outer:
                assert outer.run({})["y"].tolist() == [6]


def test_a_worker_that_is_ended_while_it_feeds_or_fetches_fails_that_run_only(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_arguments: object) -> None:
        raise SystemExit("ended")

    async def one() -> None:
        await executor.run_async({"x": rows(1)})

    with held_executor(held) as executor:
        for method in ("feed", "fetch"):
            held.go_on.release()
            with monkeypatch.context() as patch:
                patch.setattr(Replica, method, ended)
                with pytest.raises(WorkerLostError, match="SystemExit: ended"):
                    anyio.run(one)
        assert executor.statistics().failed == 2


def test_a_worker_that_dies_before_it_could_tell_the_caller_is_replaced_and_the_caller_told(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_executor(held) as executor, ThreadPoolExecutor(2) as threads:
        notify = executor._dispatcher.notify
        dying = [True]

        def die_once(request: object) -> None:
            if dying.pop() if dying else False:
                raise SystemExit
            notify(request)  # type: ignore[arg-type]

        monkeypatch.setattr(executor._dispatcher, "notify", die_once)
        first = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        second = threads.submit(executor.run, {"x": rows(1)})
        while not executor.statistics().queued:
            pass
        held.go_on.release(2)
        for future in (first, second):
            np.testing.assert_array_equal(future.result(PATIENCE)["y"], [2, 2, 2])
        assert executor.statistics().pool.replaced == 1


def test_a_worker_that_dies_while_it_wakes_an_event_loop_does_not_leave_it_asleep(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both() -> list[dict[str, np.ndarray]]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        dying = [True]

        def die_once(callback: Callable[[], object]) -> object:
            if dying.pop() if dying else False:
                raise SystemExit
            return wake(callback)

        monkeypatch.setattr(loop, "call_soon_threadsafe", die_once)
        runs = (executor.run_async({"x": rows(1)}) for _ in range(2))
        return await asyncio.wait_for(asyncio.gather(*runs), PATIENCE)

    with held_executor(held) as executor:
        held.go_on.release(2)
        for result in asyncio.run(both()):
            np.testing.assert_array_equal(result["y"], [2, 2, 2])
        assert executor.statistics().pool.replaced == 1


def test_ctrl_c_while_a_timed_out_run_ends_still_waits_for_it(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = ThreadWait.wait

    def interrupted_second(self: ThreadWait, seconds: float = -1) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        if len(waits) == 3:
            held.go_on.release()
        return wait(self, seconds)

    with held_executor(held) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadWait, "wait", interrupted_second)
            with pytest.raises(KeyboardInterrupt):
                executor.run({"x": rows(1)}, timeout=0.001)
        assert executor.statistics().running == 0
        assert executor.statistics().timed_out == 1


def test_threads_and_tasks_may_run_at_the_same_time() -> None:
    results: list[np.ndarray] = []

    async def tasks(first: int) -> None:
        async def one(value: int) -> None:
            results.append((await executor.run_async({"x": rows(value)}))["y"] / value)

        async with anyio.create_task_group() as group:
            for value in range(first, first + 50):
                group.start_soon(one, value)

    with (
        dagexec.compile(doubled_model(), optimize=False, replicas=3, num_workers=2) as executor,
        ThreadPoolExecutor(6) as threads,
    ):
        loops = [threads.submit(anyio.run, tasks, 1, backend=backend) for backend in ("asyncio", "trio", "asyncio")]
        plain = [threads.submit(lambda: executor.run({"x": rows(5)})["y"] / 5) for _ in range(100)]
        results += [future.result(PATIENCE) for future in plain]
        for future in loops:
            future.result(PATIENCE)
    assert len(results) == 250
    for result in results:
        np.testing.assert_allclose(result, rows(2), rtol=1e-6)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_an_async_with_block_that_was_cancelled_still_closes(backend: str, held: Held) -> None:
    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with executor, anyio.create_task_group() as tasks:
                tasks.start_soon(executor.run_async, {"x": rows(1)})
                await anyio.to_thread.run_sync(held.wait_inside)
                scope.cancel()
                held.go_on.release()
        assert scope.cancelled_caught
        with pytest.raises(ClosedError):
            await executor.run_async({"x": rows(1)})

    with held_executor(held) as executor:
        anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_drain_leaves_an_executor_that_can_be_closed(backend: str, held: Held) -> None:
    async def main() -> None:
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

    with held_executor(held) as executor:
        anyio.run(main, backend=backend)


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


def test_a_run_cancelled_while_all_workers_are_busy_is_over_at_once(held: Held) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(executor.run_async, {"x": rows(0)})
            await anyio.to_thread.run_sync(held.wait_inside, 2)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(executor.run_async, {"x": rows(1)})
                    await anyio.wait_all_tasks_blocked()
                    assert executor.statistics().running == 3
                    scope.cancel()
            assert (executor.statistics().running, executor.statistics().cancelled) == (2, 1)
            held.go_on.release(2)

    with held_executor(held, replicas=3) as executor:
        anyio.run(main)


def test_errors_of_the_executor_are_all_dagexec_errors() -> None:
    for error in (ClosedError, RunCancelledError, RunTimeoutError, WorkerLostError):
        assert issubclass(error, DagexecError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_in_a_forked_child_a_run_is_refused_and_every_way_to_close_returns(held: Held) -> None:
    """The parent has runs in flight and queued, which the child does not wait for."""

    async def asynchronously() -> None:
        async with executor:
            assert await executor.drain_async()

    with held_executor(held) as executor, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(executor.run, {"x": rows(1)}) for _ in range(2)]
        held.wait_inside()
        while not executor.statistics().queued:
            pass
        child = os.fork()
        if not child:
            status = 1
            try:
                with executor, pytest.raises(ClosedError, match="the process was forked"):
                    executor.run({"x": rows(1)})
                assert executor.drain()
                anyio.run(asynchronously)
                moment = executor.statistics()
                assert (moment.running, moment.queued) == (0, 0)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.go_on.release(2)
        for run in runs:
            np.testing.assert_array_equal(run.result(PATIENCE)["y"], [2, 2, 2])


def test_a_thread_interrupted_while_a_worker_feeds_leaves_the_replica_to_the_worker(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeding, go_on = threading.Event(), threading.Event()

    feed = Replica.feed

    def feed_slowly(replica: Replica, feeds: Mapping[str, np.ndarray], *results: object) -> None:
        feeding.set()
        assert go_on.wait(PATIENCE)
        feed(replica, feeds, *results)

    with held_executor(held) as executor:
        submit = executor._pool.submit

        def interrupted(run: Run) -> None:
            submit(run)
            assert feeding.wait(PATIENCE)
            raise KeyboardInterrupt

        wait = ThreadWait()
        request = Request({"x": rows(1)}, ["y"], notify=wait.notify)
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "feed", feed_slowly)
            patch.setattr(executor._pool, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor._pooled.submit(request, start_here=False)
            assert executor.statistics().running == 1
            assert executor._dispatcher.cancel(request, RunCancelledError("interrupted"))
        go_on.set()
        assert wait.wait(PATIENCE)
        assert executor.statistics().cancelled == 1
        assert (request.replica, request.run, request.feeds) == (None, None, {})


def test_a_request_cancelled_just_before_it_is_handed_to_a_worker_is_over_at_once(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only worker is busy with another run meanwhile."""
    with (
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, replicas=2) as executor,
        ThreadPoolExecutor(1) as threads,
    ):
        dispatcher, pooled = executor._dispatcher, executor._pooled
        serve_on_worker = pooled._serve_on_worker
        running = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()

        def cancelled_first(request: Request) -> None:
            assert dispatcher.cancel(request, RunCancelledError("too late"))
            serve_on_worker(request)

        monkeypatch.setattr(pooled, "_serve_on_worker", cancelled_first)
        wait = ThreadWait()
        pooled.submit(Request({"x": rows(2)}, ["y"], notify=wait.notify), start_here=False)
        assert wait.wait(PATIENCE)
        assert not running.done()
        assert len(dispatcher.state.idle) == 1
        held.go_on.release()
        running.result(PATIENCE)


def test_many_requests_that_cannot_be_fed_fail_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise ValueError("refused")

    async def main() -> list[object]:
        runs = (executor.run_async({"x": rows(1)}) for _ in range(2 * sys.getrecursionlimit()))
        return await asyncio.gather(*runs, return_exceptions=True)

    monkeypatch.setattr(Replica, "feed", refuse)
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1) as executor:
        assert {str(error) for error in asyncio.run(main())} == {"refused"}
        assert executor.statistics().failed == 2 * sys.getrecursionlimit()


@pytest.mark.slow
def test_an_error_that_is_kept_keeps_no_other_request(held: Held) -> None:
    """Its traceback holds the request that failed. Beside it there are those that the two workers had last."""
    others = requests_alive()  # of tests before this one
    held.failing = {1}
    with held_executor(held) as executor, ThreadPoolExecutor(8) as threads:
        running = [threads.submit(executor.run, {"x": rows(1)})]
        held.wait_inside()
        running += [threads.submit(executor.run, {"x": rows(2)}) for _ in range(7)]
        while executor.statistics().queued < 7:
            pass
        held.go_on.release(8)
        kept = running[0].exception(PATIENCE)
        for future in running[1:]:
            future.result(PATIENCE)
        assert isinstance(kept, OperatorError)
        assert len(requests_alive()) - len(others) <= 3
