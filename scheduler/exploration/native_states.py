"""Every state of a pool whose runs are in machine code: who takes and ends pieces holds no lock of the pool.

What `engine_code` does with the lock of a run is one event, decided by a `Machine`; what it reads afterwards of the
words that the roster tells (who sleeps) is another, and what Python does with the pool's lock a third, although threads
in machine code may go on within it. Every piece is taken to be worth waking a worker for.
"""

from __future__ import annotations

from collections.abc import Hashable

from dagexec.scheduler.exploration.pool_states import Pool, PoolStates
from dagexec.scheduler.run.engine import NativeRun, PoolMemory
from dagexec.scheduler.run.engine_layout import PoolWords
from dagexec.scheduler.run.machine import Machine, TaskGraph


class ModeledRun(NativeRun):
    """A run in machine code, whose state is a `Machine` and the words of its header that others write.

    Attributes:
        machine: what is left of it.
        word: 1 when it is stopped, 2 when all are to leave for a while.
        inside: how many threads are in it, as the roster told.
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
        """With the lock of the run: a piece, or out of the machine code, or to look for a while."""
        thread, run = pool.threads[number], _modeled(pool, number)
        gives_way = number < self._workers and run.inside > 1 and _word(pool, PoolWords.WAITING)
        if run.word:
            self._go_to(pool, number, "out")
        elif gives_way or not run.remaining:
            self._go_to(pool, number, "leave")
        elif (found := run.machine.take()) is None:
            self._go_to(pool, number, "spin")
        else:
            pool.threads[number] = thread._replace(at="taken", task=found[0], piece=found[1])

    def _taken(self, pool: Pool, number: int) -> None:
        """Without a lock: look who sleeps."""
        run = _modeled(pool, number)
        helps = _word(pool, PoolWords.IDLE) and run.inside < run.width
        pool.threads[number] = pool.threads[number]._replace(at="help" if helps else "piece")

    def _help(self, pool: Pool, number: int) -> None:
        thread, roster = pool.threads[number], pool.roster
        helper = roster.helper_for(pool.runs[thread.run]) if roster.idle else None
        self._go(pool, number, thread._replace(at="piece"), helper)

    def _end(self, pool: Pool, number: int) -> None:
        """With the lock of the run: go on with the task, or pick another."""
        thread, run = pool.threads[number], _modeled(pool, number)
        left = run.machine.remaining
        run.machine.end(thread.task, thread.piece)
        if not run.machine.remaining:
            self._go_to(pool, number, "leave")
        elif run.machine.remaining < left or not _has_more(run.machine, thread.task):
            self._pick(pool, number)
        elif run.word:
            self._go_to(pool, number, "out")
        elif _word(pool, PoolWords.WAITING):
            self._pick(pool, number)
        else:
            found = run.machine.take(thread.task)
            assert found is not None
            pool.threads[number] = thread._replace(at="taken", piece=found[1])

    def _spin(self, pool: Pool, number: int) -> None:
        """Without a lock: there is something, or it is over, or it was long enough."""
        run = _modeled(pool, number)
        if run.machine.available:
            self._go_to(pool, number, "pick")
        else:
            self._go_to(pool, number, "out" if run.remaining and run.word else "leave")

    def _out(self, pool: Pool, number: int) -> None:
        """With the pool's lock, after it was stopped or interrupted."""
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
