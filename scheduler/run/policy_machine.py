"""The machine of a run in which a policy decides: which chain begins next, and for which worker.

A worker that ends a task of a chain goes on with the chain's next one, and pieces of tasks are shared as in `Machine`;
so the policy is asked for chains only. A policy's workers are numbers. Each thread takes one of them for its work, that
of its last piece if possible, and asks for other free ones where its own is to wait: so no chain waits for a thread
that is not there.

`take` raises PolicyError for what a policy does wrong.
"""

from __future__ import annotations

import copy
import pickle
from bisect import insort
from collections.abc import Hashable
from typing import Self

from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduling.planned import PlannedPolicy
from dagexec.scheduling.policy import RunState


def machine_of(graph: TaskGraph, workers: int | None = None) -> Machine:
    """The machine of a run. `workers` is for its policy, by default the number that it was planned for.

    Raises PolicyError where the policy cannot even begin.
    """
    return Machine(graph) if graph.policy is None else PolicyMachine(graph, graph.policy, workers)


class PolicyMachine(Machine):
    """The state of one run in which a policy decides."""

    __slots__ = ("_begun", "_following", "_free", "_latest", "_planned", "_ready", "_refused", "_run", "_workers")

    def __init__(self, graph: TaskGraph, planned: PlannedPolicy, workers: int | None = None) -> None:
        super().__init__(graph)
        self._planned = planned
        count = workers or planned.chains.workers
        self._begun = planned.begun(count)
        self._run = RunState(released_by=[-1] * len(planned.chains.names))
        self._free = list(range(count))
        self._workers: dict[tuple[int, int], int] = {}  # of each piece under way; -1 for more threads than workers
        self._latest = -1  # the worker whose piece ended last
        self._ready = {graph.chains[task]: task for task in self._fresh}  # in the order in which they became ready
        self._following: list[int] = []  # tasks of chains that have begun
        self._refused = False  # all free workers are to wait
        self._fresh.clear()

    @property
    def available(self) -> int:
        """Tasks that may have a piece to take."""
        ready = 0 if self._refused or not self._free else len(self._ready)
        return ready + len(self._following) + len(self._open)

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        """As `Machine.take`, but the policy is asked for a task that has not begun."""
        if self.stopped:
            return None
        worker = self._latest if last >= 0 and self._latest in self._free else min(self._free, default=-1)
        task = last if last >= 0 and self._taken[last] < self._graph.pieces[last] else self._next_of_chain(last)
        if task < 0 and self._ready and self._free:
            task, worker = self._choose(worker)
        if task < 0 and self._open:
            task = self._open[0]
        if task < 0:
            return None
        if not self._taken[task]:
            insort(self._open, task)
        taken = self._next_piece(task, from_last)
        self._workers[taken] = worker
        if worker >= 0:
            self._free.remove(worker)
        return taken

    def _next_of_chain(self, last: int) -> int:
        """The next task of a chain that has begun, that of task `last` if there is one; else -1."""
        if not self._following:
            return -1
        children = self._graph.children[last] if last >= 0 else ()
        task = next((task for task in self._following if task in children), self._following[0])
        self._following.remove(task)
        return task

    def _choose(self, first: int) -> tuple[int, int]:
        """The first task of a chain, and its worker: `first`, or another free one; (-1, first) for none."""
        ready = tuple(self._ready)
        for worker in (first, *sorted(worker for worker in self._free if worker != first)):
            try:
                chain = self._begun.choose(ready, worker, self._run)
            except Exception as error:
                raise self._planned.failed(error) from error
            if chain is None:
                continue
            self._check(chain)
            self._run.running[chain] = worker
            return self._ready.pop(chain), worker
        self._refused = True
        if not self._workers and not self._open:
            raise self._planned.wrong("lets all workers wait for nothing and never begins it", ready[0])
        return -1, first

    def _check(self, chain: object) -> None:
        count = len(self._planned.chains.names)
        if not isinstance(chain, int) or not 0 <= chain < count:
            raise self._planned.wrong(f"chooses {chain!r:.80}; chains have the numbers 0 to {count - 1}")
        if chain in self._ready:
            return
        first = self._graph.chains.index(chain)
        waiting = self._left[first]
        what = f"chooses it while it waits for {waiting} other(s)" if waiting else "hands it out twice"
        raise self._planned.wrong(what, chain)

    def end(self, task: int, piece: int = -1) -> None:
        """This piece of `task` has ended."""
        self._latest = worker = self._workers.pop((task, piece))
        if worker >= 0:
            self._free.append(worker)
        self._refused = False
        before = self.remaining
        super().end(task)
        if self.remaining == before:
            return
        chain = self._graph.chains[task]
        if not any(self._graph.chains[child] == chain for child in self._graph.children[task]):
            del self._run.running[chain]
            self._run.released_by[chain] = -1
        for child in sorted(self._fresh):
            if self._graph.chains[child] == chain:
                self._following.append(child)
            else:
                self._run.released_by[self._graph.chains[child]] = worker
                self._ready[self._graph.chains[child]] = child
        self._fresh.clear()

    def stop(self) -> None:
        """Let no worker take anything any more."""
        super().stop()
        self._ready.clear()
        self._following.clear()

    def state(self) -> Hashable:
        """Everything that the future depends on; of the policy's own state, what can be pickled.

        The end of a piece and the next `take` are one event, as they are for the pool.
        """
        run = self._run
        account = tuple(run.running.items()), tuple(run.released_by), pickle.dumps(run.own), self._refused
        return super().state(), tuple(self._ready), tuple(self._following), frozenset(self._workers.items()), account

    def copy(self) -> Self:
        """Another run in the same state."""
        other = super().copy()
        other._planned, other._begun = self._planned, self._begun
        other._run = RunState(dict(self._run.running), list(self._run.released_by), copy.deepcopy(self._run.own))
        other._free, other._workers, other._latest = list(self._free), dict(self._workers), self._latest
        other._ready, other._following, other._refused = dict(self._ready), list(self._following), self._refused
        return other
