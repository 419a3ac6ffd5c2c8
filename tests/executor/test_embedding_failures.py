"""What can happen to a request that is under way, and how an executor ends: nothing is lost, nothing runs on unseen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import anyio
import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.binding.replicas import Replica
from dagexec.core.model import Model
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, DagexecError, OperatorError, RunCancelledError, RunTimeoutError, WorkerLostError
from dagexec.executor.requests.request import Request
from dagexec.platform.threads import ThreadWait
from dagexec.scheduler.run.run import Run
from tests.executor.held_executor import after_cancel, held_executor, requests_alive
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import temporary_operator
from tests.ops.running import operator_def


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


async def test_a_worker_that_is_ended_while_it_feeds_or_fetches_fails_that_run_only(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_arguments: object) -> None:
        raise SystemExit("ended")

    with held_executor(held) as executor:
        for method in ("feed", "fetch"):
            held.go_on.release()
            with monkeypatch.context() as patch:
                patch.setattr(Replica, method, ended)
                with pytest.raises(WorkerLostError, match="SystemExit: ended"):
                    await executor.run_async({"x": rows(1)})
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
        first = threads.submit(executor.run, {"x": rows(1)}, timeout=PATIENCE)
        held.wait_inside()
        second = threads.submit(executor.run, {"x": rows(1)})
        while not executor.statistics().queued:
            pass
        held.go_on.release(2)
        for future in (first, second):
            np.testing.assert_array_equal(future.result(PATIENCE)["y"], [2, 2, 2])
        assert executor.statistics().pool.replaced == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_that_dies_while_it_wakes_an_event_loop_does_not_leave_it_asleep(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    dying = [True]

    def die_once(callback: Callable[[], object]) -> object:
        if dying.pop() if dying else False:
            raise SystemExit
        return wake(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", die_once)
    with held_executor(held) as executor:
        held.go_on.release(2)
        runs = (executor.run_async({"x": rows(1)}) for _ in range(2))
        for result in await asyncio.wait_for(asyncio.gather(*runs), PATIENCE):
            np.testing.assert_array_equal(result["y"], [2, 2, 2])
        assert executor.statistics().pool.replaced == 1


def test_ctrl_c_while_a_timed_out_run_ends_still_waits_for_it(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = ThreadWait.wait

    def over_inside_and_interrupted_then(self: ThreadWait, seconds: float = -1) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            held.wait_inside()
            return False
        if len(waits) == 2:
            raise KeyboardInterrupt
        if len(waits) == 3:
            held.go_on.release()
        return wait(self, seconds)

    with held_executor(held) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadWait, "wait", over_inside_and_interrupted_then)
            with pytest.raises(KeyboardInterrupt):
                executor.run({"x": rows(1)}, timeout=PATIENCE)
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


async def test_a_run_cancelled_while_all_workers_are_busy_is_over_at_once(held: Held) -> None:
    with held_executor(held, replicas=3) as executor:
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
        serve_on_worker = pooled.serve_on_worker
        running = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()

        def cancelled_first(request: Request) -> None:
            assert dispatcher.cancel(request, RunCancelledError("too late"))
            serve_on_worker(request)

        monkeypatch.setattr(pooled, "serve_on_worker", cancelled_first)
        wait = ThreadWait()
        pooled.submit(Request({"x": rows(2)}, ["y"], notify=wait.notify), start_here=False)
        assert wait.wait(PATIENCE)
        assert not running.done()
        assert len(dispatcher.state.idle) == 1
        held.go_on.release()
        running.result(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_requests_that_cannot_be_fed_fail_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(Replica, "feed", refuse)
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1) as executor:
        runs = (executor.run_async({"x": rows(1)}) for _ in range(2 * sys.getrecursionlimit()))
        assert {str(error) for error in await asyncio.gather(*runs, return_exceptions=True)} == {"refused"}
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
