"""Requests joined along their batch axis: who runs with whom, when, and that nobody's fate is another's."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.core.proto import NetDef
from dagexec.errors import ClosedError, FeedError, OperatorError, RunTimeoutError, SettingError
from dagexec.platform.threads import SystemThreads, Timer, installed
from dagexec.platform.timer_thread import TimedCall
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.nets import temporary_operator
from tests.ops.running import operator_def


class StoppedClock(SystemThreads):
    """Time stands still, and no timer rings, until told."""

    def __init__(self) -> None:
        self.time = 0.0
        self.calls: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.time

    def call_briefly(self, seconds: float, function: Callable[[], object]) -> Timer:
        self.calls.append(function)
        return TimedCall(function)

    def ring(self, seconds: float) -> None:
        """Let time go on, and make all calls."""
        self.time += seconds
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def held_model() -> Model:
    """y = 2 x, row by row, once the operator that is held lets go: its own result is 1 everywhere."""
    net = NetDef(
        name="held",
        op=[
            operator_def("HeldRows", ["x"], ["ones"]),
            operator_def("Mul", ["x", "scale"], ["doubled"]),
            operator_def("Mul", ["doubled", "ones"], ["y"]),
        ],
    )
    return dataclasses.replace(doubled_model(), name="held", net=net)


class Joined:
    """An executor of held operators, and threads that ask it."""

    def __init__(self, executor: dagexec.Executor, callers: ThreadPoolExecutor, held: Held) -> None:
        self.executor = executor
        self.callers = callers
        self.held = held

    def ask(self, value: float, count: int = 1, **options: object) -> Future[dict[str, np.ndarray]]:
        """Call `run` in a thread, and return once the request waits, has a replica, or is over."""
        before = self._known()
        asked = self.callers.submit(self.executor.run, {"x": rows(value, count)}, **options)  # type: ignore[arg-type]
        while self._known() == before and not asked.done():
            pass
        return asked

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self.held.go_on.release()

    def _known(self) -> int:
        found = self.executor.statistics()
        over = found.completed + found.failed + found.cancelled + found.timed_out + found.rejected
        return over + found.running + found.queued + found.awaiting_admission


@contextmanager
def joining(held: Held, max_wait: float = 0.0, **options: object) -> Iterator[Joined]:
    """Up to four rows are joined. Afterwards all replicas are idle."""
    with (
        ThreadPoolExecutor(12) as callers,
        dagexec.compile(
            held_model(), optimize=False, num_workers=2, max_batch=4, max_wait=max_wait, **options
        ) as executor,  # type: ignore[arg-type]
    ):
        try:
            yield Joined(executor, callers, held)
        except BaseException:
            held.go_on.release(50)  # or closing waits for those who are held
            raise
        executor._dispatcher.when_empty(lambda: None)
        if not executor._dispatcher.state.shut:
            assert len(executor._dispatcher.state.idle) == executor.statistics().replicas


def test_a_lone_request_that_waits_for_nobody_runs_in_its_callers_thread() -> None:
    callers: list[threading.Thread] = []

    def noted(operator: Operator) -> None:
        callers.append(threading.current_thread())
        operator.y(0)[...] = operator.x(0)

    with (
        temporary_operator("NotedRows", noted, row_by_row=True),
        dagexec.compile(
            doubled_model("NotedRows"), optimize=False, num_workers=1, max_batch=4, max_wait=0, warm_start={"x": (5, 3)}
        ) as executor,
    ):
        with pytest.raises(FeedError, match="at most max_batch=4 rows, found 5"):  # the replica is prepared for these
            executor.run({"x": rows(1, 5)})
        callers.clear()
        for _ in range(3):  # the first is filled up to five rows, for the second is prepared
            np.testing.assert_array_equal(executor.run({"x": rows(2, 3)})["y"], rows(4, 3))
        assert callers[2] is threading.current_thread()
        assert executor.statistics().batch_sizes == {3: 3}


def test_requests_that_wait_for_a_replica_run_as_one_of_at_most_max_batch_rows(held: Held) -> None:
    with joining(held) as joined:
        asked = [joined.ask(0)]
        held.wait_inside()
        asked += [joined.ask(1), joined.ask(2, 2), joined.ask(3, 2), joined.ask(4)]
        joined.let_go(3)
        assert [len(one.result(PATIENCE)["y"]) for one in asked] == [1, 1, 2, 2, 1]
        statistics = joined.executor.statistics()
    assert held.seen == [0, 1, 3]
    assert statistics.batch_sizes == {1: 1, 3: 2}
    assert statistics.completed == 5
    assert statistics.runs_per_replica == (3,)


@pytest.mark.usefixtures("plain_results")
def test_each_caller_gets_its_own_rows_in_arrays_of_its_own() -> None:
    clock = StoppedClock()
    out = np.zeros((2, 3), np.float32)
    with (
        installed(clock),
        dagexec.compile(doubled_model(), optimize=False, max_batch=6, max_wait=1000) as executor,
        ThreadPoolExecutor(3) as callers,
    ):
        asked = [
            callers.submit(executor.run, {"x": rows(1)}),
            callers.submit(executor.run, {"x": rows(2)}, out={"y": out}),
            callers.submit(executor.run, {"x": rows(3)}),
        ]
        results = [one.result(PATIENCE)["y"] for one in asked]
        assert executor.statistics().batch_sizes == {6: 1}
    for value, result in zip((2, 4, 6), results, strict=True):
        np.testing.assert_array_equal(result, rows(value))
    assert results[1] is out
    assert results[0].base is None


def test_a_lone_request_waits_for_others_until_its_time_is_up_and_no_longer(held: Held) -> None:
    clock = StoppedClock()
    with installed(clock), joining(held, max_wait=3.0) as joined:
        asked = [joined.ask(1), joined.ask(2)]
        clock.ring(2.9)
        assert joined.executor.statistics().queued == 2
        clock.ring(0.1)
        joined.let_go()
        assert [one.result(PATIENCE)["y"][0, 0] for one in asked] == [2, 4]
        assert joined.executor.statistics().batch_sizes == {2: 1}


def test_a_full_batch_and_a_full_queue_wait_for_nobody(held: Held) -> None:
    with installed(StoppedClock()), joining(held, max_wait=1000, max_queued=2) as joined:
        full = joined.ask(1, 4)
        joined.let_go()
        full.result(PATIENCE)
        both = [joined.ask(2), joined.ask(3)]
        joined.let_go()
        assert [len(one.result(PATIENCE)["y"]) for one in both] == [1, 1]
        assert joined.executor.statistics().batch_sizes == {2: 1, 4: 1}


def test_the_members_of_a_run_that_fails_run_alone_and_only_the_bad_one_fails(held: Held) -> None:
    held.failing = {1}
    with joining(held) as joined:
        first = joined.ask(0)
        held.wait_inside()
        bad, good, other = joined.ask(1), joined.ask(2), joined.ask(3)
        joined.let_go(5)
        first.result(PATIENCE)
        with pytest.raises(OperatorError, match="told to fail at 1"):
            bad.result(PATIENCE)
        assert [one.result(PATIENCE)["y"][0, 0] for one in (good, other)] == [4, 6]
        statistics = joined.executor.statistics()
    assert held.seen == [0, 1, 1, 2, 3]
    assert (statistics.failed, statistics.completed, statistics.retried) == (1, 3, 3)


def test_a_member_whose_time_is_up_leaves_and_the_run_goes_on_for_the_others(held: Held) -> None:
    with joining(held) as joined:
        first = joined.ask(0)
        held.wait_inside()
        stays, leaves = joined.ask(1), joined.ask(2, timeout=0.05)
        joined.let_go()
        held.wait_inside()
        with pytest.raises(RunTimeoutError):
            leaves.result(PATIENCE)
        assert joined.executor.statistics().running == 1
        joined.let_go()
        assert stays.result(PATIENCE)["y"].shape == (1, 3)
        first.result(PATIENCE)
        assert joined.executor.statistics().timed_out == 1


async def test_a_run_that_all_its_members_left_stops(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Run] = []
    stop = WorkerPool.stop

    def noted(pool: WorkerPool, run: Run, error: BaseException) -> None:
        stopped.append(run)
        stop(pool, run, error)

    monkeypatch.setattr(WorkerPool, "stop", noted)

    with joining(held) as joined:
        first = joined.ask(0)
        await anyio.to_thread.run_sync(held.wait_inside)
        async with anyio.create_task_group() as tasks:
            for value in (1, 2):
                tasks.start_soon(joined.executor.run_async, {"x": rows(value, 1)})
            while joined.executor.statistics().queued < 2:
                await anyio.lowlevel.checkpoint()
            joined.let_go()
            await anyio.to_thread.run_sync(held.wait_inside)
            tasks.cancel_scope.cancel()
        joined.let_go()
        first.result(PATIENCE)
        assert joined.executor.drain(PATIENCE)
        statistics = joined.executor.statistics()
    assert (statistics.completed, statistics.cancelled, statistics.retried) == (1, 2, 0)
    assert len(stopped) == 1


def test_a_group_that_lost_a_member_is_not_full(held: Held) -> None:
    with installed(StoppedClock()), joining(held, max_wait=1000) as joined:
        stays, leaves = joined.ask(1), joined.ask(2, 2, timeout=0.0)
        with pytest.raises(RunTimeoutError):
            leaves.result(PATIENCE)
        more = joined.ask(3, 2)
        assert joined.executor.statistics().queued == 2
        last = joined.ask(4)
        joined.let_go()
        for one in (stays, more, last):
            one.result(PATIENCE)
        assert joined.executor.statistics().batch_sizes == {4: 1}


def test_members_that_run_again_go_before_those_that_wait(held: Held) -> None:
    held.failing = {1}
    with joining(held) as joined:
        first = joined.ask(0)
        held.wait_inside()
        again = [joined.ask(1), joined.ask(2)]
        joined.let_go()
        held.wait_inside()
        waiting = joined.ask(3, priority=1)
        joined.let_go(4)
        with pytest.raises(OperatorError):
            again[0].result(PATIENCE)
        for one in (first, again[1], waiting):
            one.result(PATIENCE)
    assert held.seen == [0, 1, 1, 2, 3]


def test_requests_of_other_outputs_and_other_lengths_are_not_joined(held: Held) -> None:
    with joining(held) as joined:
        asked = [joined.ask(0)]
        held.wait_inside()
        asked += [joined.ask(1), joined.ask(2, outputs=["y", "x"]), joined.ask(3), joined.ask(4, priority=1)]
        joined.let_go(3)
        for one in asked:
            one.result(PATIENCE)
    assert held.seen == [0, 4, 2]


def test_a_drain_runs_those_that_wait_for_others_and_a_close_ends_them(held: Held) -> None:
    for drain in (True, False):
        with installed(StoppedClock()), joining(held, max_wait=1000) as joined:
            waiting = joined.ask(1)
            joined.let_go(drain)
            joined.executor.close(drain=drain)
            if drain:
                assert waiting.result(PATIENCE)["y"].shape == (1, 3)
            else:
                with pytest.raises(ClosedError):
                    waiting.result(PATIENCE)


def two_inputs() -> Model:
    """y = a + b, row by row."""
    free = InputInfo(dtypes.FLOAT32, (None, 3))
    net = NetDef(name="sum", op=[operator_def("Add", ["a", "b"], ["y"])], external_input=["a", "b"])
    return Model(name="sum", net=net, parameters={}, inputs={"a": free, "b": free}, outputs=("y",))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 3), r"the inputs disagree on the number of rows: \{'a': 2, 'b': 3\}"),
        ((5, 5), "a request has at most max_batch=4 rows, found 5"),
    ],
)
def test_rows_that_cannot_be_joined_are_refused_with_their_numbers(counts: tuple[int, int], message: str) -> None:
    with dagexec.compile(two_inputs(), optimize=False, max_batch=4) as executor:
        with pytest.raises(FeedError, match=message):
            executor.run({"a": rows(1, counts[0]), "b": rows(1, counts[1])})
        np.testing.assert_array_equal(executor.run({"a": rows(1), "b": rows(2)})["y"], rows(3))


def test_a_model_of_a_fixed_number_of_rows_is_refused() -> None:
    fixed = InputInfo(dtypes.FLOAT32, (2, 3))
    model = dataclasses.replace(two_inputs(), inputs={"a": fixed, "b": fixed})
    with pytest.raises(SettingError, match=r"max_batch needs an input of any number of rows, found .*\(2, 3\)"):
        dagexec.compile(model, optimize=False, max_batch=4)
