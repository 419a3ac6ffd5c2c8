"""Runs that are cancelled, closed, interrupted or lose their worker; see `test_operators`."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import anyio
import anyio.lowlevel
import pytest

from dagexec.devices.sim import Fault
from dagexec.errors import ClosedError, OperatorError, RunCancelledError, WorkerLostError
from dagexec.scheduler.run.run import Run
from tests.failures.acting import (
    BOTH,
    LEFT,
    PATIENCE,
    PLAIN,
    RIGHT,
    Acts,
    Array,
    Gate,
    Place,
    Setting,
    beside,
    feed,
    raising,
    release_when_cancelled,
    right_bytes,
    serves,
    until,
)


@pytest.mark.slow
async def test_a_cancelled_await_ends_when_nothing_works_for_it_any_more(place: Place, acts: Acts) -> None:
    held = Gate()
    with place.compile(num_workers=3) as executor, beside(executor, acts):
        acts.does[1] = held
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.run_async, feed(LEFT))
            await anyio.to_thread.run_sync(held.wait_inside)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for _ in range(10):
                    await anyio.lowlevel.checkpoint()
                assert executor.statistics().running == 2  # the task has not returned: the operator is at work
            held.open()
        assert executor.statistics().running == 1
        assert executor.statistics().cancelled == 1
        assert acts.behind[LEFT] <= place.finishes_what_is_launched
        del acts.does[1]
        assert (await executor.run_async(feed(LEFT)))["y"].tobytes() == right_bytes(LEFT)


@pytest.mark.slow
def test_closing_lets_runs_in_flight_finish_and_ends_queued_ones(place: Place, acts: Acts) -> None:
    with ThreadPoolExecutor(3) as threads:
        executor = place.compile(replicas=1)
        gate = Gate()
        acts.does[2] = gate
        running = threads.submit(executor.run, feed(RIGHT))
        gate.wait_inside()
        queued = threads.submit(executor.run, feed())
        until(lambda: executor.statistics().queued == 1)
        closing = threads.submit(executor.close)
        with pytest.raises(ClosedError, match="the executor was closed"):
            queued.result(PATIENCE)
        gate.open()
        assert running.result(PATIENCE)["y"].tobytes() == right_bytes(RIGHT)
        closing.result(PATIENCE)
        with pytest.raises(ClosedError, match="the executor is closed"):
            executor.run(feed())


@pytest.mark.slow
def test_draining_past_its_time_stops_runs_at_the_next_chain(place: Place, acts: Acts) -> None:
    with ThreadPoolExecutor(2) as threads:
        executor = place.compile(replicas=1, num_workers=1)
        gate = Gate()
        acts.does[1] = gate
        release_when_cancelled(executor, gate)
        running = threads.submit(executor.run, feed(LEFT))
        gate.wait_inside()
        assert executor.drain(timeout=0) is False
        with pytest.raises(ClosedError, match="the executor was closed"):
            running.result(PATIENCE)
        assert acts.behind[LEFT] <= place.finishes_what_is_launched


def test_a_worker_that_dies_is_replaced_and_only_its_run_ends(
    host: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Run.failure

    def die(run: Run, *arguments: object) -> BaseException:
        if any(isinstance(argument, LookupError) for argument in arguments):
            raise MemoryError("the worker dies while it reports")
        return failure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "failure", die)
    with host.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(LookupError("deadly"))
            with pytest.raises(WorkerLostError, match="died: MemoryError: the worker dies") as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, MemoryError)
        serves(executor, acts)
        assert executor.statistics().pool.replaced == 1
        assert executor.statistics().pool.workers == 2


def test_a_worker_that_dies_while_it_launches_is_replaced(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Run.failure

    def die(run: Run, *arguments: object) -> BaseException:
        if any(isinstance(argument, OperatorError) for argument in arguments):
            raise MemoryError("the worker dies while it reports")
        return failure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "failure", die)
    simulate(faults=[Fault("launch", match="Acting 'left'", nth=2)])
    with device.compile() as executor:
        with beside(executor, acts), pytest.raises(WorkerLostError, match="died: MemoryError: the worker dies"):
            executor.run(feed(LEFT), timeout=PATIENCE)
        serves(executor, acts)
        assert executor.statistics().pool.replaced == 1


@pytest.mark.slow
def test_ctrl_c_in_the_caller_stops_its_run_only(place: Place, acts: Acts) -> None:
    hung = Gate()
    with place.compile(num_workers=3) as executor:
        with beside(executor, acts), ThreadPoolExecutor(1) as threads:
            acts.does[1] = hung
            reasons = release_when_cancelled(executor, hung)

            def interrupt() -> None:
                hung.wait_inside()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            interrupting = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                executor.run(feed(LEFT), timeout=PATIENCE)
            interrupting.result(PATIENCE)
            assert [type(reason) for reason in reasons] == [RunCancelledError]
            assert acts.behind[LEFT] <= place.finishes_what_is_launched
        serves(executor, acts)


def test_a_child_of_fork_is_told_and_the_parent_goes_on(place: Place, acts: Acts) -> None:
    with place.compile() as executor:
        with beside(executor, acts) as gate:
            told = in_a_child(lambda: executor.run(feed(), timeout=PATIENCE))
            assert isinstance(told, ClosedError)
            assert "forked" in str(told)
            assert "call reopen() in the child, or compile the model again there" in str(told)
            assert gate.inside.acquire(blocking=False) is False
        serves(executor, acts)


def in_a_child(function: Callable[[], object]) -> BaseException | None:
    """What `function` raises in a child process made by fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        error: BaseException | None = None
        try:
            function()
        except BaseException as caught:
            error = type(caught)(str(caught))
        try:
            os.write(writing, pickle.dumps(error))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found: BaseException | None = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return found


@pytest.mark.slow
def test_many_failures_of_all_kinds_at_once_lose_nothing(place: Place, acts: Acts) -> None:
    acts.does[1] = raising(ValueError("left"))
    acts.does[2] = raising(KeyError("right"))
    codes = [PLAIN, LEFT, PLAIN, RIGHT, BOTH]
    with place.compile(num_workers=3, replicas=3) as executor, ThreadPoolExecutor(6) as threads:
        futures: list[tuple[float, Future[dict[str, Array]]]] = [
            (code, threads.submit(executor.run, feed(code), timeout=PATIENCE)) for code in codes * 20
        ]
        for code, future in futures:
            if code == PLAIN:
                assert future.result(PATIENCE)["y"].tobytes() == right_bytes()
            else:
                with pytest.raises(OperatorError, match="Acting"):
                    future.result(PATIENCE)
        moment = executor.statistics()
        assert (moment.completed, moment.failed) == (40, 60)
        acts.does.clear()
        serves(executor, acts)
