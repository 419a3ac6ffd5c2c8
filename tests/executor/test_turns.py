"""Very short runs of tasks wait for turns of their event loop, and for nothing that might not come."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, OperatorError
from dagexec.executor.batching.row_blocks import RowBlocks
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.state import MAX_IN_TURN
from dagexec.executor.requests.request import Request
from dagexec.executor.requests.waiting import MAX_TURN
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.options import CompileOptions
from tests.executor.timed_executor import Timed, timed
from tests.held import PATIENCE, rows
from tests.nets import temporary_operator

QUICK = 0.24 * MAX_TURN
CALLERS = 24

assert QUICK <= MAX_IN_TURN


async def ask(runs: Timed, value: float, count: int = 2) -> None:
    found = await runs.executor.run_async({"x": rows(value, count)})
    np.testing.assert_array_equal(found["y"], rows(2 * value, count))


async def some_wait(runs: Timed) -> None:
    """Return once requests wait for turns."""
    while not runs.executor.statistics().queued:
        await anyio.lowlevel.checkpoint()


async def test_the_loop_has_them_in_its_turns_in_order_and_workers_none() -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        await ask(runs, number)
        ended.append(number)

    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(call, number)
            await some_wait(runs)
            found = runs.executor.statistics()
            assert (found.running, found.queued > 0) == (0, True)
        assert runs.in_turns == runs.handed_over >= CALLERS / 2
        assert len(ended) == CALLERS
        found = runs.executor.statistics()
        assert found.completed == CALLERS + 2
        assert len(found.runs_per_replica) == 1


def test_who_waits_for_no_turn_gets_a_replica_although_those_before_get_one_too() -> None:
    """A thread comes while two replicas are idle and a request of a loop waits for its turn: both are served."""
    binding = SimpleNamespace(signature=(), is_shared=False, seconds_at_best=0.0, shortest=0.0)
    replicas: Any = [SimpleNamespace(number=number, io_binding=binding) for number in range(2)]
    pool: Any = SimpleNamespace(workers={}, is_worker=lambda: False)
    loop: Any = object()
    dispatcher = Dispatcher("net", replicas, pool, CompileOptions(), None)
    dispatcher.call_loop = lambda _: None
    pooled = PooledRuns(dispatcher, pool, 1, RowBlocks.__new__(RowBlocks))
    served: list[Request] = []
    pooled.serve = served.append  # type: ignore[method-assign]
    waits, comes = Request({}), Request({})
    waits.loop = loop
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pooled.submit, waits, start_here=False).result(PATIENCE)
        assert served == []
        thread.submit(pooled.submit, comes, start_here=False).result(PATIENCE)
    assert served == [waits, comes]


async def test_runs_of_another_shape_and_runs_that_became_long_are_the_workers() -> None:
    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number, 2 + number % 2)
        assert runs.executor.statistics().completed == CALLERS + 2
    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number)
            await some_wait(runs)
            runs.seconds = 2 * MAX_TURN
            before = runs.in_turns
        assert runs.in_turns - before <= 3


async def test_a_loop_that_is_busy_with_other_work_leaves_them_to_workers() -> None:
    with timed(seconds=QUICK) as runs:
        turns = runs.executor._turns
        assert turns is not None
        clock = itertools.count()
        turns._now = lambda: float(next(clock))
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number)
        assert runs.in_turns < CALLERS / 2


async def test_who_blocks_the_loops_thread_does_not_wait_for_its_turns() -> None:
    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number)
            await some_wait(runs)
            assert runs.executor.run({"x": rows(3)}, timeout=PATIENCE)["y"].flat[0] == 6
        assert runs.executor.statistics().completed == CALLERS + 3


@pytest.mark.parametrize("way", ["close", "aclose", "drain", "drain_async"])
async def test_closing_ends_them_and_draining_has_them_served(way: str) -> None:
    async def call(number: int) -> None:
        with suppress(ClosedError):
            await ask(runs, number)

    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(call, number)
            await some_wait(runs)
            before = runs.executor.statistics()
            ending = getattr(runs.executor, way)()
            if way.endswith(("aclose", "async")):
                await ending
        found = runs.executor.statistics()
        ended = (found.completed - before.completed, found.cancelled)
        assert ended == ((before.queued, 0) if way.startswith("drain") else (0, before.queued))


async def test_a_task_that_is_cancelled_leaves_the_others_their_turns() -> None:
    with timed(seconds=QUICK) as runs:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number)
            await some_wait(runs)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await ask(runs, 1)
            assert scope.cancelled_caught
        found = runs.executor.statistics()  # trio may have had the others first, so that it had its turn at once
        assert found.completed + found.cancelled == CALLERS + 3
        assert found.cancelled <= 1


async def test_one_that_fails_fails_alone() -> None:
    def body(operator: Operator) -> None:
        if operator.x(0).flat[0] == 7:
            raise ValueError("seven")
        operator.y(0)[...] = operator.x(0).flat[0]

    failed: list[str] = []

    async def call(number: int) -> None:
        try:
            assert (await runs.executor.run_async({"x": rows(number)}))["y"].flat[0] == 2 * number
        except OperatorError as error:
            failed.append(str(error))

    with temporary_operator("Own", body), timed("Own", seconds=QUICK) as runs:
        assert runs.executor._inline is not None
        runs.executor._inline.__dict__["waits_for_nothing"] = True
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(call, number)
        assert runs.in_turns >= CALLERS / 2
        assert len(failed) == 1
        assert "seven" in failed[0]


@pytest.mark.parametrize("others", ["threads", "loops"])
def test_tasks_threads_and_other_loops_are_all_served(others: str) -> None:
    async def many() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(ask, runs, number)

    def one_after_another() -> None:
        for number in range(CALLERS):
            found = runs.executor.run({"x": rows(number)}, timeout=PATIENCE)
            np.testing.assert_array_equal(found["y"], rows(2 * number))

    with timed(seconds=QUICK) as runs, ThreadPoolExecutor(3) as threads:
        calls = [partial(anyio.run, many), one_after_another if others == "threads" else partial(anyio.run, many)]
        for done in [threads.submit(call) for call in (*calls, calls[1])]:
            done.result(PATIENCE)
        assert runs.executor.statistics().completed == 3 * CALLERS + 2


@pytest.mark.parametrize("other", ["thread", "loop"])
def test_a_loop_that_is_closed_while_requests_wait_for_it_holds_nobody_up(other: str) -> None:
    async def begin() -> None:
        kept.extend(asyncio.ensure_future(ask(runs, number)) for number in range(CALLERS))
        await some_wait(runs)

    kept: list[asyncio.Future[None]] = []
    with timed(seconds=QUICK) as runs:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        if other == "thread":
            assert runs.executor.run({"x": rows(3)}, timeout=PATIENCE)["y"].flat[0] == 6
        else:
            asyncio.run(asyncio.wait_for(ask(runs, 3), PATIENCE))
        closing = threading.Thread(target=runs.executor.close)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
    for task in kept:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
