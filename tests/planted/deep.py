"""Bugs that need one thread to stand still while another does a whole run, or four of them, and no more.

At each of some thirty choices a random schedule would have to leave the same thread where it is.
"""

from __future__ import annotations

from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.roster import Roster
from tests.planted import scenes
from tests.planted.bug import Bug, Edit

FAMILY = "deep"
_LENGTH = 16

_TOGETHER = (
    "            on_stop, left = run.on_stop, run.over\n"
    "            if run.stopped or (left and on_stop is None):\n"
    "                return\n"
    "            over = run.over = run.active == 0\n"
)

BUGS = (
    Bug(
        "a look that is a run old",
        FAMILY,
        "who stops a run looks in one step whether it is over, and stops it in the next: it may have begun and ended "
        "in between, and fails after its owner was told that all went well",
        (Edit(WorkerPool.stop, _TOGETHER, _TOGETHER + "        with self.lock:\n"),),
        scenes.stop_of_an_ended_run(_LENGTH),
        "schedules",
        "failed after it had ended well",
        slow=True,
    ),
    Bug(
        "ABA on workers",
        FAMILY,
        "who stops a run looks in one step which workers are in it, and in the next stops what these are in: the "
        "workers are the same, but the first run has ended, and they are in another one",
        (
            Edit(
                WorkerPool.stop,
                "        with self.lock:\n",
                "        with self.lock:\n"
                "            inside = [one for one in self._roster.workers if one.run is run]\n"
                "        with self.lock:\n            run = next((one.run for one in inside if one.run), run)\n",
            ),
        ),
        scenes.stop_of_one_of_two(_LENGTH),
        "schedules",
        "that nobody stopped",
        slow=True,
    ),
    Bug(
        "ABA on the count of runs",
        FAMILY,
        "a worker that has found nothing looks again only if runs came since, and counts them modulo four",
        (
            Edit(Roster.sleep, "return self.next_run() is None", "return True"),
            Edit(
                WorkerPool._serve_runs,
                "                if roster.sleep(worker):\n",
                "                seen = roster._admitted % 4\n"
                "                lock.release()\n                lock.acquire()\n"
                "                if roster._admitted % 4 == seen and roster.sleep(worker):\n",
            ),
        ),
        scenes.runs_then_meeting(4),
        "schedules",
        "deadlock",
        slow=True,
    ),
)
