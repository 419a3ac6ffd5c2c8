"""MaximumFlow, by networkx's algorithms on random networks."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from dagexec.core.maximum_flow import UNLIMITED, MaximumFlow


@pytest.mark.parametrize("seed", range(40))
def test_flow_and_cut_are_those_of_networkx(seed: int) -> None:
    chance = random.Random(seed)
    nodes = chance.randint(2, 14)
    flow, network = MaximumFlow(nodes), nx.DiGraph()
    network.add_nodes_from(range(nodes))
    pairs = {(chance.randrange(nodes), chance.randrange(nodes)) for _ in range(3 * nodes)}
    for tail, head in sorted(pair for pair in pairs if pair[0] != pair[1]):
        there = chance.choice([0, 1, 2, 5, 9])
        back = chance.choice([0, 0, 4]) if (head, tail) not in pairs else 0
        flow.connect(tail, head, there, back)
        network.add_edge(tail, head, capacity=there)
        if back:
            network.add_edge(head, tail, capacity=back)
    value, (_, sink_side) = nx.minimum_cut(network, 0, nodes - 1)
    assert flow.run(0, nodes - 1) == value
    assert flow.sink_side(nodes - 1) == sink_side


def test_unlimited_edges_are_never_cut() -> None:
    flow = MaximumFlow(4)
    for tail, head, capacity in ((0, 1, UNLIMITED), (1, 2, 7), (2, 3, UNLIMITED)):
        flow.connect(tail, head, capacity)
    assert flow.run(0, 3) == 7
    assert flow.sink_side(3) == {2, 3}
