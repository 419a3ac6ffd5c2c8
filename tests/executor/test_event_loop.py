"""What the thread of an event loop does for callers of `run_async`: short runs, so many in a turn, and nothing long."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from unittest.mock import Mock

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, RunTimeoutError
from dagexec.executor.requests.waiting import MAX_ALONE, MAX_TURN, EventLoop, TaskWait
from dagexec.executor.runs.inline import AMPLE
from dagexec.scheduler.observe.trace import Trace
from tests.executor.timed_executor import timed
from tests.held import PATIENCE, rows
from tests.nets import temporary_operator

SHORT = 0.45 * MAX_TURN
CALLERS = 64


async def test_runs_that_were_short_are_on_the_loops_thread() -> None:
    with timed(seconds=SHORT) as runs:
        assert await runs.is_here()
        assert await runs.is_here(priority=3)
        out = np.empty_like(rows(0))
        assert await runs.is_here(out={"y": out})
        assert out.tolist() == rows(6).tolist()
        assert not await runs.is_here(trace=Trace())
        assert runs.executor.statistics().completed == 6


async def test_a_timeout_leaves_a_run_there_that_took_a_small_part_of_it() -> None:
    with timed(seconds=SHORT) as runs:
        assert await runs.is_here(timeout=PATIENCE)
        runs.measure(SHORT)
        assert not await runs.is_here(timeout=0.99 * AMPLE * SHORT)
        for wrong, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
            with pytest.raises(error, match="timeout"):
                await runs.executor.run_async({"x": rows(3)}, timeout=wrong)


async def test_a_run_that_was_expected_to_be_in_time_and_was_not_ends_with_its_timeout() -> None:
    with timed(seconds=SHORT) as runs:
        runs.seconds = PATIENCE
        with pytest.raises(RunTimeoutError, match="net 'doubled': not done within 20 seconds"):
            await runs.executor.run_async({"x": rows(3)}, timeout=20)
        assert runs.handed_over == 0
        runs.seconds = SHORT
        assert await runs.is_here(), "nothing was measured of it, and its replica serves on"
        found = runs.executor.statistics()
        assert (found.timed_out, found.completed) == (1, 3)


async def test_a_run_alone_may_take_longer_than_one_of_several() -> None:
    with timed(seconds=0.99 * MAX_ALONE) as runs:
        assert await runs.is_here()
        runs.measure(0.99 * MAX_ALONE)
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLERS):
                tasks.start_soon(runs.is_here)
        assert runs.handed_over == CALLERS - 1
        runs.measure(1.01 * MAX_ALONE)
        assert not await runs.is_here()


async def test_one_long_run_has_the_next_two_handed_over() -> None:
    with timed(seconds=SHORT) as runs:
        runs.seconds = 2 * MAX_ALONE
        assert await runs.is_here()
        runs.seconds = MAX_TURN / 4
        assert [await runs.is_here() for _ in range(3)] == [False, False, True]


async def test_runs_that_may_wait_or_that_nobody_has_measured_are_not() -> None:
    def body(operator: Operator) -> None:
        operator.y(0)[...] = 3

    with temporary_operator("Own", body), timed("Own", seconds=SHORT) as runs:
        assert not await runs.is_here()
    with timed(seconds=SHORT) as runs:
        found = (await runs.executor.run_async({"x": rows(3, 5)}))["y"]
        np.testing.assert_array_equal(found, rows(6, 5))
        assert runs.handed_over == 1


async def test_a_turn_of_the_loop_has_time_for_so_many_runs_and_the_next_for_more() -> None:
    """Tasks that are started together run in one turn; workers get what is too much for it."""
    with timed(seconds=SHORT) as runs:
        for _ in range(2):
            runs.measure(SHORT)
            async with anyio.create_task_group() as tasks:
                for _ in range(CALLERS):
                    tasks.start_soon(runs.is_here)
            assert runs.handed_over == CALLERS - MAX_TURN // SHORT


class Calls:
    """Counts the calls of dagexec's functions in this thread, by room and name: ("binding", "arrays_of").

    Left out is what is a call under one Python and none under another: comprehensions, which are part of their function
    from 3.12 on, and taking a lock, which is a function of ours from 3.14 on (`platform/locks.py` says why).
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        package, _, module = str(frame.f_globals.get("__name__")).partition(".")
        name = frame.f_code.co_name
        if event == "call" and package == "dagexec" and module != "platform.locks" and name[0] != "<":
            self.counts[module.rpartition(".")[0], name] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


@pytest.mark.usefixtures("plain_results")
async def test_of_many_callers_the_loop_gets_little_work_for_each_and_nothing_that_may_last() -> None:
    """Preparing for new shapes, feeding, operators and fetching are the workers' for runs that are not short.

    What is left is a few dozen calls of small functions, so that all callers together take a turn of milliseconds.
    """
    calls = Calls()

    async def call(number: int) -> None:
        for size in (number % 8 + 1, 2):
            found = await runs.executor.run_async({"x": rows(number, size)})
            np.testing.assert_array_equal(found["y"], rows(2 * number, size))

    with timed(seconds=1.0) as runs, calls.counted():
        async with anyio.create_task_group() as tasks:
            for number in range(CALLERS):
                tasks.start_soon(call, number)
    rooms = {room for room, _ in calls.counts}
    inside = {"executor", "executor.dispatch", "executor.requests", "executor.runs"}
    assert rooms <= {*inside, "binding", "core", "platform", "scheduler.plan", "scheduler.run"}
    assert {name for room, name in calls.counts if room == "binding"} == {"fitting", "arrays_like"}
    # Each may be of another size than the run before (5 calls), and find a replica idle (22), as the schedule decides.
    assert calls.counts.total() < 2 * CALLERS * 64


async def test_others_have_their_turns_between_two_runs() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    with timed(seconds=SHORT) as runs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            found = []
            for _ in range(5):
                assert await runs.is_here()
                found.append(turns)
            tasks.cancel_scope.cancel()
    assert found[-1] - found[0] >= len(found) - 2  # trio has the tasks of a turn in any order


async def test_a_task_that_is_cancelled_is_told_and_a_closed_executor_refuses() -> None:
    with timed(seconds=SHORT) as runs:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runs.executor.run_async({"x": rows(3)})
        assert scope.cancelled_caught
        assert await runs.is_here()
        runs.executor.close()
        with pytest.raises(ClosedError, match="the executor is closed"):
            await runs.executor.run_async({"x": rows(3)})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_is_cancelled_as_its_time_is_up_waits_on_and_lets_the_loop_go_on() -> None:
    wait = TaskWait()
    task = asyncio.ensure_future(wait.wait(PATIENCE))
    await asyncio.sleep(0)
    wait._event.set()  # as the timer does
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not wait._event.is_set()
    ending = asyncio.ensure_future(wait.wait_out())
    await asyncio.sleep(0)
    wait.notify()
    await ending


class LinesOf:
    """Calls `act` before line `number` of a function that runs in this thread, counted as they run."""

    def __init__(self, function: Callable[..., object], number: int, act: Callable[[], object]) -> None:
        self._code, self._left, self._act = function.__code__, number, act

    def __call__(self, frame: FrameType, event: str, _argument: object) -> LinesOf | None:
        if frame.f_code is not self._code:
            return None
        if event in ("line", "return"):
            if self._left == 0:
                self._act()
            self._left -= 1
        return self

    @property
    def were_all(self) -> bool:
        """There were fewer lines."""
        return self._left >= 0


def test_whoever_is_put_in_while_the_loop_empties_its_waits_is_set() -> None:
    """Another thread may do so before any line of it, and finds the loop about to be done."""
    for number in itertools.count():
        scheduled: list[Callable[[], object]] = []
        loop = EventLoop(SimpleNamespace(call_soon_threadsafe=scheduled.append, call_soon=None), is_asyncio=True)
        first, late = Mock(spec=TaskWait), Mock(spec=TaskWait)
        loop.put(first)
        lines = LinesOf(EventLoop._empty, number, lambda loop=loop, late=late: loop.put(late))
        before = sys.gettrace()
        sys.settrace(lines)
        try:
            scheduled.pop()()
        finally:
            sys.settrace(before)
        if lines.were_all:
            break
        while scheduled:
            scheduled.pop()()
        first.set.assert_called_once()
        assert late.set.call_count == 1, f"put in before line {number}"
    assert number >= 4
