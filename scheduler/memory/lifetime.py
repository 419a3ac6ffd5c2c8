"""Lifetimes: which buffers are done with before others begin, in every schedule of a net.

A buffer lives from the first operator that touches it to the last, or, if it is kept, to the end of the run. Two may
share bytes only if every operator that touches the first is done before any that touches the second begins. "Before" is
an `Order`: list order where operators follow one another, else what the dependencies of the graph guarantee (Lamport
1978), for any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import numpy as np
import numpy.typing as npt

from dagexec.core.graph import Graph
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]
Packed = npt.NDArray[np.uint8]

MAX_IN_PAIRS = 4096
"""Operators or buffers that are compared in pairs; a table of pairs of more would take too much memory."""

_SHORT = 64  # operators
_MANY = 32  # buffers that conflict with another
_MAX_STEPS = 4096
_MAX_PAIRS = 8 * MAX_IN_PAIRS**2 // 10


@dataclass(frozen=True)
class Order:
    """Which operators are done before which begin.

    Attributes:
        count: the number of operators.
        before: for each, the operators before it: bit i stands for operator i. None when they run one after another,
            or when there are too many.
        graph: gives the dependencies if there are too many; None when they run one after another.
    """

    count: int
    before: tuple[int, ...] | None = None
    graph: Graph | None = None

    def is_before(self, earlier: int, later: int) -> bool:
        """True when operator `earlier` is known to be done whenever operator `later` begins."""
        if self.before is not None:
            return bool(self.before[later] >> earlier & 1)
        return earlier < later if self.graph is None else _is_found(self.graph, earlier, later)


def _is_found(graph: Graph, earlier: int, later: int) -> bool:
    """True when a search of `_MAX_STEPS` finds a path of dependencies between the two."""
    seen: set[int] = set()
    waiting = [later]
    while waiting and len(seen) < _MAX_STEPS:
        for parent in graph.reduced_parents[waiting.pop()]:
            if parent == earlier:
                return True
            if parent > earlier and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False


def list_order(count: int) -> Order:
    """The order of `count` operators that run one after another."""
    return Order(count)


def graph_order(graph: Graph) -> Order:
    """The order that every correct schedule of `graph` has: a path of dependencies leads from one to the other."""
    if all(parents == (index - 1,) for index, parents in enumerate(graph.reduced_parents) if index):
        return list_order(len(graph))
    if len(graph) > MAX_IN_PAIRS:
        return Order(len(graph), None, graph)
    before: list[int] = []
    for parents in graph.reduced_parents:
        ancestors = 0
        for parent in parents:
            ancestors |= before[parent] | 1 << parent
        before.append(ancestors)
    return Order(len(graph), tuple(before))


class Lifetimes:
    """The lifetimes of buffers under an order. Each buffer has at least one user.

    Where operators follow one another, this takes O(buffers) steps, and for each question about as many as the answer
    is long; else O(buffers x (buffers + uses)), in NumPy, and buffers squared bytes.
    """

    def __init__(self, users: Sequence[Sequence[int]], kept: Sequence[bool], order: Order) -> None:
        """`users` are the operators that touch each buffer; a buffer that is `kept` is never done with.

        Not for an order that only a graph gives.
        """
        flags = np.array(kept, np.bool_)
        self._lives = _Intervals(users, flags) if order.before is None else _Sets(users, flags, order.before)

    @cached_property
    def precedes(self) -> Flags:
        """[a, b] is true when buffer a is done with before buffer b begins."""
        return self._lives.precedes()

    def are_crowded(self) -> bool:
        """True when so many buffers are alive at once that comparing them in pairs would take long."""
        return self._lives.are_crowded()

    def conflicting(self, buffer: int) -> Numbers:
        """The buffers that must not share bytes with `buffer`, itself among them, in any order."""
        return self._lives.conflicting(buffer)

    def crowds(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each buffer, the sum of the sizes of those that must not share bytes with it."""
        return self._lives.crowds(sizes)

    def peak_live(self, sizes: Sequence[int]) -> int:
        """A total of `sizes` of buffers alive at one time, the largest known: no plan can need less."""
        return self._lives.peak_live(np.array(sizes, np.int64))

    def live_at(self, operator: int) -> Flags:
        """True for the buffers that may be in use while `operator` runs."""
        return self._lives.live_at(operator)

    def together(self, others: Numbers, operator: int) -> Flags:
        """True for those of `others` that are `operator`, or may run at the same time."""
        return self._lives.together(others, operator)


class _Intervals:
    """Lifetimes where operators run one after another: from the first user to the last.

    Buffers that begin before another and are alive when it does are long, or begin at most `_SHORT` before it.
    """

    def __init__(self, users: Sequence[Sequence[int]], kept: Flags) -> None:
        self._first = np.fromiter(map(min, users), np.intp, len(users))
        last = np.fromiter(map(max, users), np.intp, len(users))
        self._last = np.where(kept, np.iinfo(np.intp).max, last)
        self._sorted = np.argsort(self._first, kind="stable")
        self._starts, self._ends = self._first[self._sorted], self._last[self._sorted]
        self._long = np.flatnonzero(self._ends - self._starts > _SHORT)

    @cached_property
    def _near(self) -> list[tuple[int, int]]:
        low = np.searchsorted(self._starts, self._first - _SHORT, "left")
        high = np.searchsorted(self._starts, self._last, "right")
        return list(zip(low.tolist(), high.tolist(), strict=True))

    def precedes(self) -> Flags:
        return self._last[:, np.newaxis] < self._first

    def are_crowded(self) -> bool:
        begun = np.searchsorted(self._starts, self._last, "right")
        done = np.searchsorted(np.sort(self._ends), self._first, "left")
        return int((begun - done).sum()) > _MAX_PAIRS

    @cached_property
    def _pairs(self) -> tuple[list[int], Numbers] | None:
        """The buffers that conflict with each, all in one array, and where each buffer's begin; None for too many."""
        count = len(self._starts)
        place = np.arange(count)
        begun = np.searchsorted(self._starts, self._ends, "right") - place - 1  # while each of them is alive
        total = int(begun.sum())
        if total > _MANY * count:
            return None
        first = np.repeat(place, begun)
        second = np.arange(total) - np.repeat(np.cumsum(begun) - begun, begun) + first + 1
        rows = self._sorted[np.concatenate((place, first, second))]
        conflicts = self._sorted[np.concatenate((place, second, first))]
        starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count))))
        return starts.tolist(), conflicts[np.argsort(rows, kind="stable")]

    def crowds(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        pairs = self._pairs
        if pairs is None:
            return np.array([sizes[self.conflicting(buffer)].sum() for buffer in range(len(sizes))], np.int64)
        starts, conflicts = pairs
        return np.add.reduceat(sizes[conflicts], starts[:-1]) if len(sizes) else sizes

    def conflicting(self, buffer: int) -> Numbers:
        if self._pairs is not None:
            starts, every = self._pairs
            return every[starts[buffer] : starts[buffer + 1]]
        low, high = self._near[buffer]
        near = np.arange(low, high)
        candidates = np.concatenate((self._long[: np.searchsorted(self._long, low)], near))
        chosen: Numbers = self._sorted[candidates[self._ends[candidates] >= self._first[buffer]]]
        return chosen

    def peak_live(self, sizes: npt.NDArray[np.int64]) -> int:
        ends = np.sort(self._ends)
        done = np.concatenate(([0], np.cumsum(sizes[np.argsort(self._last, kind="stable")])))
        begun = np.cumsum(sizes[self._sorted])
        last_of_equals = np.append(self._starts[1:] != self._starts[:-1], True)
        alive = begun - done[np.searchsorted(ends, self._starts, "left")]
        return int(alive[last_of_equals].max(initial=0)) if len(sizes) else 0

    def live_at(self, operator: int) -> Flags:
        return (self._first <= operator) & (self._last >= operator)

    def together(self, others: Numbers, operator: int) -> Flags:
        flags: Flags = others == operator
        return flags


class _Sets:
    """Lifetimes where some operators may run at the same time: by the set of operators before each."""

    def __init__(self, users: Sequence[Sequence[int]], kept: Flags, order: Sequence[int]) -> None:
        self._count = len(order)
        self._listed = _Intervals(users, kept)
        self._users = np.fromiter((user for row in users for user in row), np.intp)
        self._starts = np.cumsum([0, *(len(row) for row in users[:-1])], dtype=np.intp) if users else None
        self._kept = kept
        self._conflicts: Flags | None = None
        self._before = _packed([reduce(and_, (order[user] for user in row)) for row in users], self._count)
        self._order = _packed(order, self._count)

    def precedes(self) -> Flags:
        result = np.zeros((len(self._kept), len(self._kept)), np.bool_)
        for buffer, row in enumerate(self._before):
            result[:, buffer] = self._done_before(row)
        return result

    def are_crowded(self) -> bool:
        return False

    def conflicting(self, buffer: int) -> Numbers:
        if self._conflicts is None:
            precedes = self.precedes()
            self._conflicts = ~(precedes | precedes.T)
        return np.flatnonzero(self._conflicts[buffer])

    def crowds(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.array([sizes[self.conflicting(buffer)].sum() for buffer in range(len(sizes))], np.int64)

    def peak_live(self, sizes: npt.NDArray[np.int64]) -> int:
        return self._listed.peak_live(sizes)  # list order is one of the orders that the plan must allow

    def live_at(self, operator: int) -> Flags:
        return ~(_members(self._before, operator) | self._done_before(self._order[operator]))

    def together(self, others: Numbers, operator: int) -> Flags:
        earlier = _unpacked(self._order[operator], self._count)[others]
        return ~(earlier | _members(self._order[others], operator))

    def _done_before(self, before: Packed) -> Flags:
        """True for the buffers whose users are all in the set `before`."""
        if self._starts is None:
            return np.zeros(0, np.bool_)
        inside = _unpacked(before, self._count)
        return np.logical_and.reduceat(inside[self._users], self._starts) & ~self._kept


def _packed(sets: Sequence[int], count: int) -> Packed:
    """Sets of numbers below `count`, as bits of integers, packed into one row of bytes each."""
    width = count // 8 + 1
    return np.frombuffer(b"".join(row.to_bytes(width, "little") for row in sets), np.uint8).reshape(len(sets), width)


def _unpacked(members: Packed, count: int) -> Flags:
    """A set, one row of `_packed`, as an array."""
    return np.unpackbits(members, count=count, bitorder="little").view(np.bool_)


def _members(sets: Packed, number: int) -> Flags:
    """True for the sets that contain `number`."""
    return (sets[:, number >> 3] >> (number & 7) & 1).view(np.bool_)
