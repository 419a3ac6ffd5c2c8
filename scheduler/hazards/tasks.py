"""Tasks: a check that the work handed out to workers is the work that the operators of a net were prepared into.

Every Python step and every native call must be there once; a phase must begin after the one before, and a chain after
those that it depends on. The work is read backwards, from its calls to the operators that they belong to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from dagexec.core.graph import Graph, Hazard
from dagexec.core.native import NativeCall, phases_of
from dagexec.core.operator import Step, parts_of
from dagexec.platform.records import dataclass
from dagexec.scheduler.hazards.pieces import PieceFault
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.task_graph import Dependencies
from dagexec.scheduler.run.work import Work


@dataclass(frozen=True, slots=True)
class _Phase:
    """What may be done at the same time: the calls of each piece, or one step."""

    operator: int
    number: int
    pieces: Sequence[Sequence[Hashable]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call or a step is in the work."""

    task: int
    piece: int
    position: int


def check_work(
    graph: Graph, preparation: Preparation, plan: Dependencies, chains: Sequence[Sequence[int]], work: Work
) -> list[PieceFault]:
    """The faults of `work`, which is to execute the operators of `chains` in the order of `plan`."""
    places: dict[Hashable, list[_Place]] = {}
    for task, pieces in enumerate(_calls(work)):
        for piece, calls in enumerate(pieces):
            for position, call in enumerate(calls):
                places.setdefault(call, []).append(_Place(task, piece, position))
    return [*_wrong_counts(graph, work), *_Check(graph, preparation, plan, chains, work, places).run()]


def _calls(work: Work) -> Iterator[list[list[Hashable]]]:
    """The native calls and Python steps of each task, by piece."""
    for task, pieces in enumerate(work.steps):
        native = [] if work.native is None else work.native.calls[task]
        if native:
            assert work.native is not None
            yield [
                [_key(call) for call, row in zip(calls, table, strict=True) if row[0] == call.function]
                for calls, table in zip(native, work.native.tables[task], strict=True)
            ]
            continue
        keys: list[list[Hashable]] = []
        for steps in pieces:
            keys.append([])
            for step in steps:
                keys[-1] += [key for phase in _phases_of(step) for calls in phase for key in calls]
        yield keys


def _wrong_counts(graph: Graph, work: Work) -> Iterator[PieceFault]:
    """Tasks that wait for fewer or more tasks than lead to them."""
    leading = Counter(child for row in work.graph.children for child in row)
    for task, count in enumerate(work.graph.parent_counts):
        if leading[task] != count:
            what = f"task {task} waits for {count} tasks, and {leading[task]} lead to it"
            yield PieceFault(Hazard.CONTROL, f"net {graph.name!r}", None, (), "", what)


class _Check:
    def __init__(
        self, graph: Graph, preparation: Preparation, plan: Dependencies, chains: Sequence[Sequence[int]], work: Work,
        places: dict[Hashable, list[_Place]],
    ) -> None:  # fmt: skip
        self._graph = graph
        self._plan = plan
        self._work = work
        self._places = places
        self._chains = [[phase for index in chain for phase in _phases(preparation, index)] for chain in chains]
        self._expected = Counter(
            call for row in self._chains for phase in row for calls in phase.pieces for call in calls
        )

    def run(self) -> Iterator[PieceFault]:
        for number, phases in enumerate(self._chains):
            for phase in phases:
                yield from self._counted(phase)
            for before, after in pairwise(phases):
                if not self._in_order(before, after):
                    yield self._unordered(before, after)
            for child in self._plan.children[number]:
                later = self._chains[child]
                if phases and later and not self._in_order(phases[-1], later[0]):
                    yield self._unordered(phases[-1], later[0])

    def _unordered(self, before: _Phase, after: _Phase) -> PieceFault:
        if before.operator == after.operator:
            what = f"does not wait for phase {before.number}"
        else:
            what = f"does not wait for phase {before.number} of {self._graph.label(before.operator)}"
        return PieceFault(Hazard.CONTROL, self._graph.label(after.operator), after.number, (), "", what)

    def _counted(self, phase: _Phase) -> Iterator[PieceFault]:
        for number, calls in enumerate(phase.pieces):
            counts = {len(self._places.get(call, ())) for call in self._own(calls)}
            if counts - {1}:
                what = "is left out" if 0 in counts else f"is handed out {max(counts)} times"
                yield PieceFault(Hazard.CONTROL, self._graph.label(phase.operator), phase.number, (number,), "", what)

    def _own(self, calls: Sequence[Hashable]) -> list[Hashable]:
        """The calls that no other piece makes; pieces may share some, as those that look at the same flag."""
        return [call for call in calls if self._expected[call] == 1]

    def _places_of(self, phase: _Phase) -> list[_Place]:
        return [place for calls in phase.pieces for call in self._own(calls) for place in self._places.get(call, ())]

    def _in_order(self, before: _Phase, after: _Phase) -> bool:
        first, then = self._places_of(before), self._places_of(after)
        earlier, later = {place.task for place in first}, {place.task for place in then}
        if earlier == later and len(earlier) == 1:
            if len({place.piece for place in (*first, *then)}) > 1:
                return False
            return max(place.position for place in first) < min(place.position for place in then)
        children = self._work.graph.children
        return all(parent != child and child in children[parent] for parent in earlier for child in later)


def _phases(preparation: Preparation, index: int) -> Iterator[_Phase]:
    """The phases of an operator."""
    number = 0
    for step, _ in preparation.timed([index]):
        for part in parts_of(step):
            for phase in _phases_of(part):
                yield _Phase(index, number, phase)
                number += 1


def _phases_of(step: Step) -> list[list[list[Hashable]]]:
    phases = phases_of(step)
    return [[[id(step)]]] if phases is None else [[list(map(_key, piece)) for piece in phase] for phase in phases]


def _key(call: NativeCall) -> Hashable:
    """A key by content, as some steps make an equal call anew whenever they are asked."""
    return call.function, call.arguments
