"""Layered drawings: layers follow the edges, nodes do not lie on each other, and few edges cross."""

import random
from itertools import combinations, pairwise

import pytest

from dagexec.core.drawing.layers import Edge, Layout, layered


def crossings(edges: list[Edge], layout: Layout) -> int:
    """How often pieces of edges between the same two layers cross."""
    pieces = []
    for (source, target), bends in zip(edges, layout.bends, strict=True):
        points = [layout.nodes[source], *bends, layout.nodes[target]]
        pieces += [(upper[1], upper[0], lower[0]) for upper, lower in pairwise(points)]
    return sum(
        first[0] == second[0] and (first[1] - second[1]) * (first[2] - second[2]) < 0
        for first, second in combinations(pieces, 2)
    )


def test_a_chain_is_a_straight_line() -> None:
    layout = layered(3, [(0, 1), (1, 2)])
    assert layout.nodes == ((0.0, 0.0), (0.0, 1.0), (0.0, 2.0))


def test_an_edge_over_a_layer_passes_beside_the_node_there() -> None:
    layout = layered(3, [(0, 1), (1, 2), (0, 2)])
    ((bend, depth),) = layout.bends[2]
    assert depth == 1
    assert abs(bend - layout.nodes[1][0]) >= 1


def test_branches_do_not_cross() -> None:
    # four branches of two, whose second operators come in the opposite order
    edges = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 8), (2, 7), (3, 6), (4, 5), (5, 9), (6, 9), (7, 9), (8, 9)]
    assert crossings(edges, layered(10, edges)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_dags(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 60)
    edges = [(draw.randrange(child), child) for child in range(1, count) for _ in range(draw.randint(0, 2))]
    edges = list(dict.fromkeys(edges))
    layout = layered(count, edges)
    assert all(layout.nodes[source][1] < layout.nodes[target][1] for source, target in edges)
    for (source, target), bends in zip(edges, layout.bends, strict=True):
        assert len(bends) == layout.nodes[target][1] - layout.nodes[source][1] - 1
    taken = sorted((y, x) for x, y in (*layout.nodes, *(point for bends in layout.bends for point in bends)))
    for (y, x), (other_y, other_x) in pairwise(taken):
        assert y != other_y or other_x - x > 1 - 1e-9


def test_no_nodes_are_an_empty_drawing() -> None:
    assert layered(0, []).nodes == ()
