"""The pool and the nets under controlled schedules: they are right under all of them, and planted bugs are caught."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappush

import pytest

from dagexec import Workspace
from dagexec.errors import DagexecError, RunTimeoutError, WorkerLostError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds, systematic
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.executing import NotedExecuting
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, finish
from tests.scheduler.scenarios import (
    DIAMOND,
    Done,
    expected,
    fed,
    held,
    net_scenario,
    outputs_of,
    pool_scenario,
    run_of,
    sums,
)

FORK = [[], [0], [0]]
TWO_LAYERS = [[], [], [0, 1], [0, 1], [2, 3]]


class LatePool(WorkerPool):
    """One whose threads are started when there is something for them."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, at_once=False)


class EarlyPool(WorkerPool):
    """Planted: the last chain is released one parent too early."""

    def submit(self, run: Run) -> None:
        """Count one parent less."""
        children = [list(row) for row in run.work.graph.children]
        counts = list(run.work.graph.parent_counts)
        last = len(children) - 1
        max(row for row in enumerate(children) if last in row[1])[1].remove(last)
        counts[last] -= 1
        run.machine = Machine(replace(run.work.graph, children=children, parent_counts=counts))
        super().submit(run)


class TwoSteps(NotedExecuting):
    """Planted: a worker reads the count of a child and writes it back without holding the lock in between."""

    def _in_python(self, run: Run, machine: Machine, from_last: bool) -> None:
        self._acquire()
        found = machine.take()
        while found is not None:
            self._lock.release()
            self._call(run, found[0], run.work.steps[found[0]][found[1]])
            for child in run.work.graph.children[found[0]]:
                with self._lock:
                    count = machine._left[child]
                with self._lock:
                    machine._left[child] = count - 1
                    if count == 1:
                        heappush(machine._fresh, child)
            self._acquire()
            machine.remaining -= 1
            found = machine.take()
        if not run.active - 1:
            run.stopped = True


class TwoStepPool(WorkerPool):
    """One whose workers work in two steps."""

    def _begin(self) -> None:
        super()._begin()
        self._executing = TwoSteps(self.lock, self._roster, concurrent=False)


class SleepyPool(WorkerPool):
    """Planted: a run is submitted without waking anybody up."""

    def submit(self, run: Run) -> None:
        """List the run."""
        with self.lock:
            self._roster.submit(run)


class LateLookPool(WorkerPool):
    """Planted: whether a stopped run is over is looked up when the lock is not held any more."""

    def stop(self, run: Run, error: BaseException) -> None:
        """As the real one was once."""
        with self.lock:
            if run.over or run.stopped:
                return
            run.over = run.active == 0
            run.stop(error)
        if run.over:
            finish(run)


def stop_scenario(pool_class: type[WorkerPool], parents: Sequence[Sequence[int]]) -> Callable[[], None]:
    """A run is stopped while it runs; its owner must be told exactly once."""

    def scenario() -> None:
        done = Done()
        with pool_class(1) as pool:
            run = run_of(parents, [lambda: None] * len(parents), done)
            pool.submit(run)
            pool.stop(run, DagexecError("enough"))
            done.wait()
            assert run.over
            assert run.active == 0
        assert done.told == 1, f"told {done.told} times"

    return scenario


@pytest.mark.parametrize(
    ("pool_class", "parents", "error"),
    [
        (EarlyPool, DIAMOND, "before its parent"),
        (TwoStepPool, DIAMOND, "1 tasks not done"),
        (SleepyPool, [[]], "deadlock"),
    ],
)
def test_a_pool_with_a_planted_bug_is_caught_and_the_schedule_replayed(
    pool_class: type[WorkerPool], parents: list[list[int]], error: str
) -> None:
    scenario = pool_scenario(parents, 2, pool_class)
    found = systematic(scenario, preemptions=2)
    assert found.failed is not None
    assert error in str(found.failed.failure)
    again = found.failed.replay(scenario)
    assert again.trace == found.failed.trace
    assert str(again.failure) == str(found.failed.failure)


@pytest.mark.slow
@pytest.mark.parametrize("parents", [[[]], FORK])
def test_a_stopped_run_is_told_once_under_every_schedule(parents: list[list[int]]) -> None:
    search = systematic(held(stop_scenario(WorkerPool, parents)), preemptions=2)
    search.raise_failure()
    assert search.exhausted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parents", "workers", "bound"), [([[]], 1, 2), (FORK, 1, 2), (DIAMOND, 2, 1), ([[], []], 2, 1)]
)
def test_the_pool_is_right_under_every_schedule_with_few_preemptions(
    parents: list[list[int]], workers: int, bound: int
) -> None:
    search = systematic(held(pool_scenario(parents, workers)), preemptions=bound)
    search.raise_failure()
    assert search.exhausted
    assert search.tried > 10


@pytest.mark.slow
@pytest.mark.parametrize(("parents", "workers"), [([[]], 2), (FORK, 2)])
def test_workers_are_given_threads_when_they_are_woken_under_every_schedule(
    parents: list[list[int]], workers: int
) -> None:
    search = systematic(held(pool_scenario(parents, workers, LatePool)), preemptions=1)
    search.raise_failure()
    assert search.exhausted


@pytest.mark.slow
@pytest.mark.parametrize(("parents", "workers"), [(DIAMOND, 2), (TWO_LAYERS, 2), (TWO_LAYERS, 3)])
def test_the_pool_is_right_for_many_seeds_and_they_differ(parents: list[list[int]], workers: int) -> None:
    scenario = held(pool_scenario(parents, workers))
    explore_seeds(scenario, range(150)).raise_failure()


def test_two_runs_of_two_priorities_share_a_pool_under_every_schedule() -> None:
    def scenario() -> None:
        done = [Done(), Done()]
        with WorkerPool(1) as pool:
            runs = [run_of(FORK, [lambda: None] * 3, told) for told in done]
            runs[1].priority = 1
            for run in runs:
                pool.submit(run)
            for told, run in zip(done, runs, strict=True):
                told.wait()
                run.check_complete()
                run.raise_error()
        assert [told.told for told in done] == [1, 1]

    search = systematic(held(scenario), preemptions=2)
    search.raise_failure()
    assert search.exhausted


@pytest.mark.slow
def test_a_dead_worker_ends_its_run_once_under_every_schedule(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "dagexec")

    def die() -> None:
        raise ValueError("in an operator whose name cannot be told")

    def unnamed(_chain: int, _step: object) -> str:
        raise KeyError("no name")

    def scenario() -> None:
        done, after = Done(), Done()
        with WorkerPool(2) as pool:
            run = run_of([[], []], [die, lambda: None], done)
            run.name_step = unnamed
            pool.submit(run)
            done.wait()
            with pytest.raises(WorkerLostError, match="died: KeyError"):
                run.raise_error()
            whole = run_of([[], []], [lambda: None, lambda: None], after)
            pool.submit(whole)
            after.wait()
            whole.raise_error()
            assert pool.statistics().replaced == 1
        assert done.told == 1

    explore_seeds(held(scenario), range(100)).raise_failure()
    systematic(held(scenario), preemptions=1, limit=400).raise_failure()


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["dag", "async_dag"])
def test_nets_compute_what_simple_net_does_under_every_schedule(net_type: str) -> None:
    search = systematic(held(net_scenario(sums(DIAMOND), net_type)), preemptions=1)
    search.raise_failure()
    assert search.exhausted
    explore_seeds(held(net_scenario(sums(TWO_LAYERS), net_type, workers=3, runs=2)), range(40)).raise_failure()


@pytest.mark.slow
def test_a_timeout_at_any_point_of_a_run_leaves_the_net_usable() -> None:
    net = sums(FORK)
    right = expected(net)
    outcomes = set()

    def scenario() -> None:
        workspace = fed()
        made = workspace.create_net(net, "dag", 1)
        assert isinstance(made, BaseNet)
        with made:
            try:
                made.run(timeout=1)
                outcomes.add("done")
            except RunTimeoutError:
                outcomes.add("timeout")
            made.run()
            assert outputs_of(workspace, net) == right

    search = systematic(held(scenario), preemptions=1, timeouts=True)
    search.raise_failure()
    assert search.exhausted
    explore_seeds(held(scenario), range(50), timeouts=True).raise_failure()
    assert outcomes == {"done", "timeout"}


@pytest.mark.slow
def test_callers_of_one_net_in_several_threads_take_turns_under_many_schedules() -> None:
    net = sums(FORK)
    right = expected(net)

    def scenario() -> None:
        workspace: Workspace = fed()
        made = workspace.create_net(net, "dag", 2)
        assert isinstance(made, BaseNet)
        with made:
            callers = [threads().start(made.run, f"caller {number}") for number in range(3)]
            for caller in callers:
                caller.join()
            assert outputs_of(workspace, net) == right

    explore_seeds(held(scenario), range(60)).raise_failure()
