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
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.graph import Graph

Order = tuple[int, ...]
"""For each operator, the operators that are done before it begins: bit i stands for operator i."""

Flags = npt.NDArray[np.bool_]


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
        self._before = [reduce(and_, (order[user] for user in row)) for row in users]
        self.precedes = np.zeros((len(users), len(users)), np.bool_)
        for buffer, before in enumerate(self._before):
            self.precedes[:, buffer] = self._done_before(before)

    def conflicts(self) -> Flags:
        """[a, b] is true when the two buffers must not share bytes."""
        return ~(self.precedes | self.precedes.T)

    def alive_at(self, operator: int) -> Flags:
        """True for the buffers that may be in use while `operator` runs."""
        bit = 1 << operator
        later = np.fromiter((bool(before & bit) for before in self._before), np.bool_, len(self._before))
        return ~(later | self._done_before(self.order[operator]))

    def together(self, one: int, other: int) -> bool:
        """True when the two operators are one, or may run at the same time."""
        return not (self.order[one] >> other & 1 or self.order[other] >> one & 1)

    def _done_before(self, before: int) -> Flags:
        """True for the buffers that operators among the set `before` alone touch."""
        if self._starts is None:
            return np.zeros(0, np.bool_)
        inside = _flags(before, len(self.order))
        return np.logical_and.reduceat(inside[self._users], self._starts) & ~self._kept


def _flags(members: int, count: int) -> Flags:
    """A set of numbers below `count`, given as the bits of an integer, as an array."""
    packed: npt.NDArray[Any] = np.frombuffer(members.to_bytes(count // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
