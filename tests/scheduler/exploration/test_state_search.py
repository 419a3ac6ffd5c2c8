"""The search through all states of a model: on models so small that their states are counted by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from dagexec.errors import DagexecError
from dagexec.scheduler.exploration.state_search import ModelFault, search

Held = tuple[tuple[int, ...], ...]
"""Of each thread, the locks that it holds, in the order in which it took them; (-1,): it has ended."""


class TakesLocks:
    """Threads that each take two locks, one after the other, and then let both go and end."""

    def __init__(self, orders: list[tuple[int, int]], most_holding: int = 9) -> None:
        self.orders = orders
        self.most_holding = most_holding

    def begin(self) -> Iterable[Held]:
        return [((),) * len(self.orders)]

    def steps(self, state: Held) -> Iterator[tuple[str, Held]]:
        taken = {lock for held in state for lock in held}
        for number, held in enumerate(state):
            after = (-1,)
            if held == (-1,):
                continue
            if len(held) < 2:
                lock = self.orders[number][len(held)]
                if lock in taken:
                    continue
                after = (*held, lock)
            yield f"thread {number}", (*state[:number], after, *state[number + 1 :])

    def fault(self, state: Held) -> str | None:
        holding = [number for number, held in enumerate(state) if held and held != (-1,)]
        return f"threads {holding} hold locks" if len(holding) > self.most_holding else None

    def is_end(self, state: Held) -> bool:
        return all(held == (-1,) for held in state)

    def canonical(self, state: Held) -> Held:
        return state


class TakesLocksAlike(TakesLocks):
    """As before, where all threads do the same."""

    def canonical(self, state: Held) -> Held:
        return tuple(sorted(state))


def test_two_threads_that_take_two_locks_in_one_order_always_end() -> None:
    found = search(TakesLocks([(0, 1), (0, 1)]))
    assert found.holds
    assert found.exhausted
    assert found.waiting == 0
    # Each of the two has ended or not, and one that has not may hold one lock or both: 4 + 2 * (2 + 1 + 1).
    assert found.states == 12
    assert found.depth == 6


def test_two_threads_that_take_them_in_two_orders_come_to_a_deadlock_whose_shortest_path_is_told() -> None:
    found = search(TakesLocks([(0, 1), (1, 0)]))
    assert found.fault == "nothing can happen any more, and it is not the end"
    assert sorted(found.path) == ["thread 0", "thread 1"]
    assert not found.holds
    assert not found.exhausted


def test_a_state_that_violates_the_invariant_is_found_with_its_path() -> None:
    found = search(TakesLocks([(0, 1), (2, 3), (4, 5)], most_holding=2))
    assert found.fault == "threads [0, 1, 2] hold locks"
    assert sorted(found.path) == ["thread 0", "thread 1", "thread 2"]


def test_threads_that_do_the_same_are_counted_once_and_the_path_keeps_their_names() -> None:
    orders = [(0, 1), (0, 1), (0, 1)]
    all_states, reduced = search(TakesLocks(orders)), search(TakesLocksAlike(orders))
    assert all_states.holds
    assert reduced.holds
    assert all_states.depth == reduced.depth == 9
    # k of 3 ended, and perhaps one other has begun (two states): sum of binomials, or one each.
    assert all_states.states == 1 + 3 + 3 + 1 + 2 * (3 * 1 + 3 * 2 + 3 * 1)
    assert reduced.states == 4 + 2 * 3

    class EndsThrice(TakesLocksAlike):
        def fault(self, state: Held) -> str | None:
            return f"{state} have ended" if state.count((-1,)) == 2 else None

    path = search(EndsThrice(orders)).path
    assert len(path) == 6
    assert len(set(path[:3])) == len(set(path[3:])) == 1
    assert path[0] != path[3]


def test_an_event_that_raises_is_the_last_of_the_path() -> None:
    class Raises(TakesLocks):
        def steps(self, state: Held) -> Iterator[tuple[str, Held]]:
            for label, after in super().steps(state):
                if (-1,) in after:
                    raise ModelFault(f"{label} must not end", f"{label} ends")
                yield label, after

    found = search(Raises([(0, 1)]))
    assert (found.fault, found.path) == ("thread 0 must not end", ("thread 0", "thread 0", "thread 0 ends"))


@pytest.mark.parametrize("budget", [{"most": 20}, {"seconds": 0.0}])
def test_a_budget_ends_the_search_which_says_how_far_it_got_and_does_not_hold(budget: dict[str, float]) -> None:
    model = TakesLocks([(2 * number, 2 * number + 1) for number in range(5)])
    found = search(model, **budget)  # type: ignore[arg-type]
    assert found.fault is None
    assert not found.exhausted
    assert not found.holds
    assert found.waiting > 0
    if "most" in budget:
        # 1 + 5 + 15 states within two events, and all after the first event were looked at.
        assert found.depth == 1
        assert 20 <= found.states <= 21
    else:
        assert found.depth == 0
        assert found.states == 1
    assert search(model).states == 4**5


class GivesBack(TakesLocks):
    """A thread that cannot have its second lock gives the first one back, and tries again."""

    def steps(self, state: Held) -> Iterator[tuple[str, Held]]:
        yield from super().steps(state)
        for number, held in enumerate(state):
            if held and held != (-1,) and len(held) == 1:
                yield f"thread {number} gives back", (*state[:number], (), *state[number + 1 :])


class SpinsForEver(TakesLocks):
    """Two threads that each have a lock look for the other one for ever."""

    def steps(self, state: Held) -> Iterator[tuple[str, Held]]:
        yield from super().steps(state)
        if all(len(held) == 1 and held != (-1,) for held in state):
            yield "looks", state


def test_what_can_go_on_for_ever_is_found_only_where_no_end_can_be_reached() -> None:
    orders = [(0, 1), (1, 0)]
    assert search(GivesBack(orders), must_end=True).holds
    assert search(SpinsForEver(orders)).holds
    found = search(SpinsForEver(orders), must_end=True)
    assert found.fault == "things happen for ever, and none leads to an end"
    assert sorted(found.path) == ["thread 0", "thread 1"]


class WrongSymmetry:
    """1 is taken for 0, but 2 comes after 0 only."""

    def begin(self) -> Iterable[int]:
        return [1]

    def steps(self, state: int) -> Iterable[tuple[str, int]]:
        return [("on", state + 2)] if state < 2 else []

    def fault(self, state: int) -> str | None:
        return "it is 2" if state == 2 else None

    def is_end(self, state: int) -> bool:
        return state > 1

    def canonical(self, state: int) -> int:
        return 0 if state == 1 else state


def test_a_wrong_symmetry_is_told_rather_than_a_wrong_path() -> None:
    with pytest.raises(DagexecError, match="have another future"):
        search(WrongSymmetry())
