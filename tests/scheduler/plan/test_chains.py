import itertools

import pytest
from hypothesis import given, settings

from dagexec import NetDef
from dagexec.core.graph import build_graph
from dagexec.scheduler.plan.chains import compute_chains, single_operator_chains
from tests.nets import net_of, noop_nets, parents_from_edges

EXPECTED = {
    "two in a row are one chain": (2, [(0, 1)], [(0, 1)]),
    "a fork is three chains": (3, [(0, 1), (0, 2)], [(0,), (1,), (2,)]),
    "what follows a join joins it": (4, [(0, 2), (1, 2), (2, 3)], [(0,), (1,), (2, 3)]),
    "an edge to an ancestor does not count": (4, [(0, 1), (0, 2), (0, 3), (2, 3)], [(0,), (1,), (2, 3)]),
    "a fork joins nothing": (5, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)], [(0,), (1,), (2,), (3,), (4,)]),
    "a shortcut over a row is no fork": (4, [(0, 1), (1, 2), (2, 3), (0, 3)], [(0, 1, 2, 3)]),
    "what Caffe2's pruning misses": (4, [(0, 2), (0, 3), (1, 2), (2, 3)], [(0,), (1,), (2, 3)]),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_chains_follow_the_rules(case: str) -> None:
    count, edges, chains = EXPECTED[case]
    assert list(compute_chains(build_graph(net_of(parents_from_edges(count, edges))))) == chains


def test_operators_on_different_devices_are_never_in_one_chain() -> None:
    net = net_of([[], [0], [1]])
    net.op[2].device_option.device_type = 20901
    assert compute_chains(build_graph(net)) == ((0, 1), (2,))


@pytest.mark.slow
@given(noop_nets())
@settings(max_examples=300, deadline=None)
def test_every_operator_is_in_one_chain_and_chains_are_linear(net: NetDef) -> None:
    graph = build_graph(net)
    chains = compute_chains(graph)
    assert sorted(index for chain in chains for index in chain) == list(range(len(graph)))
    for chain in chains:
        for earlier, later in itertools.pairwise(chain):
            assert graph.reduced_parents[later] == (earlier,)
            assert graph.reduced_children[earlier] == (later,)


@pytest.mark.slow
@given(noop_nets())
@settings(max_examples=100, deadline=None)
def test_chains_are_as_long_as_the_rules_allow(net: NetDef) -> None:
    graph = build_graph(net)
    head = {chain[0] for chain in compute_chains(graph)}
    for index in range(len(graph)):
        parents = graph.reduced_parents[index]
        must_join = (
            len(parents) == 1
            and len(graph.reduced_children[parents[0]]) == 1
            and len(graph.reduced_children[index]) <= 1
        )
        assert must_join == (index not in head)


def test_chaining_can_be_switched_off() -> None:
    assert single_operator_chains(build_graph(net_of([[], [0], [1]]))) == ((0,), (1,), (2,))
