"""Graphs of other systems: operators on threads and streams, with events; the same proof as for nets (`check`).

Here the stream of each operator is known, so work on one stream is done in the order of the launches:

    thread    operators that one host thread launches are launched in list order
    host      an operator without a stream is done before its thread goes on
    after     an operator is launched after the launch of those it comes after; after their end, if on the host
    stream    work on one stream is done in the order of the launches, where that order is certain
    event     an operator that waits for an event begins when the recorded work is done; on the host its thread waits

The list is the intended order: a reader should see what the last writer before it in the list wrote.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import chain, pairwise
from typing import NamedTuple

from dagexec.core.graph import Hazard
from dagexec.errors import ResourceError
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.records import dataclass
from dagexec.scheduler.hazards.accesses import Accesses, Resource
from dagexec.scheduler.hazards.check import Pair, Proof, UnorderedAccesses, conflicts
from dagexec.scheduler.hazards.reachability import joined

_MAX_STRETCHES = 20_000_000
_MAX_ROUNDS = 16


class ForeignOperator(NamedTuple):
    """One operator, or a call that only records or waits.

    Attributes:
        name: in findings.
        reads, writes: memories by name.
        stream: where it is executed after its launch; None on the host, by its thread.
        thread: the host thread that launches it.
        after: operators, by their place in the list, which come before in it.
        waits: events, each as last recorded earlier in the list.
        records: events that are recorded after it.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    stream: str | None = None
    thread: str = "main"
    after: tuple[int, ...] = ()
    waits: tuple[str, ...] = ()
    records: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"stream {self.stream!r}" if self.stream is not None else f"thread {self.thread!r}"
        return f"operator {self.name!r} on {where}"


class ByteRange(NamedTuple):
    """Bytes from `low` up to `high` of a space that memories share."""

    space: str
    low: int
    high: int


@dataclass(frozen=True)
class ForeignGraph:
    """Operators in the intended order, and the memories that lie in common spaces; others lie apart."""

    name: str
    operators: tuple[ForeignOperator, ...]
    memories: Mapping[str, ByteRange] = field(default_factory=dict)


def check_graph(graph: ForeignGraph) -> Proof:
    """Prove that all conflicting accesses of `graph` are ordered, or find those that are not.

    Raises ResourceError when memories overlap in too many places.
    """
    with garbage_collection_paused():
        return _check(graph)


def _check(graph: ForeignGraph) -> Proof:
    operators = graph.operators
    order = _Order(operators)
    accesses = _accesses(graph)
    candidates: list[tuple[int, Pair]] = []
    contested = 0
    for resource, users in enumerate(accesses.users()):
        if len(users) > 1:
            pairs = conflicts(users, resource, accesses)
            contested += bool(pairs)
            candidates += [(resource, pair) for pair in pairs]
    nodes = [(2 * earlier + 1, 2 * later + 1) for _, (earlier, later, _) in candidates]
    ordered = joined(order.predecessors, nodes)
    unordered: dict[Pair, UnorderedAccesses] = {}  # of several resources of a pair, the first
    if len(ordered) < len(nodes):  # or some are of two resources
        for (resource, pair), between in zip(candidates, nodes, strict=True):
            if between not in ordered and pair not in unordered:
                earlier, later = operators[pair[0]], operators[pair[1]]
                unordered[pair] = UnorderedAccesses(
                    accesses.resources[resource].name, pair[2], str(earlier), str(later), _missing(earlier, later)
                )
    return Proof(
        operators=len(operators),
        chains=len({operator.stream if operator.stream is not None else (operator.thread,) for operator in operators}),
        dependencies=sum(len(operator.after) for operator in operators),
        events=sum(len(operator.records) for operator in operators),
        waits=sum(len(operator.waits) for operator in operators),
        guards={},
        resources=contested,
        pairs_checked=len(candidates),
        unordered=(*order.faults, *(unordered[key] for key in sorted(unordered, key=lambda key: key[:2]))),
    )


class _Order:
    """The launch and the end of every operator as nodes, each with the nodes that always come before it.

    Attributes:
        predecessors: of all nodes; those of operator n are 2 n and 2 n + 1.
        faults: waits for events that another thread may record later.
    """

    def __init__(self, operators: Sequence[ForeignOperator]) -> None:
        self._operators = operators
        self.predecessors: list[list[int]] = []
        self._open: list[tuple[int, int, int]] = []  # a node that follows an operator's end if the launches are ordered
        issued: list[int] = []  # by operator, the node after which its thread goes on
        last_of_thread: dict[str, int] = {}
        last_on_stream: dict[str, int] = {}
        last_of_both: dict[tuple[str, str], int] = {}
        recorded: dict[str, int] = {}
        waits: dict[tuple[int, int, int], str] = {}
        for index, operator in enumerate(operators):
            thread, stream = operator.thread, operator.stream
            launched, done = 2 * index, 2 * index + 1
            launch, end = [issued[before] for before in operator.after], [launched]
            self.predecessors += (launch, end)
            if thread in last_of_thread:
                launch.append(issued[last_of_thread[thread]])
            for event in operator.waits:
                recorder = recorded[event]
                if operators[recorder].thread == thread:
                    (launch if stream is None else end).append(2 * recorder + 1)
                else:
                    waits[recorder, index, launched if stream is None else done] = event
            if stream is not None:
                before = last_on_stream.get(stream, index)
                if operators[before].thread != thread:
                    self._open.append((before, index, done))
                    before = last_of_both.get((thread, stream), index)
                if before != index:
                    end.append(2 * before + 1)
                last_on_stream[stream] = last_of_both[thread, stream] = index
            issued.append(done if stream is None else launched)
            last_of_thread[thread] = index
            for event in operator.records:
                recorded[event] = index
        self._open += waits
        self._close()
        left = set(self._open)
        self.faults = [self._fault(*key[:2], event) for key, event in waits.items() if key in left]

    def _close(self) -> None:
        """Add the edges that follow if one launch always comes after another; they may order further launches."""
        for _ in range(_MAX_ROUNDS):
            if not self._open:
                return
            ordered = joined(self.predecessors, {(2 * first, 2 * last) for first, last, _ in self._open})
            still = []
            for first, last, node in self._open:
                if (2 * first, 2 * last) in ordered:
                    self.predecessors[node].append(2 * first + 1)
                else:
                    still.append((first, last, node))
            if len(still) == len(self._open):
                return
            self._open = still

    def _fault(self, recorder: int, waiter: int, event: str) -> UnorderedAccesses:
        earlier, later = self._operators[recorder], self._operators[waiter]
        return UnorderedAccesses(
            f"event {event!r}", Hazard.CONTROL, str(earlier), str(later),
            f"thread {later.thread!r} may wait before thread {earlier.thread!r} has launched what it waits for",
        )  # fmt: skip


def _accesses(graph: ForeignGraph) -> Accesses:
    """Memories as resources; those in a common space are cut wherever one of them begins or ends."""
    used = dict.fromkeys(chain.from_iterable(chain(operator.reads, operator.writes) for operator in graph.operators))
    cuts: dict[str, set[int]] = {}
    for name in used:
        if name in graph.memories:
            part = graph.memories[name]
            cuts.setdefault(part.space, set()).update((part.low, part.high))
    resources: list[Resource] = []
    first: dict[str, int] = {}
    ends = {space: sorted(places) for space, places in cuts.items()}
    for space, places in ends.items():
        first[space] = len(resources)
        resources += [Resource(f"bytes {low:,} to {high:,} of {space!r}") for low, high in pairwise(places)]
    numbers: dict[str, Sequence[int]] = {}
    for name in used:
        if name in graph.memories:
            part = graph.memories[name]
            numbers[name] = range(*(first[part.space] + bisect_left(ends[part.space], end) for end in part[1:]))
        else:
            numbers[name] = (len(resources),)
            resources.append(Resource(f"memory {name!r}"))
    if graph.memories:
        touched = sum(
            len(numbers[name]) for operator in graph.operators for name in (*operator.reads, *operator.writes)
        )
        if touched > _MAX_STRETCHES:
            raise ResourceError(
                f"graph {graph.name!r}: its memories overlap so that operators touch {touched:,} parts of them; "
                f"{_MAX_STRETCHES:,} are looked at"
            )
    return Accesses(
        tuple(resources),
        tuple([_numbers(operator.reads, numbers) for operator in graph.operators]),
        tuple([_numbers(operator.writes, numbers) for operator in graph.operators]),
    )


def _numbers(names: Sequence[str], numbers: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    if len(names) == 1:
        return tuple(numbers[names[0]])
    return tuple(sorted({number for name in names for number in numbers[name]})) if names else ()


def _missing(earlier: ForeignOperator, later: ForeignOperator) -> str:
    if earlier.stream is None:
        return f"{later.name!r} must be launched after {earlier.name!r}, as it is of thread {earlier.thread!r}"
    event = f"event {earlier.records[0]!r}" if earlier.records else f"an event that is recorded behind {earlier.name!r}"
    return f"{later.name!r} must wait for {event}"
