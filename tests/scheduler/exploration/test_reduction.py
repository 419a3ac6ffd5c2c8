"""The reduction reaches all that schedules can reach: what it skips is compared with an enumeration of all of them."""

from __future__ import annotations

import dis
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from dagexec.errors import DeadlockError
from dagexec.platform.locks import Lock
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import BoundedSearch, explore, reduction, search_begins, systematic, watching
from dagexec.scheduler.exploration.races import conflict
from dagexec.scheduler.exploration.strategies.reduction import CutError, PathStrategy, Reduction
from dagexec.scheduler.run.pool import WorkerPool
from tests.scheduler.exploration.test_exploration import (
    check_then_act,
    locks_in_two_orders,
    lost_update,
    two_locks_in_one_order,
)
from tests.scheduler.exploration.test_exploration_pool import (
    LateLookPool,
    SleepyPool,
    TwoStepPool,
    stop_scenario,
)
from tests.scheduler.scenarios import DIAMOND, pool_scenario

Outcome = tuple[str, str]
Action = tuple[str, int, int]
Program = list[list[Action]]

LIMIT = 800


def all_outcomes(scenario: Callable[[], object], *, timeouts: bool = False) -> set[Outcome] | None:
    """Of every schedule; None if there are too many."""
    search, found = BoundedSearch(1000, timeouts=timeouts), set[Outcome]()
    for _ in range(LIMIT):
        schedule = explore(scenario, search)
        found.add((repr(schedule.result), repr(schedule.failure)))
        if not search.advance():
            return found
    return None


def reduced_outcomes(
    scenario: Callable[[], object], *, race_free: bool = False, timeouts: bool = False
) -> tuple[set[Outcome], int]:
    """Of the schedules that the reduction runs, and their number."""
    found, count = set[Outcome](), 0
    with watching.watching():
        for strategy in Reduction(race_free=race_free, timeouts=timeouts).strategies():
            schedule = explore(scenario, strategy)
            count += 1
            if not isinstance(schedule.failure, CutError):
                found.add((repr(schedule.result), repr(schedule.failure)))
    return found, count


class Box:
    """What threads of a program share."""

    def __init__(self) -> None:
        self.value = 0
        self.items: list[int] = []


class Memory:
    """What one thread has seen."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] = ()


def act(action: str, box: Box, memory: Memory, number: int) -> None:
    """One access."""
    if action == "read":
        memory.seen += (box.value,)
    elif action == "write":
        box.value = number
    elif action == "same":
        box.value = 0
    elif action == "append":
        box.items.append(number)
    elif action == "remove":
        with suppress(ValueError):
            box.items.remove(number)
    else:
        memory.seen += (len(box.items),)


def run_actions(actions: list[Action], boxes: list[Box], locks: list[Lock], memory: Memory, number: int) -> None:
    """What one thread of a program does."""
    for kind, one, other in actions:
        name, _, where = kind.partition(" ")
        if where == "bare":
            act(name, boxes[one], memory, number)
            threads().point("go on")
        elif where == "locked":
            with locks[other]:
                act(name, boxes[one], memory, number)
        elif where == "twice":
            with locks[other], locks[one]:
                act(name, boxes[one], memory, number)
        elif where == "tried":
            if locks[other].acquire(blocking=False):
                act(name, boxes[one], memory, number)
                locks[other].release()
        elif where == "looked":
            memory.seen += (locks[other].locked(),)
        else:
            memory.seen += (locks[other].acquire(timeout=1),)
            with suppress(RuntimeError):
                locks[other].release()


def program_scenario(program: Program) -> Callable[[], object]:
    """Its outcome: what all boxes hold in the end, and what each thread has seen."""

    def scenario() -> object:
        boxes, locks = [Box(), Box()], [threads().lock(), threads().lock()]
        memories = [Memory() for _ in program]
        started = [
            threads().start(partial(run_actions, actions, boxes, locks, memories[number], number + 1), f"t{number}")
            for number, actions in enumerate(program)
        ]
        for thread in started:
            thread.join()
        return [(box.value, box.items) for box in boxes], [memory.seen for memory in memories]

    return scenario


def program_of(seed: int, where: tuple[str, ...]) -> Program:
    """Two threads that do one or two things each."""
    chance = random.Random(seed)
    names = ("read", "write", "same", "append", "remove", "count")
    lengths = chance.choice(((2, 1), (1, 2), (1, 1), (2, 2)))
    return [
        [
            (f"{chance.choice(names)} {chance.choice(where)}", chance.randrange(2), chance.randrange(2))
            for _ in range(length)
        ]
        for length in lengths
    ]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module's classes are watched, and its functions known."""
    monkeypatch.setattr(watching, "OBSERVED", (*watching.OBSERVED, __name__))


@pytest.mark.slow
@pytest.mark.usefixtures("observed")
@pytest.mark.parametrize("where", [("bare", "locked"), ("locked", "twice"), ("locked", "tried", "looked", "timed")])
def test_random_programs_reach_the_same_ends_as_under_all_schedules(where: tuple[str, ...]) -> None:
    compared = 0
    for seed in range(16):
        scenario = program_scenario(program_of(seed, where))
        everything = all_outcomes(scenario)
        if everything is not None:
            assert reduced_outcomes(scenario)[0] == everything, f"seed {seed}"
            compared += 1
    assert compared > 3


@pytest.mark.slow
@pytest.mark.usefixtures("observed")
def test_deadlines_that_may_pass_at_any_time_are_tried_at_any_time() -> None:
    compared = 0
    for seed in range(10):
        scenario = program_scenario(program_of(seed, ("locked", "timed")))
        everything = all_outcomes(scenario, timeouts=True)
        if everything is not None:
            assert reduced_outcomes(scenario, timeouts=True)[0] == everything, f"seed {seed}"
            compared += 1
    assert compared > 1


@pytest.mark.parametrize(
    ("scenario", "race_free"),
    [
        (lost_update, True),
        (check_then_act, True),
        (check_then_act, False),  # the others have thousands of schedules, if they may have races
        (locks_in_two_orders, True),
        (two_locks_in_one_order, True),
    ],
)
@pytest.mark.slow
def test_code_that_is_not_watched_reaches_the_same_ends(scenario: Callable[[], object], race_free: bool) -> None:
    everything = {(result, failure.partition(" at ")[0]) for result, failure in _every(scenario)}
    found, _ = reduced_outcomes(scenario, race_free=race_free)
    assert {(result, failure.partition(" at ")[0]) for result, failure in found} == everything


def _every(scenario: Callable[[], object]) -> set[Outcome]:
    """Of a search with three preemptions, as all schedules are too many."""
    search, found = BoundedSearch(3), set[Outcome]()
    while True:
        schedule = explore(scenario, search)
        found.add((repr(schedule.result), repr(schedule.failure)))
        if not search.advance():
            return found


@pytest.mark.usefixtures("observed")
def test_sections_of_one_lock_that_touch_different_boxes_are_run_in_one_order() -> None:
    def program(*boxes: int) -> Program:
        return [[("write locked", box, 0)] * 2 for box in boxes]

    apart, counted = reduced_outcomes(program_scenario(program(0, 1)))
    assert (len(apart), counted) == (1, 1)
    shared, counted = reduced_outcomes(program_scenario(program(0, 0)))
    assert len(shared) == 2
    assert counted == 6  # two sections of two threads, in every order


@pytest.mark.usefixtures("observed")
def test_a_section_that_changes_nothing_is_one_that_reads() -> None:
    program: Program = [[("same locked", 0, 0)], [("same locked", 0, 0)], [("read locked", 0, 0)]]
    assert reduced_outcomes(program_scenario(program))[1] == 1


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (lost_update, "an update is lost"),
        (check_then_act, "somebody came between"),
        (locks_in_two_orders, "deadlock"),
        (pool_scenario([[]], 1, SleepyPool), "deadlock"),
        (stop_scenario(LateLookPool, [[]]), "told 2 times"),
    ],
)
@pytest.mark.slow
def test_planted_bugs_are_found_and_replayed_without_a_watch(scenario: Callable[[], object], text: str) -> None:
    found = reduction(scenario, 1000, race_free=True)
    assert found.failed is not None
    assert text in str(found.failed.failure)
    again = found.failed.replay(scenario)
    assert [step[:3] for step in again.trace] == [step[:3] for step in found.failed.trace]


@pytest.mark.slow
def test_a_run_on_a_pool_of_one_worker_is_right_under_every_schedule() -> None:
    strict, guarded = (reduction(pool_scenario([[]], 1), race_free=race_free) for race_free in (False, True))
    for found in (strict, guarded):
        found.raise_failure()
        assert found.exhausted
    assert guarded.tried < strict.tried
    assert guarded.tried < systematic(pool_scenario([[]], 1), 2).tried


@pytest.mark.slow
def test_a_run_on_two_workers_that_are_there_is_right_under_every_schedule() -> None:
    found = reduction(pool_scenario([[], [0]], 2, settled=True), race_free=True)
    found.raise_failure()
    assert found.exhausted
    assert found.tried > reduction(pool_scenario([[]], 2, settled=True), race_free=True).tried


@pytest.mark.slow
def test_a_count_in_two_steps_is_found_on_two_workers() -> None:
    found = reduction(pool_scenario(DIAMOND, 2, TwoStepPool, settled=True), 2000, race_free=True)
    assert found.failed is not None
    assert "1 tasks not done" in str(found.failed.failure)


@pytest.mark.slow
def test_what_comes_before_the_search_is_done_in_one_order() -> None:
    def scenario(before: bool) -> None:
        lock = threads().lock()

        def enter() -> None:
            with lock:
                pass

        def enter_all() -> None:
            for thread in [threads().start(enter, f"thread {number}") for number in range(2)]:
                thread.join()

        if before:
            enter_all()
        search_begins()
        enter_all()

    once = reduction(partial(scenario, before=False))
    assert once.tried > 1
    assert reduction(partial(scenario, before=True)).tried == once.tried


@pytest.mark.slow
def test_a_stopped_run_is_told_once_under_every_schedule() -> None:
    found = reduction(stop_scenario(WorkerPool, [[]]), race_free=True)
    found.raise_failure()
    assert found.exhausted


def test_steps_say_what_they_read_and_changed() -> None:
    with watching.watching():
        schedule = explore(pool_scenario([[]], 1), PathStrategy((), {}))
    taken = next(step for step in schedule.trace if step.kind == "acquire" and "Machine 1.remaining" in step.writes)
    assert taken.resource in taken.reads  # taken and let go again
    assert "Roster 1.inside" in taken.writes
    assert not conflict(taken, taken._replace(thread="other", writes=frozenset(), merges=frozenset(["x"])))
    assert conflict(taken, taken._replace(thread="other"))


def test_nothing_is_watched_once_a_search_is_over() -> None:
    before = vars(WorkerPool).copy()
    reduction(lambda: None)
    assert vars(WorkerPool) == before


@pytest.mark.parametrize("name", watching.OBSERVED)
def test_observed_modules_keep_what_threads_share_in_attributes(name: str) -> None:
    """No function of theirs sets a variable of its module, or of a function around it."""
    module = importlib.import_module(name)
    code = compile(open(module.__file__ or "").read(), name, "exec")  # noqa: SIM115
    found = {
        f"{function.co_qualname}: {instruction.argval}"
        for function in _functions(code)
        for instruction in dis.get_instructions(function)
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (instruction.opname == "STORE_DEREF" and instruction.argval in function.co_freevars)
    }
    assert found <= {"_forget_holders: _lock"}  # in a child made by `os.fork`


def _functions(code: object) -> Iterator[object]:
    for constant in code.co_consts:  # type: ignore[attr-defined]
        if hasattr(constant, "co_consts"):
            yield constant
            yield from _functions(constant)


def test_a_deadlock_that_takes_one_order_is_reached_and_ends_the_search() -> None:
    found = reduction(locks_in_two_orders, race_free=True)
    assert found.failed is not None
    assert isinstance(found.failed.failure, DeadlockError)
    assert not found.exhausted
