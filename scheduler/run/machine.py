"""The machine that decides in a run: which task next, and when it is over. No threads, locks or clock.

A *task* is a stretch of a chain: steps that one worker executes, or the pieces of a phase, which several may. Tasks are
numbered by priority. A worker takes, in this order: the next piece of the task that it is in; the first task that is
ready and not begun; a piece of the first task that other workers are in. When the last piece of a task ends, the tasks
that waited for it may begin.

Some workers take the first piece that is left, others the last one. Neighbors in a chain are often cut alike, so each
worker finds its inputs in the cache of its own core: of 200 rows of 192 numbers, normalized by two threads, the rows of
one take 5 us, or 9 to 37 if the other wrote their inputs (AMD EPYC, Zen 4).

The pool drives it under its lock, `scheduler.run.engine_code` is the same in machine code, and prediction and
exploration drive it on virtual time. Its state is small and can be compared (`Machine.state`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Self

from dagexec.scheduler.plan.task_graph import TaskGraph


def in_order(graph: TaskGraph) -> Iterator[int]:
    """The tasks in the order in which a single worker ends them."""
    machine, last = Machine(graph), -1
    while (answer := machine.take(last)) is not None:
        last = answer[0]
        machine.end(last)
        if answer[1] + 1 == graph.pieces[last]:
            yield last


class Machine:
    """The state of one run of a graph of tasks.

    Attributes:
        remaining: tasks that have not ended.
        stopped: no worker takes anything any more.
    """

    __slots__ = ("_done", "_fresh", "_graph", "_left", "_open", "_taken", "_taken_last", "remaining", "stopped")

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._left = list(graph.parent_counts)
        self._taken = [0] * len(self._left)
        self._taken_last = [0] * len(self._left)  # of the taken pieces, those taken from the last one on
        self._done = [0] * len(self._left)
        self._fresh = [task for task, count in enumerate(self._left) if not count]  # ascending, hence a heap
        self._open: list[int] = []  # ascending; tasks leave it in any order
        self.remaining = len(self._left)
        self.stopped = False

    @property
    def available(self) -> int:
        """Tasks that have a piece to take."""
        return len(self._fresh) + len(self._open)

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        """A task and the number of its piece, for a worker that did one of task `last`; None if there is nothing.

        It is the first piece that is left, or the last one.
        """
        if last >= 0 and self._taken[last] < self._graph.pieces[last] and not self.stopped:
            return self._next_piece(last, from_last)
        if self._fresh:
            task = heappop(self._fresh)
            if self._graph.pieces[task] == 1:
                self._taken[task] = 1
                return task, 0
            insort(self._open, task)
            return self._next_piece(task, from_last)
        return self._next_piece(self._open[0], from_last) if self._open else None

    def end(self, task: int, piece: int = -1) -> None:
        """A piece of `task` has ended, no matter which. The run is over when `remaining` is 0."""
        self._done[task] += 1
        if self._done[task] < self._graph.pieces[task]:
            return
        self.remaining -= 1
        for child in self._graph.children[task]:
            self._left[child] -= 1
            if not self._left[child] and not self.stopped:
                heappush(self._fresh, child)

    def stop(self) -> None:
        """Let no worker take anything any more."""
        self.stopped = True
        self._fresh.clear()
        self._open.clear()

    def _next_piece(self, task: int, from_last: bool) -> tuple[int, int]:
        count = self._graph.pieces[task]
        piece = count - 1 - self._taken_last[task] if from_last else self._taken[task] - self._taken_last[task]
        self._taken_last[task] += from_last
        self._taken[task] += 1
        if self._taken[task] == count:
            self._open.remove(task)
        return task, piece

    def state(self) -> Hashable:
        """Everything that the future depends on."""
        counts = zip(self._graph.pieces, self._taken, self._taken_last, self._done, strict=True)
        return tuple((taken, last if taken < pieces else 0, done) for pieces, taken, last, done in counts), self.stopped

    def copy(self) -> Self:
        """Another run in the same state."""
        other = object.__new__(type(self))
        other._graph = self._graph
        other._left, other._done = self._left[:], self._done[:]
        other._taken, other._taken_last = self._taken[:], self._taken_last[:]
        other._fresh, other._open = self._fresh[:], self._open[:]
        other.remaining, other.stopped = self.remaining, self.stopped
        return other
