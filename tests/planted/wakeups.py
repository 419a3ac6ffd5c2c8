"""Bugs of waking: somebody sleeps on although there is something to do."""

from __future__ import annotations

from dagexec.executor.dispatch.state import DispatchState
from dagexec.scheduler.run.executing import Executing
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.roster import Roster
from tests.planted import scenes
from tests.planted.bug import Bug, Edit
from tests.planted.scenes import FORK
from tests.scheduler.scenarios import pool_scenario

FAMILY = "lost wake-ups"

_LOOK = "                if roster.sleep(worker):\n"
_APART = "                lock.release()\n                lock.acquire()\n"
_SLEEP = Edit(Roster.sleep, "return self.next_run() is None", "return True")

BUGS = (
    Bug(
        "a submitted run wakes nobody",
        FAMILY,
        "whoever submits a run takes a worker off the list of those that sleep, and does not wake it",
        (Edit(WorkerPool.submit, "            if helper is not None:\n                helper.wake()\n", ""),),
        pool_scenario([[]]),
        "schedules",
        "deadlock",
    ),
    Bug(
        "to look and to sleep are two steps",
        FAMILY,
        "between a worker's look for work and its entry in the list of those that sleep, a run may come",
        (_SLEEP, Edit(WorkerPool._serve_runs, _LOOK, _APART + _LOOK)),
        pool_scenario([[]], 1),
        "schedules",
        "deadlock",
        modeled_on="uxlfoundation/oneTBB#2136: who lets a mutex go looks whether anybody waits, while the waiting "
        "thread has seen the mutex taken and is about to enter itself; it sleeps on a mutex that is free",
    ),
    Bug(
        "a helper is chosen and not woken",
        FAMILY,
        "a worker that leaves something to take in its run chooses a helper, and does not wake it",
        (Edit(Executing._in_python, "helper.wake(as_helper=True)", "pass"),),
        scenes.meeting(parents=FORK),
        "schedules",
        "deadlock",
    ),
    Bug(
        "work that appears is not listed",
        FAMILY,
        "what becomes ready in a run while all workers are busy is found by none of them when they are free",
        (
            Edit(
                Executing._in_python,
                "if (roster.idle or not run.listed) and machine.available:",
                "if roster.idle and machine.available:",
            ),
        ),
        scenes.busy_elsewhere,
        "schedules",
        "deadlock",
    ),
    Bug(
        "a replaced worker wakes nobody",
        FAMILY,
        "a worker that dies between choosing another and waking it leaves that one asleep",
        (Edit(WorkerPool._replace, "        self._wake_all()\n", ""),),
        scenes.death_of_a_waker,
        "schedules",
        "deadlock",
    ),
    Bug(
        "a freed replica is kept from who waits",
        FAMILY,
        "the request that gets the replica of one that is over is not told",
        (
            Edit(
                DispatchState.end,
                "request.following = self.release(request, now)\n        if request.over:",
                "self.release(request, now)\n        if request.over:",
            ),
        ),
        scenes.two_callers,
        "schedules",
        "deadlock",
    ),
)
