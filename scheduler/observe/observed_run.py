"""A run under observation: it replaces the plain steps by wrapped ones.

So a run that nobody observes calls the plain steps and pays nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.platform.threads import threads
from dagexec.scheduler.observe.observed_steps import ObservedOperator, ObservedPiece, SharedOperator
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.culprit import stand_for

if TYPE_CHECKING:
    from dagexec.core.stream import Kernel
    from dagexec.scheduler.plan.plan import Plan
    from dagexec.scheduler.plan.task_graph import TaskGraph

Pieces = Sequence[tuple[Step, ...]]
"""Of a task: the steps of each piece."""

_now = time.perf_counter_ns


class ObservedRun:
    """One run of a net under observation: makes its steps, and knows when each chain became ready.

    Attributes:
        observer: receives the events.
        graph: the operators.
        operators: their objects, in list order.
        chains: operator indices of each chain; a single chain of all that run for a net that has no plan.
        parents: the chains that each chain waits for.
        prepared: the operators as they are prepared, in list order; empty if unknown.
        started: when the run was made.
        shared: for each phase of an operator that workers share, the number of its task, and of its pieces.
        tasks: what the run hands out; None before it is known, and for a run in one thread.
    """

    def __init__(
        self,
        observer: Observer,
        graph: Graph,
        operators: Sequence[Operator],
        plan: Plan | None = None,
        prepared: Sequence[Prepared] = (),
    ) -> None:
        """Tells the observer that the run started."""
        self.observer = observer
        self.prepared = prepared
        self.graph = graph
        self.operators = operators
        self.chains = (_unsettled(len(graph), prepared),) if plan is None else plan.chains
        parents: list[list[int]] = [[] for _ in self.chains]
        for chain, children in enumerate(() if plan is None else plan.children):
            for child in children:
                parents[child].append(chain)
        self.parents = tuple(tuple(row) for row in parents)
        self.stopped_at: list[int] = [0] * len(self.chains)
        self._indices: dict[int, int] | None = None
        self.shared: dict[int, list[tuple[int, int]]] = {}
        self.tasks: TaskGraph | None = None
        self._shared: list[SharedOperator] = []
        self.started = _now()
        observer.run_started(self)

    def chain(
        self, number: int, steps: Sequence[Step], waits: Sequence[Step] = (), after: Sequence[Step] = ()
    ) -> tuple[Step, ...]:
        """The steps of chain `number` under observation, one for each given, in this order: `waits`, `steps`, `after`.

        `steps` are those of its operators, all of them; `waits` make it wait for its parents' events; `after` are for
        records and the like.
        """
        bodies: list[Step] = [self._wait(number, step) for step in waits]
        bodies += [ObservedOperator(self, index, step) for index, step in zip(self.chains[number], steps, strict=True)]
        bodies += after
        chain = _ObservedChain(self, number)
        last = len(bodies) - 1
        return tuple(chain.step(body, position == 0, position == last) for position, body in enumerate(bodies))

    def all_chains(self, steps: Sequence[Step]) -> list[tuple[Step, ...]]:
        """The steps of every chain under observation, from those of the operators in list order."""
        return [self.chain(number, [steps[index] for index in row]) for number, row in enumerate(self.chains)]

    def tasks_of_chains(self, steps: Sequence[Step], most: Sequence[int]) -> list[list[Pieces]]:
        """The tasks of every chain under observation, of up to `most` pieces a phase each; see `scheduler.run.work`."""
        chains: list[list[Pieces]] = []
        for number, row in enumerate(self.chains):
            chains.append(self._tasks(number, [steps[index] for index in row], most[number], sum(map(len, chains))))
        return chains

    def _tasks(self, number: int, steps: Sequence[Step], most: int, first: int) -> list[Pieces]:
        """The tasks of a chain, numbered from `first`."""
        bodies: list[Sequence[Step]] = []
        for index, step in zip(self.chains[number], steps, strict=True):
            shared = SharedOperator(self, index, step, most)
            if all(len(phase) <= 1 for phase in shared.phases):
                bodies.append([ObservedOperator(self, index, step)])
                continue
            self._shared.append(shared)
            bodies += [[shared.start], *shared.phases, [shared.stop]]
        chain = _ObservedChain(self, number)
        last = len(bodies) - 1
        tasks: list[Pieces] = []
        alone = False
        for position, pieces in enumerate(bodies):
            piece_steps = [(chain.step(body, position == 0, position == last),) for body in pieces]
            if len(piece_steps) == 1 and alone:
                tasks[-1] = [tasks[-1][0] + piece_steps[0]]
            else:
                tasks.append(piece_steps)
            alone = len(piece_steps) == 1
            if pieces and isinstance(pieces[0], ObservedPiece):
                self.shared.setdefault(pieces[0].index, []).append((first + len(tasks) - 1, len(pieces)))
        return tasks or [[()]]

    def stopped(self, error: BaseException | None) -> None:
        """Tell the observer that the run is over, and before that of operators that never ended."""
        for shared in self._shared:
            shared.give_up(error)
        self.observer.run_stopped(self, _now(), error)

    def ready(self, chain: int) -> int:
        """When the last parent of `chain` was done; the start of the run when it has none."""
        return max((self.stopped_at[parent] for parent in self.parents[chain]), default=self.started)

    def index_of(self, operator: object) -> int | None:
        """The index of `operator`, None when it is not one of this run's."""
        if self._indices is None:
            self._indices = {id(member): index for index, member in enumerate(self.operators)}
        return self._indices.get(id(operator))

    def _wait(self, chain: int, step: Step) -> Step:
        def observed() -> None:
            start = _now()
            try:
                step()
            finally:
                self.observer.event_waited(self, chain, threading.current_thread().name, start, _now())

        return observed


def _unsettled(count: int, prepared: Sequence[Prepared]) -> tuple[int, ...]:
    """The indices of `count` operators without those that are settled as they are `prepared`."""
    return tuple(index for index in range(count) if not (prepared and prepared[index].is_settled))


class _ObservedChain:
    """One execution of a chain: its first step starts it, its last step or one that raises stops it."""

    __slots__ = ("_number", "_run", "_start", "_worker")

    def __init__(self, run: ObservedRun, number: int) -> None:
        self._run = run
        self._number = number
        self._start = 0
        self._worker = ""

    def step(self, body: Step, is_first: bool, is_last: bool) -> Step:
        def observed() -> None:
            if is_first:
                self._begin()
            try:
                body()
            except BaseException as error:
                self._end(error)
                raise
            if is_last:
                self._end(None)

        if isinstance(body, ObservedOperator | ObservedPiece):
            stand_for(observed, body.index)
        return observed

    def _begin(self) -> None:
        self._worker = threading.current_thread().name
        self._start = _now()
        run = self._run
        run.observer.chain_started(run, self._number, self._worker, run.ready(self._number), self._start)

    def _end(self, error: BaseException | None) -> None:
        end = self._run.stopped_at[self._number] = _now()
        self._run.observer.chain_stopped(self._run, self._number, self._worker, self._start, end, error)


class RunsUnderWay:
    """The observed runs that are not over, to tell which operator of which run a kernel belongs to."""

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._runs: tuple[ObservedRun, ...] = ()

    def add(self, run: ObservedRun) -> None:
        """`run` started."""
        with self._lock:
            self._runs = (*self._runs, run)

    def remove(self, run: ObservedRun) -> None:
        """`run` is over."""
        with self._lock:
            self._runs = tuple(other for other in self._runs if other is not run)

    def find(self, kernel: Kernel) -> tuple[ObservedRun, int] | None:
        """The run and the index of the operator whose kernel this is. A net, and hence an operator, has one run at a
        time."""
        if kernel.operator is not None:
            for run in self._runs:
                index = run.index_of(kernel.operator)
                if index is not None:
                    return run, index
        return None
