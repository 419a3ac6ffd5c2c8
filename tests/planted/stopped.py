"""Bugs of runs that are stopped: too late, too often, not wholly, or in place of another."""

from __future__ import annotations

from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.scheduler.run.drain import Drain
from dagexec.scheduler.run.executing import Executing
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from tests.planted import scenes
from tests.planted.bug import Bug, Edit

FAMILY = "stopped runs"

BUGS = (
    Bug(
        "a stopped machine that hands out",
        FAMILY,
        "what becomes ready in a run after it was stopped is handed out",
        (Edit(Machine.end, "if not self._left[child] and not self.stopped:", "if not self._left[child]:"),),
        scenes.all_states(scenes.tasks([1, 1], [[1], []])),
        "machine",
        "a stopped run",
    ),
    Bug(
        "a stopped run keeps its chains",
        FAMILY,
        "chains of a run that was stopped are begun",
        (
            Edit(Run.stop, "        self.interrupted = True\n        self.machine.stop()\n", ""),
            Edit(Executing._call, "                if run.stopped:\n                    return False\n", ""),
        ),
        scenes.stopped_run(),
        "schedules",
        "after its run was stopped",
    ),
    Bug(
        "a body goes on without its operator's run",
        FAMILY,
        "with a run, the runs of nets in its operators are not stopped",
        (Edit(Run.stop, "for inner in self.inner:", "for inner in ():"),),
        scenes.stopped_body,
        "schedules",
        "operator's body",
    ),
    Bug(
        "a stopped run that nobody ends",
        FAMILY,
        "a run that is stopped before a worker was in it waits for one to end it",
        (Edit(WorkerPool.stop, "over = run.over = run.active == 0", "over = False"),),
        scenes.stopped_run([[]]),
        "schedules",
        "deadlock",
    ),
    Bug(
        "an owner that is told twice",
        FAMILY,
        "whether a stopped run is over is looked at when the lock is not held any more",
        (
            Edit(
                WorkerPool.stop,
                "if over and not left:\n            finish",
                "if run.over and not left:\n            finish",
            ),
        ),
        scenes.stopped_in_a_chain,
        "schedules",
        "told 2 times",
    ),
    Bug(
        "a cancellation between two steps",
        FAMILY,
        "a request that is cancelled after it got a replica, and before its run is known, is not stopped",
        (Edit(Dispatcher.started, "return request.cancelled", "return None"),),
        scenes.hung_request,
        "schedules",
        "deadlock",
        modeled_on="tensorflow/tensorflow#39015: an abort that comes after a call was entered in the table of calls, "
        "and before its cancel function was set, stops nothing, and the call is waited for forever",
        timeouts=True,
    ),
    Bug(
        "what hangs is given up once",
        FAMILY,
        "a kernel that a worker launches after its stopped run has given up the streams is not given up",
        (
            Edit(
                Drain._abandon,
                "self._timer = None if self._done else threads().call_later(ABANDON_AFTER, self._abandon)",
                "self._timer = None",
            ),
        ),
        scenes.hung_kernel,
        "schedules",
        "deadlock",
        timeouts=True,
        slow=True,
    ),
)
