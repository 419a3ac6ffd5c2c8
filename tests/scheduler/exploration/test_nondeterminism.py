"""What depends on something other than its schedule parts when it is run twice, and the cause is named."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from dagexec.platform.locks import Lock
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.exploration.nondeterminism import Parting, parting
from tests.planted.scenes import two_models
from tests.scheduler.exploration.test_exploration import lost_update
from tests.scheduler.scenarios import net_scenario, sums


class Guarded:
    """Something with a lock, that hashes by its address."""

    def __init__(self) -> None:
        self.lock = threads().lock()


def locks() -> list[Lock]:
    """A few."""
    return [threads().lock() for _ in range(64)]


def by_set_of_objects() -> None:
    for one in {Guarded() for _ in range(64)}:
        with one.lock:
            pass


def by_attribute() -> None:
    class Holder:
        def __init__(self) -> None:
            self.waiting = frozenset(Guarded() for _ in range(64))

        def take(self) -> None:
            for one in self.waiting:
                with one.lock:
                    pass

    Holder().take()


def by_id() -> None:
    for one in sorted({Guarded() for _ in range(64)}, key=id):
        with one.lock:
            pass


def by_clock() -> None:
    with locks()[time.perf_counter_ns() // 100 % 64]:
        pass


def by_random() -> None:
    with locks()[random.randrange(64)]:
        pass


def by_uuid() -> None:
    with locks()[uuid.uuid4().int % 64]:
        pass


RUNS = itertools.count()


def by_thread_of_its_own() -> None:
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(next(RUNS)))
    other.start()
    other.join()
    with locks()[seen[0] % 64]:
        pass


class Finalized:
    """Garbage that takes a lock when it goes."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.itself = self

    def __del__(self) -> None:
        with self.lock:
            pass


def by_garbage() -> None:
    made = locks()
    Finalized(made[next(RUNS) % 64])
    gc.collect()


def found(scenario: Callable[[], object]) -> Parting:
    """Where it parts; by some attempt, as addresses may happen to be those of before."""
    attempts: Iterator[Parting | None] = (parting(scenario, explore(scenario, 1)) for _ in range(10))
    result = next(filter(None, attempts))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        (by_set_of_objects, "the order of a set that is made in"),
        (by_attribute, "the order of the set 'self.waiting' of Guarded, which hash by address"),
        (by_id, "addresses of objects: id at"),
        (by_clock, "real time: perf_counter_ns at"),
        (by_random, "randomness without a seed: Random.getrandbits at"),
        (by_uuid, "randomness without a seed: urandom at"),
        (by_thread_of_its_own, "a thread that is not of the schedule: start_"),
        (by_garbage, "garbage collection: collect at"),
    ],
)
def test_the_cause_is_named_with_its_place(scenario: Callable[[], object], cause: str) -> None:
    result = found(scenario)
    assert any(cause in text for text in result.causes), result
    assert "test_nondeterminism.py:" in result.causes[0]
    assert result.first != result.second
    assert "main: acquire lock" in result.first


def test_what_only_the_first_run_does_is_told_as_such() -> None:
    first: list[int] = []

    def scenario() -> None:
        if not first:
            first.append(1)
            with threads().lock():
                pass
        with threads().lock():
            pass

    result = parting(scenario, explore(scenario))
    assert result is not None
    assert result.step == 0
    assert "outlives a run" in result.causes[0]
    assert "two runs under the same decisions part after 0 steps: main: acquire lock 1" in str(result)


@pytest.mark.parametrize("scenario", [lost_update, net_scenario(sums([[], [0]]))])
def test_what_its_schedule_decides_does_not_part(scenario: Callable[[], object]) -> None:
    before = threading.getprofile()
    for seed in range(3):
        assert parting(scenario, explore(scenario, seed)) is None
    assert threading.getprofile() is before


@pytest.mark.slow
def test_models_that_share_arenas_give_them_back_in_an_order_that_repeats_itself() -> None:
    """Both are idle equally long in virtual time; which of them gives back what it has was the order of a set once."""
    for _ in range(5):
        assert parting(two_models, explore(two_models, 31)) is None
