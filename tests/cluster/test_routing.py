"""Routers: compared with a list of counts that is searched from end to end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.cluster.routing import ROUTERS, LeastOutstanding, RandomChoice, RoundRobin, Router
from dagexec.errors import SettingError

STEPS = st.lists(st.tuples(st.sampled_from(["acquire", "release", "add", "remove"]), st.integers(0, 5)), max_size=80)


def walk(router: Router[int], steps: list[tuple[str, int]]) -> None:
    """Do the steps that are possible; after each, router and counts must agree."""
    counts = {0: 0, 1: 0, 2: 0}
    limit = router.max_outstanding or 1_000
    for step, number in steps:
        if step == "acquire":
            chosen = router.acquire()
            if min(counts.values(), default=limit) >= limit:
                assert chosen is None
                continue
            assert chosen is not None
            assert counts[chosen] < limit
            if isinstance(router, LeastOutstanding):
                assert counts[chosen] == min(counts.values())
            counts[chosen] += 1
        elif step == "release" and counts.get(number):
            router.release(number)
            counts[number] -= 1
        elif step == "add" and number not in counts:
            router.add(number)
            counts[number] = 0
        elif step == "remove" and number in counts:
            router.remove(number)
            del counts[number]
        assert {name: router.outstanding(name) for name in counts} == counts
        assert len(router) == len(counts)


@pytest.mark.parametrize("routing", ROUTERS)
@pytest.mark.parametrize("limit", [None, 1, 2])
@given(steps=STEPS)
def test_a_router_counts_and_keeps_the_limit(routing: str, limit: int | None, steps: list[tuple[str, int]]) -> None:
    walk(ROUTERS[routing](range(3), limit, 7), steps)


def test_of_equal_replicas_the_one_that_waited_longest_is_next() -> None:
    router = LeastOutstanding("abc")
    assert [router.acquire() for _ in range(4)] == ["a", "b", "c", "a"]
    router.release("b")
    router.release("c")
    assert [router.acquire() for _ in range(3)] == ["b", "c", "b"]


def test_round_robin_goes_round_whatever_the_counts_are() -> None:
    router = RoundRobin("abc")
    assert [router.acquire() for _ in range(3)] == ["a", "b", "c"]
    router.release("c")
    assert router.acquire() == "a"


def test_random_choices_are_even_and_follow_from_the_seed() -> None:
    found = []
    for _ in range(2):
        router = RandomChoice(range(4), seed=3)
        found.append([router.acquire() for _ in range(4_000)])
    assert found[0] == found[1]
    assert all(abs(count - 1_000) < 4 * (4_000 * 3 / 16) ** 0.5 for count in Counter(found[0]).values())


def test_the_answer_of_a_removed_replica_is_no_error_and_one_too_many_is() -> None:
    router = LeastOutstanding("ab")
    assert router.acquire() == "a"
    router.remove("a")
    router.release("a")
    assert router.acquire() == "b"
    router.release("b")
    with pytest.raises(ValueError, match="'b' has no outstanding request"):
        router.release("b")


def test_wrong_use_is_refused() -> None:
    with pytest.raises(SettingError, match="max_outstanding"):
        LeastOutstanding("a", max_outstanding=0)
    with pytest.raises(ValueError, match="there already"):
        LeastOutstanding("aa")
