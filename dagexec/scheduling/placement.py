"""Placement: every task on a worker before the run begins, where it ends earliest, also in a gap between others.

Workers may differ, and what one task passes to another may take time where they are on two workers: so it is in the
papers. The workers of a net are alike and share their memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import field
from heapq import heapify, heappop, heappush

from dagexec.platform.records import dataclass
from dagexec.scheduling.policy import Chains, Policy, RunState


@dataclass(frozen=True, eq=False)
class Costs:
    """What is placed.

    Attributes:
        children: tasks that wait for each task; a task has a larger number than those it waits for.
        seconds: of each task on each worker.
        transfer: seconds from one task to another where they are on two workers; none for those not named.
    """

    children: Sequence[Sequence[int]]
    seconds: Sequence[Sequence[float]]
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.seconds[0])


def costs_of(chains: Chains) -> Costs:
    """The chains of a net, which take equally long on each worker."""
    return Costs(chains.children, [[seconds] * chains.workers for seconds in chains.seconds])


@dataclass(frozen=True, eq=False)
class Placement:
    """A schedule.

    Attributes:
        rows: of each worker, (start, end, task), ascending.
    """

    rows: Sequence[Sequence[tuple[float, float, int]]]

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return max((row[-1][1] for row in self.rows if row), default=0.0)


def place(costs: Costs, ranks: Sequence[float], ahead: Sequence[Sequence[float]] | None = None) -> Placement:
    """Each task, of the ready ones that of the highest rank next, where its end and what is `ahead` of it are least.

    `ahead` is what is added to the end of a task on a worker, by default nothing.
    """
    parents: list[list[int]] = [[] for _ in costs.children]
    for task, row in enumerate(costs.children):
        for child in row:
            parents[child].append(task)
    left = list(map(len, parents))
    rows: list[list[tuple[float, float, int]]] = [[] for _ in range(costs.workers)]
    ends: dict[int, tuple[float, int]] = {}
    ready = [(-ranks[task], task) for task, count in enumerate(left) if not count]
    heapify(ready)
    while ready:
        task = heappop(ready)[1]
        best: tuple[float, int, float, float] | None = None
        for worker, busy in enumerate(rows):
            arrived = [
                ends[parent][0] + (0.0 if ends[parent][1] == worker else costs.transfer.get((parent, task), 0.0))
                for parent in parents[task]
            ]
            seconds = costs.seconds[task][worker]
            start = _earliest(busy, max(arrived, default=0.0), seconds)
            score = start + seconds + (ahead[task][worker] if ahead else 0.0)
            if best is None or score < best[0]:
                best = score, worker, start, start + seconds
        assert best is not None
        _, worker, start, end = best
        insort(rows[worker], (start, end, task))
        ends[task] = end, worker
        for child in costs.children[task]:
            left[child] -= 1
            if not left[child]:
                heappush(ready, (-ranks[child], child))
    return Placement(rows)


def _earliest(busy: Sequence[tuple[float, float, int]], start: float, seconds: float) -> float:
    """The first moment from `start` on at which a worker is free for so long."""
    first = bisect_right(busy, start, key=lambda row: row[1])  # what has ended by then leaves no gap
    for begin, end, _ in busy[first:]:
        if start + seconds <= begin:
            return start
        start = max(start, end)
    return start


class Placing(Policy):
    """Follows a placement: each worker does its own tasks, in their order, and waits for them."""

    def place(self, chains: Chains) -> Placement:
        """The placement."""
        raise NotImplementedError

    def begin(self, chains: Chains) -> None:
        """Place all chains."""
        self._rows = [[task for *_, task in row] for row in self.place(chains).rows]

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        """The next one of its own, once that is ready."""
        if state.own is None:
            state.own = [0] * len(self._rows)  # how many of each worker's have begun
        begun: int = state.own[worker]
        row = self._rows[worker]
        if begun == len(row) or row[begun] not in ready:
            return None
        state.own[worker] += 1
        return row[begun]
