"""Where to draw the nodes of a DAG: in layers from top to bottom, with few crossings.

The method of Sugiyama, Tagawa and Toda ("Methods for Visual Understanding of Hierarchical System Structures", 1981):
a node stands one layer below its lowest parent, an edge over several layers passes through a point in each, and sweeps
down and up order each layer by the mean place of the neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dagexec.platform.records import dataclass

_SWEEPS = 8

Edge = tuple[int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Places in units of a node's width and of a layer's height; the layers are centered at x = 0.

    Attributes:
        nodes: the place of each node.
        bends: for each edge the points that it passes through, from top to bottom; none where it meets the next layer.
    """

    nodes: tuple[Point, ...]
    bends: tuple[tuple[Point, ...], ...]


def layered(count: int, edges: Sequence[Edge]) -> Layout:
    """Places for nodes 0 to `count` - 1. Every edge leads from a smaller number to a larger one.

    Takes time in proportion to nodes and layers that edges pass.
    """
    depths = _depths(count, edges)
    layers: list[list[int]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for node, depth in enumerate(depths):
        layers[depth].append(node)
    paths = []
    total = count
    for source, target in edges:
        path = [source]
        for depth in range(depths[source] + 1, depths[target]):
            layers[depth].append(total)
            path.append(total)
            total += 1
        paths.append([*path, target])
    above: list[list[int]] = [[] for _ in range(total)]
    below: list[list[int]] = [[] for _ in range(total)]
    for path in paths:
        for upper, lower in pairwise(path):
            below[upper].append(lower)
            above[lower].append(upper)
    places = _ordered(layers, above, below, total)
    points: list[Point] = [(0.0, 0.0)] * total
    for depth, layer in enumerate(layers):
        for node in layer:
            points[node] = (places[node], float(depth))
    return Layout(tuple(points[:count]), tuple(tuple(points[node] for node in path[1:-1]) for path in paths))


def _depths(count: int, edges: Sequence[Edge]) -> list[int]:
    depths = [0] * count
    for source, target in sorted(edges):
        depths[target] = max(depths[target], depths[source] + 1)
    return depths


def _ordered(layers: list[list[int]], above: list[list[int]], below: list[list[int]], total: int) -> list[float]:
    """Order each layer by its neighbors, sweeping down and up; the place of each node."""
    places = [0.0] * total
    for layer in layers:
        _spread(layer, places)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbors = above if down else below
        for layer in layers if down else reversed(layers):
            targets = {node: _mean([places[other] for other in neighbors[node]], places[node]) for node in layer}
            layer.sort(key=targets.__getitem__)
            _settle(layer, targets, places)
    return places


def _spread(layer: list[int], places: list[float]) -> None:
    for place, node in enumerate(layer):
        places[node] = place - (len(layer) - 1) / 2


def _settle(layer: list[int], targets: dict[int, float], places: list[float]) -> None:
    """Place nodes, in order, as near as possible to their `targets` (least squares), at least 1 apart.

    This is isotonic regression of the targets less the node's rank (pool adjacent violators; Ayer et al., 1955).
    """
    blocks: list[tuple[float, int]] = []  # the sum and the number of its nodes' targets less ranks
    for rank, node in enumerate(layer):
        total, size = targets[node] - rank, 1
        while blocks and blocks[-1][0] * size >= total * blocks[-1][1]:
            before, count = blocks.pop()
            total, size = total + before, size + count
        blocks.append((total, size))
    rank = 0
    for total, size in blocks:
        for node in layer[rank : rank + size]:
            places[node] = total / size + rank
            rank += 1


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
