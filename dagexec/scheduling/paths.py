"""Longest paths to the end of a graph."""

from __future__ import annotations

from collections.abc import Sequence


def longest_paths(children: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Of each node, the seconds along the longest path that begins with it. Nodes may be numbered in any order."""
    left = [0] * len(children)
    for row in children:
        for child in row:
            left[child] += 1
    order = [node for node, count in enumerate(left) if not count]
    for node in order:
        for child in children[node]:
            left[child] -= 1
            if not left[child]:
                order.append(child)
    found = list(seconds)
    for node in reversed(order):
        found[node] += max((found[child] for child in children[node]), default=0.0)
    return found
