"""Maximum flows and minimum cuts (Dinic 1970), O(nodes^2 x edges) and on layered networks far less.

networkx has them too, a hundred times as slow on networks of thousands of nodes, which compilation cannot wait for.
"""

from __future__ import annotations

from collections import deque

UNLIMITED = 1 << 62
"""A capacity that no flow exhausts."""


class MaximumFlow:
    """A network of numbered nodes. Edge e and the edge back, e ^ 1, lie side by side."""

    def __init__(self, nodes: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._target: list[int] = []
        self._free: list[int] = []

    def connect(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        """An edge, and one back."""
        self._edges[tail].append(len(self._target))
        self._edges[head].append(len(self._target) + 1)
        self._target += [head, tail]
        self._free += [capacity, back]

    def run(self, source: int, sink: int) -> int:
        """The value of a maximum flow."""
        total = 0
        while (levels := self._levels(source, sink)) is not None:
            total += self._blocking_flow(source, sink, levels)
        return total

    def sink_side(self, sink: int) -> frozenset[int]:
        """After `run`, the nodes on the sink's side of the minimum cut that has the fewest of them there."""
        reached = {sink}
        waiting = [sink]
        while waiting:
            for edge in self._edges[waiting.pop()]:
                tail = self._target[edge]
                if self._free[edge ^ 1] and tail not in reached:
                    reached.add(tail)
                    waiting.append(tail)
        return frozenset(reached)

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
