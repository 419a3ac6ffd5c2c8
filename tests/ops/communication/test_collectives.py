"""Collectives: the right sums in a fixed order, the same bytes on all ranks, in every schedule; no wait without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, ClosedError, CommunicationError, DagexecError, ShapeError
from dagexec.ops.families.communication import (
    CommonWorld,
    ThreadGroup,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    connect,
    reduce,
)
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore, explore_seeds, systematic
from tests.ops.communication.ranks import on_ranks, results_of

Array = npt.NDArray[Any]


def values_of(rank: int, count: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Different numbers on every rank, whose sum depends on the order of additions."""
    return np.random.default_rng(rank + 1).standard_normal(count).astype(dtype)


def pairwise(parts: list[Array]) -> Array:
    """The sum of neighbors, then of neighboring sums, and so on."""
    while len(parts) > 1:
        parts = [
            parts[index] + parts[index + 1] if index + 1 < len(parts) else parts[index]
            for index in range(0, len(parts), 2)
        ]
    return parts[0]


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 9), count=st.integers(0, 40), dtype=st.sampled_from(["float32", "float64", "float16"]))
def test_the_tree_sums_neighbors_first_and_gives_every_rank_those_bytes(size: int, count: int, dtype: str) -> None:
    def work(world: CommonWorld) -> Array:
        array = values_of(world.rank, count, dtype)
        all_reduce(world, array, algorithm="tree")
        return array

    expected = pairwise([values_of(rank, count, dtype) for rank in range(size)])
    for found in results_of(on_ranks(size, work)):
        assert found.tobytes() == expected.tobytes()


def ring_sum(parts: list[Array]) -> Array:
    """Chunk c is summed from rank c on, around the ring."""
    size, count = len(parts), parts[0].size
    chunks = []
    for chunk in range(size):
        piece = slice(count * chunk // size, count * (chunk + 1) // size)
        total = parts[chunk][piece]
        for step in range(1, size):
            total = total + parts[(chunk + step) % size][piece]
        chunks.append(total)
    return np.concatenate(chunks)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 7), count=st.integers(0, 40), divisor=st.sampled_from([1, 3, 4]))
def test_the_ring_sums_every_chunk_in_its_own_order_and_gives_every_rank_those_bytes(
    size: int, count: int, divisor: int
) -> None:
    def work(world: CommonWorld) -> Array:
        array = values_of(world.rank, count).reshape(1, -1)
        all_reduce(world, array, algorithm="ring", divisor=divisor)
        return array

    expected = ring_sum([values_of(rank, count) for rank in range(size)]) / np.float32(divisor)
    for found in results_of(on_ranks(size, work)):
        assert found.shape == (1, count)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_broadcast_reduce_and_all_gather_work_for_every_root(size: int) -> None:
    for root in range(size):

        def work(world: CommonWorld, root: int = root) -> tuple[Array, Array, Array]:
            sent = np.full(3, world.rank + 10.0)
            broadcast(world, sent, root)
            summed = values_of(world.rank, 5)
            reduce(world, summed, root, divisor=2)
            gathered = np.empty((size, 2), np.int64)
            all_gather(world, np.array([world.rank, -world.rank]), gathered)
            barrier(world)
            return sent, summed, gathered

        results = results_of(on_ranks(size, work))
        expected = pairwise([values_of(rank, 5) for rank in range(size)]) / np.float32(2)
        assert results[root][1].tobytes() == expected.tobytes()
        for sent, _, gathered in results:
            assert sent.tolist() == [root + 10.0] * 3
            assert gathered.tolist() == [[rank, -rank] for rank in range(size)]


def test_no_rank_leaves_a_barrier_before_all_have_entered_it() -> None:
    def scenario() -> None:
        entered: list[int] = []

        def work(world: CommonWorld) -> None:
            entered.append(world.rank)
            barrier(world)
            assert len(entered) == 3, f"rank {world.rank} passed when {entered} had come"

        results_of(on_ranks(3, work))

    explore_seeds(scenario, range(30)).raise_failure()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_every_schedule_gives_the_same_bytes(algorithm: str) -> None:
    def scenario(size: int = 3) -> bytes:
        def work(world: CommonWorld) -> bytes:
            array = values_of(world.rank, 7)
            all_reduce(world, array, algorithm=algorithm)
            all_reduce(world, array, algorithm=algorithm, divisor=3)
            return array.tobytes()

        results = results_of(on_ranks(size, work))
        assert len(set(results)) == 1
        return results[0]

    explored = {explore(scenario, seed).result for seed in range(40)}
    assert len(explored) == 1
    assert None not in explored
    systematic(lambda: scenario(2), preemptions=1).raise_failure()


class PlannedError(Exception):
    """What the failing rank raises."""


def failing_at(world: CommonWorld, point: int) -> list[str]:
    """Make the rank fail at the `point`-th time that it sends or receives; the list gets what it does."""
    done: list[str] = []
    for name in ("post", "receive", "receive_sum"):
        original = getattr(world, name)

        def step(*arguments: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
            done.append(name)
            if len(done) > point:
                raise PlannedError(f"{name} at point {point}")
            return original(*arguments)

        setattr(world, name, step)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["tree", "ring"])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_rank_that_fails_at_any_point_ends_all_with_its_name(algorithm: str, failing: int) -> None:
    def scenario(point: int) -> bool:
        def work(world: CommonWorld) -> bool:
            done = failing_at(world, point if world.rank == failing else 1 << 30)
            array = values_of(world.rank, 9)
            all_reduce(world, array, algorithm=algorithm)
            barrier(world)
            return len(done) <= point

        start = threads().monotonic()
        ends = on_ranks(4, work, timeout=1e6)
        assert threads().monotonic() - start < 1e5, "a rank has waited until its timeout"
        if isinstance(ends[failing], PlannedError):
            for rank, end in enumerate(ends):
                if isinstance(end, BaseException) and rank != failing:
                    assert isinstance(end, CommunicationError), f"rank {rank} ended with {end!r}"
                    assert end.rank == failing
                    assert f"rank {failing} failed: " in str(end)
                    assert "PlannedError" in str(end)
            assert any(isinstance(end, CommunicationError) for end in ends)
            return False
        results_of(ends)
        return True

    point = 0
    while True:
        survived = set()
        for seed in range(4):
            schedule = explore(lambda point=point: scenario(point), seed)
            schedule.raise_failure()
            survived.add(schedule.result)
        assert len(survived) == 1
        if survived == {True}:
            break
        point += 1
    assert point > 2


def test_a_rank_that_is_silent_is_named_after_the_timeout_however_far_it_is() -> None:
    def scenario() -> None:
        def work(world: CommonWorld) -> None:
            if world.rank != 3:  # 3 sends to 2, and 2 to 0: 0 and 1 wait for a rank that waits
                all_reduce(world, np.ones(4), algorithm="tree")

        ends = on_ranks(4, work, timeout=5.0, leave=False)
        for rank in range(3):
            end = ends[rank]
            assert isinstance(end, CommunicationError)
            assert end.rank == 3
            assert "no message from it" in str(end)
            assert "5 s in all-reduce by tree 0" in str(end)

    explore_seeds(scenario, range(20)).raise_failure()


def test_a_rank_that_leaves_is_named() -> None:
    def work(world: CommonWorld) -> None:
        if world.rank != 1:
            all_reduce(world, np.ones(4))

    ends = on_ranks(3, work)
    assert all(isinstance(ends[rank], CommunicationError) for rank in (0, 2))
    assert any("rank 1 has left the group" in str(end) for end in ends)
    assert ends[1] is None


def test_ranks_in_different_collectives_are_told_so() -> None:
    def work(world: CommonWorld) -> None:
        if world.rank == 0:
            all_reduce(world, np.ones(4))
        else:
            broadcast(world, np.ones(4), 1)

    ends = on_ranks(2, work)
    assert "rank 0 is in all-reduce by tree 0, and rank 1 in broadcast 0" in str(ends[0])


@pytest.mark.parametrize("other", [np.ones(5), np.ones(4, np.float32)])
def test_ranks_with_arrays_that_do_not_fit_are_told_so(other: Array) -> None:
    ends = on_ranks(2, lambda world: all_reduce(world, np.ones(4) if world.rank == 0 else other))
    assert isinstance(ends[0], ShapeError)
    assert f"rank 1 sends {other.dtype} {other.shape}, and rank 0 expects float64 (4,)" in str(ends[0])
    assert isinstance(ends[1], CommunicationError)
    assert ends[1].rank == 0


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least 1 rank, found 0"):
        ThreadGroup(0)
    group = ThreadGroup(2)
    world = group.join(0)
    with pytest.raises(ArgumentError, match="rank 0 of this group of 2 has already joined"):
        group.join(0)
    with pytest.raises(ArgumentError, match="ranks 0 to 1, found 2"):
        group.join(2)
    with pytest.raises(ArgumentError, match="must be positive and finite, found 0"):
        group.join(1, timeout=0)
    with pytest.raises(ArgumentError, match="one of tree, ring, found 'star'"):
        all_reduce(world, np.ones(2), algorithm="star")
    with pytest.raises(ArgumentError, match="a rank from 0 to 1, found 7"):
        broadcast(world, np.ones(2), 7)
    with pytest.raises(ArgumentError, match="the mean of int64"):
        all_reduce(ThreadGroup(1).join(0), np.ones(2, np.int64), divisor=2)
    with pytest.raises(ShapeError, match="only packed arrays"):
        all_reduce(ThreadGroup(1).join(0), np.ones((4, 4))[:, 1], algorithm="ring")
    with pytest.raises(ShapeError, match=r"needs an output of shape \(1, 3\), found float64 \(2, 3\)"):
        all_gather(ThreadGroup(1).join(0), np.ones(3), np.ones((2, 3)))
    world.close()
    with pytest.raises(ClosedError, match="rank 0 has closed its common world"):
        barrier(world)


def test_groups_are_found_by_name_and_forgotten_with_their_last_rank() -> None:
    first = connect("threads", "a test", 0, 2)
    with pytest.raises(ArgumentError, match="'a test' has 2 ranks, found size=3"):
        connect("threads", "a test", 1, 3)
    del first
    assert connect("threads", "a test", 0, 3).size == 3
    with pytest.raises(ArgumentError, match="transport 'pigeons' is unknown; expected one of"):
        connect("pigeons", "a test", 0, 2)


def test_messages_and_bytes_are_counted() -> None:
    def work(world: CommonWorld) -> tuple[int, int, int]:
        all_reduce(world, np.ones(8), algorithm="ring")
        found = world.statistics()
        return found.collectives, found.messages_sent, found.bytes_sent

    assert results_of(on_ranks(4, work)) == [(1, 6, 6 * 2 * 8)] * 4


def test_a_failed_group_stays_failed() -> None:
    def work(world: CommonWorld) -> None:
        if world.rank == 1:
            world.abort("it had enough")
            return
        for _ in range(2):
            with pytest.raises(DagexecError, match="rank 1 failed: it had enough"):
                barrier(world)

    results_of(on_ranks(2, work))
