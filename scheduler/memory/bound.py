"""The lower bound: the most bytes that are alive together, which no placement of the buffers can be below.

Buffers of which none is done with before another begins must all lie apart. They are an antichain of the order
`Lifetimes.precedes`, and the heaviest antichain is the bound. By Dilworth's theorem with weights it is the least
number of chains that cover every buffer as often as its weight says: all weights together, less what chains can pass
on from the end of one buffer to the beginning of a later one, a maximum flow (Fulkerson 1956; the flow: Dinic 1970).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from dagexec.core.graph import transitive_reduction
from dagexec.scheduler.memory.lifetime import Flags

_UNLIMITED = 1 << 62


def heaviest_antichain(weights: Sequence[int], precedes: Flags) -> int:
    """The largest total weight of elements of which none precedes another. `precedes` is a strict partial order."""
    count = len(weights)
    rank = np.argsort(precedes.sum(axis=0), kind="stable")  # what precedes more elements comes before them
    ordered = precedes[np.ix_(rank, rank)]
    reduced = transitive_reduction([np.flatnonzero(ordered[:, later]).tolist() for later in range(count)])
    source, sink = 2 * count, 2 * count + 1
    flow = _MaximumFlow(2 * count + 2)
    for element in range(count):
        weight = int(weights[rank[element]])
        flow.connect(source, 2 * element + 1, weight)  # its end passes on as much
        flow.connect(2 * element, sink, weight)  # and its beginning takes as much
        flow.connect(2 * element, 2 * element + 1, _UNLIMITED)  # what passes by it
        for earlier in reduced[element]:
            flow.connect(2 * earlier + 1, 2 * element, _UNLIMITED)
    return sum(map(int, weights)) - flow.run(source, sink)


class _MaximumFlow:
    """Dinic's algorithm. Edge e and the edge back, e ^ 1, lie side by side."""

    def __init__(self, nodes: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._target: list[int] = []
        self._free: list[int] = []

    def connect(self, tail: int, head: int, capacity: int) -> None:
        """An edge."""
        self._edges[tail].append(len(self._target))
        self._edges[head].append(len(self._target) + 1)
        self._target += [head, tail]
        self._free += [capacity, 0]

    def run(self, source: int, sink: int) -> int:
        """The value of a maximum flow."""
        total = 0
        while (levels := self._levels(source, sink)) is not None:
            total += self._blocking_flow(source, sink, levels)
        return total

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Edges from the source to each node along free edges; None when the sink is not reached."""
        levels = [-1] * len(self._edges)
        levels[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                head = self._target[edge]
                if self._free[edge] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels if levels[sink] >= 0 else None

    def _blocking_flow(self, source: int, sink: int, levels: list[int]) -> int:
        """Fill shortest paths until none is left."""
        target, free = self._target, self._free
        following = [0] * len(self._edges)
        path: list[int] = []
        total, node = 0, source
        while True:
            if node == sink:
                amount = min(free[edge] for edge in path)
                for edge in path:
                    free[edge] -= amount
                    free[edge ^ 1] += amount
                total += amount
                full = next(place for place, edge in enumerate(path) if not free[edge])
                node = target[path[full] ^ 1]
                del path[full:]
                continue
            edges = self._edges[node]
            while following[node] < len(edges):
                edge = edges[following[node]]
                if free[edge] and levels[target[edge]] == levels[node] + 1:
                    break
                following[node] += 1
            else:
                if not path:
                    return total
                node = target[path.pop() ^ 1]
                following[node] += 1
                continue
            path.append(edge)
            node = target[edge]
