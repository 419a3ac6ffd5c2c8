"""Lifetimes: which buffers are done with before others begin, in every schedule of a net.

A buffer lives from the first operator that touches it to the last, or, if it is kept, to the end of the run. Two may
share bytes only if every operator that touches the one is done before any that touches the other begins. "Before" is an
`Order`: list order where operators follow one another, else what the dependencies of the graph promise (Lamport 1978),
whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np
import numpy.typing as npt

from dagexec.core.graph import Graph

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]
Packed = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Order:
    """Which operators are done before which begin.

    Attributes:
        count: the operators there are.
        before: for each, the operators before it: bit i stands for operator i. None when they run one after another.
    """

    count: int
    before: tuple[int, ...] | None = None

    def is_before(self, earlier: int, later: int) -> bool:
        """True when operator `earlier` is done whenever operator `later` begins."""
        return earlier < later if self.before is None else bool(self.before[later] >> earlier & 1)


def list_order(count: int) -> Order:
    """The order of `count` operators that run one after another."""
    return Order(count)


def graph_order(graph: Graph) -> Order:
    """The order that every correct schedule of `graph` has: a path of dependencies leads from one to the other."""
    before: list[int] = []
    for parents in graph.reduced_parents:
        found = 0
        for parent in parents:
            found |= before[parent] | 1 << parent
        before.append(found)
    return Order(len(graph), tuple(before))


class Lifetimes:
    """The lifetimes of buffers under an order. Each buffer has at least one user.

    O(buffers x (buffers + uses)) elementary steps, in NumPy; `precedes` takes buffers squared bytes.

    Attributes:
        precedes: [a, b] is true when buffer a is done with before buffer b begins.
    """

    def __init__(self, users: Sequence[Sequence[int]], kept: Sequence[bool], order: Order) -> None:
        """`users` are the operators that touch each buffer; a buffer that is `kept` is never done with."""
        flags = np.array(kept, np.bool_)
        self._lives = _Intervals(users, flags) if order.before is None else _Sets(users, flags, order.before)
        self.precedes = self._lives.precedes()

    def conflicts(self) -> Flags:
        """[a, b] is true when the two buffers must not share bytes."""
        return ~(self.precedes | self.precedes.T)

    def alive_at(self, operator: int) -> Flags:
        """True for the buffers that may be in use while `operator` runs."""
        return self._lives.alive_at(operator)

    def together(self, others: Numbers, operator: int) -> Flags:
        """True for those of `others` that are `operator`, or may run at the same time."""
        return self._lives.together(others, operator)


class _Intervals:
    """Lifetimes where operators run one after another: from the first user to the last."""

    def __init__(self, users: Sequence[Sequence[int]], kept: Flags) -> None:
        self._first = np.fromiter(map(min, users), np.intp, len(users))
        last = np.fromiter(map(max, users), np.intp, len(users))
        self._last = np.where(kept, np.iinfo(np.intp).max, last)

    def precedes(self) -> Flags:
        return self._last[:, np.newaxis] < self._first

    def alive_at(self, operator: int) -> Flags:
        return (self._first <= operator) & (self._last >= operator)

    def together(self, others: Numbers, operator: int) -> Flags:
        found: Flags = others == operator
        return found


class _Sets:
    """Lifetimes where some operators may run at the same time: from what is before whom."""

    def __init__(self, users: Sequence[Sequence[int]], kept: Flags, order: Sequence[int]) -> None:
        self._count = len(order)
        self._users = np.fromiter((user for row in users for user in row), np.intp)
        self._starts = np.cumsum([0, *(len(row) for row in users[:-1])], dtype=np.intp) if users else None
        self._kept = kept
        self._before = _packed([reduce(and_, (order[user] for user in row)) for row in users], self._count)
        self._order = _packed(order, self._count)

    def precedes(self) -> Flags:
        found = np.zeros((len(self._kept), len(self._kept)), np.bool_)
        for buffer, row in enumerate(self._before):
            found[:, buffer] = self._done_before(row)
        return found

    def alive_at(self, operator: int) -> Flags:
        return ~(_members(self._before, operator) | self._done_before(self._order[operator]))

    def together(self, others: Numbers, operator: int) -> Flags:
        earlier = _unpacked(self._order[operator], self._count)[others]
        return ~(earlier | _members(self._order[others], operator))

    def _done_before(self, before: Packed) -> Flags:
        """True for the buffers that operators among the set `before` alone touch."""
        if self._starts is None:
            return np.zeros(0, np.bool_)
        inside = _unpacked(before, self._count)
        return np.logical_and.reduceat(inside[self._users], self._starts) & ~self._kept


def _packed(sets: Sequence[int], count: int) -> Packed:
    """Sets of numbers below `count`, given as the bits of integers, a row of bytes each."""
    width = count // 8 + 1
    return np.frombuffer(b"".join(row.to_bytes(width, "little") for row in sets), np.uint8).reshape(len(sets), width)


def _unpacked(members: Packed, count: int) -> Flags:
    """A set, one row of `_packed`, as an array."""
    return np.unpackbits(members, count=count, bitorder="little").view(np.bool_)


def _members(sets: Packed, number: int) -> Flags:
    """True for the sets that have `number` in them."""
    return (sets[:, number >> 3] >> (number & 7) & 1).view(np.bool_)
