"""A plan for smaller sizes takes the offsets of a larger one, for buffers and for working memory."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import CPU
from dagexec.core.runtime import runtime_of
from dagexec.scheduler.memory import ArenaMemory, MemoryPlan, graph_order, list_order
from dagexec.scheduler.memory import plan as plan_module
from dagexec.scheduler.memory.buffers import Buffer, Buffers
from dagexec.scheduler.memory.lifetime import Lifetimes, Order
from tests.scheduler.memory.conflicts import conflicts_of
from tests.scheduler.memory.test_memory import random_graph, users_of

RUNTIME = runtime_of(CPU)


def planned(users: list[list[int]], sizes: list[int], order: Order, memory: ArenaMemory) -> MemoryPlan:
    rows = zip(users, sizes, strict=True)
    buffers = tuple(Buffer(f"b{n}", size, tuple(row), False, RUNTIME) for n, (row, size) in enumerate(rows))
    return MemoryPlan("net", Buffers(buffers, {}, 0), order, memory)


def ask(plan: MemoryPlan, operator: int, nbytes: int) -> None:
    plan._arena(RUNTIME).working_memory(operator, nbytes)


def pieces(plan: MemoryPlan) -> list[tuple[list[int], int, int, int]]:
    """Users, block, first byte and end of everything that a plan has placed."""
    arena = plan._arenas[CPU]
    placed = zip(plan.buffers, arena.offsets.tolist(), strict=True)
    return [
        *((list(buffer.users), 0, offset, offset + buffer.nbytes) for buffer, offset in placed),
        *(([one.operator], one.block, one.offset, one.offset + one.nbytes) for one in arena.working),
    ]


@pytest.mark.slow
@given(st.integers(0, 100_000), st.integers(1, 25), st.booleans())
@settings(max_examples=60, deadline=None)
def test_smaller_sizes_take_the_same_bytes_and_nothing_overlaps(seed: int, count: int, in_turn: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, count)
    users, order = users_of(graph), list_order(count) if in_turn else graph_order(graph)
    memory = ArenaMemory()
    sizes = [rng.randint(1, 5000) for _ in users]
    asked = [(operator, rng.randint(1, 5000)) for operator in range(count) for _ in range(rng.randint(0, 2))]
    large = planned(users, sizes, order, memory)
    for operator, nbytes in asked:
        ask(large, operator, nbytes)
    small = planned(users, [rng.randint(1, size) for size in sizes], order, memory)
    for operator, nbytes in asked:
        ask(small, operator, rng.choice((rng.randint(1, nbytes), nbytes, nbytes + 100)))
    assert small._arenas[CPU].offsets is large._arenas[CPU].offsets
    found = pieces(small)
    lifetimes = Lifetimes([row for row, *_ in found], [False] * len(found), order)
    conflicts = conflicts_of(lifetimes)
    for (a, (_, block, start, end)), (b, (_, other, first, last)) in combinations(enumerate(found), 2):
        if conflicts[a, b] and block == other:
            assert end <= first or last <= start


def test_sizes_that_are_not_all_smaller_are_placed_anew_and_then_serve() -> None:
    memory, order = ArenaMemory(), list_order(3)
    users = [[0, 1], [1, 2], [0, 2]]
    offsets = [planned(users, sizes, order, memory)._arenas[CPU].offsets for sizes in ([900, 900, 900], [9, 990, 9])]
    again = planned(users, [9, 990, 1], order, memory)._arenas[CPU].offsets
    assert offsets[0] is not offsets[1]
    assert again is offsets[1]


def test_buffers_of_other_lifetimes_are_placed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ArenaMemory()
    planned([[0, 1], [2, 3]], [64, 64], list_order(4), memory)
    other = planned([[0, 2], [2, 3]], [64, 64], list_order(4), memory)
    assert sorted(other._arenas[CPU].offsets.tolist()) == [0, 64]
    monkeypatch.setattr(plan_module, "place", None)
    assert planned([[0, 2], [2, 3]], [64, 32], list_order(4), memory).tensor_bytes == 128


def test_buffers_that_come_and_go_with_the_sizes_are_placed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, order = ArenaMemory(), list_order(3)
    two, three = [[0, 1], [1, 2]], [[0, 1], [1, 2], [0, 2]]
    for users in (two, three):
        planned(users, [900] * len(users), order, memory)
    monkeypatch.setattr(plan_module, "place", None)
    for users in (two, three, two):
        planned(users, [90] * len(users), order, memory)


def test_a_few_placements_are_kept() -> None:
    memory, order = ArenaMemory(), list_order(9)
    for last in range(1, 9):
        planned([[0, last]], [64], order, memory)
    assert 1 < len(memory.placements[CPU]) < 8


def test_sizes_that_grow_a_little_get_room_for_the_next_steps() -> None:
    """A decoder's: some stay, some are one position longer at each step. What jumps, or shrinks, gets no room."""
    memory, order = ArenaMemory(), list_order(3)
    users = [[0, 1], [1, 2], [0, 2]]

    def offsets(*sizes: int) -> object:
        return planned(users, list(sizes), order, memory)._arenas[CPU].offsets

    found = [offsets(64, 25600 + 64 * step, 6400) for step in range(26)]
    assert len(set(map(id, found))) == 2
    assert planned(users, [64, 40000, 6400], order, memory).tensor_bytes == 64 + 40000 + 6400
