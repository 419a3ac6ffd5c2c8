"""Every state of a pool whose runs are in machine code, where workers take and end pieces without the pool's lock.

What `engine_code` does under the lock of a run is one event, decided by a `Machine`; that it then reads the roster's
words (which workers sleep) is another; and what Python does under the pool's lock a third, although threads in machine
code may go on meanwhile. Every piece is taken to be worth waking a worker for.
"""

from __future__ import annotations

from collections.abc import Hashable

from dagexec.scheduler.exploration.pool_states import Pool, PoolStates
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.engine import NativeRun, PoolMemory
from dagexec.scheduler.run.engine_layout import PoolWords
from dagexec.scheduler.run.machine import Machine


class ModeledRun(NativeRun):
    """A run in machine code, whose state is a `Machine` and the words of its header that others write.

    Attributes:
        machine: decides; the rest of the run.
        word: 1 when it is stopped, 2 when all threads are to leave for a while.
        inside: how many threads are in it, by the roster's account.
        width: how many may be.
    """

    __slots__ = ("inside", "machine", "width", "word")

    def __init__(self, graph: TaskGraph) -> None:
        self.machine = Machine(graph)
        self.word = self.inside = self.width = 0

    def belong_to(self, pool: PoolMemory, width: int) -> None:
        self.width = width

    @property
    def available(self) -> int:
        return 0 if self.word == 1 else self.machine.available

    @property
    def remaining(self) -> int:
        return self.machine.remaining

    def stop(self) -> None:
        self.word = 1

    def interrupt(self, interrupted: bool) -> None:
        if self.word != 1:
            self.word = 2 if interrupted else 0

    def active(self, threads: int) -> None:
        self.inside = threads

    def copy(self) -> ModeledRun:
        other = object.__new__(ModeledRun)
        other.machine, other.word = self.machine.copy(), self.word
        other.inside, other.width = self.inside, self.width
        return other

    def state(self) -> Hashable:
        return self.machine.state(), self.word, self.inside


class NativeStates(PoolStates):
    """The states of a pool whose threads want runs in machine code."""

    on_the_way = (*PoolStates.on_the_way, "pick", "taken", "help", "spin", "leave", "out")

    def _new_run(self, graph: TaskGraph) -> ModeledRun:
        return ModeledRun(graph)

    def _enter(self, pool: Pool, number: int) -> None:
        self._pick(pool, number)

    def _pick(self, pool: Pool, number: int) -> None:
        """Under the run's lock: take a piece, leave the machine code, or look for work for a while."""
        thread, run = pool.threads[number], _modeled(pool, number)
        gives_way = number < self._workers and run.inside > 1 and _word(pool, PoolWords.WAITING)
        if run.word:
            self._go_to(pool, number, "out")
        elif gives_way or not run.remaining:
            self._go_to(pool, number, "leave")
        elif (piece := run.machine.take()) is None:
            self._go_to(pool, number, "spin")
        else:
            pool.threads[number] = thread._replace(at="taken", task=piece[0], piece=piece[1])

    def _taken(self, pool: Pool, number: int) -> None:
        """Without a lock: look which workers sleep."""
        run = _modeled(pool, number)
        helps = _word(pool, PoolWords.IDLE) and run.inside < run.width
        pool.threads[number] = pool.threads[number]._replace(at="help" if helps else "piece")

    def _help(self, pool: Pool, number: int) -> None:
        thread, roster = pool.threads[number], pool.roster
        helper = roster.helper_for(pool.runs[thread.run]) if roster.idle else None
        self._go(pool, number, thread._replace(at="piece"), helper)

    def _end(self, pool: Pool, number: int) -> None:
        """Under the run's lock: go on with the task, or pick another."""
        thread, run = pool.threads[number], _modeled(pool, number)
        before = run.machine.remaining
        run.machine.end(thread.task, thread.piece)
        if not run.machine.remaining:
            self._go_to(pool, number, "leave")
        elif run.machine.remaining < before or not _has_more(run.machine, thread.task):
            self._pick(pool, number)
        elif run.word:
            self._go_to(pool, number, "out")
        elif _word(pool, PoolWords.WAITING):
            self._pick(pool, number)
        else:
            piece = run.machine.take(thread.task)
            assert piece is not None
            pool.threads[number] = thread._replace(at="taken", piece=piece[1])

    def _spin(self, pool: Pool, number: int) -> None:
        """Without a lock: there is work, or the run is over, or the time is up."""
        run = _modeled(pool, number)
        if run.machine.available:
            self._go_to(pool, number, "pick")
        else:
            self._go_to(pool, number, "out" if run.remaining and run.word else "leave")

    def _out(self, pool: Pool, number: int) -> None:
        """Under the pool's lock, after the run was stopped or interrupted."""
        run = pool.runs[pool.threads[number].run]
        if run.stopped or pool.roster.gives_way(run):
            self._go_on(pool, number, None)
        else:
            self._go_to(pool, number, "pick")

    def _leave(self, pool: Pool, number: int) -> None:
        self._go_on(pool, number, None)

    def _go_to(self, pool: Pool, number: int, at: str) -> None:
        pool.threads[number] = pool.threads[number]._replace(at=at, task=-1, piece=-1)


def _has_more(machine: Machine, task: int) -> bool:
    return machine._taken[task] < machine._graph.pieces[task]


def _modeled(pool: Pool, number: int) -> ModeledRun:
    run = pool.runs[pool.threads[number].run].machine
    assert isinstance(run, ModeledRun)
    return run


def _word(pool: Pool, word: PoolWords) -> int:
    return int(pool.roster.memory._words[word])
