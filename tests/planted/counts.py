"""Bugs of counts: who is inside, what is left, and whose numbers they are."""

from __future__ import annotations

from dagexec.scheduler.exploration.pool_states import Job
from dagexec.scheduler.run.executing import Executing
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from tests.planted import scenes
from tests.planted.bug import Bug, Edit
from tests.scheduler.scenarios import pool_scenario

FAMILY = "counts"
FORK = scenes.tasks([1, 1, 1], [[1, 2], [], []])

BUGS = (
    Bug(
        "a count in two steps",
        FAMILY,
        "a worker reads how many parents a child waits for, and writes one less when others may have written",
        (
            Edit(
                Executing._in_python,
                "            machine.end(task, piece)\n",
                "            left = list(machine._left)\n            self._lock.release()\n"
                "            self._acquire()\n            machine._left = left\n            machine.end(task, piece)\n",
            ),
        ),
        pool_scenario(scenes.DIAMOND),
        "schedules",
        "deadlock|not done",
    ),
    Bug(
        "counts shared by runs",
        FAMILY,
        "two runs of one plan count down the same numbers",
        (
            Edit(
                Machine.__init__,
                "self._left = list(graph.parent_counts)",
                "self._left = graph.__dict__.setdefault('left', list(graph.parent_counts))",
            ),
        ),
        scenes.all_states(scenes.tasks([1, 1], [[1], []])),
        "machine",
        "have a piece to take, but it says",
    ),
    Bug(
        "counted in too late",
        FAMILY,
        "a worker counts itself into a run after it has let go of the lock under which there was a place",
        (
            Edit(
                WorkerPool._serve_runs,
                "            advance = roster.begin(worker, run)\n            helper = roster.helper()\n"
                "            lock.release()\n",
                "            helper = roster.helper()\n            lock.release()\n"
                "            advance = roster.begin(worker, run)\n",
            ),
        ),
        scenes.one_at_a_time,
        "schedules",
        "two workers in a run of width 1",
        slow=True,
    ),
    Bug(
        "any number may enter",
        FAMILY,
        "how many workers may be in a run is not looked at",
        (Edit(Run.has_place, " and self.active < self.width", ""),),
        scenes.one_at_a_time,
        "schedules",
        "two workers in a run of width 1",
    ),
    Bug(
        "nobody is the last",
        FAMILY,
        "whether a run is at its end is looked at before a worker leaves it: of two that leave together each takes the "
        "other for the last",
        (
            Edit(
                Executing.work,
                "        self._roster.leave(worker, run)  # with the lock still held\n",
                "        last = not run.machine.remaining and run.active == 1\n        self._lock.release()\n"
                "        self._acquire()\n        self._roster.leave(worker, run)\n",
            ),
            Edit(Executing.work, "if run.over or not run.has_ended():", "if run.over or not last:"),
        ),
        pool_scenario(scenes.INDEPENDENT),
        "schedules",
        "deadlock",
    ),
    Bug(
        "a failed run keeps its places",
        FAMILY,
        "a worker that leaves a run that failed still counts as one that is in a run",
        (Edit(Roster.leave, "self.inside -= not worker.depth", "self.inside -= not worker.depth and not run.error"),),
        scenes.all_pool_states([Job(FORK)], failures=1),
        "machine",
        "threads are in runs, but the roster counts",
        modeled_on="dask/distributed#5497: once a task had raised, every later computation on the cluster hung",
    ),
)
