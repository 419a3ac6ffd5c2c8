"""Bugs of runs in machine code: in the code itself, and in what Python does where it comes out of that.

No schedule decides there. What each shows in is forced: pieces that wait for each other, workers that sleep, a single
worker.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.errors import DagexecError
from dagexec.scheduler.run import engine_code, engine_log
from dagexec.scheduler.run.engine import native_tasks
from dagexec.scheduler.run.engine_layout import Kind
from dagexec.scheduler.run.executing import Executing
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import Work
from tests.planted.bug import Edit
from tests.planted.shell import ShellBug
from tests.scheduler.run.test_callers import run_of
from tests.scheduler.run.test_machine import _call, add_one, tasks_of

SECONDS = 5
"""For a run to end, or to be met."""


def from_both_sides() -> None:
    """A caller and a worker make the pieces of tasks, two at a time."""
    meeting = threading.Barrier(2)
    made: list[tuple[int, int]] = []

    def piece(phase: int, number: int) -> Callable[[], object]:
        def make() -> None:
            made.append((phase, number))
            with suppress(threading.BrokenBarrierError):
                meeting.wait(SECONDS)

        return make

    counts = [2, 4, 4]
    with WorkerPool(2) as pool:
        asleep(pool, 2)
        pool.run_here(run_of([[piece(*one) for one in row] for row in rows(counts)], in_machine_code=True))
    assert Counter(made) == Counter(one for row in rows(counts) for one in row), made


def rows(counts: list[int]) -> list[list[tuple[int, int]]]:
    """The pieces of each phase."""
    return [[(phase, number) for number in range(count)] for phase, count in enumerate(counts)]


def asleep(pool: WorkerPool, count: int) -> None:
    """Wait until so many workers of a pool sleep."""
    while pool.statistics().idle != count:
        os.sched_yield()


def steps_and_pieces(act: Callable[[WorkerPool, Run, int], object] = lambda _pool, _run, _task: None) -> None:
    """A worker takes several short steps of Python at once, and then makes pieces."""
    code = add_one()
    assert code is not None
    graph = tasks_of([[], *[[0]] * 12, list(range(1, 13))], [1] * 13 + [4])
    counts, made = np.zeros(4, np.int64), []
    pieces = [(_call(code, counts, piece),) for piece in range(4)]
    tasks = native_tasks(graph, [*[Kind.SHORT_PYTHON] * 13, pieces], [1.0] * 14)
    runs: list[Run] = []

    def step(task: int) -> Step:
        def make() -> None:
            made.append(task)
            act(pool, runs[0], task)

        return make

    done = threading.Event()
    work = Work(graph, [*(((step(task),),) for task in range(13)), ()], tasks)
    runs.append(Run("steps", work, lambda chain, _step: f"operator {chain}", done.set))
    with WorkerPool(1) as pool:
        pool.submit(runs[0])
        assert done.wait(SECONDS), "the run hangs"
    if runs[0].error is None:
        runs[0].check_complete()
        assert (made, counts.tolist()) == (list(range(13)), [1] * 4)
    else:
        assert counts.tolist() == [0] * 4, "pieces of a run that was stopped before"


def stopped_in_its_first_step() -> None:
    """The same, which is stopped."""

    def stop(pool: WorkerPool, run: Run, task: int) -> None:
        if not task:
            pool.stop(run, DagexecError("enough"))

    steps_and_pieces(stop)


def with_helpers() -> None:
    """Pieces are there to take when the other worker has gone to sleep."""
    done = threading.Event()
    with WorkerPool(2) as pool:
        run = run_of([[lambda: asleep(pool, 1)], [nothing_to_do] * 4], in_machine_code=True)
        run.finished = done.set
        pool.submit(run)
        assert done.wait(SECONDS), "the run hangs"


@contextmanager
def code_of_now() -> Iterator[None]:
    """Within it, and after it, machine code is that of the functions which write it as they are then."""
    made = (engine_code.engine_code, engine_log.logging_code, engine_log._telling_code)
    try:
        for code in made:
            code.cache_clear()
        yield
    finally:
        for code in made:
            code.cache_clear()


_STOP = '    code.compare_memory(S0, 8 * Header.STOP, 0)\n    code.jump("unlock and STOPPED", NOT_ZERO)\n'
_TAKEN = "    code.store_number(A3, S2, 8 * Task.TAKEN)\n    code.compare_with_memory(A3, S2, 8 * Task.COUNT)\n"
_EARLY = "    code.move(S3, RESULT)\n    unlock(code)\n    code.move(RESULT, S3)\n"
_DONE = '    code.mark("done")\n    code.log(Logged.END)\n'
_LESS = "    code.add_to_memory(S0, 8 * Header.REMAINING, -1)\n"
_PIECE = "    code.load_number(T0, S1, None, offset=8 * Slot.PIECE)\n"
_CALLS = (
    "                        if not self._call(run, task, run.work.calls[task]):\n                            break\n"
)

ENGINE_BUGS = (
    ShellBug(
        "machine code does not leave out, from the first, what was taken from the last",
        (
            Edit(
                engine_code._pick,
                "    code.move(RESULT, A3)\n    code.subtract(RESULT, A2)\n",
                "    code.move(RESULT, A3)\n",
            ),
        ),
        from_both_sides,
        True,
        "it is to take piece",
    ),
    ShellBug(
        "machine code does not count what is taken from the last",
        (Edit(engine_code._pick, "    code.add_to_memory(S2, 8 * Task.TAKEN_LAST, 1)\n", ""),),
        from_both_sides,
        True,
        "it is to take piece",
    ),
    ShellBug(
        "machine code takes the piece before the last for the last",
        (Edit(engine_code._pick, "    code.add_number(RESULT, -1)\n", "    code.add_number(RESULT, -2)\n"),),
        from_both_sides,
        True,
        "it is to take piece",
    ),
    ShellBug(
        "machine code executes the first piece in place of another",
        (Edit(engine_code._execute, _PIECE, "    code.clear(T0)\n"),),
        from_both_sides,
        True,
        "the piece that it was given is another",
    ),
    ShellBug(
        "machine code lets the lock go before a piece is counted",
        (Edit(engine_code._pick, _TAKEN, _EARLY + _TAKEN),),
        steps_and_pieces,
        False,
        "the lock of the run, which nobody holds",
    ),
    ShellBug(
        "machine code lets the lock go before an end is counted",
        (Edit(engine_code._end, _DONE, _DONE.replace("    code.log", "    unlock(code)\n    code.log")),),
        steps_and_pieces,
        False,
        "the lock of the run, which nobody holds",
    ),
    ShellBug(
        "machine code ends a task twice",
        (Edit(engine_code._end, _LESS, _LESS.replace("-1", "-2")),),
        steps_and_pieces,
        True,
        "the owner of the run is told at its end",
    ),
    ShellBug(
        "machine code does not look at a stop",
        (Edit(engine_code._pick, _STOP, ""),),
        stopped_in_its_first_step,
        True,
        "the run is stopped",
    ),
    ShellBug(
        "of tasks that were taken together one is called",
        (Edit(Executing._natively, _CALLS, _CALLS.replace("if not ", "").replace("]):\n    ", "])\n")),),
        steps_and_pieces,
        True,
        "of its 1 steps it came to 0",
    ),
    ShellBug(
        "a piece is dropped for waking somebody",
        (Edit(Executing._natively, "                mode = Mode.CONTINUE\n", "                mode = Mode.PICK\n"),),
        with_helpers,
        True,
        "which nobody else can end",
    ),
)
