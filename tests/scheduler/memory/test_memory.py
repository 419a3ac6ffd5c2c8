"""Memory plans on invented buffers: lifetimes, offsets and the lower bound, against programs that try everything."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.graph import Graph, build_graph
from dagexec.scheduler.memory.lifetime import Lifetimes, graph_order, list_order
from dagexec.scheduler.memory.lower_bound import heaviest_antichain
from dagexec.scheduler.memory.offsets import ALIGNMENT, place
from tests.ops.running import operator_def
from tests.scheduler.memory.conflicts import conflicts_of

Users = list[tuple[int, ...]]


def random_graph(rng: random.Random, count: int) -> Graph:
    """A net of Sum operators, each reading up to three blobs before it."""
    operators = []
    for index in range(count):
        sources = [f"b{rng.randrange(index)}" for _ in range(min(index, rng.randint(1, 3)))] or ["x"]
        operators.append(operator_def("Sum", sorted(set(sources)), [f"b{index}"]))
    return build_graph(NetDef(name="random", op=operators))


def users_of(graph: Graph) -> Users:
    """The operators that touch each operator's output."""
    names = [definition.output[0] for definition in graph.operators]
    return [
        (index, *(reader for reader, other in enumerate(graph.operators) if name in other.input))
        for index, name in enumerate(names)
    ]


def schedules(graph: Graph) -> list[list[tuple[str, int]]]:
    """Every order in which starts and ends of the operators may follow one another, by search."""
    found: list[list[tuple[str, int]]] = []

    def go_on(done: frozenset[int], running: frozenset[int], events: list[tuple[str, int]]) -> None:
        if len(done) == len(graph):
            found.append(events)
            return
        for index in range(len(graph)):
            if index not in done | running and set(graph.parents[index]) <= done:
                go_on(done, running | {index}, [*events, ("start", index)])
        for index in running:
            go_on(done | {index}, running - {index}, [*events, ("end", index)])

    go_on(frozenset(), frozenset(), [])
    return found


def alive_together(graph: Graph, users: Users, kept: list[bool]) -> set[tuple[int, int]]:
    """The pairs of buffers that are in use at one time in some schedule: from the first start to the last end."""
    found = set()
    for events in schedules(graph):
        place_of = {event: place for place, event in enumerate(events)}
        lives = [
            (
                min(place_of["start", user] for user in row),
                len(events) if stays else max(place_of["end", user] for user in row),
            )
            for row, stays in zip(users, kept, strict=True)
        ]
        for (a, one), (b, other) in itertools.combinations(enumerate(lives), 2):
            if one[0] < other[1] and other[0] < one[1]:
                found.add((a, b))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_two_buffers_conflict_exactly_when_some_schedule_of_the_graph_has_both_in_use(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 5)
    users = users_of(graph)
    kept = [rng.random() < 0.2 for _ in users]
    conflicts = conflicts_of(Lifetimes(users, kept, graph_order(graph)))
    seen = {(a, b) for a, b in itertools.combinations(range(len(users)), 2) if conflicts[a, b]}
    assert seen == alive_together(graph, users, kept)


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_in_list_order_buffers_conflict_when_their_intervals_overlap(seed: int, count: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    kept = [rng.random() < 0.1 for _ in users]
    conflicts = conflicts_of(Lifetimes(users, kept, list_order(count)))
    ends = [count if stays else max(row) for row, stays in zip(users, kept, strict=True)]
    for a, b in itertools.combinations(range(count), 2):
        assert conflicts[a, b] == (min(users[a]) <= ends[b] and min(users[b]) <= ends[a])


def test_what_is_alive_while_an_operator_runs_is_all_that_is_not_surely_over_or_yet_to_come() -> None:
    graph = build_graph(
        NetDef(
            name="n",
            op=[
                operator_def("Relu", ["x"], ["a"]),
                operator_def("Relu", ["a"], ["b"]),
                operator_def("Relu", ["b"], ["c"]),
                operator_def("Relu", ["x"], ["d"]),
            ],
        )
    )
    lifetimes = Lifetimes(users_of(graph), [False] * 4, graph_order(graph))
    assert lifetimes.live_at(2).tolist() == [False, True, True, True]
    assert lifetimes.live_at(0).tolist() == [True, False, False, True]
    assert lifetimes.together(np.array([3, 0, 2]), 2).tolist() == [True, False, True]
    in_turn = Lifetimes(users_of(graph), [False] * 4, list_order(4))
    assert in_turn.live_at(2).tolist() == [False, True, True, False]
    assert in_turn.together(np.array([3, 2]), 2).tolist() == [False, True]


@pytest.mark.slow
@given(st.integers(0, 100_000), st.integers(1, 30), st.booleans())
@settings(max_examples=80, deadline=None)
def test_buffers_that_conflict_never_overlap_and_lie_on_cache_lines(seed: int, count: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    sizes = [rng.choice([1, 64, 65, 1000, 4096, 100_000]) for _ in users]
    kept = [rng.random() < 0.1 for _ in users]
    lifetimes = Lifetimes(users, kept, list_order(count) if in_turn else graph_order(graph))
    conflicts = conflicts_of(lifetimes)
    placed = place(sizes, lifetimes.conflicting, lifetimes.peak_live([-(-size // 64) * 64 for size in sizes]))
    offsets = placed.offsets.tolist()
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert placed.extent >= max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    for a, b in itertools.combinations(range(count), 2):
        if conflicts[a, b]:
            assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
    assert placed.extent >= heaviest_antichain([-(-size // 64) * 64 for size in sizes], lifetimes.precedes)


def antichain_by_trying(weights: list[int], precedes: list[list[bool]]) -> int:
    """The heaviest set of elements of which none precedes another, by trying all sets."""
    count = len(weights)
    best = 0
    for chosen in range(1 << count):
        members = [element for element in range(count) if chosen >> element & 1]
        if not any(precedes[a][b] for a in members for b in members):
            best = max(best, sum(weights[element] for element in members))
    return best


@given(st.integers(0, 100_000), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_the_bound_is_the_heaviest_antichain(seed: int, count: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    lifetimes = Lifetimes(users, [rng.random() < 0.2 for _ in users], graph_order(graph))
    weights = [rng.choice([0, 1, 5, 64, 1 << 40]) for _ in users]
    assert lifetimes.peak_live(weights) <= heaviest_antichain(weights, lifetimes.precedes)
    assert heaviest_antichain(weights, lifetimes.precedes) == antichain_by_trying(weights, lifetimes.precedes.tolist())


@given(st.integers(0, 100_000), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_in_list_order_the_bound_is_the_most_bytes_in_use_at_one_time(seed: int, count: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    weights = [rng.randint(1, 100) for _ in users]
    most = max(
        sum(weight for weight, row in zip(weights, users, strict=True) if min(row) <= time <= max(row))
        for time in range(count)
    )
    lifetimes = Lifetimes(users, [False] * count, list_order(count))
    assert heaviest_antichain(weights, lifetimes.precedes) == lifetimes.peak_live(weights) == most


@given(st.integers(0, 100_000), st.integers(1, 200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rivals_of_a_buffer_are_those_that_it_conflicts_with(seed: int, count: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users = users_of(graph)
    kept = [rng.random() < 0.05 for _ in users]
    lifetimes = Lifetimes(users, kept, list_order(count) if in_turn else graph_order(graph))
    conflicts = conflicts_of(lifetimes)
    for buffer in range(count):
        assert sorted(lifetimes.conflicting(buffer).tolist()) == np.flatnonzero(conflicts[buffer]).tolist()


def test_a_chain_needs_two_buffers_and_side_by_side_chains_two_each() -> None:
    chain = build_graph(NetDef(name="n", op=[operator_def("Relu", [f"b{i}"], [f"b{i + 1}"]) for i in range(10)]))
    lifetimes = Lifetimes(users_of(chain), [False] * 10, graph_order(chain))
    assert place([64] * 10, lifetimes.conflicting).extent == 128
    branches = build_graph(
        NetDef(
            name="n",
            op=[operator_def("Relu", [f"{b}{i}" if i else "x"], [f"{b}{i + 1}"]) for i in range(5) for b in "pqr"],
        )
    )
    wide = Lifetimes(users_of(branches), [False] * 15, graph_order(branches))
    assert place([64] * 15, wide.conflicting).extent == 3 * 128
    in_turn = Lifetimes(users_of(branches), [False] * 15, list_order(15))
    assert place([64] * 15, in_turn.conflicting).extent == 4 * 64


@pytest.mark.slow
def test_a_thousand_operators_are_placed_in_well_under_a_second_and_close_to_the_bound() -> None:
    rng = random.Random(7)
    operators = []
    for index in range(1000):
        recent = range(max(0, index - 30), index)
        sources = {f"b{rng.choice(recent)}" for _ in range(rng.randint(1, 3))} if index else {"x"}
        operators.append(operator_def("Sum", sorted(sources), [f"b{index}"]))
    graph = build_graph(NetDef(name="large", op=operators))
    users = users_of(graph)
    sizes = [64 * rng.randint(1, 10_000) for _ in users]
    start = time.process_time()
    lifetimes = Lifetimes(users, [False] * 1000, graph_order(graph))
    placed = place(sizes, lifetimes.conflicting)
    seconds = time.process_time() - start
    assert seconds < 1.0
    assert placed.extent <= 1.2 * heaviest_antichain(sizes, lifetimes.precedes)
    assert placed.extent < 0.6 * np.sum(sizes)
