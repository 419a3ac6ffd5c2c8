"""Lifetimes: which buffers are done with before others begin, in every schedule of a net.

A buffer lives from the first operator that touches it to the last, or, if it is kept, to the end of the run. Two may
share bytes only if every operator that touches the one is done before any that touches the other begins. "Before" is an
`Order`: list order where operators follow one another, else what the dependencies of the graph promise (Lamport 1978),
whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import numpy as np
import numpy.typing as npt

from dagexec.core.graph import Graph

Order = tuple[int, ...]
"""For each operator, the operators that are done before it begins: bit i stands for operator i."""

Flags = npt.NDArray[np.bool_]
Packed = npt.NDArray[np.uint8]


def list_order(count: int) -> Order:
    """The order of `count` operators that run one after another."""
    return tuple((1 << index) - 1 for index in range(count))


def graph_order(graph: Graph) -> Order:
    """The order that every correct schedule of `graph` has: a path of dependencies leads from one to the other."""
    before: list[int] = []
    for parents in graph.reduced_parents:
        found = 0
        for parent in parents:
            found |= before[parent] | 1 << parent
        before.append(found)
    return tuple(before)


class Lifetimes:
    """The lifetimes of buffers under an order. Each buffer has at least one user.

    O(buffers x (buffers + uses)) elementary steps, in NumPy; `precedes` takes buffers squared bytes.

    Attributes:
        precedes: [a, b] is true when buffer a is done with before buffer b begins.
    """

    def __init__(self, users: Sequence[Sequence[int]], kept: Sequence[bool], order: Order) -> None:
        """`users` are the operators that touch each buffer; a buffer that is `kept` is never done with."""
        self.order = order
        self._users = np.fromiter((user for row in users for user in row), np.intp)
        self._starts = np.cumsum([0, *(len(row) for row in users[:-1])], dtype=np.intp) if users else None
        self._kept = np.array(kept, np.bool_)
        before = [reduce(and_, (order[user] for user in row)) for row in users]
        self._before = _packed(before, len(order))
        self._order: Packed | None = None
        self.precedes = np.zeros((len(users), len(users)), np.bool_)
        for buffer, row in enumerate(self._before):
            self.precedes[:, buffer] = self._done_before(row)

    def conflicts(self) -> Flags:
        """[a, b] is true when the two buffers must not share bytes."""
        return ~(self.precedes | self.precedes.T)

    def alive_at(self, operator: int) -> Flags:
        """True for the buffers that may be in use while `operator` runs."""
        later = _members(self._before, operator)
        return ~(later | self._done_before(self._rows()[operator]))

    def together(self, others: npt.NDArray[np.intp], operator: int) -> Flags:
        """True for those of `others` that are `operator`, or may run at the same time."""
        rows = self._rows()
        earlier = _unpacked(rows[operator], len(self.order))[others]
        return ~(earlier | _members(rows[others], operator))

    def _rows(self) -> Packed:
        """The order, packed."""
        if self._order is None:
            self._order = _packed(self.order, len(self.order))
        return self._order

    def _done_before(self, before: Packed) -> Flags:
        """True for the buffers that operators among the set `before` alone touch."""
        if self._starts is None:
            return np.zeros(0, np.bool_)
        inside = _unpacked(before, len(self.order))
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
