"""PieceWatch: how a detector observes operators whose pieces workers share.

Two things must hold. The pieces of a phase touch no byte that another of them writes; that is tried before the first of
them begins (`hazards.pieces`). And the run executes each piece once, phase after phase; what counts is not the order in
which pieces came this time, but whether the tasks that hand them out wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from dagexec.core.graph import Hazard
from dagexec.core.operator import Operator, Prepared
from dagexec.core.tensor import Tensor
from dagexec.platform.threads import threads
from dagexec.scheduler.hazards.pieces import PieceFault, check_pieces, phases_of_operator
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.plan.task_graph import TaskGraph


class PieceWatch:
    """Told of pieces and operators; the answers about operators are the faults of their pieces."""

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._tried: dict[int, tuple[Prepared, list[PieceFault]]] = {}  # by the id of what is prepared
        self._counts: dict[tuple[ObservedRun, int], Counter[tuple[int, int]]] = {}

    def operator_started(self, run: ObservedRun, operator: int) -> list[PieceFault]:
        """The pieces of an operator, if it has some in this run, and how they are ordered."""
        if operator not in run.shared:
            return []
        prepared = run.prepared[operator]
        tried = self._tried.get(id(prepared))
        if tried is None:
            faults = self._try_out(run, operator, run.operators[operator], prepared)
            tried = self._tried[id(prepared)] = prepared, faults
        return [*tried[1], *_unordered(run, operator)]

    def _try_out(self, run: ObservedRun, index: int, operator: Operator, prepared: Prepared) -> list[PieceFault]:
        """Leaves memory between elements and generators of random numbers as they were."""
        packed = all(
            blob.value.is_packed
            for blob in (*operator.input_blobs, *operator.output_blobs)
            if isinstance(blob.value, Tensor)
        )
        if not packed or any(callable(piece) for phase in phases_of_operator(prepared) for piece in phase):
            return []
        return check_pieces(run.graph, index, operator, prepared, operator.input_blobs)[1]

    def piece_stopped(self, run: ObservedRun, operator: int, phase: int, piece: int) -> None:
        """A piece was executed."""
        with self._lock:
            self._counts.setdefault((run, operator), Counter())[phase, piece] += 1

    def operator_stopped(self, run: ObservedRun, operator: int) -> list[PieceFault]:
        """The pieces of a finished operator that were not executed, or more than once."""
        shared = run.shared.get(operator)
        with self._lock:
            counts = self._counts.pop((run, operator), Counter())
        label = run.graph.label(operator)
        faults: list[PieceFault] = []
        for phase, (_, pieces) in enumerate(shared or ()):
            for piece in range(pieces):
                times = counts[phase, piece]
                if times != 1:
                    what = f"was executed {times} times" if times else "was not executed"
                    faults.append(PieceFault(Hazard.CONTROL, label, phase, (piece,), "", what))
        return faults

    def run_stopped(self, run: ObservedRun) -> None:
        """Forget the run."""
        with self._lock:
            self._counts = {key: counts for key, counts in self._counts.items() if key[0] is not run}

    def forget(self) -> None:
        """No run is under way any more."""
        self._tried.clear()


def _unordered(run: ObservedRun, operator: int) -> Iterator[PieceFault]:
    """The phases whose task does not wait for that of the phase before."""
    tasks = [task for task, _ in run.shared[operator]]
    for phase, (before, task) in enumerate(pairwise(tasks), 1):
        if run.tasks is not None and before != task and not _leads_to(run.tasks, before, task):
            what = f"does not wait for phase {phase - 1}"
            yield PieceFault(Hazard.CONTROL, run.graph.label(operator), phase, (), "", what)


def _leads_to(graph: TaskGraph, first: int, last: int) -> bool:
    """True where `last`, of the same chain, waits for `first`."""
    waiting, seen = [first], {first}
    while waiting:
        for child in graph.children[waiting.pop()]:
            if child == last:
                return True
            if child not in seen and graph.chains[child] == graph.chains[last]:
                seen.add(child)
                waiting.append(child)
    return False
