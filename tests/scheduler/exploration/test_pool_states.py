"""Every state of small pools: that all runs end, nobody sleeps in vain, and mutants of the roster are found."""

from __future__ import annotations

from typing import Any

import pytest

from dagexec.scheduler.exploration.native_states import NativeStates
from dagexec.scheduler.exploration.pool_states import Job, Pool, PoolStates
from dagexec.scheduler.exploration.state_search import SearchResult, search
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.worker import Worker
from tests.scheduler.exploration.test_run_states import tasks_of

ONE, CHAIN = tasks_of([[]]), tasks_of([[], [0]])
FORK, PIECES = tasks_of([[], [0], [0]]), tasks_of([[], [0]], [1, 3])


def searched(jobs: list[Job], workers: int, model: type[PoolStates] = PoolStates, **options: Any) -> SearchResult:
    return search(model(jobs, workers, **options), must_end=True)


def test_a_run_of_one_task_on_one_worker_has_states_that_can_be_counted() -> None:
    # Before the run is submitted the worker looks or sleeps (2); where it slept it is to be woken, was woken, is awake
    # (3). It looks, is to enter, in the piece, tells (4); then looks or sleeps, and the owner goes on or not yet (4).
    assert searched([Job(ONE)], 1).states == 13


@pytest.mark.parametrize(
    ("jobs", "workers", "options"),
    [
        ([Job(FORK)], 2, {}),
        ([Job(ONE), Job(ONE)], 2, {}),
        ([Job(CHAIN), Job(ONE, priority=1)], 2, {}),
        ([Job(FORK, here=True)], 2, {}),
        ([Job(CHAIN, stops=True), Job(ONE)], 1, {}),
        ([Job(ONE)], 2, {"deaths": 1}),
        ([Job(CHAIN, here=True, stops=True)], 2, {"failures": 1}),
        ([Job(FORK)], 2, {"at_once": False}),
        pytest.param([Job(FORK, here=True), Job(ONE)], 2, {"at_once": False}, marks=pytest.mark.slow),
        pytest.param([Job(ONE), Job(ONE)], 2, {"at_once": False, "deaths": 1}, marks=pytest.mark.slow),
        ([Job(FORK, here=True)], 2, {"at_once": False, "shuts": True}),
        pytest.param([Job(FORK)], 2, {"failures": 1, "shuts": True}, marks=pytest.mark.slow),
        pytest.param([Job(FORK)], 2, {"deaths": 1}, marks=pytest.mark.slow),
        pytest.param([Job(ONE, here=True), Job(ONE)], 1, {"deaths": 1}, marks=pytest.mark.slow),
        pytest.param([Job(CHAIN, user=0), Job(ONE, user=0), Job(ONE, user=1)], 1, {}, marks=pytest.mark.slow),
        pytest.param([Job(PIECES), Job(ONE, priority=1)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(FORK, here=True), Job(CHAIN, priority=1)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(PIECES, here=True, stops=True), Job(ONE, here=True)], 1, {}, marks=pytest.mark.slow),
        pytest.param([Job(FORK, user=0), Job(CHAIN, user=1)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(FORK)], 3, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_in_every_state_of_a_pool_who_sleeps_has_nothing_to_do_and_all_runs_end(
    jobs: list[Job], workers: int, options: dict[str, Any]
) -> None:
    found = searched(jobs, workers, **options)
    assert found.fault is None, (found.fault, found.path)
    assert found.exhausted


@pytest.mark.parametrize(
    ("jobs", "workers", "options"),
    [
        ([Job(FORK)], 2, {}),
        ([Job(CHAIN), Job(ONE, priority=1)], 1, {}),
        ([Job(CHAIN, stops=True)], 2, {"failures": 1}),
        pytest.param([Job(FORK, here=True)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(PIECES, stops=True)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(CHAIN), Job(ONE, priority=1)], 2, {}, marks=pytest.mark.slow),
        pytest.param([Job(ONE, here=True), Job(ONE, here=True)], 1, {}, marks=pytest.mark.slow),
        pytest.param([Job(FORK)], 2, {"shuts": True}, marks=pytest.mark.slow),
    ],
)
def test_in_every_state_of_a_pool_with_runs_in_machine_code_nobody_sleeps_in_vain_and_all_runs_end(
    jobs: list[Job], workers: int, options: dict[str, Any]
) -> None:
    found = searched(jobs, workers, NativeStates, **options)
    assert found.fault is None, (found.fault, found.path)
    assert found.exhausted


class DiesAlone(PoolStates):
    """Nobody is woken when a worker dies that sleeps, or has taken another one from those that do."""

    def _wake_all(self, pool: Pool, number: int) -> None:
        pool.threads[number] = pool.threads[number]._replace(at="lose the run")


@pytest.mark.parametrize("jobs", [[Job(ONE)], [Job(FORK)]])
def test_a_pool_that_does_not_wake_others_when_a_worker_dies_is_found(jobs: list[Job]) -> None:
    fault = searched(jobs, 2, DiesAlone, deaths=1).fault
    assert fault is not None
    assert fault.endswith("sleeps, and nobody knows")


class TellsNobodyWhoSleeps(Roster):
    """Machine code learns only when a worker wakes up, not that it sleeps."""

    def sleep(self, worker: Worker) -> bool:
        self.idle.append(worker)
        return self.next_run() is None


class LeavesWithoutALook(Roster):
    """A run in machine code that has something again, unseen, is not looked for."""

    def counts_changed(self, run: Run) -> None:
        super().counts_changed(run)
        self._native.clear()


@pytest.mark.parametrize(
    ("mutant", "jobs"), [(TellsNobodyWhoSleeps, [Job(FORK)]), (LeavesWithoutALook, [Job(FORK), Job(ONE)])]
)
def test_a_mutant_of_what_machine_code_is_told_is_found(mutant: type[Roster], jobs: list[Job]) -> None:
    found = searched(jobs, 2, NativeStates, roster=mutant)
    assert found.fault == "run 0 waits, worker 1 sleeps, and nobody wakes it"


class WakesNobodyForARun(Roster):
    """A run that is submitted is found by who looks, but nobody is woken."""

    def take_idle(self) -> Worker | None:
        return None


class WakesNobodyInARun(Roster):
    """Who leaves pieces behind does not say so."""

    def helper_for(self, run: Run) -> Worker | None:
        if run.has_place() and not run.listed:
            self.list_run(run)
        return None


class WakesOneOnly(Roster):
    """Who was woken for a run does not wake another one for the next run."""

    def helper(self) -> Worker | None:
        return None


class ForgetsARun(Roster):
    """A run that somebody is in is no run for others."""

    def next_run(self) -> Run | None:
        found = super().next_run()
        return None if found is not None and found.active else found


class NewestFirst(Roster):
    """Takes the run that came last."""

    def submit(self, run: Run) -> None:
        super().submit(run)
        self.runs.sort(key=lambda row: (row[0], row[1], -row[2]))


class NeverGivesWay(Roster):
    """Workers stay in a run of lower priority."""

    def gives_way(self, run: Run) -> bool:
        run.interrupt(False)
        return False


class AlwaysGivesWay(Roster):
    """Workers leave a run for another one that they do not enter."""

    def next_run(self) -> Run | None:
        found = super().next_run()
        return None if found is not None and found.priority else found

    def sleep(self, worker: Worker) -> bool:
        return not self.runs and super().sleep(worker)


class CountsTwice(Roster):
    """Who leaves a run is still counted there."""

    def leave(self, worker: Worker, run: Run) -> None:
        super().leave(worker, run)
        self.inside += 1


@pytest.mark.parametrize(
    ("mutant", "jobs", "fault"),
    [
        (WakesNobodyForARun, [Job(ONE)], "run 0 waits, worker 0 sleeps, and nobody wakes it"),
        (WakesNobodyInARun, [Job(FORK)], "run 0 waits, worker 1 sleeps, and nobody wakes it"),
        (ForgetsARun, [Job(FORK)], "run 0 waits, worker 1 sleeps, and nobody wakes it"),
        (NewestFirst, [Job(ONE), Job(ONE)], "run 1 is entered, but run 0 is next"),
        (WakesOneOnly, [Job(FORK, here=True), Job(ONE, here=True)], "run 0 waits, worker"),
        (NeverGivesWay, [Job(CHAIN), Job(ONE, priority=1)], "run 0 is gone on with, but run 1 has a higher priority"),
        (AlwaysGivesWay, [Job(ONE, priority=1)], "for ever"),
        (CountsTwice, [Job(ONE)], "0 threads are in runs, but the roster counts 1"),
    ],
)
def test_a_mutant_of_the_roster_is_found_with_the_events_that_lead_there(
    mutant: type[Roster], jobs: list[Job], fault: str
) -> None:
    found = searched(jobs, 2, roster=mutant)
    assert found.fault is not None
    assert fault in found.fault
    assert found.path
