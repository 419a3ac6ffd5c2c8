"""Memory of nets with very many operators: placed in one walk, right for every schedule, and not much larger."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.graph import Graph
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.memory import lifetime, plan
from dagexec.scheduler.memory.lifetime import Lifetimes, Order, graph_order, list_order
from dagexec.scheduler.memory.list_order_offsets import place_in_list_order
from tests.scheduler.memory.conflicts import conflicts_of
from tests.scheduler.memory.test_memory import random_graph, users_of
from tests.scheduler.memory.test_memory_nets import KINDS, Make, make, random_net, results, workspace_for


def order_by_graph(graph: Graph) -> Order:
    """The order of a graph as that of a large one is given."""
    return Order(len(graph), None, graph)


@given(st.integers(0, 100_000), st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_conflicts_lies_apart(seed: int, count: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    for _ in range(rng.randrange(3)):  # buffers that several operators may be the first to use, as what is joined
        one, other = rng.choice(users), rng.choice(users)
        users.append(tuple(sorted({*one, *other})))
    sizes = [rng.choice([1, 64, 65, 1000, 4096]) for _ in users]
    kept = [rng.random() < 0.1 for _ in users]
    exact = list_order(count) if in_turn else graph_order(graph)
    conflicts = conflicts_of(Lifetimes(users, kept, exact))
    walked = place_in_list_order(sizes, users, kept, list_order(count) if in_turn else order_by_graph(graph))
    for a, b in itertools.combinations(range(len(users)), 2):
        apart = walked.offsets[a] + sizes[a] <= walked.offsets[b] or walked.offsets[b] + sizes[b] <= walked.offsets[a]
        assert apart or not conflicts[a, b]
    for earlier, later in itertools.combinations(range(count), 2):
        assert walked.strips[earlier] != walked.strips[later] or exact.is_before(earlier, later)
    assert all(walked.offsets + sizes <= walked.extent)


def test_a_chain_takes_two_places() -> None:
    rows = [(index, index + 1) if index < 99 else (index,) for index in range(100)]
    assert place_in_list_order([64] * 100, rows, [False] * 100, list_order(100)).extent == 128


@given(st.integers(0, 100_000), st.integers(2, 60))
@settings(max_examples=60, deadline=None)
def test_an_order_that_only_the_graph_tells_is_that_of_the_table(seed: int, count: int) -> None:
    graph = random_graph(random.Random(seed), count)
    table, searched = graph_order(graph), order_by_graph(graph)
    for earlier, later in itertools.combinations(range(count), 2):
        assert table.is_before(earlier, later) == searched.is_before(earlier, later)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_nets_planned_as_large_ones_are_have_the_bytes_of_simple_net_and_are_proven(
    kind: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "MAX_IN_PAIRS", 4)
    monkeypatch.setattr(plan, "MAX_IN_PAIRS", 4)
    rng = random.Random(seed)
    definition, keep = random_net(rng, 12)
    found = []
    for planned in (None, frozenset(keep)):
        with make(kind, definition, workspace_for(random.Random(seed)), 3, planned) as net:
            found.append(results(net, keep))
            assert check_net(net).holds
    assert found[0] == found[1]
