"""Bugs of the shell: the machine decides right, and threads do something else, in Python or in machine code.

Schedules show those that make a run compute something else, end otherwise, or hang; held against the machine, all show
that do anything at all. Machine code is under no schedule: there, threads run as they like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dagexec.core.operator import Step
from dagexec.errors import DagexecError
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.executing import Executing
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import Work
from tests.planted.bug import Edit
from tests.scheduler.run.test_machine import tasks_of
from tests.scheduler.scenarios import Done

Parents = Sequence[Sequence[int]]
STEPS = 2
"""Of each piece."""


@dataclass(frozen=True)
class ShellBug:
    """One mistake.

    Attributes:
        name: in words.
        edits: the mistake.
        scene: what it shows in.
        alone: the scene fails, where it can be under some schedule, though nobody holds it against the machine.
        right: part of what the machine says.
    """

    name: str
    edits: tuple[Edit, ...]
    scene: Callable[[], object]
    alone: bool
    right: str


# What they show in


class PiecesRun:
    """A run of pieces of two steps, which says whether each step was made once, and when it was right to."""

    def __init__(
        self,
        fails: tuple[int, int] | None = None,
        parents: Parents = ((), (0,), (0,), (1, 2)),
        pieces: Sequence[int] = (1, 3, 2, 1),
    ) -> None:
        self.parents = parents
        self.graph: TaskGraph = tasks_of([list(row) for row in parents], list(pieces))
        self.made: list[tuple[int, int, int]] = []
        self.done = Done()
        self.run = Run("pieces", self._work(fails), lambda chain, _step: f"operator {chain}", self.done)

    def _work(self, fails: tuple[int, int] | None) -> Work:
        return Work(
            self.graph,
            [
                [self._steps(task, piece, fails) for piece in range(count)]
                for task, count in enumerate(self.graph.pieces)
            ],
        )

    def _steps(self, task: int, piece: int, fails: tuple[int, int] | None) -> tuple[Step, ...]:
        return tuple(partial(self._make, task, piece, step, fails) for step in range(STEPS))

    def _make(self, task: int, piece: int, step: int, fails: tuple[int, int] | None) -> None:
        self.made.append((task, piece, step))
        if (task, piece) == fails:
            raise ValueError("on purpose")

    def check(self, *, whole: bool = True) -> None:
        """Raises AssertionError."""
        assert self.done.told == 1, f"told {self.done.told} times"
        counts = Counter(self.made)
        assert all(count == 1 for count in counts.values()), f"made more than once: {counts}"
        place = {made: number for number, made in enumerate(self.made)}
        for task, piece, step in self.made:
            assert not step or place[task, piece, 0] < place[task, piece, step]
            for parent in self.parents[task]:
                for one in range(self.graph.pieces[parent]):
                    assert place.get((parent, one, STEPS - 1), 1 << 30) < place[task, piece, step], "before its parent"
        if whole:
            self.run.raise_error()
            self.run.check_complete()
            assert len(self.made) == STEPS * sum(self.graph.pieces), f"made {self.made}"


def pieces(workers: int = 2, width: int | None = None) -> None:
    """A run on a pool."""
    mine = PiecesRun()
    mine.run.width = width or mine.run.width
    with WorkerPool(workers) as pool:
        pool.submit(mine.run)
        mine.done.wait()
    mine.check()


def pair() -> None:
    """Two tasks that nothing orders, on two workers."""
    mine = PiecesRun(None, ((), ()), (1, 1))
    with WorkerPool(2) as pool:
        pool.submit(mine.run)
        mine.done.wait()
    mine.check()


def urgent(width: int = 2) -> None:
    """A run that another one outruns."""
    runs = [PiecesRun(), PiecesRun()]
    runs[0].run.width = width
    runs[1].run.priority = 1
    with WorkerPool(1) as pool:
        for mine in runs:
            pool.submit(mine.run)
        for mine in runs:
            mine.done.wait()
    for mine in runs:
        mine.check()


def failing() -> None:
    """A run in which a piece fails, and one after it."""
    broken, whole = PiecesRun((1, 1)), PiecesRun()
    with WorkerPool(2) as pool:
        for mine in (broken, whole):
            pool.submit(mine.run)
            mine.done.wait()
    broken.check(whole=False)
    assert isinstance(broken.run.error, DagexecError)
    assert all(task != 3 for task, _, _ in broken.made)
    whole.check()


def stopped() -> None:
    """A run that is stopped while it runs."""
    mine = PiecesRun()
    with WorkerPool(2) as pool:
        pool.submit(mine.run)
        pool.stop(mine.run, DagexecError("enough"))
        mine.done.wait()
        count = len(mine.made)
    assert len(mine.made) == count, "something is begun after the end"
    mine.check(whole=False)


# The mistakes

_LEAVE = "        self._roster.leave(worker, run)  # with the lock still held\n"
_CALL = "            self._call(run, task, steps[task][piece])\n"
_END = "            machine.end(task, piece)\n"
_ACQUIRE, _RELEASE = "            self._acquire()\n", "            self._lock.release()\n"

SHELL_BUGS = (
    ShellBug(
        "an end is reported twice",
        (Edit(Executing._in_python, _END, _END + _END),),
        pieces,
        True,
        "has ended it before",
    ),
    ShellBug(
        "an end is reported before the piece is run",
        (
            Edit(
                Executing._in_python,
                _CALL + _ACQUIRE + _END,
                _ACQUIRE + _END + _RELEASE + _CALL + _ACQUIRE,
            ),
        ),
        pieces,
        True,
        "the piece that it was given is another: none",
    ),
    ShellBug(
        "the end of another piece is reported",
        (Edit(Executing._in_python, _END, "            machine.end(task, 0)\n"),),
        pieces,
        False,
        "nobody has taken it",
    ),
    ShellBug(
        "a piece is not run by who has woken a helper",
        (Edit(Executing._in_python, _CALL, "            if helper is None:\n    " + _CALL),),
        pieces,
        True,
        "came to 0",
    ),
    ShellBug(
        "the first piece is run in place of another",
        (Edit(Executing._in_python, "steps[task][piece])", "steps[task][0])"),),
        pieces,
        True,
        "the piece that it was given is another",
    ),
    ShellBug(
        "the last step of a piece is left out",
        (Edit(Executing._call, "for step in steps:", "for step in steps[: len(steps) - len(steps) // 2]:"),),
        pieces,
        True,
        "of its 2 steps it came to",
    ),
    ShellBug(
        "steps of a stopped run go on",
        (Edit(Executing._call, "                if run.stopped:\n                    return False\n", ""),),
        stopped,
        False,
        "the run is stopped, and one step was begun since",
    ),
    ShellBug(
        "a failure does not stop the run",
        (Edit(Executing._fail, "run.stop(failure)", "run.error = failure"),),
        failing,
        True,
        "of its 2 steps it came to",
    ),
    ShellBug(
        "who gives way has taken a piece",
        (
            Edit(
                Executing._in_python,
                "            if run.interrupted and (run.stopped or roster.gives_way(run)):\n                break\n"
                "            taken = machine.take(task, from_last=from_last)\n",
                "            taken = machine.take(task, from_last=from_last)\n"
                "            if run.interrupted and (run.stopped or roster.gives_way(run)):\n                break\n",
            ),
        ),
        urgent,
        True,
        "which nobody else can end",
    ),
    ShellBug(
        "an end is reported without the lock",
        (Edit(Executing._in_python, _ACQUIRE + _END, _END + _ACQUIRE),),
        pieces,
        False,
        "pool's lock",
    ),
    ShellBug(
        "who leaves is counted out without the lock",
        (Edit(Executing.work, _LEAVE, "        self._lock.release()\n" + _LEAVE + "        self._acquire()\n"),),
        pieces,
        False,
        "pool's lock",
    ),
    ShellBug(
        "that a run is over is set without the lock",
        (
            Edit(
                Executing.work,
                "        run.over = True\n        self._lock.release()\n",
                "        self._lock.release()\n        run.over = True\n",
            ),
        ),
        pair,
        True,
        "has told the owner",
    ),
    ShellBug(
        "whoever finds a run at its end tells its owner",
        (Edit(Executing.work, "if run.over or not run.has_ended():", "if not run.has_ended():"),),
        pair,
        True,
        "has told the owner",
    ),
    ShellBug(
        "an owner is told while others are inside",
        (Edit(WorkerPool.stop, "over = run.over = run.active == 0", "over = run.over = True"),),
        stopped,
        False,
        "may have something to do in it still",
    ),
    ShellBug(
        "who leaves something behind does not list the run",
        (
            Edit(
                Executing.work,
                "            self._roster.list_run(run)\n",
                "            pass\n",
            ),
        ),
        partial(urgent, 1),
        True,
        "somebody goes in: 2 tasks have something to take",
    ),
    ShellBug(
        "who enters a run takes a helper and does not wake it",
        (
            Edit(
                WorkerPool._serve_runs,
                "            if helper is not None:\n                helper.wake()\n            if run.share",
                "            if run.share",
            ),
        ),
        pieces,
        False,
        "is to wake it first",
    ),
    ShellBug(
        "between the choice of a run and its entry the lock is let go",
        (
            Edit(
                WorkerPool._serve_runs,
                "            advance = roster.begin(worker, run)\n",
                "            lock.release()\n            lock.acquire()\n"
                "            advance = roster.begin(worker, run)\n",
            ),
        ),
        partial(pieces, 2, 1),
        False,
        "no more than 1 may be inside",
    ),
    ShellBug(
        "who leaves stays counted",
        (Edit(Roster.leave, "run.active -= 1", "run.active -= not run.stopped"),),
        stopped,
        True,
        "the owner is told",
    ),
)
